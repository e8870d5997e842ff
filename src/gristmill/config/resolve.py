"""The run in plain numbers, and the rules that no single field can check.

`check` runs a list of small named rules over settings that are each valid by themselves and returns
everything broken at once. `resolve` then derives what follows: portions of the batch, steps, the
padded vocabulary, and spans in samples (a sample is `sequence` tokens, a step as many samples as
its stage says: `batch` if the batch does not grow).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gristmill.base.errors import Problem
from gristmill.base.stages import Stages, ceil_divide
from gristmill.base.units import Duration, Progress, Unit, parse_split
from gristmill.config.hf import model_settings
from gristmill.config.optim import InverseSqrtSchedule, MuonConfig, WarmupStableDecaySchedule
from gristmill.config.schema import ModelConfig, RunConfig, TrainConfig

Broken = tuple[tuple[str, ...], Problem]

FP8_MULTIPLE = 16
"""Matrix products in fp8 are of sizes that are multiples of this."""

SHAPE_FREE = {
    "start",
    "dropout",
    "init_std",
    "embedding_std",
    "head_std",
    "zero_init",
    "vocab_multiple",
    "vocab",
}
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
    """Samples per step, once the batch has its full size."""
    stages: Stages
    """Samples per step over the run."""
    micro_batch: int
    """Samples per forward pass."""
    accumulate: int
    """Forward passes per step of the full size."""
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
        """Tokens of a step of the full size."""
        return self.batch * self.sequence

    @property
    def samples(self) -> int:
        """Samples in the whole run."""
        return self.stages.samples_after(self.steps)

    def progress_at(self, step: int) -> Progress:
        samples = self.stages.samples_after(step)
        return Progress(step, samples, samples * self.sequence)

    def samples_at_end(self, progress: Progress) -> int:
        """Samples done when the run, now at `progress`, has made its last step."""
        left = max(0, self.steps - progress.steps)
        return self.stages.samples_after(left, start=progress.samples)

    def samples_of(self, span: Duration | float) -> int:
        """A span from the start of the run in samples; a fraction is one of the whole run."""
        if isinstance(span, float):
            return round(span * self.samples)
        if span.unit is Unit.STEPS:
            return self.stages.samples_after(span.amount)
        return _in_samples(span, sequence=self.sequence)

    def last_samples_of(self, span: Duration | float) -> int:
        """A span up to the end of the run in samples, whose steps may be larger than the first."""
        if isinstance(span, float) or span.unit is not Unit.STEPS:
            return self.samples_of(span)
        too_long = max(0, span.amount - self.steps)
        before = self.stages.samples_after(self.steps + too_long - span.amount)
        return self.samples - before + too_long * self.batch


@dataclass(frozen=True)
class Portions:
    """How a step's batch is divided."""

    batch: int
    micro_batch: int
    accumulate: int


def portions(train: TrainConfig) -> Portions | Problem:
    """Batch, micro-batch and accumulation from those that are given."""
    batch, micro, times = train.batch, train.micro_batch, train.accumulate
    if batch is not None and micro is None and times is None and train.ramp is not None:
        # The largest portion of which every stage of a growing batch is a multiple.
        micro = math.gcd(batch, train.ramp.start, train.ramp.by)
    if batch is None and micro is None:
        return Problem("the batch size is not given", remedy="set train.batch, in samples per step")
    if batch is None:
        assert micro is not None
        return Portions(micro * (times or 1), micro, times or 1)
    divisor = micro or times or 1
    if batch % divisor:
        name = "micro_batch" if micro else "accumulate"
        return Problem(
            f"batch {batch} is not a multiple of {name} {divisor}",
            remedy=f"{name} could be {_nearest(_divisors(batch), divisor)}",
        )
    if micro is None:
        return Portions(batch, batch // divisor, divisor)
    if times is not None and micro * times != batch:
        return Problem(
            f"micro_batch {micro} x accumulate {times} is {micro * times}, not batch {batch}",
            remedy="leave one of the three out",
        )
    return Portions(batch, micro, batch // micro)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest(choices: list[int], wanted: int) -> str:
    """The three choices that are nearest to a number, in words."""
    best = sorted(choices, key=lambda choice: abs(choice - wanted))[:3]
    return ", ".join(map(str, sorted(best)))


def resolve(config: RunConfig, *, vocab: int) -> Resolved:
    """Derive the numbers of a run whose tokenizer has `vocab` ids."""
    parts = portions(config.train)
    assert isinstance(parts, Portions), "the rules are checked when settings are loaded"
    sequence = config.data.sequence or config.model.context
    vocab = config.model.vocab or vocab
    until = config.train.until
    stages = _stages(config.train, batch=parts.batch, sequence=sequence)
    steps = (
        until.amount
        if until.unit is Unit.STEPS
        else stages.steps_to(_in_samples(until, sequence=sequence))
    )
    return Resolved(
        sequence=sequence,
        data_seed=config.train.seed if config.data.seed is None else config.data.seed,
        asked_samples=config.data.samples
        or (until.amount if until.unit is Unit.SAMPLES else stages.samples_after(steps)),
        batch=parts.batch,
        stages=stages,
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


def _stages(train: TrainConfig, *, batch: int, sequence: int) -> Stages:
    ramp = train.ramp
    if ramp is None:
        return Stages.constant(batch)
    over = ramp.over
    if isinstance(over, float):
        # Of the horizon as it is written: in samples, a horizon in steps would depend on the ramp.
        over = Duration(max(1, round(over * train.until.amount)), train.until.unit)
    return Stages.growing(start=ramp.start, by=ramp.by, full=batch, over=over, sequence=sequence)


def _in_samples(duration: Duration, *, sequence: int) -> int:
    """An amount of samples or tokens in samples, rounded up."""
    assert duration.unit is not Unit.STEPS
    return ceil_divide(duration.amount, sequence if duration.unit is Unit.TOKENS else 1)


# ------------------------------------------------------------------ rules


def check(config: RunConfig) -> list[Broken]:
    """Everything wrong with settings that are each valid by themselves."""
    return [broken for rule in _RULES for broken in rule(config)]


def _heads_divide(config: RunConfig) -> Iterator[Broken]:
    model = config.model
    if model.width % model.heads:
        yield (
            ("model", "heads"),
            Problem(
                f"{model.heads} heads do not divide the width {model.width}",
                remedy=f"heads could be {_nearest(_divisors(model.width), model.heads)}",
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


def _model_settings_act(config: RunConfig) -> Iterator[Broken]:
    model = config.model
    if model.head_std is not None and model.tie_head:
        what = "has no effect on a head that is tied to the embedding"
        remedy = "remove it, or set model.tie_head = false"
        yield ("model", "head_std"), Problem(what, remedy=remedy)
    most = -(-model.layers // 2)
    if model.value_embeddings > most:
        what = f"every other one of {model.layers} layers are {most}, not {model.value_embeddings}"
        yield ("model", "value_embeddings"), Problem(what, remedy=f"give at most {most}")


def _batch_divides(config: RunConfig) -> Iterator[Broken]:
    parts = portions(config.train)
    if isinstance(parts, Problem):
        yield ("train", "batch"), parts


def _ramp_fits(config: RunConfig) -> Iterator[Broken]:
    parts = portions(config.train)
    if config.train.ramp is None or isinstance(parts, Problem):
        return
    broken = list(_ramp_broken(config.train, parts))
    yield from broken
    if broken:
        return
    numbers = resolve(config, vocab=1)
    grown = numbers.stages.stages[-1].begin
    if grown >= numbers.samples:
        what = (
            f"the full batch comes after sample {grown}, and the run ends at sample "
            f"{numbers.samples}"
        )
        yield ("train", "ramp", "over"), Problem(what, remedy="shorten it, or prolong train.until")


def _ramp_broken(train: TrainConfig, parts: Portions) -> Iterator[Broken]:
    """What is wrong with a ramp in itself and with the portions of its batches."""
    ramp, batch, micro = train.ramp, parts.batch, parts.micro_batch
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
        remedy = f"by could be {_nearest(_divisors(growth), ramp.by)}"
        yield ("train", "ramp", "by"), Problem(what, remedy=remedy)
        return
    common = math.gcd(ramp.start, ramp.by)
    if common % micro:
        odd = next(n for n in range(ramp.start, batch, ramp.by) if n % micro)
        fitting = _divisors(common)
        if train.micro_batch is not None:
            name, choices = "micro_batch", _nearest(fitting, micro)
        else:
            name = "accumulate"
            choices = _nearest([batch // size for size in fitting], parts.accumulate)
        what = f"the ramp's batch of {odd} is not a multiple of micro_batch {micro}"
        yield ("train", name), Problem(what, remedy=f"{name} could be {choices}")


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


def _fp8_fits(config: RunConfig) -> Iterator[Broken]:
    precision, model = config.precision, config.model
    if not precision.fp8:
        return
    if precision.compute != "bf16":
        what = f"needs compute = 'bf16', not {precision.compute!r}"
        remedy = 'set precision.compute = "bf16", or leave fp8 out'
        yield ("precision", "fp8"), Problem(what, remedy=remedy)
    for name, size in (("width", model.width), ("vocab_multiple", model.vocab_multiple)):
        if size % FP8_MULTIPLE:
            what = f"{size} is not a multiple of {FP8_MULTIPLE}, which products in fp8 need"
            yield ("model", name), Problem(what, remedy="change it, or leave precision.fp8 out")


def _schedule_fits(config: RunConfig) -> Iterator[Broken]:
    schedule = config.schedule
    min_lr = getattr(schedule, "min_lr", 0.0)
    if min_lr > config.optim.lr:
        what = f"{min_lr} is above the peak optim.lr = {config.optim.lr}"
        yield ("schedule", "min_lr"), Problem(what)
    parts = portions(config.train)
    if isinstance(parts, Problem) or any(_ramp_broken(config.train, parts)):
        return
    numbers = resolve(config, vocab=1)
    warmup = numbers.samples_of(schedule.warmup)
    if isinstance(schedule, InverseSqrtSchedule) and warmup == 0:
        yield ("schedule", "warmup"), Problem("inverse-sqrt needs a warm-up above zero")
    if isinstance(schedule, WarmupStableDecaySchedule):
        if warmup + numbers.last_samples_of(schedule.decay) > numbers.samples:
            what = "warm-up and decay together are longer than the run"
            yield ("schedule", "decay"), Problem(what, remedy="shorten one, or prolong train.until")
        return
    decay = getattr(schedule, "decay", None)
    end = numbers.samples if decay is None else numbers.samples_of(decay)
    if warmup and warmup >= end:
        what = f"the warm-up ends at sample {warmup}, after the decay's end at sample {end}"
        yield ("schedule", "warmup"), Problem(what, remedy="shorten it, or prolong train.until")


def _muon_settings_act(config: RunConfig) -> Iterator[Broken]:
    optim = config.optim
    if not isinstance(optim, MuonConfig):
        return
    if optim.momentum_start is not None and optim.momentum_warmup in (0.0, *_NOTHING):
        what = "has no effect when optim.momentum_warmup is zero"
        yield ("optim", "momentum_start"), Problem(what, remedy="remove one of the two")
    if optim.beta2 is not None and optim.normalise == "none":
        what = "has no effect with normalise = 'none'"
        remedy = 'remove it, or set optim.normalise = "neurons"; adam_beta2 is Adam\'s'
        yield ("optim", "beta2"), Problem(what, remedy=remedy)
    if optim.cautious and optim.weight_decay == 0:
        what = "has no effect when optim.weight_decay is zero"
        yield ("optim", "cautious"), Problem(what, remedy="remove one of the two")
    if optim.head_lr is not None and config.model.tie_head:
        what = "has no effect on a tied head, which is the embedding"
        remedy = "set optim.embedding_lr, or model.tie_head = false"
        yield ("optim", "head_lr"), Problem(what, remedy=remedy)
    if optim.scale == "rms" and "lr" not in optim.model_fields_set:
        what = f"the default {optim.lr} is far too high with scale = 'rms'"
        yield ("optim", "lr"), Problem(what, remedy="give a rate as for AdamW, such as 6e-4")


_NOTHING = tuple(Duration(0, unit) for unit in Unit)


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
    _model_settings_act,
    _batch_divides,
    _ramp_fits,
    _sequence_fits,
    _split_reads,
    _blend_acts,
    _order_settings_act,
    _documents_agree,
    _loss_scale_acts,
    _fp8_fits,
    _schedule_fits,
    _muon_settings_act,
    _start_agrees,
)
