"""No silent hang: every process of a run says that it lives, and sees whether the others do.

    messenger   a thread; once a second writes this process's sign into the store in which the
                processes met, and every few seconds reads the others' (see `signs`)
    judge       a thread; never waits for anything, and ends this process if
                · another has given no sign for too long: it froze or died; of processes of the
                  same machine, it is seen that they have ended
                · another failed, or ended because of a third, and this one still waits
                · the store is gone, and with it the process that kept it
                · this process has been in one phase for too long

The last line says which rank on which host in which phase at which step is to blame. The two are
apart because the store may never answer: the client of a frozen server waits for ever, whatever
timeout it was given. For the same reason the store is reached by a connection of the watch's own.

A process that ends says so. One that fails in an exchange with others asks first, by `explain`,
whether another is the cause: who dies or raises takes its peers' collectives down with it.

Time is counted by the judge, a little at a time. A process that was stopped, or a machine that
slept, finds that no time has passed, and blames nobody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Place
from gristmill.base.units import format_seconds
from gristmill.parallel.causes import (
    in_one_line,
    may_be_of_others,
    named,
    words_of_end,
    words_of_silence,
    words_of_waiting,
)
from gristmill.parallel.last_words import in_time, print_line, quiet, write_log
from gristmill.parallel.limits import Limits, Pace
from gristmill.parallel.meeting import Store, join_store, serve_store
from gristmill.parallel.neighbours import has_ended, home
from gristmill.parallel.signs import Roll, Sign, Silent, State, Summary, read_sign, write_sign


class Watch:
    """Watches the processes of a run while it is entered; for a process alone it does nothing.

    Every process calls `phase` alike, as it goes along. `last_words` is called with the reason when
    this process is about to be ended, in a thread, and not waited for long.
    """

    def __init__(
        self,
        place: Place,
        *,
        limits: Limits,
        log: Path | None = None,
        last_words: Callable[[str], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.place, self.limits, self.log = place, limits, log
        self.last_words, self.pace = last_words, pace or Pace().within(limits.whole)
        self.active = place.world > 1 and place.address is not None
        self._large = place.world > self.pace.crowd
        self._silence = limits.silent(self.pace, crowd=self._large)
        self._serves = place.rank == 0 and not place.agent
        self._time = 0.0
        self._phase = _Phase("start", 0, 0, 0.0, limits.start)
        self._state: State = "running"
        self._what = ""
        self._beat = 0
        self._roll, self._keys = Roll(place.world), set[int]()
        self._home, self._suspects = home(), set[int]()
        self._summary = self._roll.summary(self._sign(), now=0.0)
        self._connected = False
        self._exchanged_at = 0.0
        self._store_error: str | None = None
        self._store: Store | None = None
        self._hurried = self._judging = False
        self._ended_at: float | None = None
        self._leave_by: float | None = None
        self._closing, self._wake, self._spoken = (threading.Event() for _ in range(3))
        self._threads: list[threading.Thread] = []

    # -------------------------------------------------------------- for the run

    def __enter__(self) -> Watch:
        if self.active:
            if self._serves:
                self._store = serve_store(self.place)
            self._judging = True
            self._threads = [
                threading.Thread(target=work, name=f"watch{work.__name__}", daemon=True)
                for work in (self._talk, self._judge)
            ]
            quiet(self.log)
            for thread in self._threads:
                thread.start()
            # Torch would wait for the store's keeper as well, but not end as quietly. What is wrong
            # with one that answers, torch knows best.
            while not self._connected and self._store_error is None:
                time.sleep(self.pace.tick)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.done()
            return
        try:
            explained = self.explain(error)
            if explained is not None:
                raise explained from error
        finally:
            self._close(linger=self.pace.heard)

    @property
    def where(self) -> str:
        """This process, and what it is doing."""
        sign = self._sign()
        return f"{sign.who} {sign.where}"

    def phase(self, name: str, step: int = 0, *, limit: float | None = None) -> None:
        """Say what this process begins to do, and how long it may take if not as long as usual."""
        before = self._phase
        turn = before.turn + 1 if before.step == step else 1
        usual = self.limits.start if name == "start" else self.limits.phase
        self._phase = _Phase(name, step, turn, self._time, usual if limit is None else limit)

    def done(self) -> None:
        """Say that this process needs the others no more, and end the watch."""
        self._judging = False
        if self._state == "running":
            self._speak("done")
        self._close(linger=2 * self.pace.heard)

    def explain(self, error: BaseException) -> UserError | None:
        """The other process that caused an error, if one did; otherwise the others are told that
        it is this process's own. Either way, this process has to end now."""
        if not self.active or self._state in ("failed", "done"):
            return None
        if self._state == "lost":
            # Known already, here or to the judge, who may be about to end this process.
            known = isinstance(error, UserError) and error.exit is Exit.PEER
            return None if known else UserError(self._what, exit=Exit.PEER)
        self._judging = False
        words = self._cause(error) if may_be_of_others(error) else None
        self._speak("lost" if words else "failed", words or named(error))
        if words:
            write_log(self.log, words)
        self._leave_by = self._time + self.limits.leaving
        self._judging = True
        return UserError(words, exit=Exit.PEER) if words else None

    def _cause(self, error: BaseException) -> str | None:
        """Wait a moment for the others' last words."""
        self._hurry()
        enough = 3 * self.pace.beat + (2 * self.pace.reading if self._large else 0)
        began = self._time
        while self._time - began < enough and self._store_error is None:
            words = words_of_end(self._summary)
            if words is not None:
                return words
            time.sleep(self.pace.tick)
        # A process that lives has given a sign in the meantime.
        words = self._trouble(self.pace.doubtful)
        never_met = not self._connected or self._summary.absent
        if words is None and never_met and isinstance(error, UserError):
            return self._words_of_waiting()
        return words

    # -------------------------------------------------------------- speaking

    def _sign(self) -> Sign:
        phase = self._phase
        return Sign(
            rank=self.place.rank,
            host=self.place.host,
            beat=self._beat,
            phase=phase.name,
            step=phase.step,
            turn=phase.turn,
            seconds=round(self._time - phase.began, 1),
            state=self._state,
            what=self._what,
            pid=os.getpid(),
            home=self._home,
        )

    def _speak(self, state: State, what: str = "") -> None:
        """Change the state, and wait a moment until it is written."""
        self._state, self._what = state, in_one_line(what)
        if self.active:
            self._spoken.clear()
            self._wake.set()
            deadline = time.monotonic() + 2 * self.pace.beat
            while self._store_error is None and time.monotonic() < deadline:
                if self._spoken.wait(self.pace.tick):
                    break

    def _close(self, *, linger: float) -> None:
        """End the watch. Whoever keeps the store stays until all have read what was said last."""
        if not self.active or self._closing.is_set():
            return
        self._judging = False
        if self._serves:
            self._await_others(linger)
        self._closing.set()
        self._wake.set()
        # A thread that returns from torch while the interpreter ends would abort the process.
        for thread in self._threads:
            thread.join(2 * self.pace.beat)
        self._store = None

    def _hurry(self) -> None:
        """Speak and listen as often as possible from now on."""
        self._hurried = True
        self._wake.set()

    def _await_others(self, seconds: float) -> None:
        self._hurry()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._store_error is None:
            deaf = sum(one.seconds > self.pace.doubtful for one in self._summary.silent)
            if self._summary.running <= deaf and not self._summary.absent:
                return
            time.sleep(self.pace.tick)

    # -------------------------------------------------------------- the messenger

    def _talk(self) -> None:
        try:
            store = self._store or join_store(self.place, seconds=self.limits.start)
            self._exchanged_at, self._connected = self._time, True
            next_reading = 0.0
            while not self._closing.is_set():
                spoken = self._state
                self._beat += 1
                store.set(self._key(self.place.rank), write_sign(self._sign()))
                if self._hurried or self._uneasy or time.monotonic() >= next_reading:
                    self._summary = self._read(store)
                    next_reading = time.monotonic() + self.pace.reading
                self._exchanged_at = self._time
                if spoken == self._state:
                    self._spoken.set()
                self._wake.wait(self.pace.tick if self._hurried else self.pace.beat)
                self._wake.clear()
        except RuntimeError as error:
            self._store_error = str(error).partition("\n")[0]

    @property
    def _uneasy(self) -> bool:
        """Whether somebody is late, or seems to have ended, and is to be looked at again soon."""
        late = any(one.seconds > self.pace.doubtful for one in self._summary.silent[:1])
        return late or bool(self._suspects)

    def _key(self, rank: int | str) -> str:
        return f"gristmill/{self.place.attempt}/{rank}"

    def _read(self, store: Store) -> Summary:
        if self._large and self.place.rank:
            return self._read_summary(store)
        for rank in range(self.place.world):
            if rank not in self._keys and store.check([self._key(rank)]):
                self._keys.add(rank)
        ranks = sorted(self._keys)
        for text in store.multi_get([self._key(rank) for rank in ranks]):
            self._roll.note(read_sign(text), now=self._time)
        self._look_for_neighbours()
        summary = self._roll.summary(self._sign(), now=self._time)
        if self._large:
            store.set(self._key("all"), summary.write())
        return summary

    def _look_for_neighbours(self) -> None:
        """Note who has ended, if the signs were read again afterwards and it has not said so."""
        running = [one for one in self._roll.running() if one.home and one.home == self._home]
        for sign in running:
            if sign.rank in self._suspects:
                self._roll.note_end(sign.rank)
        self._suspects = {sign.rank for sign in running if has_ended(sign.pid)}

    def _read_summary(self, store: Store) -> Summary:
        if not store.check([self._key("all")]):
            return self._summary
        summary = Summary.read(store.get(self._key("all")))
        leader = summary.by
        self._roll.note(leader, now=self._time)
        # It speaks when it has read, and not at every beat.
        silence = self._roll.silence(leader.rank, now=self._time) - self.pace.reading
        silent = Silent(leader, max(0.0, silence))
        return replace(
            summary,
            failed=(*_those(leader, "failed"), *summary.failed),
            lost=(*_those(leader, "lost"), *summary.lost),
            silent=tuple(sorted((silent, *summary.silent), key=lambda one: -one.seconds)),
        )

    # -------------------------------------------------------------- the judge

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(self.pace.tick):
            now = time.monotonic()
            self._time += min(now - before, 4 * self.pace.tick)
            before = now
            words = self._verdict() if self._judging else None
            if words is not None:
                self._end(words)

    def _verdict(self) -> str | None:
        """Why this process should end, if it should."""
        if self._leave_by is not None:
            return self._what if self._time > self._leave_by else None
        ended, silent = self._words_of_end(), self._words_of_silence(self._silence)
        if silent is not None:
            return ended or silent
        if ended is None:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = self._time
        # Whatever happened to the others, its error may be on the way here, too.
        if self._ended_at is not None and self._time - self._ended_at > self.pace.heard:
            return ended
        if self._time - self._phase.began <= self._phase.limit:
            return None
        return self._trouble(self.pace.doubtful) or self._words_of_waiting()

    def _trouble(self, silent: float) -> str | None:
        """What is wrong with the others, or with the way to them."""
        return self._words_of_end() or self._words_of_silence(silent)

    def _words_of_end(self) -> str | None:
        """Who has ended, or about to."""
        words = words_of_end(self._summary)
        if words is None and self._connected and self._store_error is not None:
            words = self._words_of_store()
        return words

    def _words_of_silence(self, seconds: float) -> str | None:
        """Who was last heard of longer ago than this."""
        words = None
        if self._connected and self._time - self._exchanged_at > seconds:
            words = self._words_of_store()
        for one in self._summary.silent[:1]:
            if words is None and one.seconds > seconds:
                words = words_of_silence(one)
        return words

    def _words_of_store(self) -> str | None:
        """The store does not answer, and so its keeper; None if that one had done its part."""
        store = f"the store at {self.place.address}"
        keeper = self._roll.last(0)
        silence = format_seconds(self._time - self._exchanged_at)
        how = "is gone" if self._store_error else f"has not answered for {silence}"
        if self.place.agent:
            return f"{store}, which the launcher keeps, {how}"
        if keeper is None:
            return f"{store}, which rank 0 keeps, {how}"
        if keeper.state == "done":
            return None
        return f"{keeper.who}, which keeps {store}, {how}; it was last heard of {keeper.where}"

    def _words_of_waiting(self) -> str:
        me = self._sign()
        if not self._connected:
            whose = "the launcher" if self.place.agent else "rank 0"
            return (
                f"{me.who} has waited {format_seconds(me.seconds)} {me.where}, and {whose} has "
                f"not answered at {self.place.address}"
            )
        return words_of_waiting(replace(self._summary, by=me))

    # -------------------------------------------------------------- the end

    def _end(self, words: str) -> None:
        """End this process at once, wherever it stands. The last thing is a line that says why."""
        if self._state == "running":
            self._speak("lost", words)
        say = self.last_words
        if say is not None:
            in_time(lambda: say(words), seconds=5)
        if self._serves:
            self._await_others(self.pace.heard)
        write_log(self.log, words, threads=True)
        print_line(words)
        os._exit(Exit.INTERNAL if self._state == "failed" else Exit.PEER)


@dataclass(frozen=True)
class _Phase:
    name: str
    step: int
    turn: int
    began: float
    limit: float


def _those(sign: Sign, state: State) -> tuple[Sign, ...]:
    return (sign,) if sign.state == state else ()
