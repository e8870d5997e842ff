"""Intervals of wall-clock time that end at the same step on all processes of a run.

Rank 0's clock decides. Asking it after every step would cost a message each time, so its answer
includes the step at which all ask next: half of the remaining time at the current speed, or all of
it when little is left.
"""

from __future__ import annotations

import math
import time

from gristmill.distributed.control import ControlGroup

_FIRST_QUESTION = 5
"""Steps until the first question, since the speed is not known before."""
_FEW_STEPS = 16
"""With this many steps left or fewer, the next question is at the end of the interval."""
_AGAIN = 2.0
"""Seconds until the next question when the interval is over and was not restarted."""


class WallClock:
    """Determines when an interval of wall-clock time is over."""

    def __init__(self, seconds: float, *, step: int, control: ControlGroup) -> None:
        self.seconds, self.control = seconds, control
        self._began = self._asked = time.monotonic()
        self._asked_at, self._ask_at = step, step + _FIRST_QUESTION
        self._whole = _FIRST_QUESTION
        """Steps until the first question of a new interval, at the current speed."""

    def asks(self, step: int) -> bool:
        """Whether all processes ask after this step."""
        return step >= self._ask_at

    def over(self, step: int) -> bool:
        """Whether the interval is over; all processes ask together."""
        now = time.monotonic()
        per_step = max(1e-6, (now - self._asked) / max(1, step - self._asked_at))
        left = self.seconds - (now - self._began)
        ahead = [_steps_ahead(seconds, per_step) for seconds in (left, self.seconds)]
        over, (rest, self._whole) = self.control.broadcast([left <= 0, ahead])
        self._asked, self._asked_at, self._ask_at = now, step, step + rest
        return bool(over)

    def restart(self) -> None:
        """Start the next interval; all processes call this after the same step."""
        self._began, self._ask_at = time.monotonic(), self._asked_at + self._whole


def _steps_ahead(left: float, per_step: float) -> int:
    if left <= 0:
        return math.ceil(_AGAIN / per_step)
    steps = left / per_step
    return math.ceil(steps if steps <= _FEW_STEPS else steps / 2)
