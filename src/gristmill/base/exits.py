"""How processes of this program end: by a signal, with a report, and with their supervisor.

The signals that ask a run to stop:

    TERM, USR1   schedulers, `kill`
    INT          Ctrl-C
    HUP          the terminal or the connection is closed

Whoever started this process may have decided that some do not concern it: `nohup` ignores HUP, and
a shell script ignores INT for what it starts in the background, so that a Ctrl-C reaches only what
runs in front. Both stay ignored. TERM and USR1 are always handled: nothing else could stop a run.

The exit report is the line with which a process says why it ends, in its log and on the terminal.
The supervisor reads it from the log and repeats it:

    --- 2026-07-01T09:30:00+02:00 rank 1 of 4: gristmill train run.toml     at each start
    error: rank 3 on n03 has sent no heartbeat for 15s; last seen in phase step at step 80

A process that was started by a supervisor does not outlive it, however the supervisor ends: the
Linux kernel kills the process when the supervisor is gone; on other systems a thread checks the
parent every second. Nothing is saved: whatever killed the supervisor would not wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from gristmill.base.errors import Exit
from gristmill.base.units import timestamp

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C outside of a running training."""
_ALWAYS = (signal.SIGTERM, signal.SIGUSR1)
_UNLESS_IGNORED = (signal.SIGINT, signal.SIGHUP)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals to handle in this process."""
    ignored = [number for number in _UNLESS_IGNORED if signal.getsignal(number) is signal.SIG_IGN]
    return (*_ALWAYS, *(number for number in _UNLESS_IGNORED if number not in ignored))


def exit_on_stop_signals() -> None:
    """Until a run handles signals itself, exit at once with its status: nothing has begun."""
    for number in stop_signals():
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    # Not by an exception, which whatever is being imported might catch.
    if number == signal.SIGINT:
        os._exit(INTERRUPTED)
    name = signal.Signals(number).name
    os.write(2, f"stopped by {name} before the run began; run the same command again\n".encode())
    os._exit(Exit.STOPPED)


# ------------------------------------------------------------------ the report

START = "--- "
"""How the line begins that marks a start in a log."""
ERROR = "error: "
_TAIL, _WIDTH = 1 << 16, 400
"""Bytes of a log that are searched, and characters of a report that are repeated."""


def start_line(command: Sequence[str], *, who: str = "") -> bytes:
    """The line that marks a start in a log: what came before it is about an earlier one."""
    words = " ".join(shlex.join(command).split())
    return f"{START}{timestamp()} {who}{words}\n".encode(errors="backslashreplace")


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
    reports = errors if errors or errors_only else lines
    return reports[-1][:_WIDTH] if reports else None


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


# ------------------------------------------------------------------ the supervisor

SUPERVISOR = "GRISTMILL_SUPERVISOR"
"""The variable with the supervisor's process id."""
_PR_SET_PDEATHSIG = 1


def follow_supervisor() -> bool:
    """End this process when the supervisor that started it ends; False if there is none."""
    text = os.environ.pop(SUPERVISOR, None)
    if text is None:
        return False
    supervisor = int(text)
    set_by_kernel = sys.platform == "linux" and (
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
    )
    if not set_by_kernel:
        threading.Thread(target=_watch_parent, args=(supervisor,), daemon=True).start()
    # It may have ended before the kernel was told.
    if os.getppid() != supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _watch_parent(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
