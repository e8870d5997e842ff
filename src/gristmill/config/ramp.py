"""What can be wrong with a batch that grows: in itself, and with the portions of its batches.

start, start + by, start + 2 by, … batch      each a multiple of what all processes together
                                              take at once: processes x micro_batch
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gristmill.base.errors import Problem
from gristmill.config.resolve import Portions, divisors, nearest
from gristmill.config.schema import RampConfig, TrainConfig
from gristmill.config.settings import Broken


def ramp_broken(train: TrainConfig, parts: Portions) -> Iterator[Broken]:
    """What is wrong with a ramp in itself and with the portions of its batches."""
    ramp, batch = train.ramp, parts.batch
    if ramp is None:
        return
    if (ramp.over if isinstance(ramp.over, float) else ramp.over.amount) == 0:
        yield ("train", "ramp", "over"), Problem("must be above 0", remedy="or leave the ramp out")
    if ramp.start >= batch:
        what = f"{ramp.start} is not below the full batch {batch}"
        remedy = "the batch grows from train.ramp.start to train.batch"
        yield ("train", "ramp", "start"), Problem(what, remedy=remedy)
        return
    growth = batch - ramp.start
    if growth % ramp.by:
        what = f"growing by {ramp.by}, a batch of {ramp.start} never becomes {batch}"
        remedy = f"by could be {nearest(divisors(growth), ramp.by)}"
        yield ("train", "ramp", "by"), Problem(what, remedy=remedy)
        return
    yield from _not_in_portions(train, ramp, parts)


def _not_in_portions(train: TrainConfig, ramp: RampConfig, parts: Portions) -> Iterator[Broken]:
    common, micro = math.gcd(ramp.start, ramp.by), parts.micro_batch
    ranks = parts.batch // (micro * parts.accumulate)
    sizes = range(ramp.start, parts.batch, ramp.by)
    if common % ranks:
        odd = next(n for n in sizes if n % ranks)
        what = f"the ramp's batch of {odd} cannot be divided among {ranks} data-parallel processes"
        name = "start" if odd == ramp.start else "by"
        remedy = f"start and by could be multiples of {ranks}"
        yield ("train", "ramp", name), Problem(what, remedy=remedy)
    elif common % (ranks * micro):
        odd = next(n for n in sizes if n % (ranks * micro))
        each, be = f"the ramp's batch of {odd}", "is"
        if ranks > 1:
            each, be = f"each process's {odd // ranks} samples of {each}", "are"
        fitting = divisors(common // ranks)
        if train.micro_batch is not None:
            name, choices = "micro_batch", nearest(fitting, micro)
        else:
            name = "accumulate"
            own = parts.batch // ranks
            choices = nearest([own // size for size in fitting], parts.accumulate)
        what = f"{each} {be} not a multiple of micro_batch {micro}"
        yield ("train", name), Problem(what, remedy=f"{name} could be {choices}")
