"""Matrices that lie in parts on several processes, brought together where they are worked on.

    collect     each process sends the parts that it owns to the matrix's worker
    hand out    each worker sends every process its parts of the result

Every matrix has one worker among the processes of its stage, the largest matrices dealt out first,
so that each matrix is worked on once, whether processes hold shares or copies of it. All sizes
follow from the layout, so nothing but the numbers themselves is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist

from gristmill.base.tensor_slices import ShardSlice
from gristmill.parallel.sharding import ShardLayout
from gristmill.parallel.world import World

Parcels = list[list[torch.Tensor]]
"""Tensors to or from each process of a stage."""


class ShardedMuonExchange:
    """The way between the processes of one stage; all numbers are in fp32."""

    def __init__(self, layout: ShardLayout, world: World, *, names: Sequence[str]) -> None:
        axes = [axis for axis in world.mesh.sizes if axis != "pp"]
        self.layout, self.world, self.names = layout, world, names
        self.ranks = world.mesh.group(world.rank, *axes)
        group = world.groups.of(self.ranks)
        assert group is not None, "a process that is alone has nothing to exchange"
        self.group = group

    @cached_property
    def _worker(self) -> dict[str, int]:
        """Who works on which matrix."""
        largest_first = sorted(self.names, key=lambda name: (-prod(self.shape(name)), name))
        return {
            name: self.ranks[number % len(self.ranks)] for number, name in enumerate(largest_first)
        }

    @cached_property
    def _held(self) -> dict[tuple[str, int], tuple[ShardSlice, ...]]:
        """What each process holds of each matrix."""
        return {
            (name, rank): self.layout.slices(name, rank)
            for name in self.names
            for rank in self.ranks
        }

    @cached_property
    def _owned(self) -> dict[tuple[str, int], tuple[ShardSlice, ...]]:
        """The same without what another process answers for."""
        return {
            (name, rank): pieces if self.layout.owned(name, rank) else ()
            for (name, rank), pieces in self._held.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return self.layout.shapes[name]

    def collect(
        self, names: Sequence[str], parts: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        me = self.world.rank
        mine = self._worked_on(names, me)
        send = [
            [
                parts[place][piece.local.slices]
                for place in self._worked_on(names, other)
                for piece in self._owned[names[place], me]
            ]
            for other in self.ranks
        ]
        pieces = [
            [(place, piece) for place in mine for piece in self._owned[names[place], other]]
            for other in self.ranks
        ]
        shapes = [[piece.whole.shape for _, piece in some] for some in pieces]
        whole = {place: parts[place].new_empty(self.shape(names[place])) for place in mine}
        for some, tensors in zip(pieces, self._swap(send, shapes), strict=True):
            for (place, piece), tensor in zip(some, tensors, strict=True):
                whole[place][piece.whole.slices] = tensor
        return whole

    def hand_out(
        self,
        names: Sequence[str],
        directions: Mapping[int, torch.Tensor],
        moments: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        me = self.world.rank
        result = {
            place: torch.empty(
                _extent(self._held[name, me], self.shape(name)),
                device=self.world.device.torch_device,
            )
            for place, name in enumerate(names)
        }
        send, targets = [], []
        for other in self.ranks:
            to_other, from_other = [], []
            for place, direction in directions.items():
                held = self._held[names[place], other]
                to_other += [direction[piece.whole.slices] for piece in held]
                to_other += [moments[place]] if moments else []
            for place in self._worked_on(names, other):
                held = self._held[names[place], me]
                from_other += [result[place][piece.local.slices] for piece in held]
                from_other += [moments[place]] if moments else []
            send.append(to_other)
            targets.append(from_other)
        shapes = [[tuple(target.shape) for target in some] for some in targets]
        for some, tensors in zip(targets, self._swap(send, shapes), strict=True):
            for target, tensor in zip(some, tensors, strict=True):
                target.copy_(tensor)
        return [result[place] for place in range(len(names))]

    def _worked_on(self, names: Sequence[str], rank: int) -> list[int]:
        return [place for place, name in enumerate(names) if self._worker[name] == rank]

    def _swap(self, send: Parcels, shapes: list[list[tuple[int, ...]]]) -> Parcels:
        """Send each process its tensors; what they sent, whose shapes are known."""
        flat = [tensor.reshape(-1) for some in send for tensor in some]
        outgoing = torch.cat([torch.empty(0, device=self.world.device.torch_device), *flat])
        sizes = [[prod(shape) for shape in some] for some in shapes]
        arriving = outgoing.new_empty(sum(map(sum, sizes)))
        dist.all_to_all_single(
            arriving,
            outgoing,
            [sum(some) for some in sizes],
            [sum(tensor.numel() for tensor in some) for some in send],
            group=self.group,
        )
        tensors = iter(arriving.split([size for some in sizes for size in some]))
        return [[next(tensors).view(shape) for shape in some] for some in shapes]


def _extent(pieces: Sequence[ShardSlice], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor that pieces of a whole make up."""
    if not pieces:
        return (0, *shape[1:])
    return tuple(max(piece.local.end[dim] for piece in pieces) for dim in range(len(shape)))
