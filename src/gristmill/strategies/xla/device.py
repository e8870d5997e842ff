"""The XLA devices that a process drives, as one device to the rest of the program.

Steps are dispatched without waiting for them. Their results are tensors on the host without values
yet: an `Arrival` fills them in when the step is done, at the latest when a later mark is waited
for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gristmill.config.parallel import Mesh
from gristmill.distributed.device import Device, Mark, MatrixRate
from gristmill.models.spec import CausalLM, Split
from gristmill.strategies.xla.attention import AttentionSharding

DATA = ("dp_replicate", "dp_shard")


class Placing:
    """Where arrays are on the devices: the mesh of a run as sharding annotations.

        weights and their optimizer state   over tp as the model's splits say, then over dp_shard
        batches                             samples over dp_replicate and dp_shard together
        everything else                     whole on every device

    XLA derives all communication from these annotations. A dimension that an axis does not divide
    stays whole on that axis.
    """

    def __init__(self, mesh: Mesh, model: CausalLM) -> None:
        self.layout = mesh
        sizes = (mesh.dp_replicate, mesh.dp_shard, mesh.tp)
        self.mesh = jax.make_mesh(sizes, (*DATA, "tp"), axis_types=(AxisType.Auto,) * 3)
        splits = model.splits()
        self.weights = {
            name: self._sharding(*_axes(tuple(parameter.shape), splits.get(name), mesh))
            for name, parameter in model.named_parameters()
        }
        self.replicated = self._sharding()
        self.micro_batch = self._sharding(DATA)
        self.micro_batches = self._sharding(None, DATA)
        self.attention_sharding = AttentionSharding(self.mesh, DATA, "tp")
        self.per_device = self._sharding((*DATA, "tp"))

    def _sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def put(self, value: torch.Tensor, sharding: NamedSharding) -> jax.Array:
        """An array from a tensor of which every process has all."""
        # A copy, since on the CPU an array may share the memory of its source.
        whole = value.detach().cpu().numpy().copy()
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    def put_local(self, value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """An array from the parts that the processes have."""
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
        # One after another, so that a device never holds more than one whole array.
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


_HOST = torch.device("cpu")


class Arrival:
    """Results of a step that are still being computed."""

    def __init__(self, values: jax.Array) -> None:
        self.values: Any = values
        self.host = torch.full(values.shape, torch.nan)
        self.time = 0.0
        """When their arrival was noticed."""

    def ready(self) -> bool:
        if self.values is not None and self.values.is_ready():
            self.wait()
        return self.values is None

    def wait(self) -> None:
        if self.values is not None:
            self.host.copy_(torch.from_numpy(np.array(self.values)))
            self.values, self.time = None, time.monotonic()


@dataclass(frozen=True)
class XlaDevice(Device):
    """All local devices of JAX; the host's tensors are on the CPU."""

    torch_device: torch.device = _HOST
    arrivals: list[Arrival] = field(default_factory=list, compare=False)
    """Pending results, and the last that arrived."""

    @property
    def kind(self) -> str:
        return "xla"

    @cached_property
    def name(self) -> str:
        device = jax.devices()[0]
        return f"{jax.device_count()} x {device.device_kind} with XLA"

    @property
    def has_bf16(self) -> bool:
        return jax.default_backend() != "cpu"

    @property
    def is_async(self) -> bool:
        return True

    def expect(self, values: jax.Array) -> torch.Tensor:
        """A tensor on the host that receives these values once they are computed."""
        awaited = [arrival for arrival in self.arrivals if arrival.values is not None]
        self.arrivals[:] = [*awaited, Arrival(values)]
        return self.arrivals[-1].host

    def read_later(self, scalars: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return scalars

    def synchronize(self) -> None:
        for arrival in self.arrivals:
            arrival.wait()

    def mark(self) -> Mark:
        return XlaMark(self)

    def free_memory(self) -> int | None:
        stats = self._memory()
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)

    def total_memory(self) -> int | None:
        return self._memory().get("bytes_limit")

    def memory_peak(self) -> int:
        return self._memory().get("peak_bytes_in_use") or super().memory_peak()

    def _memory(self) -> dict[str, int]:
        """JAX's memory statistics of a device; empty for the host."""
        return jax.local_devices()[0].memory_stats() or {}

    def matrix_rate(self) -> MatrixRate:
        on_cpu = jax.default_backend() == "cpu"
        size, products = (1024, 1) if on_cpu else (8192, 10)
        dtype = jnp.float32 if on_cpu else jnp.bfloat16
        a = jax.random.normal(jax.random.key(0), (size, size), dtype)
        product = jax.jit(jnp.matmul)
        times = []
        for _ in range(6):
            started = time.monotonic()
            for _ in range(products):
                found = product(a, a)
            found.block_until_ready()
            times.append(time.monotonic() - started)
        rate = products * 2 * size**3 / min(times)
        return MatrixRate(rate, size, "fp32" if on_cpu else "bf16")


class XlaMark(Mark):
    """A point after the last step that was dispatched."""

    def __init__(self, device: XlaDevice) -> None:
        super().__init__(device)
        last = device.arrivals[-1] if device.arrivals else None
        self.arrival = last if last is not None and last.values is not None else None
        """The pending results; None if this point was reached at once."""

    def reached(self) -> bool:
        if self.arrival is not None and self.arrival.ready():
            self.time, self.arrival = self.arrival.time, None
        return self.arrival is None

    def wait(self) -> None:
        if self.arrival is not None:
            self.arrival.wait()
        self.reached()
