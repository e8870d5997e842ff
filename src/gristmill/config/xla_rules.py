"""What `runtime.device = "xla"` allows: our own GPT, AdamW, SGD and Muon, in fp32 or bf16, over
dp_replicate, dp_shard and tp."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.base.errors import Problem
from gristmill.config.model import GPTConfig
from gristmill.config.optim import AccumAdamConfig, AccumAdamWConfig
from gristmill.config.schema import RunConfig
from gristmill.config.settings import no_effect

_ELSEWHERE = 'leave it out, or train on "cuda" or "cpu"'


def xla_fits(config: RunConfig) -> Iterator[Problem]:
    """Everything that XLA devices cannot do, or would ignore."""
    if config.runtime.device != "xla":
        return
    model, parallel, precision = config.model, config.parallel, config.precision
    if not isinstance(model, GPTConfig):
        what = f"XLA devices train our own GPT, and not {model.kind} models"
        yield Problem(what, "runtime.device", 'set it to "cuda" or "cpu"')
    elif model.lora is not None:
        yield Problem("adapters are not trained on XLA devices", "model.lora", _ELSEWHERE)
    if config.optim.preconditioning is not None:
        what = f"{config.optim.preconditioning.type} does not run on XLA devices"
        yield Problem(what, "optim.preconditioner", _ELSEWHERE)
    if isinstance(config.optim, AccumAdamConfig | AccumAdamWConfig):
        what = f"{config.optim.type} does not run on XLA devices"
        yield Problem(what, "optim.type", 'set it to "adamw", "adam", "sgd" or "muon"')
    if precision.compute == "fp16":
        what = "XLA devices compute in fp32 or bf16: there is no loss scale for fp16"
        yield Problem(what, "precision.compute", 'set it to "bf16"')
    for axis in ("pp", "cp"):
        if getattr(parallel, axis) != 1:
            what = "XLA devices divide a run by dp_replicate, dp_shard and tp only"
            yield Problem(what, f"parallel.{axis}", "set it to 1")
    for name in ("gossip", "local"):
        if getattr(parallel, name) is not None:
            what = "decentralized training does not run on XLA devices"
            yield Problem(what, f"parallel.{name}", _ELSEWHERE)
    compiler = "on XLA devices, where the compiler decides that"
    for path, given in {
        "parallel.keep": parallel.keep is not None,
        "parallel.sequence": parallel.sequence is not None,
        "parallel.compare": parallel.compare is not None,
        "precision.reduce": precision.reduce is not None,
        "runtime.compile": config.runtime.compile is not None,
        "runtime.kernels": not config.runtime.kernels,
        "runtime.offload": config.runtime.offload is not None,
        "runtime.cuda_graphs": bool(config.runtime.cuda_graphs),
    }.items():
        if given:
            yield no_effect(path, compiler)
