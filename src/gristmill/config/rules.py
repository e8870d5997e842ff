"""Rules that no single setting can check: small, named, all broken ones reported at once.

`check` needs the settings, and which of them the user wrote. `check_mesh` is for what depends on
the number of processes. What both say about the sizes of a layout is in `layouts.py`. `doubts` are
about what is allowed and yet may be a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from gristmill.base.errors import Problem, UserError
from gristmill.base.units import Duration, Unit, parse_split
from gristmill.config.layouts import given_sizes_fit, mesh_fits
from gristmill.config.optim import InverseSqrtSchedule, MuonConfig, WarmupStableDecaySchedule
from gristmill.config.parallel import Mesh, build_mesh
from gristmill.config.ramp import ramp_broken
from gristmill.config.resolve import SHAPE_FREE, Resolved, divisors, nearest, portions, resolve
from gristmill.config.schema import ModelConfig, RunConfig
from gristmill.config.settings import Broken, NoEffect, Path_

FP8_MULTIPLE = 16
"""Matrix products in fp8 are of sizes that are multiples of this."""


def check(
    config: RunConfig, *, written: Collection[Path_], weights: Mapping[str, Any] | None = None
) -> list[Broken]:
    """Everything wrong with settings that are each valid by themselves; `written` are those that
    come from the user, not from a preset, `weights` those of the model in `model.start`."""
    broken = [broken for rule in _RULES for broken in rule(config)]
    if weights is not None:
        broken += _start_agrees(config, weights)
    return [*broken, *_rate_fits_scale(config, written)]


def doubts(config: RunConfig, numbers: Resolved) -> list[str]:
    """What is no mistake in itself but seldom wanted, in words."""
    optim = config.optim
    if not isinstance(optim, MuonConfig) or optim.first_momentum == optim.momentum:
        return []
    warmup = numbers.samples_of(optim.momentum_warmup)
    if warmup <= numbers.samples:
        return []
    reached = optim.first_momentum + numbers.samples / warmup * (
        optim.momentum - optim.first_momentum
    )
    return [
        f"optim.momentum_warmup, {optim.momentum_warmup}, is longer than the run: momentum ends at "
        f"{reached:.3g} instead of {optim.momentum:g}"
    ]


def _heads_divide(config: RunConfig) -> Iterator[Broken]:
    model = config.model
    if model.width % model.heads:
        yield (
            ("model", "heads"),
            Problem(
                f"{model.heads} heads do not divide the width {model.width}",
                remedy=f"heads could be {nearest(divisors(model.width), model.heads)}",
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
        yield ("model", "rotary_base"), NoEffect(what, remedy=remedy)


def _model_settings_act(config: RunConfig) -> Iterator[Broken]:
    model = config.model
    if model.head_std is not None and model.tie_head:
        what = "has no effect on a head that is tied to the embedding"
        remedy = "remove it, or set model.tie_head = false"
        yield ("model", "head_std"), NoEffect(what, remedy=remedy)
    most = -(-model.layers // 2)
    if model.value_embeddings > most:
        what = f"every other one of {model.layers} layers are {most}, not {model.value_embeddings}"
        yield ("model", "value_embeddings"), Problem(what, remedy=f"give at most {most}")


def _batch_divides(config: RunConfig) -> Iterator[Broken]:
    parts = portions(config.train)
    if isinstance(parts, Problem):
        yield ("train", "batch"), parts


def _offload_acts(config: RunConfig) -> Iterator[Broken]:
    if config.runtime.offload is None:
        return
    if config.runtime.device in ("cpu", "mps"):
        what = f"has no effect on {config.runtime.device}, whose memory is the host's"
        yield ("runtime", "offload"), NoEffect(what, remedy="remove it")
    if isinstance(config.optim, MuonConfig):
        what = "Muon's matrix products would take far too long on the host"
        yield ("runtime", "offload"), Problem(what, remedy='remove it, or set optim.type = "adamw"')


def _recompute_acts(config: RunConfig) -> Iterator[Broken]:
    if config.train.recompute_every is not None and config.train.recompute == "none":
        what = "has no effect with recompute = 'none'"
        yield ("train", "recompute_every"), NoEffect(what, remedy="remove it, or set recompute")


def _ramp_fits(config: RunConfig) -> Iterator[Broken]:
    parts = portions(config.train)
    if config.train.ramp is None or isinstance(parts, Problem):
        return
    broken = list(ramp_broken(config.train, parts))
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
        yield ("data", "split"), NoEffect(what, remedy="remove one of the two")
    elif parse_split(split) is None:
        what = f"{split!r} is not a split"
        remedy = 'write two or three proportions such as "99,1" or "969,30,1", the first above 0'
        yield ("data", "split"), Problem(what, remedy=remedy)


def _blend_acts(config: RunConfig) -> Iterator[Broken]:
    data = config.data
    if data.blend is None:
        return
    if isinstance(data.paths, str) or len(data.paths) == 1:
        yield ("data", "blend"), NoEffect("has no effect on a single token set", remedy="remove it")
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
            yield ("data", name), NoEffect(what, remedy='remove it: it is for order = "megatron"')
    if data.seed is not None and data.order == "sequential":
        what = "has no effect with order = 'sequential'"
        yield ("data", "seed"), NoEffect(what, remedy="remove it")


def _documents_agree(config: RunConfig) -> Iterator[Broken]:
    if config.data.documents == "joined":
        return
    for name in ("reset_attention", "reset_positions"):
        if getattr(config.data, name):
            what = 'has no effect with documents = "masked", which does both'
            yield ("data", name), NoEffect(what, remedy="remove one of the two")


def _loss_scale_acts(config: RunConfig) -> Iterator[Broken]:
    scale = config.precision.loss_scale
    if scale is None:
        return
    if config.precision.compute != "fp16":
        what = f"has no effect with compute = {config.precision.compute!r}"
        yield ("precision", "loss_scale"), NoEffect(what, remedy='only "fp16" needs a loss scale')
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
    if config.runtime.device in ("cpu", "mps"):
        what = f"needs an NVIDIA GPU, and runtime.device is {config.runtime.device!r}"
        yield ("precision", "fp8"), Problem(what, remedy="leave it out, or train on a GPU")
    elif not config.runtime.kernels:
        what = "has only a kernel of its own, and runtime.kernels is false"
        yield ("precision", "fp8"), Problem(what, remedy="leave one of the two out")
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
    if isinstance(parts, Problem) or any(ramp_broken(config.train, parts)):
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
        yield ("optim", "momentum_start"), NoEffect(what, remedy="remove one of the two")
    elif optim.first_momentum > optim.momentum:
        what = f"{optim.momentum_start} is above optim.momentum = {optim.momentum}"
        remedy = "momentum rises: give at most optim.momentum, or leave it out"
        yield ("optim", "momentum_start"), Problem(what, remedy=remedy)
    if optim.beta2 is not None and optim.normalise == "none":
        what = "has no effect with normalise = 'none'"
        remedy = 'remove it, or set optim.normalise = "neurons"; adam_beta2 is Adam\'s'
        yield ("optim", "beta2"), NoEffect(what, remedy=remedy)
    if optim.cautious and optim.weight_decay == 0:
        what = "has no effect when optim.weight_decay is zero"
        yield ("optim", "cautious"), NoEffect(what, remedy="remove one of the two")
    yield from _roles_have_rates(optim, config.model)


def _roles_have_rates(optim: MuonConfig, model: ModelConfig) -> Iterator[Broken]:
    if optim.table_lr is not None and not model.value_embeddings:
        what = "has no effect: the model has no value embeddings"
        yield ("optim", "table_lr"), NoEffect(what, remedy="remove it")
    if optim.head_lr is not None and model.tie_head:
        what = "has no effect on a tied head, which is the embedding"
        remedy = "set optim.embedding_lr, or model.tie_head = false"
        yield ("optim", "head_lr"), NoEffect(what, remedy=remedy)
    vectors = model.bias or model.norm_gain or model.value_embeddings
    if optim.vector_lr is not None and not vectors:
        what = "has no effect: the model has no biases, gains or gates"
        yield ("optim", "vector_lr"), NoEffect(what, remedy="remove it")


def _rate_fits_scale(config: RunConfig, written: Collection[Path_]) -> Iterator[Broken]:
    """A rate that was meant for another scale: the default, or a preset's beside the user's
    scale."""
    optim = config.optim
    if not isinstance(optim, MuonConfig) or optim.scale != "rms":
        return
    for_it = ("optim", "lr") in written or ("optim", "scale") not in written
    if "lr" not in optim.model_fields_set or not for_it:
        what = f"{optim.lr}, which is for scale = 'shape', is far too high with scale = 'rms'"
        yield ("optim", "lr"), Problem(what, remedy="give a rate as for AdamW, such as 6e-4")


_NOTHING = tuple(Duration(0, unit) for unit in Unit)


def _start_agrees(config: RunConfig, settings: Mapping[str, Any]) -> Iterator[Broken]:
    weights = ModelConfig.model_validate(settings)
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
    _recompute_acts,
    _offload_acts,
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
    given_sizes_fit,
)


def check_mesh(config: RunConfig, *, processes: int) -> Mesh:
    """The mesh of a run on so many processes; refuses one that the run does not fit."""
    broken = list(mesh_fits(config, processes=processes))
    if broken:
        raise UserError(
            [Problem(problem.what, ".".join(path), problem.remedy) for path, problem in broken]
        )
    mesh = build_mesh(config.parallel, processes)
    assert isinstance(mesh, Mesh), "one that cannot be made is refused"
    return mesh
