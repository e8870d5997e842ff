"""Who takes part in a check, and who does not come back from it.

Every process writes into the store of the rendezvous what it begins and ends:

    doctor/ATTEMPT/member/RANK        what the process says of itself (`Member`)
    doctor/ATTEMPT/CHECK/RANK         whether it has begun, ended or failed (`Word`)
    doctor/ATTEMPT/trouble            CHECK: somebody failed in it
    doctor/ATTEMPT/go                 all members, once rank 0 has seen them
    doctor/ATTEMPT/asks               rank 0 gives up, and asks all where they stand
    doctor/ATTEMPT/where/RANK         where a process stands (`Standing`)
    doctor/ATTEMPT/over               rank 0 has given up; all others end

A collective in which somebody is missing cannot be interrupted, so a thread watches the clock: on
rank 0 it gives up when a check takes longer than it may, or when somebody has failed in it. In a
collective all wait for who is not there. So the threads of all others tell first where their
process stands, which only one that lives can do, and whether it waits for the others there; then
they end it. They also do so when rank 0 is gone.
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
from gristmill.bench.cluster.members import Member, named
from gristmill.bench.finding import Finding, problem
from gristmill.distributed.liveness.rendezvous import join_store, serve_store
from gristmill.distributed.liveness.verdict import may_come_from_peer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL = 0.25
_TORCH = "/torch/"
_WAITING = ("distributed/control.py", "cluster/collectives.py", "cluster/pairs.py")
"""Files in which a process waits for others."""
_LAST_WORDS = 3.0
"""Seconds that others have to tell what happened to them, once somebody has failed."""


@dataclass(frozen=True)
class Word:
    """What a process wrote last about a check."""

    state: Literal["begun", "ended", "failed"]
    why: str = ""
    of_peer: bool = False
    """Whether it failed as those do that lose another process."""


@dataclass(frozen=True)
class Standing:
    """Where a process is in the program."""

    where: str
    waits: bool
    """Whether it waits for others."""

    @classmethod
    def of_main_thread(cls) -> Standing:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        files, ours = [], "at its end"
        while frame is not None:
            code = frame.f_code
            files.append(code.co_filename)
            if ours == "at its end" and "gristmill" in code.co_filename:
                ours = f"{Path(code.co_filename).name}:{frame.f_lineno}, in {code.co_name}"
            frame = frame.f_back
        return cls(ours, any(file.endswith(_WAITING) or _TORCH in file for file in files[:3]))


@dataclass(frozen=True)
class Lost:
    """A check that did not come to its end."""

    check: str
    limit: float
    """Seconds that it had."""
    words: Mapping[int, Word]
    """By rank; missing if a process wrote nothing."""
    standing: Mapping[int, Standing]
    """By rank; missing if a process did not answer when it was asked."""

    def finding(self, members: Sequence[Member]) -> Finding:
        """Who is to blame: those that failed by themselves; else those that did not come; else
        those that do not answer; else those that did not end it, and wait for nobody."""
        failed = [member for member in members if self._state(member) == "failed"]
        guilty = [member for member in failed if not self.words[member.rank].of_peer]
        absent = [member for member in members if member.rank not in self.words]
        begun = [member for member in members if self._state(member) == "begun"]
        silent = [member for member in begun if member.rank not in self.standing]
        busy = [member for member in begun if not self._waits(member)]
        who, what = next(
            (found, how)
            for found, how in (
                (guilty, "failed"),
                (absent, "did not come to this check"),
                (silent, "did not answer"),
                (busy, "did not end it"),
                (begun, "still wait for each other"),
                (failed, "failed"),
                (members, "did not end it"),
            )
            if found
        )
        text = f"{named([member.who for member in who])} {what}"
        speaker = next(iter(guilty or failed), None)
        if speaker is None:
            text += f" {'after' if who is begun else 'within'} {self.limit:.0f} seconds"
            stands = next((member for member in who if member.rank in self.standing), None)
            if stands is not None:
                text += f"; {stands.who} is at {self.standing[stands.rank].where}"
        else:
            text += f"; {speaker.who} says: {self.words[speaker.rank].why}"
        remedy = "see whether these processes live, and what they printed; then see their links"
        return problem(self.check, text, remedy, exit=Exit.PEER)

    def _state(self, member: Member) -> str:
        word = self.words.get(member.rank)
        return "" if word is None else word.state

    def _waits(self, member: Member) -> bool:
        standing = self.standing.get(member.rank)
        return standing is not None and standing.waits


class Attendance:
    """The store, and the thread that watches the check that is under way."""

    def __init__(
        self,
        place: ProcessInfo,
        *,
        start: float,
        on_lost: Callable[[Lost], int],
        lost_status: int = Exit.PEER,
    ) -> None:
        """`on_lost` is called in a thread, on rank 0, and returns the exit status; `lost_status`
        is that of the others."""
        self.place, self.on_lost, self.lost_status = place, on_lost, lost_status
        self.store = _open(place, seconds=start)
        self._thread: threading.Thread | None = None
        self._start = start
        self._closing = threading.Event()
        self._current: tuple[str, float, float] | None = None
        """The check under way, when it began, and how long it may take."""

    def _key(self, *names: object) -> str:
        return "/".join(map(str, ("doctor", self.place.attempt, *names)))

    # -------------------------------------------------------------- who is there

    def introduce(self, member: Member) -> None:
        """Say that this process is there."""
        self.store.set(self._key("member", self.place.rank), json.dumps(member.as_json()))

    def members(self, *, seconds: float) -> list[Member | None]:
        """All members, by rank; None for those that do not come in this time."""
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

    def await_word(self) -> list[Member] | None:
        """On the others: all members, once rank 0 has seen them; None if it does not go on."""
        keys = [self._key("go"), self._key("over")]
        while not any(there := [self.store.check([key]) for key in keys]):
            time.sleep(_POLL)
        if not there[0]:
            return None
        return [Member.from_json(values) for values in json.loads(self.store.get(keys[0]))]

    def go(self, members: Sequence[Member]) -> None:
        """Say that all are there, and who they are."""
        self.store.set(self._key("go"), json.dumps([member.as_json() for member in members]))

    def give_up(self) -> None:
        self.store.set(self._key("over"), "")

    # -------------------------------------------------------------- checks

    def watch(self) -> None:
        """Begin to watch over checks."""
        self._thread = threading.Thread(target=self._watch, name="attendance", daemon=True)
        self._thread.start()

    def begin(self, check: str, *, limit: float) -> None:
        self._write(check, Word("begun"))
        self._current = (check, time.monotonic(), limit)

    def end(self, check: str) -> None:
        self._current = None
        self._write(check, Word("ended"))

    def _write(self, check: str, word: Word) -> None:
        self.store.set(self._key(check, self.place.rank), json.dumps(asdict(word)))

    def failed(self, check: str, error: Exception) -> NoReturn:
        """Say why this process cannot go on, and wait until rank 0 has given up."""
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        with contextlib.suppress(RuntimeError):
            self._write(check, Word("failed", why, may_come_from_peer(error)))
            self.store.set(self._key("trouble"), check)
        assert self._thread is not None
        self._thread.join(self._start)
        raise error

    def close(self) -> None:
        """Part from the others; rank 0, which may host the store, as the last."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self.store.set(self._key("left", self.place.rank), "")
        if self.place.rank == 0:
            keys = [self._key("left", rank) for rank in range(self.place.world)]
            deadline = time.monotonic() + _LAST_WORDS
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _watch(self) -> None:
        try:
            # A connection of its own: the other one may be waiting.
            store = join_store(self.place, seconds=self._start)
            while not self._closing.wait(_POLL):
                if self.place.rank == 0:
                    self._watch_check(store)
                elif store.check([self._key("asks")]):
                    # The first to end would break the exchanges of others, before they have told.
                    self._tell_standing(store)
                    store.wait([self._key("over")])
                    os._exit(self.lost_status)
        except RuntimeError:
            if not self._closing.is_set():
                print_exit_report(f"rank 0, or the store at {self.place.address}, is gone")
                os._exit(Exit.PEER)

    def _tell_standing(self, store: Store) -> None:
        standing = Standing.of_main_thread()
        store.set(self._key("where", self.place.rank), json.dumps(asdict(standing)))

    def _watch_check(self, store: Store) -> None:
        if self._current is None:
            return
        check, began, limit = self._current
        if store.check([self._key("trouble")]):
            check = store.get(self._key("trouble")).decode()
            time.sleep(_LAST_WORDS)
        elif time.monotonic() - began < limit:
            return
        keys = {rank: self._key(check, rank) for rank in range(self.place.world)}
        there = {rank: key for rank, key in keys.items() if store.check([key])}
        words = {rank: Word(**json.loads(store.get(key))) for rank, key in there.items()}
        self._tell_standing(store)
        store.set(self._key("asks"), "")
        time.sleep(_LAST_WORDS)
        told = {rank: self._key("where", rank) for rank in keys}
        standing = {
            rank: Standing(**json.loads(store.get(key)))
            for rank, key in told.items()
            if store.check([key])
        }
        status = self.on_lost(Lost(check, limit, words, standing))
        store.set(self._key("over"), "")
        time.sleep(2 * _POLL)  # for the others to read it
        sys.stdout.flush()
        os._exit(status)


def _open(place: ProcessInfo, *, seconds: float) -> Store:
    if place.rank == 0 and not place.agent:
        return serve_store(place)
    try:
        return join_store(place, seconds=seconds)
    except RuntimeError as error:
        raise UserError(
            f"rank {place.rank} on {place.host} does not reach the rendezvous: {error}",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="check that rank 0 was started, and that its address can be reached from here",
            exit=Exit.PEER,
        ) from error
