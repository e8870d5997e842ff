"""Saving every so many minutes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.checkpoint.layout import CheckpointFolder, step_of
from gristmill.config.schema import RunConfig
from gristmill.distributed.control import ControlGroup
from gristmill.train import wall_clock
from gristmill.train.run import Run
from gristmill.train.wall_clock import WallClock


class Time:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(wall_clock, "time", made)
    return made


def walk(clock: Time, timer: WallClock, steps: range, seconds: float) -> tuple[list[int], int]:
    """The steps at which the interval was over, and how often all processes asked."""
    over, questions = [], 0
    for step in steps:
        clock.now += seconds
        if timer.asks(step):
            questions += 1
            if timer.over(step):
                over.append(step)
                timer.restart()
    return over, questions


def test_an_interval_ends_on_time_and_few_questions_are_asked(clock: Time) -> None:
    timer = WallClock(900, step=0, control=ControlGroup())
    over, questions = walk(clock, timer, range(1, 40_001), seconds=0.125)
    assert over == [7200, 14_400, 21_600, 28_800, 36_000]
    assert questions < 60


def test_steps_that_become_faster_or_slower_do_not_matter_much(clock: Time) -> None:
    timer = WallClock(100, step=0, control=ControlGroup())
    assert walk(clock, timer, range(1, 3), seconds=20.0) == ([], 0)
    (first,), _ = walk(clock, timer, range(3, 1300), seconds=0.05)
    assert 1202 <= first <= 1205
    # Steps twenty times as long: it asks half-way by the old speed.
    (second, *_), _ = walk(clock, timer, range(1300, 2400), seconds=1.0)
    assert second <= 2301


def test_steps_longer_than_the_interval_all_end_one(clock: Time) -> None:
    timer = WallClock(5, step=10, control=ControlGroup())
    over, _ = walk(clock, timer, range(11, 25), seconds=30.0)
    assert over == list(range(15, 25))


def test_an_interval_that_is_over_stays_so_until_it_is_restarted(clock: Time) -> None:
    timer = WallClock(10, step=0, control=ControlGroup())
    clock.now += 11
    assert timer.over(5)
    clock.now += 4
    assert timer.over(7)
    timer.restart()
    clock.now += 4
    assert not timer.over(9)


@pytest.mark.parametrize(("every", "steps"), [("0.001s", [5, 6, 7, 8]), ("15m", [8])])
def test_a_run_is_saved_by_the_wall_clock(
    make_run: Callable[..., RunConfig], every: str, steps: list[int]
) -> None:
    config = make_run(
        f"checkpoint.every={every}",
        "train.until=8 steps",
        "checkpoint.keep=9",
        "checkpoint.keep_best=false",
    )
    outcome = Run(config).train()
    saved = CheckpointFolder(outcome.folder / "checkpoints").committed()
    assert [step_of(path) for path in saved] == steps
