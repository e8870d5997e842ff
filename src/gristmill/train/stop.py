"""The wish that a run end early, with a save. Needs nothing that takes long to import, so that it
can be listened for from the first moment on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Asks the loop to stop: on TERM, INT or USR1, or when the time limit comes near.

    The handlers only note the signal. A second INT leaves at once, without a save.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.time_limit: float | None = None
        """Seconds from now on."""
        self.started = time.monotonic()
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check_time(self, *, reserve: float) -> None:
        """Stop if another step and a save, which take `reserve` seconds, might not fit."""
        if self.time_limit is not None and self.reason is None:
            spent = time.monotonic() - self.started
            if spent + reserve >= self.time_limit:
                self.reason = "the time limit"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.reason = f"signal {signal.Signals(number).name}"
