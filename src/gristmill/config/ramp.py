"""Samples per step over a run whose batch may grow.

    batch                                   a step takes the batch of the ramp step that its first
      64 |                 ............     sample falls into; it is never cut at an edge, so the
      48 |            .....                 smaller batch may last a little longer
      32 |      ......
      16 |......
         +---------------------------->     samples before the step

Everything is a function of the number of samples before a step, in exact integer arithmetic, so a
run can be resumed anywhere. The edges do not depend on the micro-batch.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from gristmill.base.units import Duration, Unit


@dataclass(frozen=True)
class RampStep:
    """One level of the ramp: a range of samples over which the batch stays the same."""

    begin: int
    """Training steps that begin at this sample or later have this batch."""
    batch: int


@dataclass(frozen=True)
class BatchRamp:
    """The batch over a run. A ramp step that begins where the next one does is skipped."""

    ramp_steps: tuple[RampStep, ...]

    @classmethod
    def constant(cls, batch: int) -> BatchRamp:
        return cls((RampStep(0, batch),))

    @classmethod
    def growing(cls, *, start: int, by: int, full: int, over: Duration, sequence: int) -> BatchRamp:
        """From `start` to `full` in equal increases. The ramp steps before the full batch are
        equally long in the unit of `over`, and add up to it."""
        increases, rest = divmod(full - start, by)
        assert increases > 0 and rest == 0 and over.amount > 0
        ramp_steps = [RampStep(0, start)]
        for number in range(1, increases + 1):
            before = ramp_steps[-1]
            match over.unit:
                case Unit.STEPS:
                    earlier = ceil_divide((number - 1) * over.amount, increases)
                    steps = ceil_divide(number * over.amount, increases) - earlier
                    begin = before.begin + steps * before.batch
                case Unit.SAMPLES:
                    begin = ceil_divide(number * over.amount, increases)
                case Unit.TOKENS:
                    begin = ceil_divide(number * over.amount, increases * sequence)
            ramp_steps.append(RampStep(begin, start + number * by))
        return cls(tuple(ramp_steps))

    @property
    def first(self) -> int:
        """Samples of the first step."""
        return self.ramp_steps[0].batch

    @property
    def full(self) -> int:
        """Samples of a step once the batch has stopped growing."""
        return self.ramp_steps[-1].batch

    @property
    def full_from(self) -> int:
        """The sample from which on every step is full."""
        return self.ramp_steps[-1].begin

    def batch_at(self, sample: int) -> int:
        """Samples of the step that begins at a sample."""
        number = bisect.bisect_right(self.ramp_steps, sample, key=lambda step: step.begin)
        return self.ramp_steps[number - 1].batch

    def samples_after(self, steps: int, *, start: int = 0) -> int:
        """The number of samples done after `steps` steps, the first of which begins at `start`."""
        assert steps >= 0
        samples = start
        for level, following in itertools.pairwise(self.ramp_steps):
            count = min(steps, ceil_divide(max(0, following.begin - samples), level.batch))
            samples += count * level.batch
            steps -= count
        return samples + steps * self.full

    def steps_to(self, samples: int) -> int:
        """The fewest steps from the start of a run that cover this many samples."""
        steps = done = 0
        for level, following in itertools.pairwise(self.ramp_steps):
            count = ceil_divide(max(0, min(samples, following.begin) - done), level.batch)
            done += count * level.batch
            steps += count
        return steps + ceil_divide(max(0, samples - done), self.full)


def ceil_divide(amount: int, by: int) -> int:
    """An integer quotient rounded up, exact at any size."""
    return -(-amount // by)
