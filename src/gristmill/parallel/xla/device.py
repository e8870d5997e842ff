"""The XLA devices that a process drives, as one device to the rest of the program.

Steps are dispatched without waiting for them. Their results are tensors on the host that have no
values yet: an `Arrival` fills them in when the step is done, at the latest when a mark after it is
waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gristmill.parallel.device import Device, Mark, MatrixRate

_HOST = torch.device("cpu")


class Arrival:
    """Results of a step that are still being computed."""

    def __init__(self, values: jax.Array) -> None:
        self.values: jax.Array | None = values
        self.host = torch.full(values.shape, torch.nan)

    def ready(self) -> bool:
        if self.values is not None and self.values.is_ready():
            self.wait()
        return self.values is None

    def wait(self) -> None:
        if self.values is not None:
            self.host.copy_(torch.from_numpy(np.array(self.values)))
            self.values = None


@dataclass(frozen=True)
class XlaDevice(Device):
    """All local devices of JAX; the host's tensors are on the CPU."""

    torch_device: torch.device = _HOST
    latest: list[Arrival] = field(default_factory=list, compare=False)
    """The results of the last step, if there was one."""

    @property
    def kind(self) -> str:
        return "xla"

    @cached_property
    def name(self) -> str:
        device = jax.devices()[0]
        return f"{jax.device_count()} x {device.device_kind} with XLA"

    @property
    def is_async(self) -> bool:
        return True

    def expect(self, values: jax.Array) -> torch.Tensor:
        """A tensor on the host that will have these values when they are computed."""
        arrival = Arrival(values)
        self.latest[:] = [arrival]
        return arrival.host

    def read_later(self, scalars: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return scalars

    def synchronize(self) -> None:
        for arrival in self.latest:
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
        """What JAX knows about the memory of a device; nothing about the host's."""
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
    """A point after the last step that was dispatched; its time is when it was seen to be
    reached."""

    def __init__(self, device: XlaDevice) -> None:
        super().__init__(device)
        self.arrivals = list(device.latest)
        self.seen = not self.arrivals
        self.reached()

    def reached(self) -> bool:
        if not self.seen and all(arrival.ready() for arrival in self.arrivals):
            self.seen, self.time = True, time.monotonic()
        return self.seen

    def wait(self) -> None:
        for arrival in self.arrivals:
            arrival.wait()
        self.reached()
