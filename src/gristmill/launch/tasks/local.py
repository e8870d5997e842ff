"""Numbered commands as processes of this machine, a few at a time.

The processes do not outlive this one, however it ends (`gristmill.launch.parent_death`). Each is
the leader of a process group, so that a Ctrl-C in the terminal does not reach it: `stop` interrupts
it once, so that it can clean up, and kills the whole group if it does not end soon.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.base.exit_report import START
from gristmill.base.files import storage_errors, utf8
from gristmill.launch.parent_death import SUPERVISOR

_GRACE = 10.0
"""Seconds from the interruption of a process to its end by force."""


def open_task_log(path: Path, command: Sequence[str]) -> BinaryIO:
    """Open a log to append to it; a first line tells this attempt from those before."""
    with storage_errors(path):
        log = path.open("ab")
        when = datetime.now().astimezone().isoformat(timespec="seconds")
        log.write(utf8(f"{START}{when} {' '.join(shlex.join(command).split())}\n"))
        log.flush()
        return log


def start_task(
    command: Sequence[str],
    log: Path,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, with its output in a log."""
    with open_task_log(log, command) as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {}), SUPERVISOR: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )


def stop_tasks(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes, by force if need be."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class LocalTasks:
    """Runs numbered commands on this machine."""

    name = "local"
    poll_seconds = 0.1

    def __init__(self, command: Sequence[str], *, logs: str, at_once: int) -> None:
        """`logs % number` is the log of a task."""
        self._command = command
        self._logs = logs
        self._at_once = at_once
        self._waiting: deque[int] = deque()
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def attach(self, jobs: Mapping[str, Any]) -> Collection[int]:
        """None: they have ended with the process that started them."""
        return ()

    def start(self, numbers: Sequence[int]) -> None:
        self._waiting.extend(numbers)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            number = self._waiting.popleft()
            command = [*self._command, str(number)]
            self._running[number] = start_task(command, Path(self._logs % number))

    def jobs(self) -> Mapping[str, Any]:
        return {}

    def poll(self) -> Mapping[int, int | None]:
        codes = {number: process.poll() for number, process in self._running.items()}
        ended = {number: code for number, code in codes.items() if code is not None}
        for number in ended:
            del self._running[number]
        self._fill()
        return ended

    @property
    def running(self) -> Collection[int]:
        return self._running.keys()

    def stop(self) -> str:
        self._waiting.clear()
        count = len(self._running)
        stop_tasks(list(self._running.values()))
        self._running.clear()
        return f"{count:,} running parts were stopped; their work is kept" if count else ""
