"""What the meter makes of a step's times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gristmill.base.units import Duration, Progress
from gristmill.checkpoint.state_file import Counters
from gristmill.plan.arithmetic import TokenCost
from gristmill.strategies.strategy import StepResult
from gristmill.track.records import StepRecord
from gristmill.train.health import RunHealth
from gristmill.train.meter import Meter, StepEvent


class Clock:
    """A device whose steps take a second each."""

    is_async = True

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> Any:
        at = self.now = self.now + 1.0
        return SimpleNamespace(
            at=at,
            wait=lambda: None,
            reached=lambda: True,
            seconds_since=lambda earlier: at - earlier.at,
        )

    def read_later(self, scalars: Any) -> Any:
        return scalars

    def memory_peak(self) -> int:
        return 1


def test_no_step_waits_for_data_longer_than_it_takes() -> None:
    written: list[StepRecord] = []
    world: Any = SimpleNamespace(device=Clock(), layout=SimpleNamespace(processes=1))
    tracker: Any = SimpleNamespace(write=written.append, say=lambda text, **_: None)
    meter = Meter(
        tracker,
        counters=Counters(),
        every=Duration.parse("1 steps"),
        cost=TokenCost(1.0, 1.0),
        world=world,
        peak_flops=None,
        health=RunHealth(None, lag=0, warn=lambda text: None),
        bad_steps=10,
    )
    result = StepResult(1, 8, torch.ones(()), torch.ones(()), torch.zeros(()))
    for number, waited in enumerate((0.25, 2.7)):
        before, after = Progress(number, number, number), Progress(*[number + 1] * 3)
        meter.add(StepEvent(before, after, result, lr=0.1, data_wait=waited))
    assert [one.step_seconds for one in written] == [1.0, 1.0]
    assert [one.data_wait for one in written] == [0.25, 1.0]
