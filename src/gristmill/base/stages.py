"""How many samples each step of a run takes, when the batch may grow on the way.

    batch                                   a step takes the batch of the stage in which its first
      64 |                 ............     sample lies, so a step is never cut at the edge of a
      48 |            .....                 stage: the stage before it ends a little late
      32 |      ......
      16 |......
         +---------------------------->     samples before the step

Everything is a function of the number of samples before a step and is counted in whole numbers, so
a run can be resumed anywhere. The edges do not depend on how a batch is divided into portions.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gristmill.base.units import Duration, Unit


@dataclass(frozen=True)
class Stage:
    """A part of the run in which all steps are equally large."""

    begin: int
    """Steps that begin at this sample or later belong to the stage."""
    batch: int
    """Samples of each of its steps."""


class _Stretch(NamedTuple):
    """Equal steps in a row, from the first sample of the first of them."""

    first: int
    batch: int
    steps: int | None
    """None for the last stretch, which has no end."""


@dataclass(frozen=True)
class Stages:
    """The batch over a run: one stage after the other, the first from sample 0, the last without
    end. A stage that begins where the next one does is passed over."""

    stages: tuple[Stage, ...]

    @classmethod
    def constant(cls, batch: int) -> Stages:
        return cls((Stage(0, batch),))

    @classmethod
    def growing(cls, *, start: int, by: int, full: int, over: Duration, sequence: int) -> Stages:
        """From `start` to `full` in equal increases; all stages before the full batch are equally
        long in the unit of `over`, and together as long as it."""
        increases, rest = divmod(full - start, by)
        assert increases > 0 and rest == 0 and over.amount > 0
        stages = [Stage(0, start)]
        for number in range(1, increases + 1):
            before = stages[-1]
            match over.unit:
                case Unit.STEPS:
                    earlier = ceil_divide((number - 1) * over.amount, increases)
                    steps = ceil_divide(number * over.amount, increases) - earlier
                    begin = before.begin + steps * before.batch
                case Unit.SAMPLES:
                    begin = ceil_divide(number * over.amount, increases)
                case Unit.TOKENS:
                    begin = ceil_divide(number * over.amount, increases * sequence)
            stages.append(Stage(begin, start + number * by))
        return cls(tuple(stages))

    @property
    def first(self) -> int:
        """Samples of the first step."""
        return self.stages[0].batch

    @property
    def full(self) -> int:
        """Samples of a step in the last stage."""
        return self.stages[-1].batch

    def batch_at(self, sample: int) -> int:
        """Samples of the step that begins at a sample."""
        number = bisect.bisect_right(self.stages, sample, key=lambda stage: stage.begin)
        return self.stages[number - 1].batch

    def samples_after(self, steps: int, *, start: int = 0) -> int:
        """The number of samples done after so many steps, the first of which begins at `start`."""
        assert steps >= 0
        for stretch in self._stretches(start):
            if stretch.steps is None or steps <= stretch.steps:
                return stretch.first + steps * stretch.batch
            steps -= stretch.steps
        raise AssertionError("the last stretch has no end")

    def steps_to(self, samples: int) -> int:
        """The fewest steps from the beginning of a run that do so many samples."""
        done = 0
        for stretch in self._stretches(0):
            steps = ceil_divide(max(0, samples - stretch.first), stretch.batch)
            if stretch.steps is None or steps <= stretch.steps:
                return done + steps
            done += stretch.steps
        raise AssertionError("the last stretch has no end")

    def _stretches(self, first: int) -> Iterator[_Stretch]:
        for stage, following in itertools.pairwise(self.stages):
            if first < following.begin:
                steps = ceil_divide(following.begin - first, stage.batch)
                yield _Stretch(first, stage.batch, steps)
                first += steps * stage.batch
        yield _Stretch(first, self.full, None)


def ceil_divide(amount: int, by: int) -> int:
    """A quotient of whole numbers, rounded up; exact at any size."""
    return -(-amount // by)
