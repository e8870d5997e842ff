"""The exit report: the line with which a process says why it ends, in its log and on the terminal.

    --- 2026-07-01T09:30:00+02:00 rank 1 of 4: gristmill train run.toml     at each start
    error: rank 3 on n03 has sent no heartbeat for 15s; last seen in phase step at step 80

The supervisor reads the report from the log and repeats it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

START = "--- "
"""How the line begins that marks a start in a log."""
ERROR = "error: "
_TAIL, _WIDTH = 1 << 16, 400
"""Bytes of a log that are searched, and characters of a report that are repeated."""


def write_exit_report(log: Path | None, message: str, *, stacks: bool = False) -> None:
    """Append the report to a log, unless standard error goes there anyway; if asked for, after the
    stacks of all threads."""
    if log is None:
        return
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            if stacks:
                faulthandler.dump_traceback(file.fileno(), all_threads=True)
            if not os.path.sameopenfile(file.fileno(), 2):
                file.write(f"{ERROR}{message}\n".encode())


def print_exit_report(message: str) -> None:
    """Print the report on standard error, whatever state Python's own streams are in."""
    run_briefly(lambda: (sys.stdout.flush(), sys.stderr.flush()), seconds=1)
    with contextlib.suppress(OSError):
        os.write(2, f"{ERROR}{message}\n".encode())


def run_briefly(act: Callable[[], object], *, seconds: float) -> None:
    """Do something that may never return, and wait for it this long at most."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)


def read_exit_report(log: Path, *, errors_only: bool) -> str | None:
    """The last error that a log holds since its last start; without one, unless only errors are
    asked for, the last line, which may be the end of a traceback."""
    lines = [line for line in _last_lines(log) if not line[0].isspace()]
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    found = errors if errors or errors_only else lines
    return found[-1][:_WIDTH] if found else None


def read_remedy(log: Path) -> str | None:
    """The remedy that follows the last error in a log, if there is one."""
    lines = _last_lines(log)
    errors = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    after = lines[errors[-1] + 1 :][:1] if errors else []
    return after[0].strip()[:_WIDTH] if after and after[0][0].isspace() else None


def _last_lines(log: Path) -> list[str]:
    """The lines at the end of a log since its last start, without empty ones."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    start = max((n for n, line in enumerate(lines) if line.startswith(START)), default=-1)
    return [line for line in lines[start + 1 :] if line.strip()]
