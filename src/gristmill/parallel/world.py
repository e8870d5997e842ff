"""The processes of a run and their devices: how they find one another, and in which groups.

Every pair of processes that exchange tensors does so in the group of an axis of the mesh, or of
several axes together. Groups are known by a purpose and their members. Only members take part in
making a group and wait for one another, so that a group which only some ranks make cannot hang the
others, and starting takes as long in a large world as in a small one.
"""

from __future__ import annotations

import os
import time
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
from gristmill.parallel.control import ControlGroup
from gristmill.parallel.device import Device, select_device

MARGIN = 60
"""Seconds that a collective waits longer than the settings say, since the monitor, which ends the
run in time, can name the process to blame."""


class Groups:
    """The groups of processes that this process is in, by axes of the mesh."""

    def __init__(self, mesh: Mesh, rank: int, *, timeout: timedelta | None = None) -> None:
        self.mesh, self.rank, self.timeout = mesh, rank, timeout
        self._known: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def along(self, *axes: str) -> dist.ProcessGroup | None:
        """Processes that differ from this one on these axes only; None if there are no others."""
        return self.of(self.mesh.group(self.rank, *axes))

    def of(
        self,
        ranks: list[int],
        *,
        purpose: str = "tensors",
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> dist.ProcessGroup | None:
        """A group of these processes, this one among them, for one purpose."""
        if len(ranks) == 1:
            return None
        key = (purpose, tuple(ranks))
        if key not in self._known:
            if len(ranks) == self.mesh.processes and backend is None:
                group = dist.group.WORLD
            else:
                group = dist.new_group(
                    ranks,
                    timeout=timeout or self.timeout,
                    backend=backend,
                    use_local_synchronization=True,
                    group_desc=purpose,
                )
            assert group is not None
            self._known[key] = group
        return self._known[key]


@dataclass(frozen=True)
class World:
    """This process's device, and its place among the processes of the run."""

    device: Device
    place: Place = field(default_factory=Place)
    mesh: Mesh = field(default_factory=Mesh)
    groups: Groups = field(default_factory=lambda: Groups(Mesh(), 0))

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def is_rank0(self) -> bool:
        return self.place.rank == 0

    @property
    def at(self) -> dict[str, int]:
        """Where this process stands on every axis."""
        return self.mesh.place(self.place.rank)

    @property
    def data_rank(self) -> int:
        """Which part of a step's batch is this process's."""
        return self.at["dp_replicate"] * self.mesh.dp_shard + self.at["dp_shard"]

    def control_group(self, purpose: str, *, timeout: float | None = None) -> ControlGroup:
        """A control group of all processes, for one thread; collectives in it wait for `timeout`
        seconds, as long as those in a step if None."""
        longer = None if timeout is None else timedelta(seconds=timeout + MARGIN)
        ranks = list(range(self.mesh.processes))
        return ControlGroup(
            self.groups.of(ranks, purpose=f"control: {purpose}", backend="gloo", timeout=longer)
        )


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
    chosen = select_device(config.device)
    device = Device(_own_gpu(place) if chosen.type == "cuda" else chosen)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.deterministic and device.kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    parallel = parallel or ParallelConfig()
    timeout = timedelta(seconds=parse_seconds(parallel.timeout) + MARGIN)
    if mesh.processes > 1 and not dist.is_initialized():
        _rendezvous(device, place, parallel, timeout=timeout)
    groups = Groups(mesh, place.rank, timeout=timeout)
    return World(device, place, mesh, groups)


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


def _rendezvous(
    device: Device, place: Place, config: ParallelConfig, *, timeout: timedelta
) -> None:
    """Wait for all processes of the run."""
    if place.address is None:
        raise UserError(
            f"started as one of {place.world} processes without an address to meet at",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="start with torchrun or `gristmill train --processes N`, or set both",
        )
    host, port = place.address
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    start = timedelta(seconds=parse_seconds(config.start_timeout))
    begun = time.monotonic()
    try:
        store, rank, world = next(rendezvous("env://", place.rank, place.world, timeout=start))
        # A launcher that starts all processes again may keep its store, and with it the addresses
        # of those that are gone.
        store = dist.PrefixStore(f"attempt-{place.attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(
            device.backend, store=store, rank=rank, world_size=world, timeout=timeout
        )
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
