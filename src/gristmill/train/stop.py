"""Requests to stop a run early, with a checkpoint. Imports nothing slow, so that signals are
handled from the start of the process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from gristmill.base.exits import stop_signals
from gristmill.base.process import job_began


class StopRequest:
    """Asks the loop to stop: on TERM, INT, HUP or USR1, or shortly before the time limit.

    The handlers only record the signal. A second INT exits at once, without a checkpoint.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.time_limit: float | None = None
        """Seconds since the start of this process, or of its job, to which the time limit
        applies."""
        self.started = time.monotonic() - _seconds_before()
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    def __enter__(self) -> StopRequest:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check_time(self, *, reserve: float) -> None:
        """Stop if another step and a save, about `reserve` seconds, might not fit."""
        spent = time.monotonic() - self.started
        if self.time_limit is not None and spent + reserve >= self.time_limit:
            self.reason = self.reason or "the time limit"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.reason = f"signal {signal.Signals(number).name}"


def _seconds_before() -> float:
    """How long the job had run before this process; 0 if there is no job that reports its start."""
    began = job_began()
    # If this clock is behind that of the job's first node, that must not extend the time.
    return 0.0 if began is None else max(0.0, time.time() - began)
