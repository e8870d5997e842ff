"""Where arrays are on the devices: the mesh of a run as sharding annotations.

    weights and their optimizer state   over tp as the model's splits say, then over dp_shard
    batches                             samples over dp_replicate and dp_shard together
    everything else                     whole on every device

XLA derives all communication from these annotations. A dimension that an axis does not divide stays
whole on that axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gristmill.config.parallel import Mesh
from gristmill.models.spec import CausalLM, Split

DATA = ("dp_replicate", "dp_shard")


class Placing:
    """The shardings of a run."""

    def __init__(self, mesh: Mesh, model: CausalLM) -> None:
        self.layout = mesh
        sizes = (mesh.dp_replicate, mesh.dp_shard, mesh.tp)
        self.mesh = jax.make_mesh(sizes, (*DATA, "tp"), axis_types=(AxisType.Auto,) * 3)
        splits = model.splits()
        self.weights = {
            name: self._sharding(*_axes(tuple(one.shape), splits.get(name), mesh))
            for name, one in model.named_parameters()
        }
        self.replicated = self._sharding()
        self.micro_batch = self._sharding(DATA)
        self.micro_batches = self._sharding(None, DATA)
        self.per_device = self._sharding((*DATA, "tp"))

    def _sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def put(self, value: torch.Tensor, sharding: NamedSharding) -> jax.Array:
        """A tensor that every process has whole."""
        # A copy of its own: on the CPU an array may use the memory that it is made from.
        whole = value.detach().cpu().numpy().copy()
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def put_local(self, value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """An array of which every process has its own part."""
        return jax.make_array_from_process_local_data(sharding, value)

    def zeros(self, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        def piece(index: Any) -> np.ndarray:
            sizes = [len(range(*one.indices(n))) for one, n in zip(index, shape, strict=True)]
            return np.zeros(sizes, np.float32)

        return jax.make_array_from_callback(shape, sharding, piece)

    def on_host(self, arrays: Mapping[Any, jax.Array]) -> dict[Any, torch.Tensor]:
        """Whole arrays as tensors, on every process."""
        if jax.process_count() == 1:
            return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        gather = jax.jit(lambda array: array, out_shardings=self.replicated)
        # One after the other, so that a device never holds more than one of them whole.
        return {
            name: torch.from_numpy(np.array(gather(array).addressable_data(0)))
            for name, array in arrays.items()
        }


def _axes(shape: tuple[int, ...], split: Split | None, mesh: Mesh) -> list[Any]:
    """The mesh axis of each dimension of a parameter."""
    axes: list[Any] = [None] * len(shape)
    if split is not None and mesh.tp > 1 and shape[split.dim] % mesh.tp == 0:
        axes[split.dim] = "tp"
    if mesh.dp_shard == 1:
        return axes
    for dim, size in enumerate(shape):
        if axes[dim] is None and size % mesh.dp_shard == 0:
            axes[dim] = "dp_shard"
            return axes
    return axes
