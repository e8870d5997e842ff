"""The run in plain numbers: what follows from settings and from the mesh of processes.

Portions of the batch, steps, the padded vocabulary, and spans in samples (a sample is `sequence`
tokens, a step as many samples as the batch ramp says: `batch` if the batch does not grow).

Samples per step over a run whose batch may grow.

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
import math
from dataclasses import dataclass
from typing import Literal

from gristmill.base.errors import Problem
from gristmill.base.units import Duration, Progress, Unit
from gristmill.config.model import GPTConfig, ModelConfig
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig, TrainConfig


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


@dataclass(frozen=True)
class Resolved:
    """Derived numbers of one run."""

    sequence: int
    """Tokens per sample."""
    data_seed: int
    """Decides the order of samples."""
    asked_samples: int
    """Samples that Megatron's order is made for."""
    batch: int
    """Samples per step, once the batch has its full size."""
    ramp: BatchRamp
    """Samples per step over the run."""
    micro_batch: int
    """Samples per forward pass."""
    accumulate: int
    """Forward passes of each process per step of the full size."""
    steps: int
    """Steps in the whole run."""
    vocab: int
    """Ids the model can predict."""
    padded_vocab: int
    """Rows of the embedding."""
    sampled_softmax: int | None
    """Tokens of the vocabulary in the loss of a training step; None for all."""
    validate_every: Duration

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step of the full size."""
        return self.batch * self.sequence

    @property
    def samples(self) -> int:
        """Samples in the whole run."""
        return self.ramp.samples_after(self.steps)

    def progress_at(self, step: int) -> Progress:
        samples = self.ramp.samples_after(step)
        return Progress(step, samples, samples * self.sequence)

    def samples_at_end(self, progress: Progress) -> int:
        """Samples done when the run, now at `progress`, has made its last step."""
        left = max(0, self.steps - progress.steps)
        return self.ramp.samples_after(left, start=progress.samples)

    def samples_of(self, span: Duration | float) -> int:
        """A span from the start of the run in samples; a fraction is one of the whole run."""
        if isinstance(span, float):
            return round(span * self.samples)
        if span.unit is Unit.STEPS:
            return self.ramp.samples_after(span.amount)
        return _in_samples(span, sequence=self.sequence)

    def last_samples_of(self, span: Duration | float, *, end: int | None = None) -> int:
        """A span up to a sample, the end of the run if None, in samples; its steps may be larger
        than the first."""
        if isinstance(span, float) or span.unit is not Unit.STEPS:
            return self.samples_of(span)
        steps, end = (self.steps, self.samples) if end is None else (self.ramp.steps_to(end), end)
        too_long = max(0, span.amount - steps)
        before = self.ramp.samples_after(steps + too_long - span.amount)
        return end - before + too_long * self.batch


@dataclass(frozen=True)
class Portions:
    """How a step's batch is divided."""

    batch: int
    micro_batch: int
    accumulate: int


def portions(train: TrainConfig, *, parts: int | None = None) -> Portions | Problem:
    """Batch, micro-batch and accumulation from those that are given. Each of `parts` data-parallel
    processes has an equal part of the batch; None if their number is not known yet."""
    batch, micro, times = train.batch, train.micro_batch, train.accumulate
    if batch is None:
        if micro is None:
            remedy = "set train.batch, in samples per step"
            return Problem("the batch size is not given", "train.batch", remedy)
        return Portions(micro * (times or 1) * (parts or 1), micro, times or 1)
    if parts is None and micro is not None and times is not None and batch % (micro * times) == 0:
        parts = batch // (micro * times)
    parts = parts or 1
    if batch % parts:
        what = f"batch {batch} cannot be divided among {parts} data-parallel processes"
        choices = nearest_multiples(parts * (micro or 1) * (times or 1), batch)
        return Problem(what, "train.batch", f"batch could be {choices}")
    if micro is None and times is None and train.ramp is not None:
        # The largest micro-batch of which every batch of the ramp is a multiple.
        common = math.gcd(batch, train.ramp.start, train.ramp.by)
        micro = 1 if common % parts else common // parts
    own = batch // parts
    divisor = micro or times or 1
    if own % divisor:
        name = "micro_batch" if micro else "accumulate"
        each = (
            f"each process's {own} samples of batch {batch} are"
            if parts > 1
            else f"batch {batch} is"
        )
        remedy = f"{name} could be {nearest(divisors(own), divisor)}"
        return Problem(f"{each} not a multiple of {name} {divisor}", "train.batch", remedy)
    if micro is None:
        return Portions(batch, own // divisor, divisor)
    if times is not None and micro * times != own:
        among = "" if parts == 1 else f" x {parts} processes"
        product = f"micro_batch {micro} x accumulate {times}{among} is {micro * times * parts}"
        return Problem(f"{product}, not batch {batch}", "train.batch", "leave one of the three out")
    return Portions(batch, micro, own // micro)


def leaves_micro_batch(train: TrainConfig) -> bool:
    """Whether only the batch is given, so that the micro-batch may be what memory allows."""
    return train.batch is not None and train.micro_batch is None and train.accumulate is None


def divisors(number: int) -> list[int]:
    """Numbers that divide another, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest(choices: list[int], wanted: int) -> str:
    """The three choices that are nearest to a number, in words."""
    best = sorted(choices, key=lambda choice: abs(choice - wanted))[:3]
    return ", ".join(map(str, sorted(best)))


def nearest_multiples(unit: int, wanted: int) -> str:
    """The multiples of a number that are nearest to another, in words."""
    middle = wanted // unit
    return nearest([unit * n for n in range(max(1, middle - 1), middle + 4)], wanted)


def resolve(config: RunConfig, *, vocab: int, mesh: Mesh | None = None) -> Resolved:
    """Derive the numbers of a run whose tokenizer has `vocab` ids, on a mesh of processes if that
    is known."""
    parts = portions(config.train, parts=None if mesh is None else mesh.data)
    assert isinstance(parts, Portions), "the rules are checked when settings are loaded"
    sequence = config.data.sequence or config.model.context
    vocab = config.model.vocab or vocab
    until = config.train.until
    ramp = _ramp(config.train, batch=parts.batch, sequence=sequence)
    steps = until.amount
    if until.unit is not Unit.STEPS:
        steps = ramp.steps_to(_in_samples(until, sequence=sequence))
    return Resolved(
        sequence=sequence,
        data_seed=config.train.seed if config.data.seed is None else config.data.seed,
        asked_samples=config.data.samples
        or (until.amount if until.unit is Unit.SAMPLES else ramp.samples_after(steps)),
        batch=parts.batch,
        ramp=ramp,
        micro_batch=parts.micro_batch,
        accumulate=parts.accumulate,
        steps=steps,
        vocab=vocab,
        padded_vocab=padded(vocab, config.model, ranks=1 if mesh is None else mesh.tp),
        sampled_softmax=_sampled(config, vocab, tp=config.parallel.tp if mesh is None else mesh.tp),
        validate_every=config.validation.every or _validate_every(config, parts.batch, steps),
    )


FP8_NARROWEST = 1024
"""Width from which products of blocks in fp8 save more time than casts take, on an H200."""


def with_formats(config: RunConfig, *, has_bf16: bool, on_gpu: bool) -> RunConfig:
    """The run with the number formats that it has on a device: what it leaves to the device, and
    fp8 only where that is faster than bf16. On the CPU it is slow in any case."""
    precision = config.precision
    compute, fp8 = precision.compute, precision.fp8
    if compute == "auto":
        compute = "bf16" if has_bf16 else "fp32"
    narrow = isinstance(config.model, GPTConfig) and config.model.width < FP8_NARROWEST
    if on_gpu and narrow:
        fp8 = tuple(part for part in fp8 if part == "head")
    if (compute, fp8) == (precision.compute, precision.fp8):
        return config
    precision = precision.model_copy(update={"compute": compute, "fp8": fp8})
    return config.model_copy(update={"precision": precision})


def _validate_every(config: RunConfig, batch: int, steps: int) -> Duration:
    """Twenty times in the run, or less often: validation is to take an eighth of its time at most.
    A window takes a third of the time of a sample that is trained on."""
    most = config.validation.windows
    sets = sum(one.windows or most for one in config.validation.sets or ())
    as_steps = (most + config.train_windows + sets) / batch / 3
    return Duration(max(math.ceil(steps / 20), math.ceil(8 * as_steps)), Unit.STEPS)


def _sampled(config: RunConfig, vocab: int, *, tp: int | Literal["auto"]) -> int | None:
    rows = config.train.sampled_softmax
    whole = tp not in (1, "auto") or config.runtime.device == "xla"
    return None if rows is None or rows >= vocab or whole else rows


def padded(vocab: int, model: ModelConfig, *, ranks: int = 1) -> int:
    """Rows of the embedding for a vocabulary that is divided over ranks."""
    multiple = model.vocab_multiple * ranks
    return math.ceil(vocab / multiple) * multiple


def _ramp(train: TrainConfig, *, batch: int, sequence: int) -> BatchRamp:
    ramp = train.ramp
    if ramp is None:
        return BatchRamp.constant(batch)
    over = ramp.over
    if isinstance(over, float):
        # Of the horizon as it is written: in samples, a horizon in steps would depend on the ramp.
        over = Duration(max(1, round(over * train.until.amount)), train.until.unit)
    return BatchRamp.growing(start=ramp.start, by=ramp.by, full=batch, over=over, sequence=sequence)


def _in_samples(duration: Duration, *, sequence: int) -> int:
    """An amount of samples or tokens in samples, rounded up."""
    assert duration.unit is not Unit.STEPS
    return ceil_divide(duration.amount, sequence if duration.unit is Unit.TOKENS else 1)
