"""What a process leaves behind when it ends because of another.

    error: rank 1 on n03 has given no sign of life for 15s; it was last heard of in step at step 80

goes to standard error and to the process's own log, from which whoever started it can repeat it.
What torch says of the same event is longer than a screen; it goes to the log alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_LONG_WINDED = ("torch.distributed.pipelining.schedules",)
"""Loggers of torch that print a whole plan when an exchange fails."""


def write_log(log: Path | None, words: str, *, threads: bool = False) -> None:
    """Note why this process ends, unless standard error goes to its log anyway; before it, if asked
    for, where all threads stand."""
    if log is None:
        return
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab", buffering=0) as file:
            if threads:
                faulthandler.dump_traceback(file.fileno(), all_threads=True)
            if not os.path.sameopenfile(file.fileno(), 2):
                file.write(_line(words))


def print_line(words: str) -> None:
    """The last line on standard error, whatever state Python's own streams are in."""
    in_time(lambda: (sys.stdout.flush(), sys.stderr.flush()), seconds=1)
    with contextlib.suppress(OSError):
        os.write(2, _line(words))


def _line(words: str) -> bytes:
    return f"error: {words}\n".encode()


def in_time(work: Callable[[], object], *, seconds: float) -> None:
    """Do something that may never end, and wait for it only so long."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


def quiet(log: Path | None) -> None:
    """From now on, let what torch has to say at length go to the log."""
    for name in _LONG_WINDED:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.handlers[:] = [_LogFile(log)] if log is not None else [logging.NullHandler()]


class _LogFile(logging.Handler):
    """Appends to a file, which is made when there is something to write."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError), self.log.open("a") as file:
            file.write(f"{self.format(record)}\n")
