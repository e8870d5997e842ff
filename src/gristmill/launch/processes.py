"""Several processes of a run on one machine: start them, supervise them, end them together.

    gristmill train RUN.toml --processes 3         the supervisor, which needs no torch
    ├── rank 0                                     writes to the terminal
    ├── rank 1                                     writes to RUN/logs/rank-00001.log
    └── rank 2                                     writes to RUN/logs/rank-00002.log

TERM, INT, HUP and USR1 are forwarded once; a second INT kills. If a process fails, the others may
wait for it for ever: they have a moment to report and exit, then they get TERM, then KILL.

The process that ended first is not always the one that failed: one that lost its peer may end
before that peer does. A process that exits with `Exit.PEER` is therefore blamed only if no other
is found. One that was killed left no report: the last line repeats what the others report of it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from gristmill.base.errors import Exit, UserError
from gristmill.base.exits import INTERRUPTED, read_exit_report, start_line, stop_signals
from gristmill.base.files import storage_errors
from gristmill.base.locks import FolderLock
from gristmill.launch.starting import LocalStarter, Process, Starter
from gristmill.track.folder import RunFolder

GRACE = 5.0
"""Seconds from the failure of a process to KILL for the others."""
_TERM = 0.2
"""The part of these that passes before TERM, which would end a process before it has reported."""
_TICK = 0.05
PERMANENT = (Exit.USAGE, Exit.DATA, Exit.DEVICE, Exit.STORAGE, Exit.REFUSED, Exit.CONFIG)
"""Failures that a restart would meet again."""


@dataclass(frozen=True)
class Job:
    """What to run."""

    command: Sequence[str]
    """The command of every process."""
    processes: int
    """How many the whole run has."""
    folder: RunFolder
    restarts: int = 0
    """How often all processes may be restarted after a failure."""
    elastic: bool = False
    """Whether the others continue when one fails, which is then restarted by itself."""
    starter: Starter | None = None
    """What starts the processes; without it, all run on this machine."""
    killed_as_signal: bool = False
    """Whether a process that was killed gives 128 and its signal, and not `Exit.PEER`."""

    @property
    def has_first(self) -> bool:
        """Whether rank 0, which speaks for the whole run, is one of the processes."""
        return self.starter is None or 0 in self.starter.ranks


@dataclass(frozen=True)
class Ending:
    """How one process ended."""

    rank: int
    code: int
    """Its exit status, or minus the signal that ended it."""
    wanted: bool = False
    """Whether the supervisor ended it, or a signal that it forwarded."""

    @property
    def failed(self) -> bool:
        return not self.wanted and self.code not in (Exit.DONE, Exit.STOPPED)

    def status(self, *, killed_as_signal: bool = False) -> int:
        """The exit status of the whole run if this is the cause."""
        killed = 128 - self.code if killed_as_signal else Exit.PEER
        return killed if self.code < 0 else self.code

    @property
    def permanent(self) -> bool:
        """Whether a restart would fail again."""
        return self.code in PERMANENT

    @property
    def blame_order(self) -> int:
        """The lowest of several that end at the same time is blamed: first those that were killed,
        last those that lost a peer."""
        return 0 if self.code < 0 else 2 if self.code == Exit.PEER else 1

    @property
    def patience(self) -> float:
        """How many times the usual grace the others get, if this is the first to fail. They need
        time to notice a killed process; one that lost a peer has waited for it long enough."""
        return 1.0 if self.wanted else (2.5, 1.0, 0.4)[self.blame_order]

    def __str__(self) -> str:
        if self.code >= 0:
            meaning = f" ({Exit(self.code).meaning})" if self.code in set(Exit) else ""
            return f"with exit status {self.code}{meaning}"
        names = {int(number): number.name for number in signal.Signals}
        hint = ", as the system does when memory runs out" if self.code == -signal.SIGKILL else ""
        return f"by signal {names.get(-self.code, -self.code)}{hint}"


def supervise(job: Job, *, grace: float = GRACE) -> int:
    """Run all processes to their end, with restarts if these may help; returns the exit status."""
    if job.has_first and job.folder.lock.is_file():
        # Refuse a folder that another run uses, before anything in it is touched.
        with storage_errors(job.folder.lock), FolderLock(job.folder.path):
            pass
    with _collected_signals() as signals:
        if job.elastic:
            return _supervise_elastic(job, signals, grace=grace)
        for attempt in range(job.restarts + 1):
            before = job.folder.newest_step()
            crew = _Crew(job, signals, grace=grace)
            crew.run()
            cause = crew.cause()
            if cause is None:
                return crew.status()
            message = _blame(job, cause)
            step = job.folder.newest_step()
            if cause.permanent or signals or job.restarts == 0:
                no_restart = ""
            elif attempt == job.restarts:
                no_restart = f"; it was restarted {job.restarts} times"
            elif attempt and (-1 if step is None else step) <= (-1 if before is None else before):
                no_restart = "; no checkpoint since the last restart, so another would not help"
            else:
                begin = "the beginning" if step is None else f"step {step}"
                count = f"{attempt + 1} of {job.restarts}"
                _print(f"{message}; restarting all processes from {begin} ({count})")
                continue
            return _fail(crew, cause, message, no_restart)
    raise AssertionError("no restart follows the last attempt")


def _supervise_elastic(job: Job, signals: list[signal.Signals], *, grace: float) -> int:
    """Run all processes to their end, each by itself."""
    crew = _ElasticCrew(job, signals, grace=grace)
    crew.run()
    done = [ending for ending in crew.endings if ending.code in (Exit.DONE, Exit.STOPPED)]
    cause = None if done else crew.cause()
    if cause is None:
        return crew.status()
    return _fail(crew, cause, _blame(job, cause), "; no worker is left")


def _blame(job: Job, cause: Ending) -> str:
    """The process that failed, and what it, or others if it was killed, reported last."""
    killed, log = cause.code < 0, job.folder.rank_log(cause.rank)
    message = f"rank {cause.rank} of {job.processes} ended first, {cause}"
    report = read_exit_report(log, errors_only=killed)
    if report is not None:
        message += f": {report}"
    elif killed:
        logs = {rank: job.folder.rank_log(rank) for rank in range(job.processes)}
        reports = {rank: read_exit_report(log, errors_only=True) for rank, log in logs.items()}
        known = [(rank, report) for rank, report in reports.items() if report is not None]
        known.sort(key=lambda pair: not pair[1].startswith(f"rank {cause.rank} on "))
        message += next((f"; rank {rank} says: {report}" for rank, report in known), "")
    return f"{message}; {f'its log is {log}' if cause.rank else 'its output is above'}"


def _fail(crew: _Crew, cause: Ending, message: str, end: str) -> int:
    """Say that the run failed, and write it into the run folder if its processes could not, unless
    they were refused the folder or never began; returns the exit status."""
    job = crew.job
    if job.has_first and not cause.permanent:
        with contextlib.suppress(UserError, OSError):
            status = job.folder.read_status()
            if status.pop("state", None) == "running":
                step = max(status.get("step", 0), job.folder.last_step())
                job.folder.write_status("failed", **{**status, "step": step, "error": message})
    if not crew.printed(cause):
        _print(f"error: {message}{end}")
    return cause.status(killed_as_signal=job.killed_as_signal)


def _print(text: str) -> None:
    # The terminal may be gone.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _collected_signals() -> Iterator[list[signal.Signals]]:
    """The signals that arrive from now on; they do nothing else."""
    seen: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in stop_signals()}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Crew:
    """All processes of one attempt."""

    job: Job
    signals: list[signal.Signals]
    """The signals that have arrived here."""
    grace: float
    running: dict[int, Process] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    """In the order in which they came."""
    forwarded: set[signal.Signals] = field(default_factory=set)
    ended_here: bool = False

    def __post_init__(self) -> None:
        self.starter = self.job.starter or LocalStarter(self.job.processes)

    def run(self) -> None:
        """Start all processes, and return when none is left, whatever happens here."""
        term_at = kill_at = float("inf")
        try:
            self._start()
            while self.running:
                self._reap()
                self._forward()
                first = next(
                    (ending for ending in self.endings if ending.wanted or ending.failed), None
                )
                now = time.monotonic()
                if first is not None and kill_at == float("inf"):
                    term_at, kill_at = now + _TERM * self.grace, now + first.patience * self.grace
                if now > term_at and not self.ended_here:
                    self.ended_here = True
                    self._send(signal.SIGTERM)
                if self.interrupted_twice or now > kill_at:
                    self._kill()
                time.sleep(_TICK)
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """Kill all that are left, and wait until they are gone."""
        self._kill()
        for process in self.running.values():
            process.wait()

    @property
    def interrupted_twice(self) -> bool:
        return self.signals.count(signal.SIGINT) > 1

    def cause(self) -> Ending | None:
        """The process that failed; None if none did, or if the user killed them."""
        failed = [ending for ending in self.endings if ending.failed]
        if self.interrupted_twice or not failed:
            return None
        return next((ending for ending in failed if ending.code != Exit.PEER), failed[0])

    def printed(self, cause: Ending) -> bool:
        """Whether rank 0, which has the terminal, has printed this failure: a permanent one is the
        same on every rank."""
        return cause.permanent and (0, cause.code) in [
            (ending.rank, ending.code) for ending in self.endings
        ]

    def status(self) -> int:
        """The exit status if nothing failed."""
        if self.interrupted_twice:
            return INTERRUPTED
        stopped = any(ending.wanted or ending.code == Exit.STOPPED for ending in self.endings)
        return Exit.STOPPED if stopped else Exit.DONE

    def _start(self) -> None:
        with storage_errors(self.job.folder.logs):
            self.job.folder.logs.mkdir(parents=True, exist_ok=True)
        self.starter.prepare(lambda: bool(self.signals))
        for rank in self.starter.ranks:
            self._start_rank(rank)

    def _start_rank(self, rank: int) -> None:
        path = self.job.folder.rank_log(rank)
        start = start_line(self.job.command, who=f"rank {rank} of {self.job.processes}: ")
        with storage_errors(path):
            with path.open("ab") as log:
                log.write(start)
            self.running[rank] = self.starter.start(rank, self.job.command, path)

    def _forward(self) -> None:
        """Send the signals that have arrived to all processes, once."""
        for number in self.signals:
            if number not in self.forwarded:
                self.forwarded.add(number)
                self._send(number)

    def _reap(self) -> None:
        """Note which processes have ended since the last time."""
        # What a process returns that is ended by a signal from here before it can stop in order.
        wanted = {-number for number in self.forwarded}
        if signal.SIGINT in self.forwarded:
            wanted.add(INTERRUPTED)
        if self.ended_here:
            wanted |= {-signal.SIGTERM, -signal.SIGKILL}
        codes = {rank: process.poll() for rank, process in self.running.items()}
        ended = [
            Ending(rank, code, wanted=code in wanted)
            for rank, code in codes.items()
            if code is not None
        ]
        for ending in ended:
            del self.running[ending.rank]
        self.endings += sorted(ended, key=lambda ending: ending.blame_order)

    def _send(self, number: signal.Signals) -> None:
        for process in self.running.values():
            process.send_signal(number)

    def _kill(self) -> None:
        """Kill all that are left, with the processes that they have started."""
        self.ended_here = True
        for process in self.running.values():
            process.kill()


class _ElasticCrew(_Crew):
    """Processes that continue without those that fail, and take them in again."""

    def run(self) -> None:
        restarts, seen, missing = 0, 0, dict[int, tuple[float, str]]()
        try:
            self._start()
            while self.running:
                self._reap()
                new, seen = self.endings[seen:], len(self.endings)
                # When one is done, the run is complete.
                over = bool(self.signals) or any(
                    ending.code == Exit.DONE for ending in self.endings
                )
                for ending in new:
                    if not ending.failed:
                        continue
                    again = restarts < self.job.restarts and not ending.permanent and not over
                    what = f"rank {ending.rank} of {self.job.processes} ended {ending}"
                    if again and self._restart(ending.rank):
                        restarts += 1
                        _print(f"{what}; restarting it ({restarts} of {self.job.restarts})")
                    elif ending.permanent:
                        report = read_exit_report(
                            self.job.folder.rank_log(ending.rank), errors_only=True
                        )
                        what += "" if report is None else f": {report}"
                        missing[ending.rank] = (time.monotonic() + self.grace, what)
                    else:
                        missing[ending.rank] = (0.0, what)
                for rank in self._say_missing(missing):
                    del missing[rank]
                self._forward()
                if self.interrupted_twice:
                    self._kill()
                time.sleep(_TICK)
        finally:
            self._end_all()

    def _restart(self, rank: int) -> bool:
        """Start a process again; the others continue if the disk or the system refuses."""
        try:
            self._start_rank(rank)
        except (UserError, OSError) as error:
            _print(f"rank {rank} cannot be restarted: {error}")
            return False
        return True

    def _say_missing(self, missing: Mapping[int, tuple[float, str]]) -> set[int]:
        """Say who is missing; after a failure that all may share, only if the others continue for a
        while. Returns who was named."""
        now, named = time.monotonic(), set[int]()
        for rank, (due, what) in missing.items():
            if now >= due and self.running:
                alone = len(self.running) == 1
                count = "1 other continues" if alone else f"{len(self.running)} others continue"
                _print(f"{what}; {count}")
                named.add(rank)
        return named
