"""The monitor: posts this process's heartbeats, and ends the process when another one is lost.

    heartbeat thread   posts this process's heartbeat in the store every second, and reads those of
                       the others every few seconds (`HeartbeatBoard`)
    monitor thread     calls `judge` a few times per second; if the process has to exit, ends it
                       with a last line that names the rank at fault

There are two threads because the client of a frozen store blocks for ever, whatever its timeout.
For the same reason the monitor has its own connection to the store.

The monitor thread adds up elapsed time in small increments. So after a process was stopped, or a
machine was suspended, hardly any time has passed for it, and no rank is blamed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.exits import print_exit_report, run_briefly, write_exit_report
from gristmill.base.process import ProcessInfo
from gristmill.distributed.failures import explain_failure
from gristmill.distributed.liveness.heartbeat import (
    Heartbeat,
    Roster,
    State,
    condense,
    has_ended,
    pid_namespace,
    read_heartbeats,
    write_heartbeats,
)
from gristmill.distributed.liveness.rendezvous import join_store, serve_store
from gristmill.distributed.liveness.verdict import (
    Heard,
    Limits,
    blame,
    ended_peer,
    judge,
    may_come_from_peer,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class HeartbeatBoard:
    """Posts this rank's heartbeat and reads those of the others, as keys of the store. For use by
    one thread.

        gristmill/ATTEMPT/RANK       that rank's heartbeat
        gristmill/ATTEMPT/summary    of a large world, the few that matter, posted by rank 0

    In a large world only rank 0 reads all heartbeats; the other ranks read its heartbeat and its
    summary.

    Whether a process in the same PID namespace, since the same boot, has ended is known from the
    kernel. For other processes, and outside Linux, only silence counts.
    """

    def __init__(self, store: Store, place: ProcessInfo, limits: Limits) -> None:
        self.store, self.place, self.limits = store, place, limits
        self.uneasy = False
        """Whether a rank is late or may have vanished, so that its heartbeat should be read
        soon."""
        self._large = place.world > limits.large_world
        self.everyone: tuple[Heartbeat, ...] = ()
        """The last heartbeats of all ranks, on ranks that read all."""
        self._roster = Roster(1 if self._large and place.rank else place.world)
        self._posted: set[int] = set()
        self._suspects: set[int] = set()

    def post(self, own: Heartbeat) -> None:
        self.store.set(self._key(own.rank), write_heartbeats([own]))

    def answer_seconds(self) -> float:
        """How long the store takes to answer, a measure of the link to it."""
        began = time.monotonic()
        self.store.check([self._key(self.place.rank)])
        return time.monotonic() - began

    def read(self, own: Heartbeat, *, now: float) -> tuple[Heartbeat, ...]:
        """The last heartbeats of all ranks; in a large world, of the few that matter."""
        if self._large and own.rank:
            heartbeats = self._read_summary(now)
        else:
            heartbeats = self.everyone = self._read_all(own, now)
            if self._large:
                heartbeats = condense(heartbeats)
                self.store.set(self._key("summary"), write_heartbeats(heartbeats))
        late = any(
            heartbeat.silence > self.limits.late
            for heartbeat in heartbeats
            if heartbeat.rank != own.rank
        )
        self.uneasy = late or bool(self._suspects)
        return heartbeats

    def _read_all(self, own: Heartbeat, now: float) -> tuple[Heartbeat, ...]:
        for rank in range(self.place.world):
            if rank not in self._posted and self.store.check([self._key(rank)]):
                self._posted.add(rank)
        for text in self.store.multi_get([self._key(rank) for rank in sorted(self._posted)]):
            self._roster.note(*read_heartbeats(text), now=now)
        snapshot, namespace = self._roster.snapshot(now=now), own.pid_namespace
        local = {
            one.rank: one.pid
            for one in snapshot
            if one.state == "running" and one.pid_namespace == namespace != ""
        }
        # A suspect ended before this read, which would have seen its last report.
        vanished = self._suspects & local.keys()
        self._suspects = {rank for rank, pid in local.items() if has_ended(pid)}
        self._roster.vanished |= vanished
        return self._roster.snapshot(now=now) if vanished else snapshot

    def _read_summary(self, now: float) -> tuple[Heartbeat, ...]:
        keys, summary = [self._key(0), self._key("summary")], list[Heartbeat]()
        if self.store.check(keys):
            leader, summary = map(read_heartbeats, self.store.multi_get(keys))
            self._roster.note(*leader, now=now)
        known = {one.rank: one for one in (*summary, *self._roster.snapshot(now=now))}
        return tuple(known.values())

    def _key(self, name: int | str) -> str:
        return f"gristmill/{self.place.attempt}/{name}"


_ANSWERS = 5
"""The fastest of this many answers of the store is taken as the latency of the link."""
_MESSAGE_WIDTH = 500
SCHEDULES = "torch.distributed.pipelining.schedules"
"""The logger of torch that prints a whole pipeline schedule when a transfer fails."""


@dataclass(frozen=True)
class _OwnState:
    state: State = "running"
    message: str = ""
    leave_by: float | None = None
    """When it is killed if it has not exited before."""


class Monitor:
    """Monitors the processes of a run while it is entered; for a single process it does nothing.

    All processes call `phase` in the same order. When this process is about to be ended, `on_exit`
    is called with the reason in a separate thread, and has a few seconds.
    """

    others_continue = False
    """When one process fails, all end."""

    def __init__(
        self,
        place: ProcessInfo,
        *,
        limits: Limits,
        log: Path | None = None,
        on_exit: Callable[[str], None] | None = None,
    ) -> None:
        self.place, self.limits, self.log, self.on_exit = place, limits, log, on_exit
        self.facts: Callable[[], Mapping[str, Any]] = dict
        """Returns further content of this process's heartbeats; called in the heartbeat thread."""
        self.everyone: tuple[Heartbeat, ...] = ()
        """The last heartbeats of all ranks, on rank 0."""
        self.active = place.world > 1 and place.address is not None
        self._hosts_store = place.rank == 0 and not place.agent
        # Any thread may read these; only the named thread replaces each, always as a whole.
        me = Heartbeat(place.rank, place.host, pid=os.getpid(), pid_namespace=pid_namespace())
        self._phase = (me, 0.0)  # the phase and when it began; training thread
        self._heard = Heard(place)  # heartbeat thread
        self._now = 0.0  # monitor thread
        self._own = _OwnState()  # the thread that decides how the process ends
        self._decided = threading.Lock()  # taken once and for all by that thread
        self._wake, self._fast, self._posted, self._closing = (threading.Event() for _ in range(4))
        self._threads: list[threading.Thread] = []

    # -------------------------------------------------------------- training thread

    def __enter__(self) -> Monitor:
        if self.active:
            store = serve_store(self.place) if self._hosts_store else None
            self._threads = [
                threading.Thread(target=self._send_heartbeats, args=(store,), daemon=True),
                threading.Thread(target=self._watch_peers, daemon=True),
            ]
            for thread in self._threads:
                thread.start()
            redirect_schedules(self.log)
            # Torch would also wait for the store, but print much more when it gives up.
            while self._heard.answered_at is None and self._heard.store_error is None:
                time.sleep(self.limits.tick)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.done()
            return
        try:
            explained = self.explain(error)
            if explained is not None:
                raise explained from error
        finally:
            self._close(linger=self.limits.propagation)

    @property
    def where(self) -> str:
        """This process and its phase, for messages."""
        own = self._heartbeat()
        return f"{own.who} {own.where}"

    def phase(self, name: str, step: int = 0) -> None:
        """Report the phase that this process enters."""
        me, _ = self._phase
        turn = me.turn + 1 if me.step == step else 1
        self._phase = (replace(me, phase=name, step=step, turn=turn), self._now)

    def done(self) -> None:
        """Report that this process no longer needs the others, and stop monitoring them."""
        if self._decided.acquire(blocking=False):
            self._report("done")
        self._close(linger=2 * self.limits.propagation)

    def explain(self, error: BaseException) -> UserError | None:
        """The error to report for this one. If another process caused it, that is the error of that
        process. If not, the failure of this process is posted to the others, and an error of NCCL
        or Gloo is explained. In both cases this process has to exit now."""
        self._decided.acquire(blocking=False)
        own = self._own
        if not self.active or own.state in ("failed", "done"):
            return None
        if own.state == "lost":  # by an earlier call, or the monitor thread is ending the process
            known = isinstance(error, UserError) and error.exit is Exit.PEER
            return None if known else UserError(own.message, exit=Exit.PEER)
        cause = self._find_cause(error) if may_come_from_peer(error) else None
        leave_by = self._now + self.limits.leaving
        if cause is None:
            failure = None if isinstance(error, UserError) else explain_failure(error)
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            message = f"{kind}{error}".removesuffix(": ")
            if failure is not None:
                message = failure.problems[0].what
            self._report("failed", message, leave_by=leave_by)
            return failure
        self._report("lost", cause, leave_by=leave_by)
        write_exit_report(self.log, cause)
        return UserError(cause, exit=Exit.PEER)

    def _find_cause(self, error: BaseException) -> str | None:
        """Wait a moment for the last heartbeats of others."""
        self._hurry()
        large = self.place.world > self.limits.large_world
        until = self._now + 3 * self.limits.beat + (2 * self.limits.read if large else 0)
        while self._now < until and self._heard.store_error is None:
            if ended_peer(self._heard) is not None:
                break
            time.sleep(self.limits.tick)
        return blame(error, self._heard, self._heartbeat(), now=self._now, limits=self.limits)

    def _close(self, *, linger: float) -> None:
        """Stop both threads. The host of the store stays until all ranks have read its last
        heartbeat."""
        if not self.active or self._closing.is_set():
            return
        self._own = replace(self._own, leave_by=None)
        if self._hosts_store:
            self._await_peers(linger)
        self._closing.set()
        self._wake.set()
        # A thread that returns from torch while the interpreter exits would abort the process.
        for thread in self._threads:
            thread.join(2 * self.limits.beat)

    # -------------------------------------------------------------- training or monitor thread

    def _heartbeat(self, count: int = 0) -> Heartbeat:
        (me, began), own = self._phase, self._own
        seconds = round(self._now - began, 1)
        return replace(me, count=count, seconds=seconds, state=own.state, message=own.message)

    def _report(self, state: State, message: str = "", *, leave_by: float | None = None) -> None:
        """Change the state of this process, and wait a moment until it is posted."""
        line = " ".join(message.split())
        line = line if len(line) <= _MESSAGE_WIDTH else f"{line[:_MESSAGE_WIDTH]}…"
        self._own = _OwnState(state, line, leave_by)
        if self.active:
            self._posted.clear()
            self._wake.set()
            deadline = time.monotonic() + 2 * self.limits.beat
            while self._heard.store_error is None and time.monotonic() < deadline:
                if self._posted.wait(self.limits.tick):
                    break

    def _hurry(self) -> None:
        """Send and read heartbeats as often as possible from now on."""
        self._fast.set()
        self._wake.set()

    def _await_peers(self, seconds: float) -> None:
        """Wait until no other rank is left that may still read from the store."""
        self._hurry()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._heard.store_error is None:
            others = self._heard.others("running", "absent")
            if self._heard.peers and all(other.silence > self.limits.late for other in others):
                return
            time.sleep(self.limits.tick)

    # -------------------------------------------------------------- heartbeat thread

    def _send_heartbeats(self, store: Store | None) -> None:
        try:
            store = store or join_store(self.place, seconds=self.limits.start)
            board = HeartbeatBoard(store, self.place, self.limits)
            self._heard = self._heard.updated(now=self._now, answered_at=self._now)
            count, next_read, answers = 0, 0.0, deque[float](maxlen=_ANSWERS)
            while not self._closing.is_set():
                count += 1
                own, peers = self._heartbeat(count), self._heard.peers
                # The fastest of several answers: the others waited for a core of this machine.
                link = min(answers, default=None)
                board.post(replace(own, facts={**self.facts(), "link": link}))
                if self._fast.is_set() or board.uneasy or time.monotonic() >= next_read:
                    answers.append(board.answer_seconds())
                    peers = board.read(own, now=self._now)
                    self.everyone = board.everyone
                    # Rank 0 also compares the paces of all ranks.
                    often = self.place.rank == 0 and self.place.world <= self.limits.large_world
                    next_read = time.monotonic() + (0.0 if often else self.limits.read)
                now = self._now
                self._heard = self._heard.updated(now=now, answered_at=now, peers=peers)
                if own.state == self._own.state:
                    self._posted.set()
                self._wake.wait(self.limits.tick if self._fast.is_set() else self.limits.beat)
                self._wake.clear()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            self._heard = self._heard.updated(now=self._now, store_error=first_line)

    # -------------------------------------------------------------- monitor thread

    def _watch_peers(self) -> None:
        before = time.monotonic()
        while not self._closing.wait(self.limits.tick):
            now = time.monotonic()
            self._now += min(now - before, 4 * self.limits.tick)
            before, own = now, self._own
            if own.leave_by is not None and self._now > own.leave_by:
                self._exit(own.message)
            if self._decided.locked():
                continue
            verdict = judge(self._heard, self._heartbeat(), now=self._now, limits=self.limits)
            if verdict is not None and self._decided.acquire(blocking=False):
                self._report("lost", verdict)
                self._exit(verdict)

    def _exit(self, message: str) -> None:
        """End this process now, wherever it is. The message is the last line that it prints."""
        if self.on_exit is not None:
            run_briefly(partial(self.on_exit, message), seconds=5)
        if self._hosts_store:
            self._await_peers(self.limits.propagation)
        write_exit_report(self.log, message, stacks=True)
        print_exit_report(message)
        os._exit(Exit.INTERNAL if self._own.state == "failed" else Exit.PEER)


def redirect_schedules(log: Path | None) -> None:
    """From now on, write the schedules that torch prints to the log instead of the terminal."""

    def append(record: logging.LogRecord) -> bool:
        if log is not None:
            with contextlib.suppress(OSError), log.open("a") as file:
                file.write(f"{logging.Formatter().format(record)}\n")
        return False

    logging.getLogger(SCHEDULES).filters[:] = [append]
