"""Everything that depends on the kind of device: memory, timing, copies to the host, peak rates."""

from __future__ import annotations

import contextlib
import gc
import platform
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from gristmill.base.errors import UserError
from gristmill.base.limits import memory_limit
from gristmill.base.units import format_bytes
from gristmill.plan.arithmetic import peak_flops
from gristmill.plan.explain import MeasuredMemory

STAGED = "staged"
"""The torch.distributed backend of processes that share a GPU (`staged.py`)."""


@dataclass(frozen=True)
class Device:
    """The device of a process."""

    torch_device: torch.device
    sharers: int | None = field(default=None, kw_only=True)
    """Processes of the run that use it, if they may share it (`parallel.share_gpu`)."""

    @property
    def kind(self) -> str:
        """cpu, cuda, mps, xla or meta."""
        return self.torch_device.type

    @cached_property
    def name(self) -> str:
        """The device's own name, or the processor's."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        return f"{platform.processor() or platform.machine()} {self.kind.upper()}"

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 is fast on the device."""
        return has_bf16(self.torch_device)

    @property
    def visible(self) -> int:
        """How many devices of its kind a process on this machine could have."""
        return torch.cuda.device_count() if self.kind == "cuda" else 1

    @property
    def is_async(self) -> bool:
        """Whether the device computes asynchronously, so that the host runs ahead."""
        return self.kind == "cuda"

    @property
    def backend(self) -> str:
        """The torch.distributed backend for such devices."""
        if self.kind != "cuda":
            return "gloo"
        return "cpu:gloo,cuda:nccl" if self.sharers is None else STAGED

    @property
    def pins_memory(self) -> bool:
        """Whether copies from pinned host memory overlap with computation."""
        return self.kind == "cuda"

    def synchronize(self) -> None:
        """Wait for all queued work."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)
        elif self.kind == "mps":
            torch.mps.synchronize()

    def read_later(self, scalars: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Queue a copy to the host. Returns a function that returns it, once a later mark is
        reached."""
        found = scalars()
        if not self.pins_memory:
            host = found.cpu()
        else:
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            host.copy_(found, non_blocking=True)
        return lambda: host

    def mark(self) -> Mark:
        """A mark after all work queued so far."""
        return Mark(self)

    def free_memory(self) -> int | None:
        """This process's share of the free device memory in bytes; None for devices that use host
        memory."""
        return self._share_of_memory()[0] if self.kind == "cuda" else None

    def total_memory(self) -> int | None:
        """This process's share of all device memory, in bytes; None for devices that use host
        memory."""
        return self._share_of_memory()[1] if self.kind == "cuda" else None

    def _share_of_memory(self) -> tuple[int, int]:
        """Free memory of a GPU and all of it, divided among the processes that share it."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        sharers = self.sharers or 1
        if sharers == 1:
            return free, total
        # This process keeps what it has allocated; the rest is also limited by the others.
        own = torch.cuda.memory_reserved(self.torch_device)
        return max(0, min(free, total // sharers - own)), total // sharers

    def memory_peak(self) -> int:
        """Peak memory since the start, in bytes."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        if self.kind == "mps":
            return torch.mps.driver_allocated_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak

    def measured_memory(self, *, processes: int = 1) -> MeasuredMemory | None:
        """The device's memory statistics; None where there are none. The memory of a host is shared
        by `processes`."""
        if self.kind == "cuda":
            free, total = self._share_of_memory()
            return MeasuredMemory(
                total,
                allocated=torch.cuda.memory_allocated(self.torch_device),
                peak=torch.cuda.max_memory_allocated(self.torch_device),
                reserved=torch.cuda.memory_reserved(self.torch_device),
                free=free,
            )
        limit = memory_limit(processes=processes)
        return None if limit is None else MeasuredMemory(limit, peak=self.memory_peak())

    def matrix_rate(self) -> MatrixRate:
        """Time a few large matrix products, in bf16 on CUDA, else fp32, and take the fastest."""
        on_gpu = self.kind == "cuda"
        size, products = (8192, 10) if on_gpu else (1024, 1)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        a = torch.randn(size, size, dtype=dtype, device=self.torch_device)
        times = []
        for _ in range(5):
            self.synchronize()
            started = time.monotonic()
            for _ in range(products):
                a @ a
            self.synchronize()
            times.append(time.monotonic() - started)
        return MatrixRate(products * 2 * size**3 / min(times), size, "bf16" if on_gpu else "fp32")

    def peak_flops(self, compute: str, *, tf32: bool) -> float | None:
        """Peak FLOP/s of matrix products in a number format, divided by the processes that share
        the device; None for an unknown device."""
        peak = peak_flops(self.name, "tf32" if compute == "fp32" and tf32 else compute)
        return None if peak is None else peak / (self.sharers or 1)


class Mark:
    """A point in a device's timeline, like a CUDA event."""

    def __init__(self, device: Device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.kind == "cuda" else None
        if self.event is not None:
            self.event.record()
        self.time = time.monotonic()

    def reached(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        return earlier.event.elapsed_time(self.event) / 1000


def select_device(asked: str) -> torch.device:
    """The requested device; `auto` takes the best available."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    usable = [name for name, is_available in available.items() if is_available]
    if asked != "auto" and asked not in usable:
        raise UserError(
            f"this machine has no {asked} device that torch can use",
            where="runtime.device",
            remedy=f'available: {", ".join(usable)}; "auto" takes the best',
        )
    # On CPUs without bf16 instructions torch falls back to others, and prints long warnings.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return torch.device(usable[0] if asked == "auto" else asked)


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 is fast on a device: on NVIDIA's GPUs since Ampere, and on AMD's."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class MatrixRate:
    """Measured speed of a large matrix product: an upper bound for a training step."""

    flops: float
    """FLOP/s."""
    size: int
    """Rows and columns of both matrices."""
    format: str
    """Their number format."""


def free_unused(device: Device) -> None:
    """Free memory that is no longer referenced."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def memory_explained(
    hint: str, explain: Callable[[str], UserError | None] | None = None
) -> Iterator[None]:
    """Turn an out-of-memory error of the device or of the host into a UserError with advice.
    `explain` returns a more detailed error, or None to use the plain one."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        what = _too_little_memory(error)
        if what is None:
            raise
        raise _explained(what, explain) or UserError(what, remedy=hint) from error


def _explained(what: str, explain: Callable[[str], UserError | None] | None) -> UserError | None:
    """The detailed error, if `explain` succeeds. It may run out of memory too, or fail on unknown
    settings; the original error is then the one to report."""
    with contextlib.suppress(Exception):
        return None if explain is None else explain(what)
    return None


def _too_little_memory(error: Exception) -> str | None:
    """The message of an out-of-memory error; None for any other error."""
    words = (str(error).splitlines() or ["an allocation failed"])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"the device has too little memory: {words}"
    if isinstance(error, MemoryError):
        return f"this machine has too little memory: {words}"
    # On the host torch raises a plain RuntimeError.
    if not any(name in str(error) for name in ("DefaultCPUAllocator", "std::bad_alloc")):
        return None
    size = re.search(r"tried to allocate (\d+) bytes", str(error))
    tried = f": could not allocate {format_bytes(int(size[1]))} more" if size else ""
    return f"this machine has too little memory{tried}"
