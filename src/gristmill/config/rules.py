"""Rules between settings; all broken ones are reported at once.

`check_mesh` has the rules that depend on the number of processes, `layouts.py` those about the
sizes of a layout, `optim_rules.py` those about optimizers. `doubts` are about what is allowed but
may be a mistake. A problem's `where` is the path of the setting to change.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gristmill.base.errors import Problem, UserError
from gristmill.base.units import parse_split
from gristmill.config.fp8_rules import fp8_fits
from gristmill.config.hf import NULL, HFConfig, positions
from gristmill.config.layouts import layout_problems, ramp_problems, xla_fits
from gristmill.config.mixture_rules import mixture_fits, validation_sets_fit
from gristmill.config.model import Ability, GPTConfig
from gristmill.config.optim import (
    AdamConfig,
    AdamWConfig,
    ConstantSchedule,
    InverseSqrtSchedule,
    MuonConfig,
    SGDConfig,
    WarmupStableDecaySchedule,
)
from gristmill.config.optim_rules import (
    adamw_fits,
    clipped_curvature,
    kfac_fits,
    long_rise,
    muon_fits,
    seldom_updated,
    sgd_fits,
    soap_fits,
)
from gristmill.config.parallel import Mesh, build_mesh
from gristmill.config.resolve import Resolved, divisors, nearest, portions, resolve
from gristmill.config.schema import DataConfig, RunConfig
from gristmill.config.settings import Settings, Written, no_effect
from gristmill.config.track import looks_secret


def check(
    config: RunConfig, *, written: Written, weights: Mapping[str, Any] | None = None
) -> list[Problem]:
    """Everything wrong with settings that are each valid by themselves; `weights` are the settings
    of the model in `model.start`."""
    of_kind = [_OF_KIND.get(type(one)) for one in (config.model, config.optim)]
    broken = [problem for rule in of_kind if rule for problem in rule(config, written)]
    for rule in (
        _model_is_able,
        _lora_fits,
        kfac_fits,
        soap_fits,
        _batch_fits,
        _offload_acts,
        _load_acts,
        _data_fits,
        _tokenizer_fits,
        _order_fits,
        _chat_fits,
        mixture_fits,
        validation_sets_fit,
        _precision_fits,
        fp8_fits,
        _schedule_fits,
        _alert_acts,
        xla_fits,
        layout_problems,
    ):
        broken += rule(config)
    if weights is not None:
        broken += _start_agrees(config, weights)
    return broken


def config_warnings(config: RunConfig, resolved: Resolved) -> list[str]:
    """What is no mistake in itself but seldom wanted, in words."""
    return [
        *_no_validation(config),
        *long_rise(config, resolved),
        *seldom_updated(config, resolved),
        *clipped_curvature(config),
        *_one_target(config),
        *_secret_address(config),
        *config.old_names,
    ]


def _one_target(config: RunConfig) -> Iterator[str]:
    """Presets ask for a second target, so it is no mistake where there is none."""
    xla = config.runtime.device == "xla"
    if config.train.mtp and (xla or config.parallel.cp not in (1, "auto")):
        where = "on XLA devices" if xla else "with context parallelism"
        yield f"train.mtp has no effect {where}: the run predicts the next token only"


def _secret_address(config: RunConfig) -> Iterator[str]:
    if config.alert is not None and config.alert.url and looks_secret(config.alert.url):
        yield (
            "whoever can read the run folder can read alert.url, which seems to hold a password; "
            'to keep it out, put it into an environment variable, and write url = "env:NAME"'
        )


def _alert_acts(config: RunConfig) -> Iterator[Problem]:
    alert = config.alert
    if alert is not None and alert.command is None and alert.url is None:
        yield Problem("nobody is told", "alert", "set alert.command, alert.url, or both")


def _no_validation(config: RunConfig) -> Iterator[str]:
    data, asked = config.data, sorted(config.validation.model_fields_set)
    shares = None if data.split is None else parse_split(data.split)
    if asked and data.validation is None and shares is not None and not shares[1]:
        yield (
            f"nothing is validated, although [validate] sets {' and '.join(asked)}: data.split = "
            f'"{data.split}" holds nothing out; give a share to validation, such as "99,1"'
        )


def _gpt_fits(config: RunConfig, written: Written) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, GPTConfig)
    if model.head_width is None and model.width % model.heads:
        what = f"{model.heads} heads do not divide the width {model.width}"
        remedy = f"heads could be {nearest(divisors(model.width), model.heads)}"
        yield Problem(what, "model.heads", remedy)
    elif model.positions == "rotary" and (model.rotated % 2 or not model.rotated):
        names = ("rotary_fraction", "head_width")
        cause = next((name for name in names if getattr(model, name) is not None), "heads")
        rotated = "head width" if model.rotary_fraction is None else "number of rotated features"
        what = f"rotary positions need an even {rotated}, not {model.rotated}"
        yield Problem(what, f"model.{cause}")
    if model.heads % model.groups:
        what = f"{model.heads} heads cannot share {model.groups} key and value heads evenly"
        yield Problem(what, "model.kv_heads", f"kv_heads must divide {model.heads}")
    for name in ("rotary_base", "rotary_fraction"):
        if getattr(model, name) is not None and model.positions != "rotary":
            remedy = 'remove it, or set model.positions = "rotary"'
            yield no_effect(f"model.{name}", f"with positions = {model.positions!r}", remedy)
    if model.window is not None and model.short_window is None:
        yield no_effect("model.window", f"with a context of {model.context}")
    if model.head_std is not None and model.tie_head:
        remedy = "remove it, or set model.tie_head = false"
        yield no_effect("model.head_std", "on a head that is tied to the embedding", remedy)
    most = -(-model.layers // 2)
    if model.value_embeddings > most:
        what = f"only every other layer can have them: {most} of {model.layers} layers"
        yield Problem(what, "model.value_embeddings", f"give at most {most}")


def _hf_fits(config: RunConfig, written: Written) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, HFConfig)
    table = model.hf_config
    if not isinstance(table.get("model_type"), str):
        remedy = "give model.hf, or set model.hf_config.model_type, such as 'llama'"
        yield Problem("the architecture is not named", "model.hf_config", remedy)
    changed = {path[2] for path in written if path[:2] == ("model", "hf_config") and path[2:]}
    for key in sorted(changed):
        near = difflib.get_close_matches(key, set(table) - changed, n=1, cutoff=0.8)
        if near:
            what = f"the config.json of {model.hf!r} has no such key"
            yield Problem(what, f"model.hf_config.{key}", f"did you mean {near[0]}?")
    if model.init == "pretrained" and model.hf is None:
        yield Problem("there are no weights to start from", "model.init", "name them with model.hf")
    if model.init == "pretrained" and model.start is not None:
        what = "the weights of model.hf and of model.start cannot both be initial"
        yield Problem(what, "model.init", "leave one of the two out")
    most = positions(table)
    if most is not None and model.context > most:
        what = f"{model.context} is more than the {most} positions of the architecture"
        yield Problem(what, "model.context", "shorten it, or raise those in model.hf_config")
    size = table.get("vocab_size")
    if model.init == "pretrained" and isinstance(size, int) and model.vocab != size:
        what = f"{model.vocab}, but the weights in {model.hf!r} have {size} rows"
        yield Problem(what, "model.vocab", "leave it out")
    if model.dropout and not model.dropout_names:
        why = f"on {model.model_type}, whose config.json has no dropout rate"
        yield no_effect("model.dropout", why)
    if table.get("quantization_config", NULL) != NULL:
        what = "quantized weights cannot be trained"
        yield Problem(what, "model.hf_config.quantization_config", "use the original model")
    if table.get("output_router_logits") is True:
        what = "the auxiliary loss of routers is not computed here"
        yield Problem(what, "model.hf_config.output_router_logits", "set it to false")


def _model_is_able(config: RunConfig) -> Iterator[Problem]:
    """Settings outside of `[model]` that need something of the model; layouts ask in layouts.py."""
    model, data = config.model, config.data
    needed = {
        "train.sampled_softmax": (Ability.SAMPLED_SOFTMAX, bool(config.train.sampled_softmax)),
        "train.mtp": (Ability.MTP, bool(config.train.mtp)),
        "data.documents": (Ability.DOCUMENTS, data.documents == "masked"),
        "data.reset_attention": (Ability.DOCUMENTS, data.reset_attention),
        "data.reset_positions": (Ability.DOCUMENTS, data.reset_positions),
    }
    for path, (ability, asked) in needed.items():
        if asked and ability not in model.abilities:
            what = f"needs {ability}, which {model.kind} models do not have"
            yield Problem(what, path, "leave it out")


def _lora_fits(config: RunConfig) -> Iterator[Problem]:
    """What adapters need. Names and sizes of layers are known here for our own model only; those of
    others are checked when the model is outlined."""
    model, parallel, lora = config.model, config.parallel, config.model.adapters
    if lora is None:
        return
    if model.initial_weights is None:
        what = "there are no weights to adapt: a new model would stay as random as it is"
        remedy = "name some with model.start"
        if isinstance(model, HFConfig):
            remedy += ', or take those of model.hf with model.init = "pretrained"'
        yield Problem(what, "model.lora", remedy)
    if isinstance(model, GPTConfig):
        yield from lora.problems(model.linears())
    if isinstance(config.optim, MuonConfig):
        what = "Muon is made for whole matrices, and adapters are factors of a small one"
        yield Problem(what, "optim.type", 'set it to "adamw", or leave model.lora out')
    for axis in ("tp", "pp"):
        if getattr(parallel, axis) != 1:
            what = "adapters are not divided over layers or within them"
            remedy = "set it to 1; dp_shard divides the frozen weights too"
            yield Problem(what, f"parallel.{axis}", remedy)
    for name in ("gossip", "local"):
        if getattr(parallel, name) is not None:
            what = "workers exchange all weights, and adapters are only some"
            yield Problem(what, f"parallel.{name}", "leave it out, or leave model.lora out")


def _batch_fits(config: RunConfig) -> Iterator[Problem]:
    train, parts = config.train, portions(config.train)
    if isinstance(parts, Problem):
        yield parts
    if train.recompute_every is not None and train.recompute == "none":
        yield no_effect(
            "train.recompute_every", "with recompute = 'none'", "remove it, or set recompute"
        )
    if train.guard is not None and train.guard.action != "rollback":
        for name in ("patience", "rollbacks"):
            if getattr(train.guard, name) is not None:
                remedy = 'remove it, or set train.guard.action = "rollback"'
                yield no_effect(f"train.guard.{name}", "when steps are skipped", remedy)
    if train.ramp is None or isinstance(parts, Problem):
        return
    if broken := list(ramp_problems(train, parts)):
        yield from broken
        return
    resolved = resolve(config, vocab=1)
    grown, end = resolved.ramp.full_from, resolved.samples
    if grown >= end:
        what = f"the full batch comes after sample {grown}, and the run ends at sample {end}"
        yield Problem(what, "train.ramp.over", "shorten it, or raise train.until")


def _load_acts(config: RunConfig) -> Iterator[Problem]:
    load = config.checkpoint.load
    own = config.folder or f"runs/{config.name}"
    if load is not None and os.path.normpath(load) == os.path.normpath(own):
        yield no_effect("checkpoint.load", "on the run's own folder, from which it resumes anyway")


def _offload_acts(config: RunConfig) -> Iterator[Problem]:
    if config.runtime.offload is None:
        return
    if config.runtime.device in ("cpu", "mps"):
        yield no_effect("runtime.offload", f"on {config.runtime.device}: it has the host's memory")
    if not config.optim.steps_on_host:
        what = f"a step of {config.optim.type} would take far too long on the host"
        yield Problem(what, "runtime.offload", 'remove it, or set optim.type = "adamw"')


def _data_fits(config: RunConfig) -> Iterator[Problem]:
    data, context = config.data, config.model.context
    if data.sequence and data.sequence > context:
        what = f"{data.sequence} is longer than the model's context {context}"
        yield Problem(what, "data.sequence", "raise model.context or shorten it")
    if data.split is not None and data.validation is not None:
        yield no_effect("data.split", "when data.validation is given", "remove one of the two")
    elif data.split is not None and parse_split(data.split) is None:
        what = f"{data.split!r} is not a split"
        remedy = 'write two or three proportions such as "99,1" or "969,30,1", the first above 0'
        yield Problem(what, "data.split", remedy)
    if data.blend is not None and (isinstance(data.paths, str) or len(data.paths) == 1):
        yield no_effect("data.blend", "on a single token set")
    elif data.blend == "exhaustive" and isinstance(data.paths, dict):
        what = "reads every sample once, so the weights in data.paths cannot apply"
        remedy = 'write the paths as a list, or set data.blend = "proportion"'
        yield Problem(what, "data.blend", remedy)
    elif data.blend == "exhaustive" and data.order == "random":
        what = "windows that start at random places cannot all be visited once"
        yield Problem(what, "data.blend", "choose another data.order")
    for name in ("reset_attention", "reset_positions"):
        if data.documents == "masked" and getattr(data, name):
            why = 'with documents = "masked", which does both'
            yield no_effect(f"data.{name}", why, "remove one of the two")


def _tokenizer_fits(config: RunConfig) -> Iterator[Problem]:
    if config.data.merges is not None and config.data.tokenizer is None:
        remedy = "name the file of the vocabulary with data.tokenizer"
        yield no_effect("data.merges", "without data.tokenizer", remedy)


def _chat_fits(config: RunConfig) -> Iterator[Problem]:
    data, remedy = config.data, 'remove it, or set data.kind = "chat"'
    if data.kind != "chat":
        if data.template is not None:
            yield no_effect("data.template", "on token files", remedy)
        return
    if data.order != "shuffled":
        what = f"conversations have no {data.order} order: they are packed, then shuffled"
        yield Problem(what, "data.order", "leave it out")
    whole = "conversations are always kept apart"
    reasons = {
        "documents": whole,
        "reset_attention": whole,
        "reset_positions": whole,
        "mask_end_of_text": "the answers decide what counts in the loss",
        "in_memory": "they are in memory anyway",
        "verify": "they have no manifest: a resumed run compares their content instead",
    }
    for name, why in reasons.items():
        if getattr(data, name) != DataConfig.model_fields[name].default:
            yield no_effect(f"data.{name}", f"on conversations: {why}")
    if data.tokenizer is None and config.model.initial_weights is None:
        what = "conversations name no tokenizer, and the run starts from no model that has one"
        remedy = "start from a model with model.start, or name a tokenizer"
        yield Problem(what, "data.tokenizer", remedy)


def _order_fits(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if data.by_rows:
        what = "Megatron's seeds are below 4294967296"
        if data.seed is not None and data.seed >= 2**32:
            yield Problem(what, "data.seed")
        elif data.seed is None and config.train.seed >= 2**32:
            yield Problem(what, "train.seed", "set data.seed for the order alone")
        return
    why = f"with order = {data.order!r}"
    for name in ("samples", "cache"):
        if getattr(data, name) is not None:
            yield no_effect(f"data.{name}", why, 'remove it: it is for order = "megatron"')
    if data.seed is not None and data.order == "sequential":
        yield no_effect("data.seed", why)


def _precision_fits(config: RunConfig) -> Iterator[Problem]:
    precision, scale = config.precision, config.precision.loss_scale
    if scale is not None and precision.compute != "fp16":
        why = f"with compute = {precision.compute!r}"
        yield no_effect("precision.loss_scale", why, 'only "fp16" needs a loss scale')
    if scale is not None and scale.minimum > scale.initial:
        what = f"{scale.minimum} is above the initial scale {scale.initial}"
        yield Problem(what, "precision.loss_scale.minimum")


def _schedule_fits(config: RunConfig) -> Iterator[Problem]:
    schedule = config.schedule
    min_lr = getattr(schedule, "min_lr", 0.0)
    if min_lr > config.optim.lr:
        yield Problem(f"{min_lr} is above the peak optim.lr = {config.optim.lr}", "schedule.min_lr")
    if schedule.initial_lr > config.optim.lr:
        what = f"{schedule.initial_lr} is above the peak optim.lr = {config.optim.lr}"
        yield Problem(what, "schedule.initial_lr")
    apart = config.parallel.decentralized and config.precision.compute == "fp16"
    if schedule.convention == "megatron" and apart:
        what = "workers skip their own fp16 steps, and share one schedule"
        yield Problem(what, "schedule.convention", 'leave it out, or use "bf16"')
    for name in ("embedding_min_lr", "head_min_lr"):
        if isinstance(schedule, ConstantSchedule) and getattr(config.optim, name, None) is not None:
            yield no_effect(f"optim.{name}", "with a constant schedule")
    parts = portions(config.train)
    if isinstance(parts, Problem) or any(ramp_problems(config.train, parts)):
        return
    resolved = resolve(config, vocab=1)
    warmup = resolved.samples_of(schedule.warmup)
    if schedule.initial_lr and not warmup:
        yield no_effect("schedule.initial_lr", "without a warm-up")
    megatron = schedule.convention == "megatron"
    if isinstance(schedule, InverseSqrtSchedule) and warmup == 0 and not megatron:
        yield Problem("inverse-sqrt needs a warm-up above zero", "schedule.warmup")
    if isinstance(schedule, WarmupStableDecaySchedule):
        end = None if schedule.end is None else resolved.samples_of(schedule.end)
        falling = resolved.last_samples_of(schedule.decay, end=end)
        if warmup + falling > (resolved.samples if end is None else end):
            what = "warm-up and decay together are longer than the run"
            raised = "train.until"
            if end is not None:
                what, raised = f"{what} up to schedule.end", "schedule.end"
            yield Problem(what, "schedule.decay", f"shorten one, or raise {raised}")
        return
    decay = getattr(schedule, "decay", getattr(schedule, "end", None))
    end = resolved.samples if decay is None else resolved.samples_of(decay)
    if warmup and warmup >= end:
        what = f"the warm-up ends at sample {warmup}, after the decay's end at sample {end}"
        yield Problem(what, "schedule.warmup", "shorten it, or raise train.until")


_OF_KIND: dict[type[Settings], Callable[[RunConfig, Written], Iterator[Problem]]] = {
    GPTConfig: _gpt_fits,
    HFConfig: _hf_fits,
    AdamWConfig: adamw_fits,
    AdamConfig: adamw_fits,
    MuonConfig: muon_fits,
    SGDConfig: sgd_fits,
}
"""The rules of one kind of model or optimizer."""


def _start_agrees(config: RunConfig, settings: Mapping[str, Any]) -> Iterator[Problem]:
    kind, start = type(config.model), config.model.start
    gone = [name for name, idle in kind.retired.items() if settings.get(name, idle) != idle]
    for name in gone:
        what = f"the weights in {start!r} have {settings[name]!r}, but the setting is gone"
        yield Problem(what, f"model.{name}")
    if gone:
        return
    weights = kind.model_validate(settings)
    for name in (name for name in kind.model_fields if name not in kind.not_of_weights):
        got, value = config.model.effective(name), weights.effective(name)
        path = f"model.{name}"
        # What follows from another setting is told there.
        given = any(getattr(one, name) is not None for one in (config.model, weights))
        if isinstance(got, dict):
            key = next((key for key in {**got, **value} if got.get(key) != value.get(key)), "")
            path, got, value = f"{path}.{key}", got.get(key), value.get(key)
        if got != value and given:
            what = f"is {got!r}, but the weights in {start!r} have {value!r}"
            yield Problem(what, path, "leave it out: it is taken from the weights")


def check_mesh(config: RunConfig, *, processes: int | None) -> Mesh:
    """The mesh of a run on a number of processes, or devices of XLA; refuses a run that does not
    fit it. While the number is not known, only what does not depend on it is checked."""
    if broken := list(layout_problems(config, processes=processes)):
        raise UserError(broken)
    mesh = build_mesh(config.parallel, processes)
    assert isinstance(mesh, Mesh), "sizes without a mesh are refused"
    return mesh
