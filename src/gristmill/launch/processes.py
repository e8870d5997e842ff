"""Several processes of a run on one machine: start them, watch them, end them together.

    gristmill train RUN.toml --processes 3         the supervisor, which needs no torch
    ├── rank 0                                     writes to the terminal
    ├── rank 1                                     writes to RUN/logs/rank-00001.log
    └── rank 2                                     writes to RUN/logs/rank-00002.log

    RANK  LOCAL_RANK  WORLD_SIZE  MASTER_ADDR=127.0.0.1  MASTER_PORT     as torchrun sets them

TERM, INT and USR1 are passed on once; a second INT kills. A process that fails ends the run: the
others may say what they know and end, then get TERM, then KILL, since they may be waiting for it
for ever. Each has a process group of its own, so that Ctrl-C in the terminal reaches it once and
not twice.

The one that ended first is not always the one that failed: a process that lost its peer may end
before the peer has. One that says so (`Exit.PEER`) is therefore blamed only if no other is found.
One that was killed could say nothing: the last line repeats what the others say of it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import FolderLock, storage_errors
from gristmill.launch.lifeline import SUPERVISOR
from gristmill.track.folder import RunFolder

GRACE = 5.0
"""Seconds from the failure of a process to KILL for the others."""
_TERM = 0.2
"""The part of these that passes before TERM, which ends who would have said why it ends."""
_TICK = 0.05
_START = "--- "
"""How the line begins that marks a start in a log."""
_TAIL, _WIDTH = 1 << 16, 400
"""Bytes of a log that are searched for last words, and characters of these that are repeated."""
_INTERRUPTED = 128 + signal.SIGINT
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_HOPELESS = (Exit.USAGE, Exit.DATA, Exit.STORAGE, Exit.REFUSED, Exit.CONFIG)
"""Failures that another start would meet again."""


@dataclass(frozen=True)
class Job:
    """What is to be run."""

    command: Sequence[str]
    """The command of every process."""
    processes: int
    folder: RunFolder
    restarts: int = 0
    """How often all may be started again after a failure."""


@dataclass(frozen=True)
class Ending:
    """How one process ended."""

    rank: int
    code: int
    """Its exit status, or minus the signal that ended it."""
    wanted: bool = False
    """Whether it was ended from here, or on a request that was passed on."""

    @property
    def failed(self) -> bool:
        return not self.wanted and self.code not in (Exit.DONE, Exit.STOPPED)

    @property
    def status(self) -> int:
        """The exit status that the whole run has if this is its cause."""
        return Exit.PEER if self.code < 0 else self.code

    @property
    def mendable(self) -> bool:
        """Whether another start may go better."""
        return self.code not in _HOPELESS

    @property
    def guilt(self) -> int:
        """Of those that end at the same time, the lowest is blamed."""
        return 0 if self.code < 0 else 2 if self.code == Exit.PEER else 1

    @property
    def patience(self) -> float:
        """How much longer than usual the others are given, if this is the first to fail. They are
        still to find out who was killed; who lost a peer has waited for it long enough."""
        if self.wanted:
            return 1.0
        return 2.5 if self.code < 0 else 0.4 if self.code == Exit.PEER else 1.0

    def __str__(self) -> str:
        if self.code >= 0:
            known = next((one for one in Exit if one == self.code), None)
            return f"with exit status {self.code}" + (f" ({_WORDS[known]})" if known else "")
        names = {int(one): one.name for one in signal.Signals}
        hint = ", as the system does where memory runs out" if -self.code == signal.SIGKILL else ""
        return f"by signal {names.get(-self.code, -self.code)}{hint}"


_WORDS = {
    Exit.DONE: "done",
    Exit.USAGE: "wrong command line",
    Exit.DATA: "bad data",
    Exit.INTERNAL: "a defect",
    Exit.STORAGE: "storage",
    Exit.STOPPED: "stopped and saved",
    Exit.PEER: "another process was lost",
    Exit.REFUSED: "refused for safety",
    Exit.CONFIG: "wrong settings",
}


def supervise(job: Job, *, grace: float = GRACE) -> int:
    """Run all processes to their end, and again if that may help; returns the exit status."""
    _require_free(job.folder)
    with _Requests() as requests:
        for attempt in range(job.restarts + 1):
            before = job.folder.newest_step()
            crew = _Crew(job, requests, grace=grace)
            crew.run()
            cause = crew.cause()
            if cause is None:
                return crew.status()
            words = _blame(job, cause)
            hopeless = _why_not_again(job, cause, requests, attempt=attempt, before=before)
            if hopeless is not None:
                _note_failure(job, cause, words)
                if not crew.told(cause):
                    _say(f"error: {words}{hopeless}")
                return cause.status
            step = job.folder.newest_step()
            begin = "the beginning" if step is None else f"step {step}"
            _say(f"{words}; starting all again from {begin} ({attempt + 1} of {job.restarts})")
    raise AssertionError("the last attempt has no other after it")


def _require_free(folder: RunFolder) -> None:
    """Refuse a folder that another run holds, before anything in it is touched."""
    if folder.lock.is_file():
        with storage_errors(folder.lock):
            lock = FolderLock(folder.path)
            lock.acquire()
            lock.release()


def _blame(job: Job, cause: Ending) -> str:
    log = job.folder.rank_log(cause.rank)
    words = f"rank {cause.rank} of {job.processes} ended first, {cause}"
    last = _last_words(log, errors_only=cause.code < 0)
    if last is not None:
        words += f": {last}"
    elif cause.code < 0:
        words += _said_by_others(job, cause)
    return f"{words}; {f'its log is {log}' if cause.rank else 'what it printed is above'}"


def _said_by_others(job: Job, cause: Ending) -> str:
    """What another process says, as a part of a sentence: best one that names the cause."""
    others = (rank for rank in range(job.processes) if rank != cause.rank)
    said = {rank: _last_words(job.folder.rank_log(rank), errors_only=True) for rank in others}
    known = [(rank, words) for rank, words in said.items() if words is not None]
    known.sort(key=lambda one: not one[1].startswith(f"rank {cause.rank} on "))
    return next((f"; rank {rank} says: {words}" for rank, words in known), "")


def _last_words(log: Path, *, errors_only: bool) -> str | None:
    """What a process said last of its failure, in one line; None if it said nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    begin = max((n for n, line in enumerate(lines) if line.startswith(_START)), default=-1)
    said = [line for line in lines[begin + 1 :] if line.strip() and not line[0].isspace()]
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    last = next(reversed(errors if errors or errors_only else said), None)
    return last if last is None else last[:_WIDTH]


def _why_not_again(
    job: Job, cause: Ending, requests: _Requests, *, attempt: int, before: int | None
) -> str | None:
    """Why there is no other attempt, as the end of a sentence; None if there is one."""
    if not cause.mendable or requests.seen or job.restarts == 0:
        return ""
    if attempt == job.restarts:
        return f"; it was started again {job.restarts} times"
    now = job.folder.newest_step()
    if attempt and (-1 if now is None else now) <= (-1 if before is None else before):
        return "; no checkpoint was saved since it was started again, which would not help"
    return None


def _note_failure(job: Job, cause: Ending, words: str) -> None:
    """Say in the run folder that the run failed, if its processes could not. Who was refused the
    folder, or never began, has no say there."""
    if cause.mendable:
        with contextlib.suppress(UserError, OSError):
            status = job.folder.read_status()
            if status.pop("state", None) == "running":
                step = max(status.get("step", 0), job.folder.last_step())
                job.folder.write_status("failed", **{**status, "step": step, "error": words})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------ requests


class _Requests:
    """Signals that arrive here, noted and nothing else."""

    def __init__(self) -> None:
        self.seen: list[signal.Signals] = []
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Requests:
        for number in _PASSED_ON:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def insisted(self) -> bool:
        """Whether INT came a second time."""
        return self.seen.count(signal.SIGINT) > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(signal.Signals(number))


# ------------------------------------------------------------------ processes


@dataclass
class _Crew:
    """All processes of one attempt."""

    job: Job
    requests: _Requests
    grace: float
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    """In the order in which they came."""
    passed_on: set[signal.Signals] = field(default_factory=set)
    ended_here: bool = False

    def run(self) -> None:
        """Start all, and return when none is left, whatever happens here."""
        term_at = kill_at = float("inf")
        try:
            self._start()
            while self.running:
                self._reap()
                self._pass_on()
                first = next((one for one in self.endings if one.wanted or one.failed), None)
                now = time.monotonic()
                if first is not None and kill_at == float("inf"):
                    term_at, kill_at = now + _TERM * self.grace, now + first.patience * self.grace
                if now > term_at and not self.ended_here:
                    self.ended_here = True
                    self._send(signal.SIGTERM)
                if self.requests.insisted or now > kill_at:
                    self._kill()
                time.sleep(_TICK)
        finally:
            self._kill()
            for process in self.running.values():
                process.wait()

    def cause(self) -> Ending | None:
        """The process that failed; None if none did, or if it was wanted."""
        failed = [one for one in self.endings if one.failed]
        if self.requests.insisted or not failed:
            return None
        return next((one for one in failed if one.code != Exit.PEER), failed[0])

    def told(self, cause: Ending) -> bool:
        """Whether the first process, which has the terminal, has said there what is wrong: it
        failed in the same way, and a start that cannot succeed fails alike everywhere."""
        return not cause.mendable and any(
            one.rank == 0 and one.code == cause.code for one in self.endings
        )

    def status(self) -> int:
        """The exit status where nothing failed."""
        if self.requests.insisted:
            return _INTERRUPTED
        stopped = any(one.wanted or one.code == Exit.STOPPED for one in self.endings)
        return Exit.STOPPED if stopped else Exit.DONE

    def _start(self) -> None:
        port = _free_port()
        with storage_errors(self.job.folder.logs):
            self.job.folder.logs.mkdir(parents=True, exist_ok=True)
        for rank in range(self.job.processes):
            values = process_environment(rank, processes=self.job.processes, port=port)
            with self._log(rank) as log:
                output = log if rank else None
                self.running[rank] = subprocess.Popen(
                    self.job.command,
                    env=values,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )

    def _log(self, rank: int) -> IO[bytes]:
        path = self.job.folder.rank_log(rank)
        when = datetime.now().astimezone().isoformat(timespec="seconds")
        words = " ".join(shlex.join(self.job.command).split())
        with storage_errors(path):
            log = path.open("ab")
            log.write(f"{_START}{when} rank {rank} of {self.job.processes}: {words}\n".encode())
            log.flush()
        return log

    def _reap(self) -> None:
        """Note who has ended since the last time."""
        ended = []
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[rank]
                ended.append(Ending(rank, code, wanted=self._wanted(code)))
        self.endings += sorted(ended, key=lambda one: one.guilt)

    def _wanted(self, code: int) -> bool:
        """Whether a process ended as it was told to, before it could do so politely."""
        told = {-number for number in self.passed_on}
        if signal.SIGINT in self.passed_on:
            told.add(_INTERRUPTED)
        if self.ended_here:
            told |= {-signal.SIGTERM, -signal.SIGKILL}
        return code in told

    def _pass_on(self) -> None:
        for number in self.requests.seen:
            if number not in self.passed_on:
                self.passed_on.add(number)
                self._send(number)

    def _send(self, number: signal.Signals) -> None:
        for process in self.running.values():
            process.send_signal(number)

    def _kill(self) -> None:
        """End all that are left, with the processes that they have started."""
        self.ended_here = True
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def process_environment(
    rank: int, *, processes: int, port: int, around: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables of one process."""
    around = os.environ if around is None else around
    values = {name: text for name, text in around.items() if not name.startswith("TORCHELASTIC_")}
    values |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        SUPERVISOR: str(os.getpid()),
    }
    if processes > 1:
        values.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // processes)))
    loopback = _loopback(name for _, name in socket.if_nameindex())
    if loopback is not None:
        # Gloo lets in whoever reaches its ports; on one machine nobody else needs to.
        values.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if rank:
        # A log should hold the last words of a process that is killed.
        values.setdefault("PYTHONUNBUFFERED", "1")
    return values


def _loopback(names: Iterable[str]) -> str | None:
    return next((name for name in names if name in ("lo", "lo0")), None)


def _cores() -> int:
    """Cores this process may use, where the system tells it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
