"""Settings of a run over several devices, and the mesh that follows from them.

The processes of a run form a grid with five named axes; a process's place in it follows from its
rank, the last axis running fastest:

    pp            stages of layers
    dp_replicate  copies of the model, each with its own part of the batch
    dp_shard      the same, but weights, gradients and optimizer state are divided among them
    cp            parts of every sequence
    tp            parts of every layer
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gristmill.base.errors import Problem
from gristmill.config.settings import Settings
from gristmill.config.values import Count, Interval, Patience, Size

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

ROW_AXES = ("dp_shard", "cp")
"""Axes over which FSDP shards rows. Parts of a sequence are parts of a batch to the weights."""

SEVERAL = ("interleaved", "zero-bubble")
"""Schedules with several groups of layers on each device."""


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
    """How cp attends; ring if not given. ring: keys and values go round. heads: sequences are
    exchanged for heads before attention and back after it; needs heads that cp divides."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    """The order of a pipeline's work; 1f1b if not given. gpipe: all forward, then all backward.
    1f1b: alternating, with less memory. interleaved: several groups of layers on each device, which
    wait less. zero-bubble: also computes gradients of weights while a device would wait."""
    stages: Count | None = None
    """Groups of layers on each device; 2 for interleaved and zero-bubble if not given, else 1."""
    compare: Interval | None = None
    """How often processes that hold copies of the same weights and optimizer state compare them to
    the bit, and at the end; never if not given. The run ends when they differ, before it saves."""
    start_timeout: Patience = "10m"
    """How long processes wait for one another at the start; at least "5s"."""
    timeout: Patience = "10m"
    """How long a process waits for others in a step or a validation before the run ends with a
    message on which rank is missing; at least "5s"."""

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
                ranks = [{**one, axis: n} for one in ranks for n in range(self.sizes[axis])]
        return [self.rank(one) for one in ranks]

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(named) or "one process"


def build_mesh(config: ParallelConfig, processes: int | None = None) -> Mesh | Problem:
    """The grid for a number of processes, or for the sizes given; or why there is none."""
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
            f"{words} asks for {'a multiple of ' if left_over else ''}{product} processes, and "
            f"there {'is' if processes == 1 else 'are'} {processes}"
        )
    if left_over:
        fixed[left_over[0]] = processes // product
    return Mesh(**fixed)
