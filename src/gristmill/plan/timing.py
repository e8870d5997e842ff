"""How long a step of a run takes: its settings, put into the numbers of the formula in step.py.

What this program does is written here once: which bytes its optimizers touch, in which format
gradients travel, what is fused, what schedules leave of a pipeline's wait, and what workers that
average their weights send and how long they have for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gristmill.base.errors import Problem
from gristmill.base.units import Unit
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import KfacConfig, MuonConfig, SoapConfig
from gristmill.config.parallel import ExchangeConfig, Mesh
from gristmill.config.resolve import padded, portions
from gristmill.config.schema import RunConfig
from gristmill.plan.hardware import Hardware
from gristmill.plan.shape import planned_model
from gristmill.plan.step import (
    PARTS,
    Program,
    Shape,
    StepPlan,
    Work,
    all_reduce,
    held_parameters,
    time_step,
)

__all__ = ["PARTS", "StepPlan", "Work", "plan_step", "planned_work"]

_NEWTON_SCHULZ = 5
"""Iterations of Muon."""
_SENT = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}
"""Bytes of an element that workers exchange."""
_TOP_K = 1 / 64
"""The share of elements that top-k sends if not given; each as an index and two bits."""
_HOST_MEMORY = 50e9
"""Bytes a second of the host, where an offloaded optimizer steps."""
_HOST_LINK = 25e9
"""Bytes a second between host and device, one way."""


def plan_step(
    config: RunConfig,
    mesh: Mesh,
    hardware: Hardware,
    *,
    vocab: int,
    micro_batch: int,
    recompute: str,
) -> StepPlan:
    """The step of a run, with this mesh, micro-batch and recomputation in place of those of the
    settings."""
    work = planned_work(
        config, mesh, hardware, vocab=vocab, micro_batch=micro_batch, recompute=recompute
    )
    plan = time_step(work, hardware)
    if config.parallel.decentralized and mesh.dp_replicate > 1:
        alone = replace(work, batch=work.batch // mesh.dp_replicate, mesh=mesh.worker)
        plan = _with_exchange(config, work, time_step(alone, hardware), hardware)
    return plan


def planned_work(
    config: RunConfig,
    mesh: Mesh,
    hardware: Hardware,
    *,
    vocab: int,
    micro_batch: int,
    recompute: str,
) -> Work:
    """A step of a run in the formula's numbers."""
    model = planned_model(config.model)
    rows = padded(config.model.vocab or vocab, config.model, ranks=mesh.tp)
    sequence = config.data.sequence or config.model.context
    sampled = config.train.sampled_softmax
    return Work(
        shape=_shape(model, rows, sequence),
        sequence=sequence,
        batch=planned_batch(config, mesh, micro_batch=micro_batch),
        micro_batch=micro_batch,
        mesh=mesh,
        recompute=recompute,
        stages=config.parallel.stages_each if mesh.pp > 1 else 1,
        keep=config.parallel.keep or ("gradients" if mesh.pp > 1 else "nothing"),
        precision=_precision(config, hardware),
        fp8=frozenset(config.precision.fp8_of_blocks),
        program=_program(config, model, hardware),
        recompute_share=1 / (config.train.recompute_every or 1),
        loss_rows=min(sampled, rows) if sampled and mesh.tp == 1 else None,
    )


def planned_batch(config: RunConfig, mesh: Mesh, *, micro_batch: int) -> int:
    """Samples of a full step on a mesh."""
    if config.train.batch is not None:
        return config.train.batch
    parts = portions(config.train, parts=mesh.data)
    return micro_batch * mesh.data if isinstance(parts, Problem) else parts.batch


@lru_cache(maxsize=64)
def _planned_shape(model: str, rows: int, sequence: int) -> Shape:
    config = GPTConfig.model_validate_json(model)
    window = config.short_window
    keys = 1.0
    if window is not None and window < sequence:
        # Of T / 2 keys in the mean; with a window W - W W / 2 T, in every other layer.
        short = (window - window**2 / (2 * sequence)) / (sequence / 2)
        keys = (config.layers - config.layers // 2 + config.layers // 2 * short) / config.layers
    shape = Shape(
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        groups=config.groups,
        head_size=config.head_size,
        inner=config.inner,
        rows=rows,
        gated=config.activation == "swiglu",
        tied=config.tie_head,
        keys=keys,
    )
    if config.lora is None:
        return shape
    lora, linears = config.lora, config.linears()
    adapters = sum(
        lora.rank * (one.inputs + one.outputs) for name, one in linears.items() if lora.chosen(name)
    )
    return replace(shape, trained=adapters / (shape.layers * shape.block))


def _shape(model: GPTConfig, rows: int, sequence: int) -> Shape:
    return _planned_shape(_as_json(model), rows, sequence)


_JSON: dict[int, tuple[GPTConfig, str]] = {}


def _as_json(model: GPTConfig) -> str:
    found = _JSON.get(id(model))
    if found is None or found[0] is not model:
        _JSON.clear()
        found = _JSON[id(model)] = (model, model.model_dump_json())
    return found[1]


def _precision(config: RunConfig, hardware: Hardware) -> str:
    compute = config.precision.compute
    tf32 = config.precision.tf32 and hardware.device == "cuda"
    return "tf32" if compute == "fp32" and tf32 else compute


def _program(config: RunConfig, model: GPTConfig, hardware: Hardware) -> Program:
    """What this program does in a run."""
    on_gpu = hardware.name != "cpu" and config.runtime.device not in ("cpu", "mps")
    compiles = config.runtime.device == "xla" or config.runtime.compiles(
        "cuda" if on_gpu else "cpu"
    )
    sent = config.precision.reduce or "fp32"
    schedule = config.parallel.schedule
    weights = 4.0 if config.precision.compute == "fp32" else 2.0
    return Program(
        fused=compiles,
        graphs=bool(config.runtime.cuda_graphs) or hardware.device == "xla",
        sequence_parallel=config.parallel.sequence in (None, True),
        parallel_block=model.parallel_residual,
        gradient_bytes=4.0 if sent == "fp32" else 2.0,
        weight_bytes=weights,
        bubble=1 / 3 if schedule == "zero-bubble" else 1.0,
        optimizer_bytes=_optimizer_bytes(config),
        host_seconds=_host_seconds(config),
        optimizer_flops=_optimizer_flops(config, model),
    )


def _optimizer_bytes(config: RunConfig) -> float:
    """Bytes read and written for each parameter: weight, gradient and state, and the gradient again
    for its norm and to clear it."""
    state = config.optim.state_bytes(Role.MATRIX)
    return 2 * (4.0 + state) + 4.0 + 8.0


def _host_seconds(config: RunConfig) -> float:
    """Seconds of an offloaded optimizer for each parameter: to the host, there, and back."""
    if config.runtime.offload is None:
        return 0.0
    return 8 / _HOST_LINK + _optimizer_bytes(config) / _HOST_MEMORY


def _optimizer_flops(config: RunConfig, model: GPTConfig) -> float:
    """Operations in matrix products for each parameter of a block."""
    flops = 0.0
    if isinstance(config.optim, MuonConfig):
        # Three products of each iteration over the smaller side.
        flops += _NEWTON_SCHULZ * 6 * model.width
    match config.optim.preconditioning:
        case SoapConfig():
            # Into the basis and back, and the two factors.
            flops += 12 * model.width
        case KfacConfig():
            flops += 8 * model.width
    return flops


def _with_exchange(config: RunConfig, work: Work, alone: StepPlan, hardware: Hardware) -> StepPlan:
    """A step of workers that average their weights now and then."""
    parallel, mesh = config.parallel, work.mesh
    exchange, every = parallel.exchange or ExchangeConfig(), parallel.exchange_every
    steps = every.amount
    if every.unit is not Unit.STEPS:
        amount = work.batch * (work.sequence if every.unit is Unit.TOKENS else 1)
        steps = max(1, every.amount // amount)
    each = _SENT.get(exchange.send, 5 * (exchange.density or _TOP_K))
    stride = mesh.processes // mesh.dp_replicate // mesh.pp
    size = each * held_parameters(work) / (mesh.dp_shard * mesh.cp if mesh.dp_shard > 1 else 1)
    if parallel.topology == "complete":
        sent = all_reduce(size, group=mesh.dp_replicate, stride=stride, hardware=hardware)
    else:
        bandwidth, latency = hardware.path(group=mesh.dp_replicate, stride=stride)
        sent = size / bandwidth + latency
    waited = max(0.0, sent - exchange.delay * alone.seconds) / steps
    parts = {**alone.parts, "data_communication": alone.parts["data_communication"] + waited}
    seconds = sum(parts.values())
    amount = work.batch * work.sequence
    return StepPlan(parts, seconds, amount / seconds, alone.mfu * alone.seconds / seconds)
