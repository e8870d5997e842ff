"""What a layout must divide: sizes that do not fit are refused, with the nearest ones that do.

    when the file is read          the given sizes, with the model and the sequence
    when processes are counted     the sizes that follow, and every batch with its micro-batches

Until the number of processes is known, a size that follows from it counts as 1. So what is refused
when the file is read would be refused on any number of processes.

What `runtime.device = "xla"` allows: our own GPT, AdamW, SGD and Muon, in fp32 or bf16, over
dp_replicate, dp_shard and tp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gristmill.base.errors import Problem
from gristmill.base.units import Unit
from gristmill.config.fp8_rules import fp8_layout_fits
from gristmill.config.model import Ability, GPTConfig
from gristmill.config.optim import AccumAdamConfig, AccumAdamWConfig
from gristmill.config.parallel import (
    AXES,
    SEVERAL,
    TOPOLOGY_SIZES,
    GossipConfig,
    Mesh,
    ParallelConfig,
    build_mesh,
    topology_misfit,
)
from gristmill.config.resolve import Portions, divisors, nearest, nearest_multiples, portions
from gristmill.config.schema import RunConfig, TrainConfig
from gristmill.config.settings import no_effect

_ELSEWHERE = 'leave it out, or train on "cuda" or "cpu"'


def xla_fits(config: RunConfig) -> Iterator[Problem]:
    """Everything that XLA devices cannot do, or would ignore."""
    if config.runtime.device != "xla":
        if config.runtime.xla_attention != "auto":
            device = config.runtime.device
            why = f"unless runtime.device is 'xla' (it is {device!r})"
            yield no_effect("runtime.xla_attention", why)
        return
    yield from _attention_fits(config)
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
        "runtime.compile": config.runtime.compile not in (None, "blocks"),
        "runtime.kernels": not config.runtime.kernels,
        "runtime.offload": config.runtime.offload is not None,
        "runtime.cuda_graphs": bool(config.runtime.cuda_graphs),
    }.items():
        if given:
            yield no_effect(path, compiler)


def _attention_fits(config: RunConfig) -> Iterator[Problem]:
    """A kernel that was asked for can compute the attention of this model."""
    model, how = config.model, config.runtime.xla_attention
    if how not in ("cudnn", "splash") or not isinstance(model, GPTConfig):
        return
    for found, what in (
        (model.attention_drop > 0, "drops no weights of attention, as model.attention_drop asks"),
        (model.short_window is not None, "has no windows, as model.window asks"),
        (config.masks_documents, "takes no masks, as data.documents asks"),
        (
            how == "cudnn" and config.precision.compute == "fp32",
            "computes in bf16, and precision.compute is 'fp32'",
        ),
    ):
        if found:
            remedy = 'leave it out, or set it to "blocked"'
            yield Problem(f"{how} {what}", "runtime.xla_attention", remedy)


def layout_problems(config: RunConfig, *, processes: int | None = None) -> Iterator[Problem]:
    """Everything that does not fit the layout, on a number of processes if that is known."""
    xla = config.runtime.device == "xla"
    mesh = build_mesh(config.parallel, processes, unit="devices" if xla else "processes")
    if isinstance(mesh, Problem):
        start = "change the sizes, or start on as many devices"
        remedy = mesh.remedy or (start if xla else _processes_to_start(config, processes or 1))
        yield Problem(mesh.what, "parallel", remedy)
        return
    yield from _settings_act(config.parallel)
    yield from _decentralized(config)
    yield from fp8_layout_fits(config, mesh)
    for axis, (ability, problems) in _NEEDED.items():
        if mesh.sizes[axis] == 1:
            continue
        if ability in config.model.abilities:
            yield from problems(config, mesh)
        else:
            what = f"needs {ability}, which {config.model.kind} models do not have"
            remedy = "set it to 1; dp_shard divides any model"
            yield Problem(what, f"parallel.{axis}", remedy)
    if processes is not None:
        yield from _batch(config, mesh)
        mine = mesh
        if config.parallel.decentralized:
            yield from _topology(config.parallel, workers=mesh.dp_replicate)
            # No gradients are summed and no weights are equal beyond a worker.
            mine = mesh.worker
        if config.precision.reduce is not None and mine.data * mine.cp == 1:
            why = f"with {mesh}: no gradients of data-parallel processes are summed"
            yield no_effect("precision.reduce", why)
        if config.parallel.compare is not None and not mine.has_copies:
            yield no_effect("parallel.compare", f"with {mesh}: no weights are held twice")


def _processes_to_start(config: RunConfig, processes: int) -> str:
    sizes = [getattr(config.parallel, axis) for axis in AXES]
    product = math.prod(size for size in sizes if isinstance(size, int))
    below = processes // product * product
    if all(isinstance(size, int) for size in sizes) or not below:
        return f"start {product} processes"
    return f"start {below} or {below + product} processes"


def _settings_act(parallel: ParallelConfig) -> Iterator[Problem]:
    needed = {"keep": "dp_shard", "sequence": "tp", "attention": "cp", "schedule": "pp"}
    for name, axis in {**needed, "stages": "pp"}.items():
        if getattr(parallel, name) is not None and getattr(parallel, axis) == 1:
            remedy = f"remove it, or give parallel.{axis} a size above 1"
            yield no_effect(f"parallel.{name}", f"without parallel.{axis}", remedy)
    several = parallel.schedule in SEVERAL
    if parallel.stages is not None and parallel.pp != 1 and (parallel.stages > 1) != several:
        what = f"{parallel.stages} groups of layers on a device do not fit this schedule"
        remedy = "interleaved and zero-bubble take 2 or more, the others 1"
        yield Problem(what, "parallel.stages", remedy)


def _decentralized(config: RunConfig) -> Iterator[Problem]:
    """What gossip and local updates allow, beside the topology's sizes."""
    parallel, guard = config.parallel, config.train.guard
    if not parallel.decentralized:
        for name in ("exchange", "elastic"):
            if getattr(parallel, name):
                remedy = "remove it, or set parallel.gossip or parallel.local"
                why = "when all processes have the same weights"
                yield no_effect(f"parallel.{name}", why, remedy)
        return
    gossip, local, exchange = parallel.gossip, parallel.local, parallel.exchange
    complete, send = parallel.topology == "complete", "fp32" if exchange is None else exchange.send
    if gossip is not None:
        yield from _gossip_acts(gossip)
        mixes = gossip.mixing != 1.0 or gossip.mixing_power is not None
        if mixes and (local is not None or (complete and send != "fp32")):
            why = "parallel.local" if local is not None else f'a complete graph and send = "{send}"'
            what = f"with {why}, all of the result counts"
            yield Problem(what, "parallel.gossip.mixing", "leave mixing and mixing_power out")
    if local is not None and local.outer == "sgd" and local.outer_momentum is not None:
        why = 'with outer = "sgd", which has none'
        yield no_effect(
            "parallel.local.outer_momentum", why, 'remove it, or set outer = "nesterov"'
        )
    if exchange is not None:
        every = parallel.exchange_every
        if exchange.density is not None and send != "top-k":
            remedy = 'remove it, or set send = "top-k"'
            yield no_effect("parallel.exchange.density", f'with send = "{send}"', remedy)
        if send == "top-k" and not complete:
            what = f'top-k sends differences to the last average, which "{parallel.topology}" lacks'
            remedy = 'set parallel.gossip.topology = "complete", or send = "int8"'
            yield Problem(what, "parallel.exchange.send", remedy)
        if every.unit is Unit.STEPS and exchange.delay > every.amount:
            what = f"{exchange.delay} steps are longer than from one exchange to the next, {every}"
            yield Problem(what, "parallel.exchange.delay", f"give at most {every.amount}")
    inside = [axis for axis in AXES if axis != "dp_replicate" and getattr(parallel, axis) != 1]
    if parallel.elastic and inside:
        what = f"workers that may die have one process each, and {inside[0]} makes them several"
        yield Problem(what, "parallel.elastic", f"set parallel.{inside[0]} = 1, or leave it out")
    if guard is not None and guard.action == "rollback":
        what = "going back needs a loss that all processes share, and workers have their own"
        yield Problem(what, "train.guard.action", 'set it to "skip"')


def _gossip_acts(gossip: GossipConfig) -> Iterator[Problem]:
    if gossip.mixing_from is not None and gossip.mixing_power is None:
        remedy = "remove it, or set parallel.gossip.mixing_power"
        yield no_effect("parallel.gossip.mixing_from", "without mixing_power", remedy)
    if gossip.workers_per_node is not None and not TOPOLOGY_SIZES[gossip.topology].knows_nodes:
        why = f'with topology = "{gossip.topology}", which does not know nodes'
        yield no_effect("parallel.gossip.workers_per_node", why)


def _topology(parallel: ParallelConfig, *, workers: int) -> Iterator[Problem]:
    per_node = None if parallel.gossip is None else parallel.gossip.workers_per_node
    if per_node is None and TOPOLOGY_SIZES[parallel.topology].knows_nodes:
        return  # it is found from the launcher, and checked then
    problem = topology_misfit(parallel.topology, workers=workers, per_node=per_node or 1)
    if problem is not None:
        yield problem


def _tensor_parallel(config: RunConfig, mesh: Mesh) -> Iterator[Problem]:
    model, sequence = config.model, config.data.sequence or config.model.context
    sizes = model.tensor_parallel_sizes()
    uneven = [name for name, size in sizes.items() if size % mesh.tp]
    if uneven:
        what = f"{mesh.tp} does not divide {', nor '.join(uneven)}"
        choices = nearest(divisors(math.gcd(*sizes.values())), mesh.tp)
        yield Problem(what, "parallel.tp", f"tp could be {choices}")
    elif _divides_sequence(config) and sequence % (mesh.tp * mesh.cp):
        what = f"a sequence of {sequence // mesh.cp} on each device cannot be divided by tp"
        remedy = "set it to false, or change tp or data.sequence"
        yield Problem(what, "parallel.sequence", remedy)


def _divides_sequence(config: RunConfig) -> bool:
    """Whether tp divides the residual stream too; the compiler of XLA decides for itself."""
    return config.parallel.sequence in (None, True) and config.runtime.device != "xla"


def _context_parallel(config: RunConfig, mesh: Mesh) -> Iterator[Problem]:
    model, sequence = config.model, config.data.sequence or config.model.context
    if sequence % 2:
        what = f"a sequence of {sequence} cannot be divided evenly by cp"
        yield Problem(what, "data.sequence", "make it even")
    elif sequence // 2 % mesh.cp:
        what = f"{mesh.cp} does not divide half the sequence {sequence // 2}"
        choices = nearest(divisors(sequence // 2), mesh.cp)
        yield Problem(what, "parallel.cp", f"cp could be {choices}")
    if config.parallel.attention == "heads" and model.attention_heads % (mesh.cp * mesh.tp):
        heads = model.attention_heads
        what = f"{_product(cp=mesh.cp, tp=mesh.tp)} the heads {heads}"
        remedy = 'set parallel.attention = "ring"'
        if heads % mesh.tp == 0:
            choices = nearest(divisors(math.gcd(heads // mesh.tp, sequence // 2)), mesh.cp)
            remedy = f"cp could be {choices}, or {remedy}"
        yield Problem(what, "parallel.cp", remedy)
    if model.attention_drop:
        # Models with context parallelism have a rate of their own for attention.
        own = getattr(model, "attention_dropout", None) is not None
        name = "model.attention_dropout" if own else "model.dropout"
        remedy = "set model.attention_dropout = 0, or parallel.cp = 1"
        yield Problem("context-parallel attention has no dropout", name, remedy)
    if getattr(model, "short_window", None) is not None:
        what = "context-parallel attention has no windows"
        yield Problem(what, "model.window", "leave it out, or set parallel.cp = 1")


def _pipeline(config: RunConfig, mesh: Mesh) -> Iterator[Problem]:
    parallel, layers = config.parallel, config.model.blocks
    each = parallel.stages_each
    if layers % (mesh.pp * each):
        name = "pp" if parallel.stages is None else "stages"
        wanted, fixed = (mesh.pp, each) if name == "pp" else (each, mesh.pp)
        least = 2 if name == "stages" and each > 1 else 1
        choices = [size for size in divisors(layers) if layers % (size * fixed) == 0]
        choices = [size for size in choices if size >= least]
        remedy = f"{name} could be {nearest(choices, wanted)}" if choices else "change model.layers"
        what = f"{_product(pp=mesh.pp, stages=each)} the layers {layers}"
        yield Problem(what, f"parallel.{name}", remedy)
    if parallel.keep in ("nothing", "weights"):
        what = "a pipeline keeps weights and gradients whole within a step"
        yield Problem(what, "parallel.keep", 'leave it out, or set it to "gradients"')
    if parallel.schedule == "zero-bubble" and config.train.recompute != "none":
        what = "zero-bubble splits the backward pass, and a split pass cannot recompute"
        yield Problem(what, "train.recompute", "leave it out, or change the schedule")


_NEEDED: dict[str, tuple[Ability, Callable[[RunConfig, Mesh], Iterator[Problem]]]] = {
    "tp": (Ability.TENSOR, _tensor_parallel),
    "cp": (Ability.CONTEXT, _context_parallel),
    "pp": (Ability.PIPELINE, _pipeline),
}
"""What a model must be able to do for an axis of the mesh, and what else that axis asks for."""


def _product(**sizes: int) -> str:
    """The beginning of a sentence on sizes that together do not divide something."""
    above_1 = {name: size for name, size in sizes.items() if size > 1}
    total = math.prod(above_1.values())
    if len(above_1) == 1:
        return f"{total} does not divide"
    named = " x ".join(f"{name} {size}" for name, size in above_1.items())
    return f"{named} = {total} does not divide"


# ------------------------------------------------------------------ batches


def _batch(config: RunConfig, mesh: Mesh) -> Iterator[Problem]:
    parts = portions(config.train, parts=mesh.data)
    if isinstance(parts, Problem):
        yield parts
        return
    broken = list(ramp_problems(config.train, parts))
    yield from broken
    if mesh.pp > 1 and not broken:
        yield from _micro_batches(config, mesh, parts)


def _micro_batches(config: RunConfig, mesh: Mesh, parts: Portions) -> Iterator[Problem]:
    """A pipeline needs enough micro-batches in every step, including the steps of a ramp."""
    pp, schedule, ramp = mesh.pp, config.parallel.schedule or "1f1b", config.train.ramp
    several = schedule in SEVERAL

    def enough(count: int) -> bool:
        return count >= pp and not (several and count % pp)

    amount = "a multiple of" if several else "at least"
    needed = f"{schedule} needs {amount} {pp} micro-batches in a step"
    if not enough(parts.accumulate):
        counts = [n for n in divisors(parts.batch // mesh.data) if enough(n)]
        remedy = _more_micro_batches(config.train, mesh, parts, counts)
        yield Problem(f"{needed}, not {parts.accumulate}", "parallel.schedule", remedy)
    elif ramp is not None:
        portion = mesh.data * parts.micro_batch
        batches = range(ramp.start, parts.batch, ramp.by)
        fitting = [batch for batch in batches if enough(batch // portion)]
        if len(fitting) == len(batches):
            return
        short = next(batch for batch in batches if batch not in fitting)
        remedy = "leave the ramp out"
        if several and parts.batch > portion * pp:
            remedy = f"start and by could be multiples of {portion * pp}"
        elif not several and fitting:
            remedy = f"start could be {nearest(fitting, ramp.start)}"
        what = f"{needed}, not {short // portion} as in the ramp's batch of {short}"
        name = "start" if short == ramp.start else "by"
        yield Problem(what, f"train.ramp.{name}", remedy)


def _more_micro_batches(train: TrainConfig, mesh: Mesh, parts: Portions, counts: list[int]) -> str:
    """How to divide a step into enough micro-batches; `counts` are those that the batch allows."""
    own = parts.batch // mesh.data
    if train.batch is None:
        return f"train.accumulate could be {nearest_multiples(mesh.pp, parts.accumulate)}"
    if not counts:
        micro = train.micro_batch or 1
        batches = nearest_multiples(mesh.data * micro * mesh.pp, train.batch)
        return f"train.batch could be {batches}, with train.micro_batch = {micro}"
    if train.accumulate is None:
        sizes = nearest([own // count for count in counts], parts.micro_batch)
        return f"train.micro_batch could be {sizes}"
    if train.micro_batch is None:
        return f"train.accumulate could be {nearest(counts, parts.accumulate)}"
    count = min(counts, key=lambda count: abs(count - parts.accumulate))
    return f"set train.accumulate = {count} and train.micro_batch = {own // count}"


def ramp_problems(train: TrainConfig, parts: Portions) -> Iterator[Problem]:
    """What is wrong with a ramp: start, start + by, start + 2 by, … must reach the batch, and each
    must be a multiple of what all processes take at once, processes x micro_batch."""
    ramp, batch, micro = train.ramp, parts.batch, parts.micro_batch
    if ramp is None:
        return
    if (ramp.over if isinstance(ramp.over, float) else ramp.over.amount) == 0:
        yield Problem("must be above 0", "train.ramp.over", "or leave the ramp out")
    if ramp.start >= batch:
        what = f"{ramp.start} is not below the full batch {batch}"
        remedy = "the batch grows from train.ramp.start to train.batch"
        yield Problem(what, "train.ramp.start", remedy)
        return
    if (batch - ramp.start) % ramp.by:
        what = f"growing by {ramp.by}, a batch of {ramp.start} never reaches {batch}"
        remedy = f"by could be {nearest(divisors(batch - ramp.start), ramp.by)}"
        yield Problem(what, "train.ramp.by", remedy)
        return
    ranks = batch // (micro * parts.accumulate)
    batches = range(ramp.start, batch, ramp.by)
    if odd := next((n for n in batches if n % ranks), None):
        what = f"the ramp's batch of {odd} cannot be divided among {ranks} data-parallel processes"
        name = "start" if odd == ramp.start else "by"
        remedy = f"start and by could be multiples of {ranks}"
        yield Problem(what, f"train.ramp.{name}", remedy)
    elif odd := next((n for n in batches if n % (ranks * micro)), None):
        each = f"the ramp's batch of {odd} is"
        if ranks > 1:
            each = f"each process's {odd // ranks} samples of the ramp's batch of {odd} are"
        name, wanted = "micro_batch", micro
        choices = divisors(math.gcd(ramp.start, ramp.by) // ranks)
        if train.micro_batch is None:
            name, wanted = "accumulate", parts.accumulate
            choices = [batch // ranks // size for size in choices]
        what = f"{each} not a multiple of micro_batch {micro}"
        yield Problem(what, f"train.{name}", f"{name} could be {nearest(choices, wanted)}")
