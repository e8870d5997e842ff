"""Rules between the settings of optimizers and preconditioners, and those of the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.base.errors import Problem
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import (
    AdamConfig,
    AdamWConfig,
    KfacConfig,
    MuonConfig,
    SGDConfig,
    SoapConfig,
)
from gristmill.config.resolve import Resolved
from gristmill.config.schema import RunConfig
from gristmill.config.settings import Written, no_effect


def long_rise(config: RunConfig, resolved: Resolved) -> list[str]:
    """A rise of momentum that the run does not finish."""
    rise = config.optim.momentum_rise
    if rise is None or rise.start == rise.end:
        return []
    warmup = resolved.samples_of(rise.over)
    if warmup <= resolved.samples:
        return []
    reached = rise.start + resolved.samples / warmup * (rise.end - rise.start)
    return [
        f"optim.momentum_warmup, {rise.over}, is longer than the run: momentum ends at "
        f"{reached:.3g} instead of {rise.end:g}"
    ]


def seldom_updated(config: RunConfig, resolved: Resolved) -> Iterator[str]:
    """Preconditioners that are hardly ever updated, or more often than makes sense."""
    kfac, table = config.optim.preconditioning, "optim.preconditioner"
    if isinstance(kfac, SoapConfig):
        every = kfac.basis_schedule(muon=isinstance(config.optim, MuonConfig))
        if min(every.values) >= resolved.steps:
            yield (
                f"{table}.basis_every, {min(every.values)} steps, is as long as the run or longer: "
                "the eigenbasis of the first gradient stays"
            )
    if not isinstance(kfac, KfacConfig):
        return
    for name, what in (("factor_every", "updated"), ("inverse_every", "inverted")):
        least = min(getattr(kfac, name).values)
        if least >= resolved.steps:
            yield (
                f"{table}.{name}, {least} steps, is as long as the run or longer: factors are "
                f"{what} once, in the first step"
            )
    if max(kfac.inverse_every.values) < min(kfac.factor_every.values):
        yield (
            f"{table}.inverse_every is below factor_every: most of the inversions invert the same "
            "factors again"
        )


def clipped_curvature(config: RunConfig) -> Iterator[str]:
    """Preconditioned gradients that are clipped as if they were plain ones."""
    kfac = isinstance(config.optim.preconditioning, KfacConfig)
    if kfac and isinstance(config.optim, SGDConfig) and config.train.clip:
        yield (
            f"train.clip = {config.train.clip:g} applies to preconditioned gradients, which are "
            "far longer than plain ones: SGD will hardly move; set train.clip = 0 and bound the "
            "step with optim.preconditioner.kl_clip"
        )


def kfac_fits(config: RunConfig) -> Iterator[Problem]:
    """What K-FAC needs. Layers of other models than our own are checked when one is outlined."""
    kfac, where = config.optim.preconditioning, "optim.preconditioner.type"
    if not isinstance(kfac, KfacConfig):
        return
    if isinstance(config.model, GPTConfig):
        yield from kfac.problems(config.model.linears())
    if config.model.adapters is not None:
        what = "K-FAC is for the weights of linear layers, and adapters leave those as they are"
        yield Problem(what, where, "leave one of the two out")
    if config.parallel.schedule == "zero-bubble":
        what = (
            "hides what K-FAC collects: it computes the gradients of weights in passes of their own"
        )
        yield Problem(what, "parallel.schedule", 'choose "1f1b" or "interleaved"')


def soap_fits(config: RunConfig) -> Iterator[Problem]:
    """What SOAP needs."""
    if not isinstance(config.optim.preconditioning, SoapConfig):
        return
    where = "optim.preconditioner.type"
    if isinstance(config.optim, AdamConfig):
        what = "SOAP's weight decay is decoupled, and that of optim.type = 'adam' is not"
        yield Problem(what, where, 'set optim.type to "adamw" or "muon", or use "kfac"')
    if isinstance(config.optim, SGDConfig):
        what = "SOAP is Adam in another basis, and SGD has no second moment to put there"
        yield Problem(what, where, 'set optim.type to "adamw" or "muon", or use "kfac"')
    if config.model.adapters is not None:
        what = "SOAP is made for whole matrices, and adapters are factors of a small one"
        yield Problem(what, where, "leave optim.preconditioner or model.lora out")
    if config.runtime.offload is not None and config.optim.steps_on_host:
        what = "a step with SOAP would take far too long on the host"
        yield Problem(what, "runtime.offload", "remove it, or leave optim.preconditioner out")


def adamw_fits(config: RunConfig, written: Written) -> Iterator[Problem]:
    """Settings of AdamW, and of Adam with L2."""
    optim = config.optim
    assert isinstance(optim, AdamWConfig)
    yield from _rates_apply(config)
    for role in (Role.EMBEDDING, Role.HEAD):
        floor = getattr(optim, f"{role}_min_lr")
        peak = getattr(optim, f"{role}_lr") or optim.lr
        if floor is not None and floor > peak:
            what = f"{floor} is above the peak optim.{role}_lr = {peak}"
            yield Problem(what, f"optim.{role}_min_lr")


def _rates_apply(config: RunConfig) -> Iterator[Problem]:
    """Rates of parameters that the model does not have."""
    absent = {
        Role.TABLE: ("the model has no value embeddings", "remove it"),
        Role.HEAD: ("a tied head is the embedding", "set embedding_lr, or model.tie_head = false"),
        Role.VECTOR: ("the model has no biases, gains or gates", "remove it"),
    }
    for role, (why, remedy) in absent.items():
        for name in (f"{role}_lr", f"{role}_min_lr"):
            if getattr(config.optim, name, None) is not None and role not in config.model.roles:
                yield no_effect(f"optim.{name}", f"because {why}", remedy)


def muon_fits(config: RunConfig, written: Written) -> Iterator[Problem]:
    """Muon's own settings."""
    optim = config.optim
    assert isinstance(optim, MuonConfig)
    warmup = optim.momentum_warmup
    if optim.momentum_start is not None and not getattr(warmup, "amount", warmup):
        why = "when optim.momentum_warmup is zero"
        yield no_effect("optim.momentum_start", why, "remove one of the two")
    elif optim.first_momentum > optim.momentum:
        what = f"{optim.momentum_start} is above optim.momentum = {optim.momentum}"
        remedy = "momentum rises: give at most optim.momentum, or leave it out"
        yield Problem(what, "optim.momentum_start", remedy)
    if optim.beta2 is not None and optim.normalise == "none":
        remedy = 'remove it, or set optim.normalise = "neurons"; adam_beta2 is Adam\'s'
        yield no_effect("optim.beta2", "with normalise = 'none'", remedy)
    if optim.cautious and optim.weight_decay == 0:
        yield no_effect(
            "optim.cautious", "when optim.weight_decay is zero", "remove one of the two"
        )
    yield from _rates_apply(config)
    # A rate that was meant for another scale: the default, or a preset's beside the user's scale.
    for_it = ("optim", "lr") in written or ("optim", "scale") not in written
    if optim.scale == "rms" and ("lr" not in optim.model_fields_set or not for_it):
        what = f"{optim.lr}, which is for scale = 'shape', is far too high with scale = 'rms'"
        yield Problem(what, "optim.lr", "give a rate as for AdamW, such as 6e-4")


def sgd_fits(config: RunConfig, written: Written) -> Iterator[Problem]:
    """SGD's own settings."""
    assert isinstance(config.optim, SGDConfig)
    if config.optim.nesterov and config.optim.momentum == 0:
        yield no_effect("optim.nesterov", "when optim.momentum is zero", "remove one of the two")
