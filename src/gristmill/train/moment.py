"""One step as the hooks see it."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.base.units import Progress
from gristmill.parallel.strategy import StepResult


@dataclass(frozen=True)
class Moment:
    """A step that was just made."""

    before: Progress
    after: Progress
    result: StepResult
    lr: float
    data_wait: float
    """Seconds spent waiting for the batch."""
