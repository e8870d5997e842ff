"""Which part of every parameter a process holds, and where that lies in the whole.

A parameter is divided at most twice: by the model itself over tp, along the dimension and in the
parts that it states, and what results by rows over dp_shard and cp together, if weights are sharded
over data-parallel processes at all. On all other axes processes hold copies.

However a model is sharded (over layers, features, rows), norms, optimizers and checkpoints see the
same thing: a plain tensor in this process's memory, and the slices of the whole parameter that it
is made of. Among the processes that hold a slice exactly one owns it: it counts in norms, and it is
written by that process.
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
    """This process's part of one parameter."""

    name: str
    """The parameter's name in the whole model."""
    shape: tuple[int, ...]
    """The whole parameter's shape."""
    local: nn.Parameter
    """What is kept here, as a plain tensor; it shares its memory with the model's own."""
    slices: tuple[ShardSlice, ...]
    """Where it lies in the whole; none if this process's part is empty."""
    owned: bool = True
    """Whether this process is the one that counts it and writes it."""

    @property
    def writes_replicated(self) -> bool:
        """Whether this process writes state of this parameter that is not sharded, such as a
        counter of its optimizer."""
        origin = (0,) * len(self.shape)
        return self.owned and any(piece.whole.begin == origin for piece in self.slices)


ShardedParameters = Mapping[str, ShardedParameter]


def whole_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """The parameters of a model that is in one place."""
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
    """How the parameters of one pipeline stage lie on its processes: arithmetic, no tensors."""

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """Of the whole parameters."""
    splits: Mapping[str, Split]

    @classmethod
    def of(cls, model: CausalLM, mesh: Mesh) -> ShardLayout:
        shapes = {name: model.whole_shape(name) for name, _ in model.named_parameters()}
        return cls(mesh, shapes, model.splits())

    def slices(self, name: str, rank: int) -> tuple[ShardSlice, ...]:
        """What of a parameter a process holds, and where in its own tensor."""
        shape, place = self.shapes[name], self.mesh.place(rank)
        slices, local = whole_slice(shape), list(shape)
        if name in self.splits:
            dim, parts = self.splits[name]
            tensor = {"rank": place["tp"], "ranks": self.mesh.tp}
            slices = split_slices(shape, dim=dim, parts=parts, **tensor)
            local[dim] //= self.mesh.tp
        if self.mesh.shards_rows:
            among = self.mesh.group(rank, *ROW_AXES)
            slices = row_slices(slices, local, rank=among.index(rank), ranks=len(among))
        return slices

    def owned(self, name: str, rank: int) -> bool:
        """Whether a process is the one, of all that hold equal copies of the same slices, that owns
        them. Owners alternate by name, so that writing is spread over the copies."""
        axes = self.mesh.copy_axes
        holders = self.mesh.group(rank, *axes, *(() if name in self.splits else ("tp",)))
        return holders[crc32(name.encode()) % len(holders)] == rank
