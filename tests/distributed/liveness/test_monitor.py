"""Processes that monitor each other: real ones, which are killed, frozen, slow or wrong."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.distributed.liveness.monitor import SCHEDULES, Monitor, redirect_schedules
from gristmill.distributed.liveness.verdict import Limits

CONTEXT = multiprocessing.get_context("forkserver")
PAIR = ProcessInfo(1, 1, 2, address=Address("127.0.0.1", 1))

MEMBER = """
import os, signal, sys, time, traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from gristmill.base.errors import UserError
from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.distributed.liveness import monitor as module
from gristmill.distributed.liveness.monitor import Monitor
from gristmill.distributed.liveness.verdict import Limits

torch.set_num_threads(1)
here = str(eval(namespace))
module.pid_namespace = lambda: here
os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
place = ProcessInfo(rank, rank, world, f"host{rank}", address=Address("127.0.0.1", port))
limits = Limits(start=start_limit, phase=phase_limit, silence=silence, leaving=1.5, beat=0.25,
    read=0.5, large_world=large_world)

def mark(name):
    (folder / f"{name}-{rank}").touch()

def meet():
    store, _, _ = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=60)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
        timeout=timedelta(seconds=60))

def exchange():
    dist.all_reduce(torch.zeros(1))

def run():
    with Monitor(
        place,
        limits=limits,
        log=folder / f"logs/{rank}.log",
        on_exit=lambda message: mark("on-exit"),
    ) as monitor:
        meet()
        try:
            for step in range(1, steps + 1):
                monitor.phase("data", step)
                exec(data, globals(), {**globals(), **locals()})
                monitor.phase("step", step)
                exec(work, globals(), {**globals(), **locals()})
                exchange()
        finally:
            exec(end, globals(), {**globals(), **locals()})
            dist.destroy_process_group()

try:
    run()
except UserError as error:
    sys.stderr.write(f"error: {error}\\n")
    sys.exit(error.exit)
except BaseException:
    traceback.print_exc()
    sys.exit(1)
"""


class Party:
    """Some processes of a run of a few steps, in which something happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[int, BaseProcess] = {}

    def start(
        self,
        world: int = 3,
        *,
        steps: int = 4,
        data: str = "",
        work: str = "",
        end: str = "",
        start_limit: float = 60.0,
        phase_limit: float = 30.0,
        silence: float = 1.5,
        large_world: int = 64,
        absent: int | None = None,
        namespace: str = "module.pid_namespace()",
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {**locals(), "folder": self.folder, "port": port}
        for rank in range(world):
            if rank != absent:
                names = {key: common[key] for key in common if key not in ("self", "probe")}
                names["rank"] = rank
                member = CONTEXT.Process(target=exec, args=(MEMBER, names), daemon=True)
                member.start()
                self.members[rank] = member

    def codes(self, *, but: int | None = None) -> dict[int, int | None]:
        """How all have ended; a frozen one is left out."""
        deadline = time.monotonic() + 60
        for rank, member in self.members.items():
            if rank != but:
                member.join(max(0.1, deadline - time.monotonic()))
        return {rank: one.exitcode for rank, one in self.members.items() if rank != but}

    def printed(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text()

    def assert_last(self, rank: int, pattern: str) -> str:
        """The last line that a process printed is this error."""
        line = self.printed(rank).splitlines()[-1]
        assert re.fullmatch(f"error: (?:{pattern})", line), line
        return line

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not list(self.folder.glob(f"{name}-*")):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        for member in self.members.values():
            assert member.pid is not None
            os.kill(member.pid, number)


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Callable[..., Party]]:
    """Start processes; parties of one test run at the same time, since they mostly wait."""
    made: list[Party] = []

    def make(world: int = 3, **settings: Any) -> Party:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Party(folder))
        made[-1].start(world, **settings)
        return made[-1]

    yield make
    for one in made:
        for member in one.members.values():
            member.kill()


def at(rank: int, what: str, *, step: int = 3) -> str:
    return f"if rank == {rank} and step == {step}: {what}"


# A moment before the end, so that the others have heard of the step.
KILL = "time.sleep(1.5); os.kill(os.getpid(), signal.SIGKILL)"
FREEZE = "time.sleep(1.5); os.kill(os.getpid(), signal.SIGSTOP)"
STORE = r"which hosts the store at 127\.0\.0\.1:\d+,"


def test_who_is_killed_is_named(party: Callable[..., Party]) -> None:
    where = "last seen in phase step at step 3"
    seen = [party(work=at(2, KILL), large_world=large) for large in (64, 1)]
    # As from another machine: nobody sees whether a process there has ended.
    apart = [party(work=at(2, KILL), large_world=large, namespace="rank") for large in (64, 1)]
    host = party(data=at(0, KILL))
    for run in (*seen, *apart):
        assert run.codes() == {0: 76, 1: 76, 2: -signal.SIGKILL}
    for rank in (0, 1):
        for run in seen:
            line = run.assert_last(
                rank, f"rank 2 on host2 died without reporting an error; {where}"
            )
            log = (run.folder / f"logs/{rank}.log").read_text()
            assert log.endswith(f"{line}\n"), "the rank's log ends with the same line"
        for run in apart:
            run.assert_last(rank, rf"rank 2 on host2 has sent no heartbeat for \d\.\ds; {where}")
    assert host.codes() == {0: -signal.SIGKILL, 1: 76, 2: 76}
    for rank in (1, 2):
        host.assert_last(
            rank, rf"rank 0 on host0, {STORE} is gone; last seen in phase data at step 3"
        )


def test_who_is_frozen_is_named(party: Callable[..., Party]) -> None:
    members = [party(data=at(1, FREEZE), large_world=large) for large in (64, 1)]
    hosts = [party(work=at(0, FREEZE), large_world=large) for large in (64, 1)]
    for run in members:
        assert run.codes(but=1) == {0: 76, 2: 76}
        for rank in (0, 2):
            line = run.assert_last(
                rank,
                r"rank 1 on host1 has sent no heartbeat for \d\.\ds; "
                "last seen in phase data at step 3",
            )
            log = (run.folder / f"logs/{rank}.log").read_text()
            assert log.endswith(f"{line}\n"), "the rank's log ends with the same line"
            assert "in exchange" in log or "all_reduce" in log, "and shows where all threads stood"
        assert (run.folder / "on-exit-0").exists()
    for run in hosts:
        assert run.codes(but=0) == {1: 76, 2: 76}
        for rank in (1, 2):
            run.assert_last(
                rank,
                rf"rank 0 on host0, {STORE} has not answered for \d\.\ds; "
                "last seen in phase step at step 3",
            )
    # Who wakes up too late ends as well.
    pid = members[0].members[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGCONT)
    assert members[0].codes()[1] == 76
    members[0].assert_last(1, rf"rank 0 on host0, {STORE} is gone; .*|rank 1 on host1 .*")


def test_an_error_is_named_and_not_its_consequence(party: Callable[..., Party]) -> None:
    wrong = "raise ValueError('no\\nsuch grain')"
    runs = [
        (rank, party(work=at(rank, wrong), large_world=large))
        for rank in (0, 1)
        for large in (1, 9)
    ]
    stuck = "if rank == 1: monitor.explain(sys.exc_info()[1]); time.sleep(600)"
    leaving = party(work=at(1, "raise UserError('no such grain')"), end=stuck)
    for rank, run in runs:
        codes = run.codes()
        assert codes.pop(rank) == 1 and set(codes.values()) == {76}
        for other in codes:
            run.assert_last(
                other,
                rf"rank {rank} on host{rank} failed in phase step at step 3: "
                "ValueError: no such grain",
            )
        assert "Traceback" in (run.folder / f"{rank}.txt").read_text()
    # One that cannot end by itself is ended.
    assert leaving.codes() == {0: 76, 1: 70, 2: 76}
    for rank in (0, 2):
        leaving.assert_last(rank, "rank 1 on host1 failed in phase step at step 3: no such grain")
    leaving.assert_last(1, "no such grain")


def test_who_is_late_is_named(party: Callable[..., Party]) -> None:
    behind = party(data=at(1, "time.sleep(600)"), phase_limit=2.5)
    # Long enough for the others to start on a slow machine.
    absent = party(start_limit=4.0, absent=2)
    first = party(2, start_limit=4.0, absent=0)
    assert behind.codes() == {0: 76, 1: 76, 2: 76}
    late = (
        r"rank 1 on host1 has waited \d\.\ds in phase data at step 3 and is behind the other ranks"
    )
    waits = r"rank [02] on host[02] has waited \d\.\ds in phase step at step 3 for "
    for rank in range(3):
        behind.assert_last(
            rank, rf"{late}|{waits}rank 1 on host1, in phase data at step 3 for \d\.\ds"
        )
    assert absent.codes() == {0: 76, 1: 76}
    for rank in (0, 1):
        absent.assert_last(
            rank,
            r"rank \d on host\d has waited \d\.\ds in phase start at step 0 for rank 2, "
            "which never joined",
        )
    assert first.codes() == {1: 76}
    first.assert_last(
        1,
        r"rank 1 on host1 has waited \d\.\ds in phase start at step 0 for rank 0, which does not "
        r"answer at 127\.0\.0\.1:\d+",
    )
    assert first.printed(1).count("\n") == 1, "torch says nothing"


def test_nobody_is_blamed_without_a_reason(party: Callable[..., Party]) -> None:
    runs = {
        "nothing happens": party(),
        "slow": party(data=at(1, "time.sleep(4)"), silence=2.5),
        "done early": party(end="if rank: monitor.done()\nelse: time.sleep(4)", silence=2.5),
        "the host of the store is done": party(end="if rank: time.sleep(6)", silence=2.5),
    }
    slept = party(data="mark('going'); time.sleep(0.05)", steps=60)
    slept.wait_for("going")
    slept.send(signal.SIGSTOP)
    time.sleep(4)
    slept.send(signal.SIGCONT)
    for what, run in {**runs, "the machine slept": slept}.items():
        assert run.codes() == {0: 0, 1: 0, 2: 0}, what
        assert "error" not in "".join(run.printed(rank) for rank in range(3)), what


# ------------------------------------------------------------------ without other processes


def test_a_single_process_monitors_nothing() -> None:
    with Monitor(ProcessInfo(), limits=Limits(start=0.01, phase=0.01)) as monitor:
        monitor.phase("step", 1)
        time.sleep(0.05)
        assert monitor.explain(RuntimeError("gloo: connection closed")) is None
        assert not monitor.active


def test_an_address_that_answers_and_is_no_store_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(place: ProcessInfo, *, seconds: float) -> None:
        raise RuntimeError("not a store")

    monkeypatch.setattr("gristmill.distributed.liveness.monitor.join_store", refuse)
    with Monitor(PAIR, limits=Limits(start=600, phase=600)) as monitor:
        assert monitor.active


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no\n  such\tgrain "), "ValueError: no such grain"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (UserError("no grain", where="mill"), "mill: no grain"),
        (UserError("x" * 9999), f"{'x' * 500}…"),
    ],
)
def test_the_others_are_told_of_an_error_in_one_line(error: BaseException, message: str) -> None:
    monitor = Monitor(PAIR, limits=Limits(start=600, phase=600, beat=0.01))
    assert monitor.explain(error) is None
    heartbeat = monitor._heartbeat()
    assert (heartbeat.state, heartbeat.message) == ("failed", message)
    assert monitor.explain(RuntimeError("gloo")) is None, "it is decided"
    assert monitor._heartbeat() == heartbeat


def test_only_one_thread_decides_how_the_process_ends() -> None:
    monitor = Monitor(PAIR, limits=Limits(start=600, phase=600, beat=0.01))
    assert monitor._decided.acquire(blocking=False)
    monitor._report("lost", "rank 0 is gone")
    explained = monitor.explain(RuntimeError("gloo: connection closed"))
    assert explained is not None and str(explained) == "rank 0 is gone"
    assert explained.exit is Exit.PEER
    assert monitor.explain(explained) is None, "it is the explanation"
    monitor.done()
    assert monitor._heartbeat().state == "lost"


# ------------------------------------------------------------------ what torch logs


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger of torch's schedules, left as it was."""
    one = logging.getLogger(SCHEDULES)
    before = one.filters[:]
    yield one
    one.filters[:] = before


def test_schedules_of_torch_go_to_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], logger: logging.Logger
) -> None:
    redirect_schedules(tmp_path / "log")
    assert not (tmp_path / "log").exists()
    logger.error("caught exception at step %s.  Full Schedule:", 36)
    assert (tmp_path / "log").read_text() == "caught exception at step 36.  Full Schedule:\n"
    redirect_schedules(None)
    logger.error("Step 01: 2UNSHARD")
    redirect_schedules(tmp_path / "missing/log")
    logger.error("Step 02: 0F0")
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "missing").exists()


def test_the_schedules_log_under_that_name() -> None:
    from torch.distributed.pipelining import schedules

    assert schedules.logger.name == SCHEDULES
