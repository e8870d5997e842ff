"""The signals that ask a run to stop.

    TERM, USR1   schedulers, `kill`
    INT          Ctrl-C
    HUP          the terminal or the connection is closed

Whoever started this process may have decided that some do not concern it: `nohup` ignores HUP, and
a shell script ignores INT for what it starts in the background, so that a Ctrl-C reaches only what
runs in front. Both stay ignored. TERM and USR1 are always handled: nothing else could stop a run.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from gristmill.base.errors import Exit

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
