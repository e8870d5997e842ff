"""Settings of a run over several devices, and the mesh that follows from them.

The processes of a run form a grid with five named axes; a process's place in it follows from its
rank, the last axis running fastest:

    pp            stages of layers
    dp_replicate  copies of the model, each with its own part of the batch
    dp_shard      the same, but weights, gradients and optimizer state are divided among them
    cp            parts of every sequence
    tp            parts of every layer

At the end: the sizes that each topology of decentralized training fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from gristmill.base.errors import Problem
from gristmill.base.units import Duration, Unit
from gristmill.config.settings import Count, Fraction, Interval, Settings, Size, Span, Timeout

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

ROW_AXES = ("dp_shard", "cp")
"""Axes over which FSDP shards rows. Parts of a sequence are parts of a batch to the weights."""

SEVERAL = ("interleaved", "zero-bubble")
"""Schedules with several groups of layers on each device."""


EVERY_STEP = Duration(1, Unit.STEPS)


class GossipConfig(Settings):
    """Decentralized training: each of the dp_replicate copies of the model is a worker with weights
    of its own, which it averages with those of a few others."""

    topology: Literal[
        "complete", "ring", "exp", "alternating-exp-ring", "random", "hierarchical"
    ] = "ring"
    """Which workers average. complete: all together. ring: the neighbour on one side, then on the
    other. exp: the worker 1, 2, 4, … places away. alternating-exp-ring: means inside nodes and of
    pairs of nodes, half of the nodes using the network at a time. random: random pairs.
    hierarchical: means inside nodes alternate with pairs between nodes."""
    workers_per_node: Count | None = None
    """Workers on each node, for the topologies that depend on nodes; from the launcher if not
    given."""
    mixing: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How far a worker moves towards the average of its group; 1 is all the way."""
    mixing_power: Annotated[float, Field(gt=0)] | None = None
    """Multiply mixing by the learning rate to this power, relative to that at mixing_from; constant
    if not given."""
    mixing_from: Span | None = None
    """When mixing begins to follow the learning rate; at the end of the warm-up if not given."""


class LocalConfig(Settings):
    """Local updates (DiLoCo): workers take many steps between two exchanges. What a worker changed
    since the last one is its outer gradient, which an outer optimizer applies."""

    every: Interval
    """How often workers exchange their outer gradients."""
    outer: Literal["nesterov", "sgd"] = "nesterov"
    """The outer optimizer. sgd with outer_lr = 1 is the plain average."""
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    """Learning rate of the outer optimizer."""
    outer_momentum: Fraction | None = None
    """Momentum of nesterov; 0.9 if not given."""


class ExchangeConfig(Settings):
    """What workers send to one another, and when they use it."""

    send: Literal["fp32", "bf16", "int8", "top-k"] = "fp32"
    """Number format on the network. int8 and top-k send differences to the last average where all
    workers share it, and add to the next exchange what the last one rounded off. top-k sends the
    largest elements only, in 2 bits each."""
    density: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the elements that top-k sends; 1/64 if not given."""
    delay: Annotated[int, Field(ge=0)] = 1
    """After how many steps the result of an exchange is used. The network has that long, while
    training continues; 0 waits for it at once."""
    average: Literal["restore", "keep"] = "restore"
    """What evaluation on the average of all workers does to them. restore: each gets its own
    weights back. keep: all continue from the average."""


class ParallelConfig(Settings):
    """How a run is divided over devices. Sizes multiply to the number of processes; one may be
    "auto": what the others leave over. Without any, every process has a copy of the model."""

    dp_replicate: Size | None = None
    """Copies of the model, each with a part of the batch; what is left over if not given and no
    other size is "auto"."""
    dp_shard: Size = 1
    """Data parallel with weights, gradients and optimizer state sharded over this many devices
    (FSDP2), which hold each of the dp_replicate copies together."""
    tp: Size = 1
    """Tensor parallel: heads, inner features and vocabulary divided among devices of one node."""
    cp: Size = 1
    """Context parallel: every sequence divided among this many devices."""
    pp: Size = 1
    """Pipeline: layers divided into this many groups, one after the other."""
    keep: Literal["nothing", "weights", "gradients"] | None = None
    """What dp_shard keeps whole within a step, trading memory for communication; nothing if not
    given, in a pipeline gradients. nothing: weights are gathered for forward and backward of every
    micro-batch (ZeRO-3). weights: once in a step (ZeRO-2). gradients: these too are kept whole, and
    summed once (ZeRO-1)."""
    sequence: bool | None = None
    """Between blocks, divide the residual stream along the sequence over the devices of tp, which
    saves memory; true if not given."""
    attention: Literal["ring", "heads"] | None = None
    """How attention works over the devices of cp; ring if not given. ring: keys and values are
    passed around. heads: sequences are exchanged for heads before attention and back after it
    (Ulysses); needs heads that cp divides."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """The pipeline schedule; 1f1b if not given. gpipe: all forward, then all backward.
    1f1b: alternating, with less memory. interleaved: several groups of layers on each device, which
    wait less. zero-bubble: also computes gradients of weights while a device would wait."""
    stages: Count | None = None
    """Groups of layers on each device; 2 for interleaved and zero-bubble if not given, else 1."""
    compare: Interval | None = None
    """How often processes that hold copies of the same weights and optimizer state compare them to
    the bit, and at the end; never if not given. The run ends when they differ, before it saves, and
    what it saved since they last agreed is renamed to doubtful-step-…."""
    gossip: GossipConfig | None = None
    """Average weights with a few other workers instead of summing gradients over all."""
    local: LocalConfig | None = None
    """Take many steps between two exchanges (DiLoCo)."""
    exchange: ExchangeConfig | None = None
    """What gossip and local updates send."""
    elastic: bool = False
    """With gossip or local updates: the run continues without workers that die, and they may
    rejoin it."""
    share_gpu: bool = False
    """Several processes use one GPU, to try a layout where GPUs are few, not for speed: those of a
    node are spread over its GPUs, and exchange tensors through host memory, over gloo instead of
    NCCL. Without effect on CPUs, which processes always share."""
    start_timeout: Timeout = "10m"
    """How long processes wait for one another at the start; at least "5s"."""
    timeout: Timeout = "10m"
    """How long a process waits for others in a step or a validation before the run ends with a
    message on which rank is missing; at least "5s"."""

    @property
    def decentralized(self) -> bool:
        """Whether the copies of the model have weights of their own."""
        return self.gossip is not None or self.local is not None

    @property
    def needs_own_gpus(self) -> bool:
        """Whether processes that run on GPUs need one each. The workers of an elastic run exchange
        tensors on the host in any case."""
        return not self.share_gpu and not self.elastic

    @property
    def topology(self) -> str:
        """Who exchanges with whom."""
        return "complete" if self.gossip is None else self.gossip.topology

    @property
    def exchange_every(self) -> Duration:
        return EVERY_STEP if self.local is None else self.local.every

    @property
    def described_exchange(self) -> str:
        """When and how workers exchange their weights, in words."""
        exchange = self.exchange or ExchangeConfig()
        steps = "1 step" if exchange.delay == 1 else f"{exchange.delay} steps"
        used = f"{steps} later" if exchange.delay else "at once"
        when = "after every step" if self.local is None else f"every {self.local.every}"
        outer = [] if self.local is None else [f"outer {self.local.outer}"]
        how = ", ".join([self.topology, *outer, exchange.send, f"result used {used}"])
        return f"workers exchange weights {when}: {how}"

    @property
    def stages_each(self) -> int:
        """Groups of layers on each device."""
        return self.stages or (2 if self.schedule in SEVERAL else 1)


@dataclass(frozen=True)
class Mesh:
    """The sizes of the grid of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def worker(self) -> Mesh:
        """The mesh of one copy of the model."""
        return replace(self, dp_replicate=1)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def processes(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data(self) -> int:
        """Parts of a step's batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards_rows(self) -> bool:
        """Whether weights are sharded over processes that see other parts of the batch."""
        return self.dp_shard > 1

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """Axes along which processes hold equal copies of the same part of the weights, apart from
        what tp does not divide."""
        return ("dp_replicate",) if self.shards_rows else ("dp_replicate", *ROW_AXES)

    @property
    def has_copies(self) -> bool:
        """Whether any weights are held by several processes; tp does not divide all of them."""
        return math.prod(self.sizes[axis] for axis in (*self.copy_axes, "tp")) > 1

    @property
    def shards(self) -> int:
        """Parts into which the weights are divided; every other process holds a copy of one."""
        return self.processes // math.prod(self.sizes[axis] for axis in self.copy_axes)

    def place(self, rank: int) -> dict[str, int]:
        """Where a process stands on every axis."""
        place = {}
        for axis, size in reversed(self.sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in AXES}

    def rank(self, place: dict[str, int]) -> int:
        """The process at a place."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + place[axis]
        return rank

    def group(self, rank: int, *axes: str) -> list[int]:
        """The processes that differ from one on these axes only, in the grid's order."""
        place = self.place(rank)
        ranks = [place]
        for axis in AXES:
            if axis in axes:
                ranks = [{**rank, axis: n} for rank in ranks for n in range(self.sizes[axis])]
        return [self.rank(rank) for rank in ranks]

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(named) or "one process"


def build_mesh(
    config: ParallelConfig, processes: int | None = None, *, unit: str = "processes"
) -> Mesh | Problem:
    """The grid for a number of processes, or for the sizes given; or why there is none. `unit`:
    what messages call the processes."""
    asked: dict[str, Size] = {axis: getattr(config, axis) for axis in AXES}
    left_over = [axis for axis, size in asked.items() if size == "auto"]
    if asked["dp_replicate"] is None:
        asked["dp_replicate"] = 1 if left_over else "auto"
        left_over = left_over or ["dp_replicate"]
    if len(left_over) > 1:
        what = f'{" and ".join(left_over)} are both "auto"'
        return Problem(what, remedy="give all but one as numbers")
    fixed = {axis: size for axis, size in asked.items() if isinstance(size, int)}
    if processes is None:
        return Mesh(**fixed)
    product = math.prod(fixed.values())
    words = " x ".join(f"{axis} {size}" for axis, size in fixed.items() if size > 1) or "1"
    if processes % product or (not left_over and product != processes):
        return Problem(
            f"{words} asks for {'a multiple of ' if left_over else ''}{product} {unit}, and "
            f"there {'is' if processes == 1 else 'are'} {processes}"
        )
    if left_over:
        fixed[left_over[0]] = processes // product
    return Mesh(**fixed)


class TopologySizes(NamedTuple):
    """The numbers of workers that a topology fits."""

    needs: str
    fits: Callable[[int, int], bool]
    """Whether it fits a number of workers, with so many on each node."""
    knows_nodes: bool = False


def is_power_of_two(number: int) -> bool:
    """Whether a number is 1, 2, 4, 8, …"""
    return number >= 1 and number & (number - 1) == 0


def _fits_nodes_in_pairs(workers: int, per_node: int) -> bool:
    nodes = workers // per_node
    return workers % per_node == 0 and nodes > 1 and is_power_of_two(nodes)


TOPOLOGY_SIZES: dict[str, TopologySizes] = {
    "complete": TopologySizes("any number of workers", lambda workers, per_node: True),
    "ring": TopologySizes("an even number of workers", lambda workers, per_node: workers % 2 == 0),
    "exp": TopologySizes(
        "a number of workers that is a power of two",
        lambda workers, per_node: is_power_of_two(workers),
    ),
    "alternating-exp-ring": TopologySizes(
        "nodes with equally many workers, and 2, 4, 8, … of them",
        _fits_nodes_in_pairs,
        knows_nodes=True,
    ),
    "random": TopologySizes("any number of workers", lambda workers, per_node: True),
    "hierarchical": TopologySizes(
        "nodes with equally many workers",
        lambda workers, per_node: workers % per_node == 0,
        knows_nodes=True,
    ),
}


def topology_fits(topology: str, *, workers: int, per_node: int) -> bool:
    """Whether a topology is defined for these sizes."""
    return workers == 1 or TOPOLOGY_SIZES[topology].fits(workers, per_node)


def topology_misfit(topology: str, *, workers: int, per_node: int) -> Problem | None:
    """What is wrong with a topology for these sizes; None if nothing is."""
    if topology_fits(topology, workers=workers, per_node=per_node):
        return None
    known = TOPOLOGY_SIZES[topology]
    sizes = f"{workers} workers"
    if known.knows_nodes:
        sizes += f" with {per_node} on each node"
    # The numbers of workers next to this one, below and above, that it does fit.
    limit = 2 * max(workers, per_node)
    nearest = [
        next((n for n in counts if topology_fits(topology, workers=n, per_node=per_node)), None)
        for counts in (range(workers - 1, 1, -1), range(workers + 1, limit + 1))
    ]
    counts = [str(number) for number in nearest if number is not None]
    others = [
        name for name in TOPOLOGY_SIZES if topology_fits(name, workers=workers, per_node=per_node)
    ]
    return Problem(
        f'"{topology}" needs {known.needs}, not {sizes}',
        "parallel.gossip.topology",
        f"use {' or '.join(counts)} workers, or one of {', '.join(others)}",
    )
