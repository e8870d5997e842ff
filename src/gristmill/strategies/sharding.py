"""Which slices of every parameter a process holds.

A parameter is divided at most twice: over tp, as the model's `Split`s declare, and then by rows
over dp_shard and cp together, if weights are sharded at all. On all other axes processes hold
copies.

However a model is sharded, norms, optimizers and checkpoints see the same thing: a plain local
tensor, and the slices of the whole parameter it is made of. Of the processes that hold a slice,
exactly one owns it, counts it in norms and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import nn

from gristmill.base.tensor_slices import ShardSlice, row_slices, split_slices, whole_slice
from gristmill.config.parallel import ROW_AXES, Mesh
from gristmill.models.spec import CausalLM, Split


@dataclass(frozen=True)
class ShardedParameter:
    """This process's shard of one parameter."""

    name: str
    """The parameter's name in the whole model."""
    shape: tuple[int, ...]
    """The whole parameter's shape."""
    local: nn.Parameter
    """The shard as a plain tensor, which shares memory with the model's parameter."""
    slices: tuple[ShardSlice, ...]
    """Its slices of the whole; none if the shard is empty."""
    owned: bool = True
    """Whether this process counts it in norms and writes it."""

    @property
    def writes_replicated(self) -> bool:
        """Whether this process writes the parameter's replicated state, such as step counters."""
        origin = (0,) * len(self.shape)
        return self.owned and any(part.whole.begin == origin for part in self.slices)


ShardedParameters = Mapping[str, ShardedParameter]


def whole_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """The parameters of a model that is not sharded."""
    return {
        name: ShardedParameter(name, tuple(one.shape), one, whole_slice(one.shape))
        for name, one in model.named_parameters()
    }


def owned_squares(parameters: ShardedParameters) -> torch.Tensor:
    """The sum of squares of the gradients that this process owns."""
    gradients = [
        one.local.grad for one in parameters.values() if one.owned and one.local.grad is not None
    ]
    if not gradients:
        device = next(iter(parameters.values())).local.device
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(gradients)).square().sum()


@dataclass(frozen=True)
class ShardLayout:
    """How the parameters of one pipeline stage are sharded over its processes."""

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the whole parameters."""
    splits: Mapping[str, Split]

    @classmethod
    def of(cls, model: CausalLM, mesh: Mesh) -> ShardLayout:
        shapes = {name: model.whole_shape(name) for name, _ in model.named_parameters()}
        return cls(mesh, shapes, model.splits())

    def slices(self, name: str, rank: int) -> tuple[ShardSlice, ...]:
        """The slices of a parameter that a process holds, and where they are in its tensor."""
        shape, place = self.shapes[name], self.mesh.place(rank)
        slices, local = whole_slice(shape), list(shape)
        if name in self.splits:
            dim, parts = self.splits[name]
            slices = split_slices(shape, dim=dim, parts=parts, rank=place["tp"], ranks=self.mesh.tp)
            local[dim] //= self.mesh.tp
        if self.mesh.shards_rows:
            group = self.mesh.group(rank, *ROW_AXES)
            slices = row_slices(slices, local, rank=group.index(rank), ranks=len(group))
        return slices

    def owned(self, name: str, rank: int) -> bool:
        """Whether a process owns its slices, among all that hold copies of them. The owner depends
        on the name, to spread writing over the copies."""
        axes = [*self.mesh.copy_axes, *(() if name in self.splits else ("tp",))]
        holders = self.mesh.group(rank, *axes)
        return holders[crc32(name.encode()) % len(holders)] == rank
