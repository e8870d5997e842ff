"""The run in plain numbers, and the rules that no single field can check.

`check` runs a list of small named rules over settings that are each valid by themselves and returns
everything broken at once. `resolve` then derives what follows: portions of the batch, steps, the
padded vocabulary, and spans in samples (a sample is `sequence` tokens, a step is `batch` samples).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gristmill.base.errors import Problem
from gristmill.base.units import Duration, Progress, Unit, parse_split
from gristmill.config.hf import model_settings
from gristmill.config.schema import (
    InverseSqrtSchedule,
    ModelConfig,
    RunConfig,
    TrainConfig,
    WarmupStableDecaySchedule,
)

Broken = tuple[tuple[str, ...], Problem]

SHAPE_FREE = {"start", "dropout", "init_std", "vocab_multiple", "vocab"}
"""Model settings that may differ between a run and the weights it loads."""


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
    """Samples per step."""
    micro_batch: int
    """Samples per forward pass."""
    accumulate: int
    """Forward passes per step."""
    steps: int
    """Steps in the whole run."""
    vocab: int
    """Ids the model can predict."""
    padded_vocab: int
    """Rows of the embedding."""
    validate_every: Duration
    checkpoint_every: Duration

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence

    @property
    def samples(self) -> int:
        """Samples in the whole run."""
        return self.steps * self.batch

    def progress_at(self, step: int) -> Progress:
        return Progress(step, step * self.batch, step * self.tokens_per_step)

    def samples_of(self, span: Duration | float) -> int:
        """A span of the run in samples; a fraction is one of the whole run."""
        if isinstance(span, float):
            return round(span * self.samples)
        match span.unit:
            case Unit.STEPS:
                return span.amount * self.batch
            case Unit.SAMPLES:
                return span.amount
            case Unit.TOKENS:
                return math.ceil(span.amount / self.sequence)


@dataclass(frozen=True)
class Portions:
    """How a step's batch is divided."""

    batch: int
    micro_batch: int
    accumulate: int


def portions(train: TrainConfig) -> Portions | Problem:
    """Batch, micro-batch and accumulation from those that are given."""
    batch, micro, times = train.batch, train.micro_batch, train.accumulate
    if batch is None and micro is None:
        return Problem("the batch size is not given", remedy="set train.batch, in samples per step")
    if batch is None:
        assert micro is not None
        return Portions(micro * (times or 1), micro, times or 1)
    divisor = micro or times or 1
    if batch % divisor:
        name = "micro_batch" if micro else "accumulate"
        near = [n for n in range(1, batch + 1) if batch % n == 0]
        best = sorted(near, key=lambda n: abs(n - divisor))[:3]
        return Problem(
            f"batch {batch} is not a multiple of {name} {divisor}",
            remedy=f"{name} could be {', '.join(map(str, sorted(best)))}",
        )
    if micro is None:
        return Portions(batch, batch // divisor, divisor)
    if times is not None and micro * times != batch:
        return Problem(
            f"micro_batch {micro} x accumulate {times} is {micro * times}, not batch {batch}",
            remedy="leave one of the three out",
        )
    return Portions(batch, micro, batch // micro)


def resolve(config: RunConfig, *, vocab: int) -> Resolved:
    """Derive the numbers of a run whose tokenizer has `vocab` ids."""
    parts = portions(config.train)
    assert isinstance(parts, Portions), "the rules are checked when settings are loaded"
    sequence = config.data.sequence or config.model.context
    vocab = config.model.vocab or vocab
    steps = _steps(config.train.until, batch=parts.batch, sequence=sequence)
    until = config.train.until
    return Resolved(
        sequence=sequence,
        data_seed=config.train.seed if config.data.seed is None else config.data.seed,
        asked_samples=config.data.samples
        or (until.amount if until.unit is Unit.SAMPLES else steps * parts.batch),
        batch=parts.batch,
        micro_batch=parts.micro_batch,
        accumulate=parts.accumulate,
        steps=steps,
        vocab=vocab,
        padded_vocab=padded(vocab, config.model),
        validate_every=config.validation.every or Duration(math.ceil(steps / 20), Unit.STEPS),
        checkpoint_every=config.checkpoint.every or Duration(math.ceil(steps / 10), Unit.STEPS),
    )


def padded(vocab: int, model: ModelConfig) -> int:
    """Rows of the embedding for a vocabulary."""
    return math.ceil(vocab / model.vocab_multiple) * model.vocab_multiple


def _steps(until: Duration, *, batch: int, sequence: int) -> int:
    per_step = {Unit.STEPS: 1, Unit.SAMPLES: batch, Unit.TOKENS: batch * sequence}
    return math.ceil(until.amount / per_step[until.unit])


# ------------------------------------------------------------------ rules


def check(config: RunConfig) -> list[Broken]:
    """Everything wrong with settings that are each valid by themselves."""
    return [broken for rule in _RULES for broken in rule(config)]


def _heads_divide(config: RunConfig) -> Iterator[Broken]:
    model = config.model
    if model.width % model.heads:
        near = [n for n in range(1, model.width + 1) if model.width % n == 0]
        best = sorted(sorted(near, key=lambda n: abs(n - model.heads))[:3])
        yield (
            ("model", "heads"),
            Problem(
                f"{model.heads} heads do not divide the width {model.width}",
                remedy=f"heads could be {', '.join(map(str, best))}",
            ),
        )
    elif model.positions == "rotary" and model.head_width % 2:
        what = f"rotary positions need an even head width, not {model.head_width}"
        yield ("model", "heads"), Problem(what)
    if model.heads % model.groups:
        what = f"{model.heads} heads cannot share {model.groups} key and value heads evenly"
        remedy = f"kv_heads must divide {model.heads}"
        yield ("model", "kv_heads"), Problem(what, remedy=remedy)


def _rotary_base_acts(config: RunConfig) -> Iterator[Broken]:
    if config.model.rotary_base is not None and config.model.positions != "rotary":
        what = f"has no effect with positions = {config.model.positions!r}"
        remedy = 'remove it, or set model.positions = "rotary"'
        yield ("model", "rotary_base"), Problem(what, remedy=remedy)


def _batch_divides(config: RunConfig) -> Iterator[Broken]:
    parts = portions(config.train)
    if isinstance(parts, Problem):
        yield ("train", "batch"), parts


def _sequence_fits(config: RunConfig) -> Iterator[Broken]:
    if config.data.sequence and config.data.sequence > config.model.context:
        what = f"{config.data.sequence} is longer than the model's context {config.model.context}"
        yield ("data", "sequence"), Problem(what, remedy="raise model.context or shorten it")


def _split_reads(config: RunConfig) -> Iterator[Broken]:
    split = config.data.split
    if split is None:
        return
    if config.data.validation is not None:
        what = "has no effect when data.validation is given"
        yield ("data", "split"), Problem(what, remedy="remove one of the two")
    elif parse_split(split) is None:
        what = f"{split!r} is not a split"
        remedy = 'write two or three proportions such as "99,1" or "969,30,1", the first above 0'
        yield ("data", "split"), Problem(what, remedy=remedy)


def _blend_acts(config: RunConfig) -> Iterator[Broken]:
    data = config.data
    if data.blend is None:
        return
    if isinstance(data.paths, str) or len(data.paths) == 1:
        yield ("data", "blend"), Problem("has no effect on a single token set", remedy="remove it")
    elif data.blend == "exhaustive" and isinstance(data.paths, dict):
        what = "every sample once leaves no room for the weights in data.paths"
        remedy = 'write the paths as a list, or set data.blend = "proportion"'
        yield ("data", "blend"), Problem(what, remedy=remedy)
    elif data.blend == "exhaustive" and data.order == "random":
        what = "windows that start at random places cannot all be visited once"
        yield ("data", "blend"), Problem(what, remedy="choose another data.order")


def _order_settings_act(config: RunConfig) -> Iterator[Broken]:
    data = config.data
    if data.order == "megatron":
        if data.seed is not None and data.seed >= 2**32:
            yield ("data", "seed"), Problem("Megatron's seeds are below 4294967296")
        elif data.seed is None and config.train.seed >= 2**32:
            what = "Megatron's seeds are below 4294967296"
            yield ("train", "seed"), Problem(what, remedy="give the order its own: data.seed")
        return
    for name in ("samples", "cache"):
        if getattr(data, name) is not None:
            what = f"has no effect with order = {data.order!r}"
            yield ("data", name), Problem(what, remedy='remove it: it is for order = "megatron"')
    if data.seed is not None and data.order == "sequential":
        what = "has no effect with order = 'sequential'"
        yield ("data", "seed"), Problem(what, remedy="remove it")


def _documents_agree(config: RunConfig) -> Iterator[Broken]:
    if config.data.documents == "joined":
        return
    for name in ("reset_attention", "reset_positions"):
        if getattr(config.data, name):
            what = 'has no effect with documents = "masked", which does both'
            yield ("data", name), Problem(what, remedy="remove one of the two")


def _loss_scale_acts(config: RunConfig) -> Iterator[Broken]:
    scale = config.precision.loss_scale
    if scale is None:
        return
    if config.precision.compute != "fp16":
        what = f"has no effect with compute = {config.precision.compute!r}"
        yield ("precision", "loss_scale"), Problem(what, remedy='only "fp16" needs a loss scale')
    if scale.minimum > scale.initial:
        what = f"{scale.minimum} is above the initial scale {scale.initial}"
        yield ("precision", "loss_scale", "minimum"), Problem(what)


def _schedule_fits(config: RunConfig) -> Iterator[Broken]:
    schedule = config.schedule
    min_lr = getattr(schedule, "min_lr", 0.0)
    if min_lr > config.optim.lr:
        what = f"{min_lr} is above the peak optim.lr = {config.optim.lr}"
        yield ("schedule", "min_lr"), Problem(what)
    if isinstance(portions(config.train), Problem):
        return
    numbers = resolve(config, vocab=1)
    warmup = numbers.samples_of(schedule.warmup)
    if isinstance(schedule, InverseSqrtSchedule) and warmup == 0:
        yield ("schedule", "warmup"), Problem("inverse-sqrt needs a warm-up above zero")
    if isinstance(schedule, WarmupStableDecaySchedule):
        if warmup + numbers.samples_of(schedule.decay) > numbers.samples:
            what = "warm-up and decay together are longer than the run"
            yield ("schedule", "decay"), Problem(what, remedy="shorten one, or prolong train.until")
        return
    decay = getattr(schedule, "decay", None)
    end = numbers.samples if decay is None else numbers.samples_of(decay)
    if warmup and warmup >= end:
        what = f"the warm-up ends at sample {warmup}, after the decay's end at sample {end}"
        yield ("schedule", "warmup"), Problem(what, remedy="shorten it, or prolong train.until")


def _start_agrees(config: RunConfig) -> Iterator[Broken]:
    if config.model.start is None:
        return
    weights = ModelConfig.model_validate(model_settings(config.model.start))
    for name in (name for name in ModelConfig.model_fields if name not in SHAPE_FREE):
        field = {"kv_heads": "groups", "mlp_width": "inner"}.get(name, name)
        got, value = getattr(config.model, field), getattr(weights, field)
        if got != value:
            what = f"is {got!r}, but the weights in {config.model.start!r} have {value!r}"
            yield (
                ("model", name),
                Problem(what, remedy="leave it out: it is taken from the weights"),
            )


_RULES: tuple[Callable[[RunConfig], Iterator[Broken]], ...] = (
    _heads_divide,
    _rotary_base_acts,
    _batch_divides,
    _sequence_fits,
    _split_reads,
    _blend_acts,
    _order_settings_act,
    _documents_agree,
    _loss_scale_acts,
    _schedule_fits,
    _start_agrees,
)
