"""The processes of a run and their devices: how they find one another, and in which groups.

Every pair of processes that exchange tensors does so in the group of an axis of the mesh, or of
several axes together. A process makes the groups that it is in itself and waits for their members
only, so that starting takes as long in a large world as in a small one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Place
from gristmill.base.units import parse_seconds
from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.config.schema import RuntimeConfig
from gristmill.parallel.council import Council

LATER = 60
"""Seconds that an exchange waits longer than the settings say."""


class Groups:
    """The groups of processes that this process is in, by axes of the mesh."""

    def __init__(self, mesh: Mesh, rank: int, *, timeout: timedelta | None = None) -> None:
        self.mesh, self.rank, self.timeout = mesh, rank, timeout
        self._known: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def along(self, *axes: str) -> dist.ProcessGroup | None:
        """Processes that differ from this one on these axes only; None if there are no others."""
        return self.of(self.mesh.group(self.rank, *axes))

    def of(self, ranks: list[int]) -> dist.ProcessGroup | None:
        """A group of these processes, this one among them."""
        if len(ranks) == 1:
            return None
        key = tuple(ranks)
        if key not in self._known:
            if len(ranks) == self.mesh.processes:
                group = dist.group.WORLD
            else:
                group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True)
            assert group is not None
            self._known[key] = group
        return self._known[key]


@dataclass(frozen=True)
class World:
    """This process's device, and its place among the processes of the run."""

    device: torch.device
    name: str
    place: Place = field(default_factory=Place)
    mesh: Mesh = field(default_factory=Mesh)
    groups: Groups = field(default_factory=lambda: Groups(Mesh(), 0))

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all."""
        return self.place.rank == 0

    @property
    def at(self) -> dict[str, int]:
        """Where this process stands on every axis."""
        return self.mesh.place(self.place.rank)

    @property
    def data_rank(self) -> int:
        """Which part of a step's batch is this process's."""
        return self.at["dp_replicate"] * self.mesh.dp_shard + self.at["dp_shard"]

    def council(self) -> Council:
        """A council of all processes, for one thread."""
        if self.mesh.processes == 1:
            return Council()
        group = dist.new_group(backend="gloo", timeout=self.groups.timeout, group_desc="council")
        return Council(group)

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


def open_world(
    config: RuntimeConfig,
    *,
    tf32: bool = True,
    mesh: Mesh | None = None,
    parallel: ParallelConfig | None = None,
    place: Place | None = None,
) -> World:
    """Set up this process: device, threads, number formats, determinism, and the way to the
    others."""
    mesh, place = mesh or Mesh(), place or Place()
    device = select_device(config.device)
    if device.type == "cuda":
        device = _own_gpu(place)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    parallel = parallel or ParallelConfig()
    # A little longer than the monitor waits, whose message says more.
    timeout = timedelta(seconds=parse_seconds(parallel.timeout) + LATER)
    if mesh.processes > 1 and not dist.is_initialized():
        _meet(device, place, parallel, timeout=timeout)
    groups = Groups(mesh, place.rank, timeout=timeout)
    return World(device, device_name(device), place, mesh, groups)


def _own_gpu(place: Place) -> torch.device:
    """The GPU of this process; where each process sees only its own, that is the first."""
    count = torch.cuda.device_count()
    if place.local_rank >= count > 1:
        raise UserError(
            f"process {place.local_rank} of this node has no GPU of its own: there are {count}",
            where="runtime.device",
            remedy=f"start at most {count} processes on a node",
        )
    device = torch.device("cuda", place.local_rank if count > 1 else 0)
    torch.cuda.set_device(device)
    return device


def _meet(
    device: torch.device, place: Place, config: ParallelConfig, *, timeout: timedelta
) -> None:
    """Wait for all processes of the run."""
    if place.address is None:
        raise UserError(
            f"started as one of {place.world} processes, but it is not said where they meet",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="start with torchrun or `gristmill train --processes N`, or set both",
        )
    host, port = place.address
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    start = timedelta(seconds=parse_seconds(config.start_timeout))
    begun = time.monotonic()
    try:
        store, rank, world = next(rendezvous("env://", place.rank, place.world, timeout=start))
        # A launcher that starts all processes again may keep its store, and with it the addresses
        # of those that are gone.
        store = dist.PrefixStore(f"attempt-{place.attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        waited = round(time.monotonic() - begun)
        raise UserError(
            f"rank {place.rank} on {place.host} did not find all {place.world} processes at "
            f"{host}:{port} within {waited} seconds: {str(error).splitlines()[0]}",
            where="parallel.start_timeout",
            remedy="see whether all processes were started, and whether the address is theirs",
            exit=Exit.PEER,
        ) from error


def close_world() -> None:
    """Leave the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Mark:
    """A point in the device's own time: after everything that was asked of it so far."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
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
