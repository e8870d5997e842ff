"""The device this process trains on, and how it is set up."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gristmill.base.errors import UserError
from gristmill.config.schema import RuntimeConfig


@dataclass(frozen=True)
class World:
    """One device and its name. The mesh of several joins here when there are several."""

    device: torch.device
    name: str

    def memory_peak(self) -> int:
        """The largest amount of memory held since the start, in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def select_device(asked: str) -> torch.device:
    """The device asked for; `auto` takes the best there is."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if asked == "auto":
        return torch.device(next(name for name, there in available.items() if there))
    if not available[asked]:
        there = ", ".join(name for name, yes in available.items() if yes)
        raise UserError(
            f"this machine has no {asked} device that torch can use",
            where="runtime.device",
            remedy=f'available: {there}; "auto" takes the best',
        )
    return torch.device(asked)


def device_name(device: torch.device) -> str:
    """The device's own name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} {device.type.upper()}"


def open_world(config: RuntimeConfig, *, tf32: bool = True) -> World:
    """Set up this process: device, threads, number formats, determinism."""
    device = select_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return World(device, device_name(device))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@dataclass(frozen=True)
class MatrixRate:
    """How fast a device multiplies two large square matrices: what a step could reach at best."""

    flops: float
    """Operations per second."""
    size: int
    """Rows and columns of both matrices."""
    format: str
    """Their number format."""


def matrix_rate(device: torch.device) -> MatrixRate:
    """Measure the best of a few large matrix products, in the format that suits the device."""
    on_gpu = device.type == "cuda"
    size, products = (8192, 10) if on_gpu else (1024, 1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a = torch.randn(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(5):
        synchronize(device)
        started = time.monotonic()
        for _ in range(products):
            a @ a
        synchronize(device)
        times.append(time.monotonic() - started)
    return MatrixRate(products * 2 * size**3 / min(times), size, "bf16" if on_gpu else "fp32")


@contextlib.contextmanager
def memory_explained(hint: str) -> Iterator[None]:
    """Turn running out of device memory into advice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the device has too little memory: {str(error).splitlines()[0]}", remedy=hint
        ) from error
