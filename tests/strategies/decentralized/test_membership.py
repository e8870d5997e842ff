"""Who takes part: views that workers propose and adopt, without a clock, and in real threads."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.distributed.liveness.rendezvous import join_store
from gristmill.strategies.decentralized import membership
from gristmill.strategies.decentralized.coordinator import (
    SignedStore,
    reach_store,
    require_same_settings,
    run_key,
    write_key,
)
from gristmill.strategies.decentralized.membership import (
    REGROUP,
    Membership,
    Roll,
    View,
    ViewChangedError,
)

SILENCE = 5.0
START = 100.0
LIMIT = 60.0
"""Seconds that something may take on a machine that is busy."""


# ------------------------------------------------------------------ without a clock


@dataclass
class Process:
    """A process of a worker in the simulation."""

    worker: int
    incarnation: str
    began: float
    roll: Roll
    view: View | None = None
    count: int = 0
    frozen: bool = False
    done_in: int | None = None
    complete: bool = False


@dataclass
class Simulation:
    """Workers that post, read and propose in any order, as with a store."""

    whole: int
    now: float = 0.0
    posted: dict[int, dict[str, Any]] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    made: int = 0

    def start(self, worker: int) -> None:
        self.made += 1
        roll = Roll(worker, SILENCE, "")
        self.processes[worker] = Process(worker, f"p{self.made}", self.now, roll)

    def look(self, worker: int) -> None:
        """One heartbeat of a worker, as `Membership` does it."""
        one = self.processes[worker]
        one.count += 1
        self.posted[worker] = {
            "incarnation": one.incarnation,
            "host": "host",
            "pid": 1,
            "namespace": "",
            "count": one.count,
            "leaving": False,
            "done_in": one.done_in,
            "complete": one.complete,
        }
        for other, values in self.posted.items():
            one.roll.note(other, values, now=self.now)
        self._adopt(one)
        wanted = one.roll.proposal(
            one.view, now=self.now, whole=self.whole, waited=self.now - one.began, start=START
        )
        if wanted is not None and wanted.members:
            # The first proposal counts.
            self.views.setdefault(wanted.number, wanted)
            self._adopt(one)

    def _adopt(self, one: Process) -> None:
        if self.views:
            one.view = self.views[max(self.views)]

    def live(self, seconds: float, rng: random.Random) -> None:
        """Let time pass, with heartbeats in random order."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            awake = [one.worker for one in self.processes.values() if not one.frozen]
            for worker in rng.sample(awake, len(awake)):
                self.look(worker)

    @property
    def newest(self) -> View:
        return self.views[max(self.views)]

    def awake(self) -> dict[int, str]:
        return {
            worker: one.incarnation
            for worker, one in sorted(self.processes.items())
            if not one.frozen and one.done_in is None
        }


def started(workers: int, rng: random.Random) -> Simulation:
    simulation = Simulation(workers)
    for worker in range(workers):
        simulation.start(worker)
    simulation.live(2, rng)
    return simulation


@pytest.mark.parametrize("seed", range(60))
def test_views_end_with_those_that_are_alive(seed: int) -> None:
    """Whatever dies, freezes, wakes up and starts again, in whatever order."""
    rng = random.Random(seed)
    workers = rng.choice((2, 3, 4, 8))
    simulation = started(workers, rng)
    assert list(simulation.newest.members) == list(range(workers))
    for _ in range(rng.randint(1, 25)):
        worker = rng.randrange(workers)
        here = simulation.processes.get(worker)
        event = rng.choice(("die", "freeze", "wake", "start", "all die"))
        if event == "all die":
            simulation.processes.clear()
        elif event == "die":
            simulation.processes.pop(worker, None)
        elif event == "start" and here is None:
            simulation.start(worker)
        elif here is not None and event in ("freeze", "wake"):
            here.frozen = event == "freeze"
        simulation.live(rng.choice((0.5, 0.5, 2, SILENCE + 2)), rng)
    if not simulation.awake():
        simulation.processes.clear()
        simulation.start(0)
    # Enough for those who are silent to be found out, and for those who come alone to give up.
    simulation.live(REGROUP + 3 * SILENCE, rng)
    assert dict(simulation.newest.members) == simulation.awake()
    quiet = max(simulation.views)
    simulation.live(3 * SILENCE, rng)
    assert max(simulation.views) == quiet, "a view that is right stays"
    for one in simulation.processes.values():
        if not one.frozen:
            assert one.view == simulation.newest


def test_numbers_of_views_have_no_gaps_and_views_never_change() -> None:
    rng = random.Random(1)
    simulation = started(4, rng)
    before = dict(simulation.views)
    del simulation.processes[0]
    simulation.live(SILENCE + 2, rng)
    assert sorted(simulation.views) == list(range(len(simulation.views)))
    assert {number: simulation.views[number] for number in before} == before


def test_the_first_view_waits_for_all() -> None:
    rng, simulation = random.Random(0), Simulation(3)
    simulation.start(0)
    simulation.live(START - 1, rng)
    simulation.start(1)
    assert not simulation.views
    simulation.live(3, rng)
    assert list(simulation.newest.members) == [0, 1], "after the limit it goes on without"
    simulation.start(2)
    simulation.live(2, rng)
    assert list(simulation.newest.members) == [0, 1, 2]


def test_a_restarted_worker_leaves_and_joins() -> None:
    rng = random.Random(0)
    simulation = started(3, rng)
    old = simulation.processes[1].incarnation
    simulation.start(1)
    simulation.live(2, rng)
    new = simulation.newest.members[1]
    assert new == simulation.processes[1].incarnation != old
    assert len(simulation.views) >= 2


def test_when_all_are_new_the_view_waits_for_all_of_them() -> None:
    """So that a run resumes from its checkpoint with as many workers as it was saved by."""
    rng = random.Random(0)
    simulation = started(3, rng)
    simulation.processes.clear()
    for worker in (2, 0, 1):
        assert len(simulation.views) == 1
        simulation.start(worker)
        simulation.live(SILENCE, rng)
    assert dict(simulation.newest.members) == simulation.awake()
    assert len(simulation.views) == 2


def test_when_all_are_dead_one_goes_on_alone_in_the_end() -> None:
    rng = random.Random(0)
    simulation = started(3, rng)
    simulation.processes.clear()
    simulation.start(2)
    simulation.live(REGROUP - 5, rng)
    assert len(simulation.views) == 1
    simulation.live(10, rng)
    assert list(simulation.newest.members) == [2]


def test_a_frozen_worker_is_left_out_and_comes_back() -> None:
    rng = random.Random(0)
    simulation = started(3, rng)
    simulation.processes[0].frozen = True
    simulation.live(SILENCE + 2, rng)
    assert list(simulation.newest.members) == [1, 2]
    simulation.processes[0].frozen = False
    simulation.live(2, rng)
    assert list(simulation.newest.members) == [0, 1, 2]
    assert simulation.newest.members[0] == simulation.processes[0].incarnation


def test_workers_that_are_done_cause_no_view() -> None:
    rng = random.Random(0)
    simulation = started(3, rng)
    for worker in (0, 2):
        simulation.processes[worker].done_in = 0
        simulation.look(worker)
        del simulation.processes[worker]
    simulation.live(3 * SILENCE, rng)
    assert len(simulation.views) == 1


def test_a_worker_that_was_done_before_a_view_is_not_waited_for_in_it() -> None:
    """It finished while another one joined, so the new view has it as a member."""
    rng = random.Random(0)
    simulation = started(3, rng)
    simulation.start(1)
    simulation.live(2, rng)
    simulation.processes[0].done_in = simulation.newest.number - 1
    simulation.look(0)
    del simulation.processes[0]
    simulation.live(2, rng)
    assert list(simulation.newest.members) == [1, 2]


def test_who_comes_after_the_end_does_not_wait() -> None:
    rng = random.Random(0)
    simulation = started(3, rng)
    del simulation.processes[1]
    simulation.live(SILENCE + 2, rng)
    for worker in (0, 2):
        here = simulation.processes[worker]
        here.done_in, here.complete = simulation.newest.number, True
        simulation.look(worker)
        del simulation.processes[worker]
    simulation.start(1)
    simulation.live(1, rng)
    assert list(simulation.newest.members) == [1]


def test_a_view_is_read_as_it_was_written() -> None:
    view = View(3, {0: "a", 2: "b", 10: "c"})
    assert View.parse(3, view.written().encode()) == view
    shuffled = json.dumps({"10": "c", "0": "a", "2": "b"}).encode()
    assert View.parse(3, shuffled).workers == (0, 2, 10)


# ------------------------------------------------------------------ threads and a store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def address() -> Iterator[Address]:
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    yield Address("127.0.0.1", port)
    del store


KEY = b"k" * 32
Join = Callable[..., Membership]


def signed(place: ProcessInfo) -> SignedStore:
    return SignedStore(join_store(place, seconds=LIMIT), KEY)


@pytest.fixture
def member(address: Address) -> Iterator[Join]:
    """A member of a run; the namespace of all is unknown, since they share a process."""
    made: list[Membership] = []

    def join(
        rank: int, *, world: int = 3, silence: float = 20.0, start: float = LIMIT
    ) -> Membership:
        place = ProcessInfo(rank=rank, world=world, host=f"host-{rank}", address=address)
        store = SignedStore(join_store(place, seconds=LIMIT), KEY)
        one = Membership(place, store, silence=silence, start=start, beat=0.05)
        one._roll.namespace = ""
        one.start()
        made.append(one)
        return one

    yield join
    for one in made:
        # Shown if the test fails.
        print(f"worker {one.place.rank}: view {one.view}, failure {one._failure}")
        one.close()


def joined(one: Membership, after: int = -1) -> View:
    view = one.join(after)
    assert view is not None
    return view


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)


def test_all_see_the_same_views(member: Join) -> None:
    members = [member(rank) for rank in range(3)]
    views = [joined(one) for one in members]
    assert views[0] == views[1] == views[2]
    assert views[0].workers == (0, 1, 2)
    for one in members:
        one.check(views[0])


def test_the_first_view_goes_on_without_those_who_are_late(member: Join) -> None:
    first = joined(member(1, start=0.3))
    assert first.workers == (1,)
    late = joined(member(0))
    assert late.workers == (0, 1)


def test_who_leaves_is_left_out_and_interrupts_the_others(member: Join) -> None:
    members = [member(rank) for rank in range(3)]
    view = joined(members[0])
    members[1].close()
    after = joined(members[0], view.number)
    assert after.workers == (0, 2)
    wait_until(lambda: members[2].view == after)
    with pytest.raises(ViewChangedError):
        members[2].check(view)
    assert members[0].await_change(view)
    assert not members[0].left_out()
    with pytest.raises(ViewChangedError, match="leaves"):
        members[1].check(view)


def test_who_is_done_interrupts_nobody(member: Join) -> None:
    members = [member(rank) for rank in range(3)]
    view = joined(members[0])
    wait_until(lambda: members[1].view == view)
    members[1].close(done_in=view, complete=True)
    members[1].close()
    time.sleep(1)
    members[0].check(view)


def test_a_frozen_worker_is_left_out_and_knows_it(
    member: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [member(rank, silence=4.0) for rank in range(3)]
    view = joined(members[1])
    wait_until(lambda: members[1].view == view and members[0].view == view)
    frozen = True
    look = members[1]._look

    def freeze() -> None:
        while frozen:
            time.sleep(0.02)
        look()

    monkeypatch.setattr(members[1], "_look", freeze)
    wait_until(lambda: members[0].view is not None and members[0].view.workers == (0, 2))
    assert not members[1].left_out(), "it cannot know"
    frozen = False
    # Nothing may be done on the strength of a look that is too old.
    with pytest.raises(ViewChangedError):
        members[1].check(view)
    assert joined(members[1], view.number).workers == (0, 1, 2)
    assert members[1].left_out()
    assert not members[1].left_out(), "since the last call"


def test_nobody_is_silent_while_this_process_is_frozen(
    member: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a machine was suspended, all of its workers go on together."""
    members = [member(rank) for rank in range(3)]
    view = joined(members[0])
    wait_until(lambda: all(one.view == view for one in members))
    asleep = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + asleep)
    monkeypatch.setattr(membership, "time", clock)
    asleep = 1000.0
    for one in members:
        one.check(view)
    looks = [one._count for one in members]
    wait_until(lambda: all(one._count > looks[0] + 3 for one in members))
    for one in members:
        one.check(view)


def test_who_comes_while_another_reads_is_not_taken_for_dead(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first view may be written between what a worker reads of the others and of views."""
    first, reader, last = (
        Membership(place, signed(place), silence=20.0, start=LIMIT, beat=0.05)
        for place in (
            ProcessInfo(rank=rank, world=3, host="", address=address) for rank in range(3)
        )
    )
    for one in (first, reader, last):
        one._roll.namespace = ""
    first._look()
    note = reader._roll.note

    def interrupted(*others: Any, **more: Any) -> None:
        monkeypatch.undo()
        last._look()
        first._look()
        note(*others, **more)

    monkeypatch.setattr(reader._roll, "note", interrupted)
    reader._look()
    for one in (reader, first, last, reader):
        one._look()
        assert one.view is not None and one.view.number == 0 and one.view.workers == (0, 1, 2)


def test_who_is_asked_to_stop_does_not_wait(member: Join) -> None:
    assert member(0).join(-1, asked_to_stop=lambda: True) is None


# ------------------------------------------------------------------ the store's process


START_IT = """
import sys
from pathlib import Path
from gristmill.base.process import Address, ProcessInfo
from gristmill.strategies.decentralized import membership
from gristmill.strategies.decentralized.coordinator import reach_store
place = ProcessInfo(address=Address("127.0.0.1", int(sys.argv[1])), world=2)
store = reach_store(place, seconds=60, log=Path(sys.argv[2]), idle=600)
store.set("from", "the first")
"""


@pytest.mark.slow
def test_the_store_outlives_the_process_that_starts_it(tmp_path: Any) -> None:
    address, log = Address("127.0.0.1", free_port()), tmp_path / "logs/coordinator.log"
    start = [sys.executable, "-c", START_IT, str(address.port), str(log)]
    subprocess.run(start, check=True, timeout=2 * LIMIT)
    place = ProcessInfo(rank=0, world=2, address=address)
    serving = [pid for pid in pids() if f"\0{address.port}\0".encode() in command_of(pid)]
    try:
        # A second start finds it, with what it holds.
        store = reach_store(place, seconds=LIMIT, log=log)
        assert store.get("from") == b"the first"
        assert len(serving) == 1
        assert log.read_text() == ""
    finally:
        for pid in serving:
            os.kill(pid, signal.SIGKILL)


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_the_store_stays_while_workers_send_heartbeats(tmp_path: Any) -> None:
    port = free_port()
    code = f"""
from gristmill.base.process import Address
from gristmill.strategies.decentralized import membership
from gristmill.strategies.decentralized.coordinator import serve
serve(Address("127.0.0.1", {port}), idle=2.0)
"""
    served = subprocess.Popen([sys.executable, "-c", code])
    try:
        place = ProcessInfo(rank=0, world=1, host="here", address=Address("127.0.0.1", port))
        one = Membership(place, signed(place), silence=2.0, start=1.0, beat=0.05)
        one.start()
        time.sleep(4)
        assert served.poll() is None
        one.close()
        assert served.wait(LIMIT) == 0
    finally:
        served.kill()


def test_a_worker_whose_store_is_gone_says_so(tmp_path: Any) -> None:
    port = free_port()
    code = f"""
from gristmill.base.process import Address
from gristmill.strategies.decentralized import membership
from gristmill.strategies.decentralized.coordinator import serve
serve(Address("127.0.0.1", {port}))
"""
    served = multiprocessing.get_context("forkserver").Process(target=exec, args=(code, {}))
    served.start()
    place = ProcessInfo(rank=0, world=1, host="here", address=Address("127.0.0.1", port))
    one = Membership(place, signed(place), silence=0.5, start=1.0, beat=0.05)
    one.start()
    view = joined(one)
    served.kill()
    served.join()
    wait_until(lambda: one._failure is not None)
    with pytest.raises(UserError, match="lost the store of the run") as caught:
        one.check(view)
    assert caught.value.exit is Exit.PEER


def names_of(store: Any) -> list[str]:
    """What anybody who reaches the port can list."""
    return [name for name in store.list_keys() if "/members/" in name or "/views/" in name]


def test_whoever_reaches_the_store_cannot_take_part_in_a_run(
    address: Address, member: Join
) -> None:
    members = [member(rank) for rank in range(3)]
    view = joined(members[0])
    stranger = join_store(ProcessInfo(address=address), seconds=LIMIT)
    beat = next(name for name in names_of(stranger) if name.endswith("/members/2"))
    # A heartbeat of another worker, which is signed, but under another name.
    other = stranger.get(beat.replace("/members/2", "/members/1"))
    members[2].close()
    stranger.set(beat, other.decode())
    wait_until(lambda: members[0]._failure is not None)
    with pytest.raises(UserError, match="somebody without the key of the run folder has written"):
        members[0].check(view)


@pytest.mark.parametrize("forged", ["", "{}", "zz" * 40, "ab" * 40])
def test_a_view_that_a_stranger_proposes_is_adopted_by_nobody(
    forged: str, address: Address, member: Join
) -> None:
    members = [member(rank) for rank in range(3)]
    view = joined(members[0])
    stranger = join_store(ProcessInfo(address=address), seconds=LIMIT)
    newest = next(name for name in names_of(stranger) if name.endswith(f"/views/{view.number}"))
    stranger.set(newest.replace(f"/{view.number}", f"/{view.number + 1}"), forged)
    wait_until(lambda: all(one._failure is not None for one in members))
    assert all(one.view in (None, view) for one in members)


def test_an_old_heartbeat_is_no_sign_of_life() -> None:
    roll = Roll(0, silence=5.0, namespace="")
    same = {"incarnation": "a", "host": "h", "pid": 1, "namespace": ""}
    same |= {"leaving": False, "done_in": None, "complete": False}
    roll.note(1, {**same, "count": 8}, now=0.0)
    roll.note(1, {**same, "count": 7}, now=4.0)
    assert roll.peers[1].heard == 0.0


def test_runs_with_different_keys_do_not_meet_in_one_store(address: Address) -> None:
    store = join_store(ProcessInfo(address=address), seconds=LIMIT)
    first, second = SignedStore(store, KEY), SignedStore(store, b"l" * 32)
    first.set("views/0", "a")
    assert first.get("views/0") == b"a" == first.clone().get("views/0")
    assert not second.check(["views/0"])
    assert second.compare_set("views/0", "", "b") == b"b"
    assert second.compare_set("views/0", "a", "c") == b"b", "it holds another value"
    assert second.compare_set("views/0", "b", "c") == b"c"
    assert first.multi_get(["views/0"]) == [b"a"]


def test_the_key_of_a_run_is_made_once_and_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: run_key(path), range(32)))
    assert len(keys) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == [".key"], "no drafts are left"
    write_key(path, KEY, replace=False)
    assert {run_key(path)} == keys
    write_key(path, KEY, replace=True)
    assert run_key(path) == KEY


@pytest.mark.parametrize("text", ["", "abc", "zz" * 32, "ab" * 31])
def test_a_damaged_key_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / ".key").write_text(text)
    with pytest.raises(UserError, match="key of an elastic run is damaged"):
        run_key(tmp_path / ".key")


def test_a_worker_with_other_settings_is_refused(address: Address, member: Join) -> None:
    place = ProcessInfo(rank=1, world=2, host="there", address=address)
    store = join_store(place, seconds=LIMIT)
    settings = {"model.width": 16, "workers": 2}
    require_same_settings(store, settings, place=place)
    require_same_settings(store, settings, place=place)
    member(0, world=2)
    with pytest.raises(UserError) as caught:
        require_same_settings(store, {**settings, "model.width": 32}, place=place)
    assert caught.value.problems[0].what == (
        f"worker 1 on there does not fit the run at {address}: model.width is 32 here and 16 there"
    )
    assert caught.value.exit is Exit.REFUSED
    assert not SignedStore(store, KEY).check(["members/1"]), "it has not met anybody"


def test_the_settings_of_a_run_that_has_ended_do_not_count(address: Address) -> None:
    place = ProcessInfo(rank=0, world=2, address=address)
    store = join_store(place, seconds=LIMIT)
    require_same_settings(store, {"model.width": 16}, place=place)
    require_same_settings(store, {"model.width": 32}, place=place, quiet=0.3)


def test_a_worker_whose_main_thread_hangs_is_left_out_until_it_lives(member: Join) -> None:
    members = [member(rank, world=2) for rank in range(2)]
    view = joined(members[0])
    wait_until(lambda: members[1].view == view)
    members[1].show_life(seconds=0.2)
    wait_until(lambda: members[0].view is not None and members[0].view.workers == (0,))
    wait_until(lambda: members[1].view == members[0].view)
    with pytest.raises(ViewChangedError):
        members[1].check(view)
    members[1].show_life(seconds=1000)
    assert joined(members[1], view.number).workers == (0, 1)
    assert members[1].left_out()
