"""Sharded matrices, gathered on the rank that orthogonalises them for Muon.

    gather      each rank sends the slices that it owns to the matrix's worker
    scatter     each worker sends every rank its slices of the result

Every matrix has one worker among the ranks of its pipeline stage, the largest matrices assigned
first, so that each matrix is processed once, whether ranks hold shards or copies of it. All sizes
follow from the layout, so only the numbers themselves are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist

from gristmill.base.tensor_slices import ShardSlice
from gristmill.parallel.sharding import ShardLayout
from gristmill.parallel.world import World


class ShardedMuonExchange:
    """The exchange among the ranks of one stage; all numbers are in fp32."""

    def __init__(self, layout: ShardLayout, world: World, *, names: Sequence[str]) -> None:
        axes = [axis for axis in world.mesh.sizes if axis != "pp"]
        self.layout, self.world, self.names = layout, world, names
        self.ranks = world.mesh.group(world.rank, *axes)
        group = world.groups.of(self.ranks)
        assert group is not None, "a single rank has nothing to exchange"
        self.group = group

    @cached_property
    def _worker(self) -> dict[str, int]:
        """The rank that processes each matrix."""
        largest_first = sorted(self.names, key=lambda name: (-prod(self.shape(name)), name))
        return dict(zip(largest_first, itertools.cycle(self.ranks), strict=False))

    @cached_property
    def _held(self) -> dict[tuple[str, int], tuple[ShardSlice, ...]]:
        """What each rank holds of each matrix."""
        pairs = itertools.product(self.names, self.ranks)
        return {(name, rank): self.layout.slices(name, rank) for name, rank in pairs}

    @cached_property
    def _owned(self) -> dict[tuple[str, int], tuple[ShardSlice, ...]]:
        """What each rank owns of each matrix."""
        return {
            (name, rank): slices if self.layout.owned(name, rank) else ()
            for (name, rank), slices in self._held.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return self.layout.shapes[name]

    def computes(self, name: str) -> bool:
        return self._worker[name] == self.world.rank

    def gather(
        self, names: Sequence[str], shards: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        me, mine = self.world.rank, self._places(names, self.world.rank)
        whole = {place: shards[place].new_empty(self.shape(names[place])) for place in mine}
        send, targets = [], []
        for other in self.ranks:
            to_other, from_other = [], []
            for place in self._places(names, other):
                owned = self._owned[names[place], me]
                to_other += [shards[place][one.local.slices] for one in owned]
            for place in mine:
                owned = self._owned[names[place], other]
                from_other += [whole[place][one.whole.slices] for one in owned]
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
                held = self._held[names[place], other]
                to_other += [direction[one.whole.slices] for one in held]
                to_other += [moments[place]] if moments else []
            for place in self._places(names, other):
                held = self._held[names[place], me]
                from_other += [result[place][one.local.slices] for one in held]
                from_other += [moments[place]] if moments else []
            send.append(to_other)
            targets.append(from_other)
        self._exchange(send, targets)
        return result

    def _places(self, names: Sequence[str], rank: int) -> list[int]:
        """Which of these matrices a rank processes."""
        return [place for place, name in enumerate(names) if self._worker[name] == rank]

    def _exchange(self, send: list[list[torch.Tensor]], targets: list[list[torch.Tensor]]) -> None:
        """Send each rank its tensors, and copy what each rank sends here to its targets."""
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
