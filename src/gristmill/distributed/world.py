"""The processes of a run: rendezvous, devices and process groups.

Collectives run in the process group of one mesh axis, or of several axes combined. Groups are
identified by purpose and members. Only members take part in creating a group, so a group that some
ranks create cannot hang the others, and startup time does not grow with the world size.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import sha1

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.base.units import parse_seconds
from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.config.schema import RuntimeConfig
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.device import STAGED, Device, select_device
from gristmill.distributed.staged import register_staged

MARGIN = 60
"""Seconds by which the timeout of collectives exceeds the configured limit, so that the monitor
ends the run first and can name the rank at fault."""
MOST_THREADS = 1024
"""CPU threads that a process may use even on a machine with fewer cores."""


_NUMBERS = itertools.count()
"""Distinguishes the groups of successive runs in the same processes."""


@contextlib.contextmanager
def _group_name(text: str) -> Iterator[None]:
    """The name under which the members of a new group find each other. Torch would derive it from
    the ranks and the number of groups that a process already has; where some processes belong to
    more groups than others, the names would differ and the members would wait for ever."""
    torch_name = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: sha1(text.encode()).hexdigest()
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = torch_name


class Groups:
    """The process groups of this process, by mesh axes."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        *,
        timeout: timedelta | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self.mesh, self.rank, self.timeout = mesh, rank, timeout
        self.members = range(mesh.processes) if members is None else members
        """The ranks, in torch's default group, of the processes on the mesh."""
        self._known: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._number = next(_NUMBERS)

    def along(self, *axes: str) -> dist.ProcessGroup | None:
        """The group of the processes that differ from this one only on these axes; None if there
        are none."""
        return self.of(self.mesh.group(self.rank, *axes))

    def of(
        self,
        ranks: list[int],
        *,
        purpose: str = "tensors",
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> dist.ProcessGroup | None:
        """A group of these processes, which include this one, for one purpose."""
        if len(ranks) == 1:
            return None
        key = (purpose, tuple(ranks))
        if key not in self._known:
            ranks = [self.members[rank] for rank in ranks]
            if len(ranks) == dist.get_world_size() and backend is None:
                group = dist.group.WORLD
            else:
                with _group_name(f"{self._number} {purpose} {ranks}"):
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
    """This process's device, rank and groups."""

    device: Device
    place: ProcessInfo = field(default_factory=ProcessInfo)
    mesh: Mesh = field(default_factory=Mesh)
    groups: Groups = field(default_factory=lambda: Groups(Mesh(), 0))
    devices: Mesh | None = None
    """The mesh of devices, if each process drives several."""

    @property
    def layout(self) -> Mesh:
        """The mesh of devices, which is that of processes unless each drives several."""
        return self.devices or self.mesh

    @property
    def data_shards_here(self) -> int:
        """Data-parallel shards of a batch that this process feeds."""
        return self.layout.data // self.mesh.data

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def is_rank0(self) -> bool:
        return self.place.rank == 0

    @property
    def at(self) -> dict[str, int]:
        """This process's mesh coordinates."""
        return self.mesh.place(self.place.rank)

    @property
    def data_rank(self) -> int:
        """This process's data-parallel rank."""
        return self.at["dp_replicate"] * self.mesh.dp_shard + self.at["dp_shard"]

    def control_group(self, purpose: str, *, timeout: float | None = None) -> ControlGroup:
        """A control group of all processes, for use by one thread. The default timeout is that of
        collectives in a step."""
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
    place: ProcessInfo | None = None,
    device: Device | None = None,
    devices: Mesh | None = None,
) -> World:
    """Set up this process: device, threads, TF32, determinism and process groups. `mesh` is the
    mesh of processes. If each process drives several devices, `device` represents those of this
    one, and `devices` is the mesh of all devices."""
    mesh, place = mesh or Mesh(), place or ProcessInfo()
    parallel = parallel or ParallelConfig()
    share = parallel.share_gpu
    device = open_device(config, tf32=tf32, place=place, device=device, share=share)
    timeout = timedelta(seconds=parse_seconds(parallel.timeout) + MARGIN)
    if mesh.processes > 1 and not dist.is_initialized():
        _rendezvous(device, place, parallel, timeout=timeout)
        if device.kind == "cuda" and not share:
            _refuse_shared_gpus(device, place)
    if mesh.processes > 1 and device.sharers is not None:
        device = replace(device, sharers=_processes_by_gpu(device, place)[_gpu_name(device, place)])
    groups = Groups(mesh, place.rank, timeout=timeout)
    return World(device, place, mesh, groups, devices)


def open_device(
    config: RuntimeConfig,
    *,
    tf32: bool,
    place: ProcessInfo,
    device: Device | None = None,
    share: bool = False,
    spread: bool = False,
) -> Device:
    """Set up this process's device, or the given one: threads, TF32 and determinism. `share`:
    whether several processes use one GPU. `spread`: they may do so where there are fewer GPUs than
    processes, since they do not communicate on them."""
    if device is None:
        chosen = select_device(config.device)
        device = Device(chosen)
        if chosen.type == "cuda":
            device = _choose_gpu(place, share=share, spread=spread)
    if config.threads is not None:
        _require_threads(config.threads)
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if config.deterministic and device.kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return device


def _require_threads(threads: int) -> None:
    """Refuse a number of threads at which torch crashes instead of raising an error."""
    cores = os.cpu_count() or 1
    most = max(MOST_THREADS, 4 * cores)
    if threads > most:
        raise UserError(
            f"{threads:,} threads are too many: this machine has {cores} cores",
            where="runtime.threads",
            remedy=f"give at most {most:,}; more threads than cores only make a run slower",
        )


def _choose_gpu(place: ProcessInfo, *, share: bool = False, spread: bool = False) -> Device:
    """The GPU of this process. If only one is visible, it is that one: Slurm can give each process
    a GPU of its own, and only comparing all processes shows whether it did."""
    count = torch.cuda.device_count()
    # All processes of the node report this, since none can start.
    needed = max(place.local_rank + 1, place.local_world or 1)
    if needed > count > 1 and not (share or spread):
        raise _too_few_gpus(place, needed, count)
    number = place.local_rank % count
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return Device(device, sharers=len(range(number, needed, count)) if share else None)


def _too_few_gpus(place: ProcessInfo, processes: int, count: int) -> UserError:
    gpus = "GPU" if count == 1 else "GPUs"
    return UserError(
        f"{processes} processes on {place.host} need a GPU each, and see {count} {gpus}",
        where="runtime.device",
        remedy=f"start at most {count} per node or ask the scheduler for more GPUs; let processes "
        "share a GPU with parallel.share_gpu = true, to try a layout; or train on the CPU with "
        'runtime.device = "cpu"',
    )


def _gpu_name(device: Device, place: ProcessInfo) -> str:
    """A name that is unique among the GPUs of the run."""
    gpu = torch.cuda.get_device_properties(device.torch_device)
    if (name := getattr(gpu, "uuid", None)) is not None:
        return str(name)
    slot = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return f"{place.host} {slot if None not in slot else place.rank}"


def _processes_by_gpu(device: Device, place: ProcessInfo) -> Counter[str]:
    """How many processes use each GPU, gathered with gloo: NCCL fails on a shared GPU."""
    return Counter(ControlGroup(dist.group.WORLD).all_gather(_gpu_name(device, place)))


def _refuse_shared_gpus(device: Device, place: ProcessInfo) -> None:
    """Refuse to run several processes on one GPU, before NCCL fails there."""
    own, shared = _gpu_name(device, place), _processes_by_gpu(device, place)
    if shared[own] > 1:
        raise _too_few_gpus(place, max(shared[own], place.local_world or 1), 1)
    if len(shared) < place.world:
        raise UserError(
            "processes on another node would have to share a GPU, so the run cannot begin",
            where="runtime.device",
            remedy="see what they say",
        )


def _rendezvous(
    device: Device, place: ProcessInfo, config: ParallelConfig, *, timeout: timedelta
) -> None:
    """Wait for all processes of the run."""
    if place.address is None:
        raise UserError(
            f"started as one of {place.world} processes without a rendezvous address",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="start with torchrun or `gristmill train --processes N`, or set both",
        )
    host, port = place.address
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    start = timedelta(seconds=parse_seconds(config.start_timeout))
    begun = time.monotonic()
    try:
        store, rank, world = next(rendezvous("env://", place.rank, place.world, timeout=start))
        # A launcher that restarts all processes may keep its store, which then holds old addresses.
        store = dist.PrefixStore(f"attempt-{place.attempt}", store)  # type: ignore[attr-defined]
        if device.backend == STAGED:
            register_staged()
        dist.init_process_group(
            device.backend, store=store, rank=rank, world_size=world, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        waited = round(time.monotonic() - begun)
        raise UserError(
            f"rank {place.rank} on {place.host} did not find all {place.world} processes at "
            f"{host}:{port} within {waited} seconds: {str(error).splitlines()[0]}",
            where="parallel.start_timeout",
            remedy="check that all processes were started and can reach this address",
            exit=Exit.PEER,
        ) from error


def close_world() -> None:
    """Destroy the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
