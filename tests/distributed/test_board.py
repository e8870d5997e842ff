"""Posting and reading heartbeats, and seeing whether processes of this machine have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from gristmill.base.process import ProcessInfo
from gristmill.distributed.heartbeat import Heartbeat, State, has_ended, pid_namespace
from gristmill.distributed.monitor import HeartbeatBoard
from gristmill.distributed.verdict import Limits

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux")


class FakeStore(dict[str, bytes]):
    """A store without a server."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


def boards(world: int, *, large_world: int = 64) -> list[HeartbeatBoard]:
    store: Any = FakeStore()
    limits = Limits(start=60, phase=60, large_world=large_world)
    return [HeartbeatBoard(store, ProcessInfo(rank, 0, world), limits) for rank in range(world)]


def states(heartbeats: tuple[Heartbeat, ...]) -> dict[int, State]:
    return {one.rank: one.state for one in heartbeats}


@pytest.mark.parametrize("large_world", [64, 1])
def test_what_one_rank_posts_the_others_read(large_world: int) -> None:
    first, second, third = boards(3, large_world=large_world)
    assert states(second.read(Heartbeat(1), now=0.0))[0] == "absent"
    for count in (1, 2):
        first.post(Heartbeat(0, "n0", count))
        second.post(Heartbeat(1, "n1", count))
        assert states(first.read(Heartbeat(0), now=1.0)) == {
            0: "running",
            1: "running",
            2: "absent",
        }
        assert states(second.read(Heartbeat(1), now=1.0))[0] == "running"
    third.post(Heartbeat(2, "n2", state="failed", message="boom"))
    first.read(Heartbeat(0), now=2.0)
    read = {one.rank: one for one in second.read(Heartbeat(1), now=5.0)}
    assert read[2].message == "boom" and read[0].silence == 4.0
    assert second.uneasy, "rank 0 is late"


def test_in_a_large_world_only_rank_0_reads_all() -> None:
    many = boards(100)
    for rank, board in enumerate(many):
        board.post(Heartbeat(rank, f"n{rank}", 1, state="failed" if rank == 70 else "running"))
    assert many[5].read(Heartbeat(5), now=1.0) == (Heartbeat(0, state="absent"),), "not yet"
    known = many[0].read(Heartbeat(0), now=1.0)
    assert len(known) < 20 and states(known)[70] == "failed"
    assert many[5].read(Heartbeat(5), now=1.0) == known
    many[0].post(Heartbeat(0, "n0", 2, state="failed", message="boom"))
    assert states(many[5].read(Heartbeat(5), now=2.0))[0] == "failed", "rank 0 reports directly"


@on_linux
def test_a_local_peer_that_ended_without_a_report_has_vanished() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    first, second = boards(2)
    own = Heartbeat(0, "n0", 1, pid=os.getpid(), pid_namespace=pid_namespace())
    peer = Heartbeat(1, "n1", 1, pid=process.pid, pid_namespace=pid_namespace())
    first.post(own)
    second.post(peer)
    assert states(first.read(own, now=0.0)) == {0: "running", 1: "running"}
    assert not first.uneasy
    process.communicate()
    assert states(first.read(own, now=0.0))[1] == "running"
    assert first.uneasy, "its report may not have been read yet"
    assert states(first.read(own, now=0.0))[1] == "vanished"


@on_linux
def test_processes_end() -> None:
    assert pid_namespace() and pid_namespace() == pid_namespace()
    assert not has_ended(os.getpid())
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(process.pid)
    process.kill()
    while not has_ended(process.pid):
        time.sleep(0.01)
    assert process.returncode is None, "it is seen before its parent has noticed"
    process.communicate()
    assert has_ended(process.pid)
