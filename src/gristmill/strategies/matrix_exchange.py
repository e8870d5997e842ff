"""Gathers sharded matrices on the ranks that process them, and scatters the results.

    gather      each rank sends the slices that it owns to the matrix's workers that lack them
    scatter     a worker sends every rank its slices of the result

By default every matrix has one worker among the ranks of its pipeline stage, with the largest
matrices assigned first, so that each is processed once, whether ranks hold shards or copies of it.
If it has several workers, each serves an equal number of consecutive ranks. All sizes follow from
the layout, so only the data itself is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist

from gristmill.base.tensor_slices import ShardSlice
from gristmill.distributed.world import World
from gristmill.strategies.sharding import ShardLayout


def stage_ranks(world: World) -> list[int]:
    """The ranks of this process's pipeline stage."""
    return world.mesh.group(world.rank, *(axis for axis in world.mesh.sizes if axis != "pp"))


class ShardedMatrixExchange:
    """The exchange among the ranks of one stage; all numbers are in fp32."""

    def __init__(
        self,
        layout: ShardLayout,
        world: World,
        *,
        names: Sequence[str],
        workers: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.layout, self.world, self.names = layout, world, names
        self.ranks = stage_ranks(world)
        self.workers = workers or self._one_each()
        """The ranks that process each matrix."""
        group = world.groups.of(self.ranks)
        assert group is not None, "a single rank has nothing to exchange"
        self.group = group

    def _one_each(self) -> dict[str, tuple[int, ...]]:
        largest_first = sorted(self.names, key=lambda name: (-prod(self.shape(name)), name))
        pairs = zip(largest_first, itertools.cycle(self.ranks), strict=False)
        return {name: (rank,) for name, rank in pairs}

    def _server(self, name: str, rank: int) -> int:
        """The worker that a rank gets its slices of the result from."""
        workers = self.workers[name]
        return workers[self.ranks.index(rank) * len(workers) // len(self.ranks)]

    @cached_property
    def _held(self) -> dict[tuple[str, int], tuple[ShardSlice, ...]]:
        """The slices of each matrix that each rank holds."""
        pairs = itertools.product(self.names, self.ranks)
        return {(name, rank): self.layout.slices(name, rank) for name, rank in pairs}

    @cached_property
    def _taken(self) -> dict[tuple[str, int, int], tuple[ShardSlice, ...]]:
        """The slices that each worker of a matrix takes from each rank: its own from itself, and
        from every other rank those that the rank owns and the worker does not hold."""
        found = {}
        for name in self.names:
            for worker, rank in itertools.product(self.workers[name], self.ranks):
                held = self._held[name, rank]
                if rank != worker:
                    here = {one.whole for one in self._held[name, worker]}
                    owned = held if self.layout.owned(name, rank) else ()
                    held = tuple(one for one in owned if one.whole not in here)
                found[name, worker, rank] = held
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self.layout.shapes[name]

    def computes(self, name: str) -> bool:
        return self.world.rank in self.workers[name]

    def gather(
        self, names: Sequence[str], shards: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        me, mine = self.world.rank, self._places(names, self.world.rank)
        whole = {place: shards[place].new_empty(self.shape(names[place])) for place in mine}
        send, targets = [], []
        for other in self.ranks:
            to_other, from_other = [], []
            for place in self._places(names, other):
                taken = self._taken[names[place], other, me]
                to_other += [shards[place][one.local.slices] for one in taken]
            for place in mine:
                taken = self._taken[names[place], me, other]
                from_other += [whole[place][one.whole.slices] for one in taken]
            send.append(to_other)
            targets.append(from_other)
        self._exchange(send, targets)
        return whole

    def scatter(
        self,
        names: Sequence[str],
        directions: Mapping[int, torch.Tensor],
        moments: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        me, device = self.world.rank, self.world.device.torch_device
        result = []
        for name in names:
            held, shape = self._held[name, me], self.shape(name)
            ends = zip(*(one.local.end for one in held), strict=True)
            local = tuple(map(max, ends)) if held else (0, *shape[1:])
            result.append(torch.empty(local, device=device))
        send, targets = [], []
        for other in self.ranks:
            to_other, from_other = [], []
            for place, direction in directions.items():
                if self._server(names[place], other) != me:
                    continue
                held = self._held[names[place], other]
                to_other += [direction[one.whole.slices] for one in held]
                to_other += [moments[place]] if moments else []
            for place in self._places(names, other):
                if self._server(names[place], me) != other:
                    continue
                held = self._held[names[place], me]
                from_other += [result[place][one.local.slices] for one in held]
                from_other += [moments[place]] if moments else []
            send.append(to_other)
            targets.append(from_other)
        self._exchange(send, targets)
        return result

    def _places(self, names: Sequence[str], rank: int) -> list[int]:
        """Which of these matrices a rank processes."""
        return [place for place, name in enumerate(names) if rank in self.workers[name]]

    def _exchange(self, send: list[list[torch.Tensor]], targets: list[list[torch.Tensor]]) -> None:
        """Send each rank its tensors, and copy the received tensors to their targets."""
        flat = [tensor.reshape(-1) for some in send for tensor in some]
        outgoing = torch.cat([torch.empty(0, device=self.world.device.torch_device), *flat])
        send_sizes, sizes = (
            [sum(tensor.numel() for tensor in some) for some in lists] for lists in (send, targets)
        )
        received = outgoing.new_empty(sum(sizes))
        dist.all_to_all_single(received, outgoing, sizes, send_sizes, group=self.group)
        into = [target for some in targets for target in some]
        parts = received.split([target.numel() for target in into])
        for target, part in zip(into, parts, strict=True):
            target.copy_(part.view(target.shape))
