"""Progress of the checks on all ranks, and a watchdog for checks that hang.

Each process records its progress in the rendezvous store:

    doctor/ATTEMPT/member/RANK        description of the process (`Member`)
    doctor/ATTEMPT/CHECK/RANK         whether it began, ended or failed the check (`CheckState`)
    doctor/ATTEMPT/failed             name of the check in which a process failed
    doctor/ATTEMPT/start              all members, once rank 0 has seen them
    doctor/ATTEMPT/report             rank 0 gives up and asks all processes for their position
    doctor/ATTEMPT/position/RANK      where a process is in the code (`StackPosition`)
    doctor/ATTEMPT/abort              rank 0 has given up; the other processes exit
    doctor/ATTEMPT/left/RANK          the process has finished with the store

A collective cannot be interrupted while a process is missing, so each process runs a watchdog
thread. Rank 0 gives up when a check exceeds its time limit or a process fails in it. The watchdogs
of the other ranks then report where their main thread is and whether it waits for other processes;
a dead process reports nothing. After that they exit, as they also do when rank 0 is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from gristmill.base.errors import Exit, UserError
from gristmill.base.exits import print_exit_report
from gristmill.base.process import ProcessInfo
from gristmill.bench.cluster.members import Member, join_names
from gristmill.bench.finding import Finding, problem
from gristmill.distributed.liveness.rendezvous import join_store, serve_store
from gristmill.distributed.liveness.verdict import may_come_from_peer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL = 0.25
_TORCH = "/torch/"
_WAITING_FILES = (
    "distributed/control.py",
    "cluster/clocks.py",
    "cluster/collectives.py",
    "cluster/pairs.py",
)
"""Files in which a process waits for other processes."""
_GRACE = 3.0
"""Seconds that the other processes get to report after one has failed."""


@dataclass(frozen=True)
class CheckState:
    """The latest state of a check on one rank."""

    state: Literal["begun", "ended", "failed"]
    reason: str = ""
    caused_by_peer: bool = False
    """Whether the error looks like the loss of another process."""


@dataclass(frozen=True)
class StackPosition:
    """Where the main thread of a process is in the code."""

    location: str
    waiting: bool
    """Whether it waits for other processes."""

    @classmethod
    def of_main_thread(cls) -> StackPosition:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        files, location = [], "at its end"
        while frame is not None:
            code = frame.f_code
            files.append(code.co_filename)
            if location == "at its end" and "gristmill" in code.co_filename:
                location = f"{Path(code.co_filename).name}:{frame.f_lineno}, in {code.co_name}"
            frame = frame.f_back
        waiting = any(file.endswith(_WAITING_FILES) or _TORCH in file for file in files[:3])
        return cls(location, waiting)


@dataclass(frozen=True)
class LostCheck:
    """A check that did not finish on all ranks."""

    check: str
    limit: float
    """Its time limit in seconds."""
    states: Mapping[int, CheckState]
    """By rank; missing for a process that never began the check."""
    positions: Mapping[int, StackPosition]
    """By rank; missing for a process that did not respond."""

    def finding(self, members: Sequence[Member]) -> Finding:
        """Name the likely cause: processes that failed on their own; else those that did not begin
        the check; else those that do not respond; else those that are busy, not waiting."""
        failed = [member for member in members if self._state(member) == "failed"]
        at_fault = [member for member in failed if not self.states[member.rank].caused_by_peer]
        absent = [member for member in members if member.rank not in self.states]
        begun = [member for member in members if self._state(member) == "begun"]
        silent = [member for member in begun if member.rank not in self.positions]
        busy = [member for member in begun if not self._waiting(member)]
        suspects, verb = next(
            (candidates, verb)
            for candidates, verb in (
                (at_fault, "failed"),
                (absent, "did not reach this check"),
                (silent, "did not respond"),
                (busy, "did not finish"),
                (begun, "still waiting for each other"),
                (failed, "failed"),
                (members, "did not finish"),
            )
            if candidates
        )
        text = f"{join_names([member.label for member in suspects])} {verb}"
        reporter = next(iter(at_fault or failed), None)
        if reporter is None:
            text += f" {'after' if suspects is begun else 'within'} {self.limit:.0f} seconds"
            located = next((member for member in suspects if member.rank in self.positions), None)
            if located is not None:
                text += f"; {located.label} is at {self.positions[located.rank].location}"
        else:
            text += f"; error of {reporter.label}: {self.states[reporter.rank].reason}"
        remedy = "check whether these processes are alive and what they printed, then their links"
        return problem(self.check, text, remedy, exit=Exit.PEER)

    def _state(self, member: Member) -> str:
        state = self.states.get(member.rank)
        return "" if state is None else state.state

    def _waiting(self, member: Member) -> bool:
        position = self.positions.get(member.rank)
        return position is not None and position.waiting


class CheckWatchdog:
    """The store, and a thread that watches the current check."""

    def __init__(
        self,
        place: ProcessInfo,
        *,
        start_timeout: float,
        on_lost: Callable[[LostCheck], int],
        peer_exit: int = Exit.PEER,
    ) -> None:
        """On rank 0 the thread calls `on_lost`, which returns the exit status; the other ranks exit
        with `peer_exit`."""
        self.place, self.on_lost, self.peer_exit = place, on_lost, peer_exit
        self.store = _open_store(place, seconds=start_timeout)
        self._thread: threading.Thread | None = None
        self._start_timeout = start_timeout
        self._closing = threading.Event()
        self._current: tuple[str, float, float] | None = None
        """The current check, when it began, and its time limit."""

    def _key(self, *names: object) -> str:
        return "/".join(map(str, ("doctor", self.place.attempt, *names)))

    # -------------------------------------------------------------- members

    def register(self, member: Member) -> None:
        """Publish the description of this process."""
        self.store.set(self._key("member", self.place.rank), json.dumps(member.as_json()))

    def wait_for_members(self, *, seconds: float) -> list[Member | None]:
        """On rank 0: all members by rank; None for those that do not register in this time."""
        deadline = time.monotonic() + seconds
        keys = [self._key("member", rank) for rank in range(self.place.world)]
        missing = set(keys)
        while missing:
            missing -= {key for key in missing if self.store.check([key])}
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL if missing else 0)
        return [
            None if key in missing else Member.from_json(json.loads(self.store.get(key)))
            for key in keys
        ]

    def announce_start(self, members: Sequence[Member]) -> None:
        """On rank 0: tell the other ranks that the checks start, with all members."""
        self.store.set(self._key("start"), json.dumps([member.as_json() for member in members]))

    def wait_for_start(self) -> list[Member] | None:
        """On the other ranks: all members, once rank 0 has seen them; None if rank 0 aborts."""
        start, abort = self._key("start"), self._key("abort")
        while not (started := self.store.check([start])) and not self.store.check([abort]):
            time.sleep(_POLL)
        if not started:
            return None
        return [Member.from_json(values) for values in json.loads(self.store.get(start))]

    def abort(self) -> None:
        """On rank 0: tell the other ranks to exit."""
        self.store.set(self._key("abort"), "")

    # -------------------------------------------------------------- checks

    def start(self) -> None:
        """Start the watchdog thread."""
        self._thread = threading.Thread(target=self._watch, name="check-watchdog", daemon=True)
        self._thread.start()

    def begin(self, check: str, *, limit: float) -> None:
        self._write(check, CheckState("begun"))
        self._current = (check, time.monotonic(), limit)

    def end(self, check: str) -> None:
        self._current = None
        self._write(check, CheckState("ended"))

    def _write(self, check: str, state: CheckState) -> None:
        self.store.set(self._key(check, self.place.rank), json.dumps(asdict(state)))

    def fail(self, check: str, error: Exception) -> NoReturn:
        """Record why this process fails, wait until rank 0 has given up, and raise the error."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        with contextlib.suppress(RuntimeError):
            self._write(check, CheckState("failed", reason, may_come_from_peer(error)))
            self.store.set(self._key("failed"), check)
        assert self._thread is not None
        self._thread.join(self._start_timeout)
        raise error

    def close(self) -> None:
        """Leave the store. Rank 0, which may host it, waits for the other ranks."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.store.set(self._key("left", self.place.rank), "")
        if self.place.rank == 0:
            keys = [self._key("left", rank) for rank in range(self.place.world)]
            deadline = time.monotonic() + _GRACE
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _watch(self) -> None:
        try:
            # A separate connection: the main thread may block on the other one.
            store = join_store(self.place, seconds=self._start_timeout)
            while not self._closing.wait(_POLL):
                if self.place.rank == 0:
                    self._watch_check(store)
                elif store.check([self._key("report")]):
                    # A process that exits breaks the collectives of the others, so all of them
                    # report their position first.
                    self._report_position(store)
                    store.wait([self._key("abort")])
                    os._exit(self.peer_exit)
        except RuntimeError:
            if not self._closing.is_set():
                print_exit_report(f"rank 0, or the store at {self.place.address}, is gone")
                os._exit(Exit.PEER)

    def _report_position(self, store: Store) -> None:
        position = StackPosition.of_main_thread()
        store.set(self._key("position", self.place.rank), json.dumps(asdict(position)))

    def _watch_check(self, store: Store) -> None:
        if self._current is None:
            return
        check, began, limit = self._current
        if store.check([self._key("failed")]):
            check = store.get(self._key("failed")).decode()
            time.sleep(_GRACE)
        elif time.monotonic() - began < limit:
            return
        ranks = range(self.place.world)
        states = {
            rank: CheckState(**json.loads(store.get(key)))
            for rank, key in ((rank, self._key(check, rank)) for rank in ranks)
            if store.check([key])
        }
        self._report_position(store)
        store.set(self._key("report"), "")
        time.sleep(_GRACE)
        positions = {
            rank: StackPosition(**json.loads(store.get(key)))
            for rank, key in ((rank, self._key("position", rank)) for rank in ranks)
            if store.check([key])
        }
        status = self.on_lost(LostCheck(check, limit, states, positions))
        store.set(self._key("abort"), "")
        time.sleep(2 * _POLL)  # for the other ranks to read it
        sys.stdout.flush()
        os._exit(status)


def _open_store(place: ProcessInfo, *, seconds: float) -> Store:
    if place.rank == 0 and not place.agent:
        return serve_store(place)
    try:
        return join_store(place, seconds=seconds)
    except RuntimeError as error:
        raise UserError(
            f"rank {place.rank} on {place.host} cannot reach the rendezvous: {error}",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="check that rank 0 was started, and that its address can be reached from here",
            exit=Exit.PEER,
        ) from error
