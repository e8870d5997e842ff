"""The processes that take part in a check, and the differences between them.

    Member         one process: rank, host, device and versions, as JSON
    CheckContext   all processes, and the process groups of the checks

Processes exchange their `Member` through the rendezvous store, before any process group exists: a
missing process, or two processes on one GPU, would prevent the groups from being formed.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.process import ProcessInfo
from gristmill.base.units import format_bytes
from gristmill.bench.cluster.nvml import driver_version
from gristmill.bench.finding import Finding, problem
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import World
from gristmill.plan.hardware import Hardware, match_hardware
from gristmill.train.environment import code_commit, version

_MAX_NAMES = 4


@dataclass(frozen=True)
class Gpu:
    """The GPU of a process."""

    name: str
    uuid: str
    memory: int
    """Bytes."""
    visible: int
    """Number of GPUs visible to the process."""


@dataclass(frozen=True)
class Member:
    """Description of a process."""

    rank: int
    local_rank: int
    host: str
    device: str
    """cpu or cuda."""
    gpu: Gpu | None
    versions: Mapping[str, str | None]

    @classmethod
    def of_this_process(cls, place: ProcessInfo, device: torch.device) -> Member:
        return cls(
            place.rank, place.local_rank, place.host, device.type, _gpu(place, device), _versions()
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Member:
        gpu = values["gpu"]
        return cls(**{**values, "gpu": None if gpu is None else Gpu(**gpu)})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def label(self) -> str:
        return f"rank {self.rank} on {self.host}"


def _gpu(place: ProcessInfo, device: torch.device) -> Gpu | None:
    """The GPU that `open_world` will select for this process; None without a GPU."""
    if device.type != "cuda":
        return None
    count = torch.cuda.device_count()
    # With too few visible GPUs the process reports the first, so `judge_members` finds it shared.
    index = place.local_rank if place.local_rank < count else 0
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", ""))
    return Gpu(properties.name, uuid, properties.total_memory, count)


def _versions() -> dict[str, str | None]:
    on_gpu = torch.cuda.is_available()
    return {
        "gristmill": version("gristmill"),
        "commit": code_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl_version() if on_gpu else None,
        "driver": driver_version() if on_gpu else None,
        "system": f"{sys.platform} {platform.machine()}",
    }


def nccl_version() -> str | None:
    """The version of NCCL in torch; None if torch was built without it."""
    try:
        number = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError):
        return None
    return ".".join(map(str, number)) if isinstance(number, tuple) else str(number)


# ------------------------------------------------------------------ all processes


@dataclass
class CheckContext:
    """All processes and their groups, as seen by one process."""

    world: World
    control: ControlGroup
    members: Sequence[Member]
    """By rank."""
    folder: Path = field(default_factory=Path)
    """The folder to check, where run folders would be."""
    report_progress: Callable[[str], None] = lambda message: None
    """Shows what a check is doing."""

    @cached_property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each host."""
        return nodes_of(self.members)

    @cached_property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [ranks[0] for ranks in self.nodes.values()]

    @property
    def member(self) -> Member:
        return self.members[self.world.rank]

    @property
    def is_node_leader(self) -> bool:
        return self.world.rank in self.leaders

    @property
    def on_gpus(self) -> bool:
        return self.world.device.kind == "cuda"

    def group(
        self, ranks: list[int], purpose: str, *, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """A group of these ranks, which include this process; None for a single rank."""
        return self.world.groups.of(ranks, purpose=f"doctor: {purpose}", backend=backend)


def nodes_of(members: Sequence[Member]) -> dict[str, list[int]]:
    """The ranks of each host, in ascending order."""
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.host, []).append(member.rank)
    return nodes


def short_time(seconds: float) -> str:
    """A short duration as text: "85 us", "4.7 ms"."""
    return f"{1e6 * seconds:.3g} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


def expected_hardware(member: Member) -> Hardware | None:
    """The entry of the hardware table for the GPU of a process; None without one."""
    gpu = member.gpu
    return None if gpu is None else match_hardware(gpu.name, memory=gpu.memory)


def join_names(names: Sequence[object], *, limit: int = 8) -> str:
    """Names separated by commas; those beyond the limit are only counted."""
    shown = ", ".join(map(str, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


# ------------------------------------------------------------------ findings


def judge_members(members: Sequence[Member]) -> Iterator[Finding]:
    """The processes, and the differences between them."""
    nodes = nodes_of(members)
    counts = sorted({len(ranks) for ranks in nodes.values()})
    each = "" if len(nodes) == 1 else f", {' or '.join(map(str, counts))} on each"
    hosts = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    what = f"{len(members)} on {hosts}{each}: {join_names(list(nodes))}"
    if len(counts) > 1:
        incomplete = [
            f"{host} has {len(ranks)}" for host, ranks in nodes.items() if len(ranks) != counts[-1]
        ]
        yield problem(
            "processes",
            f"{what}; {join_names(incomplete)}",
            "start equally many processes on each node",
        )
    else:
        yield Finding("processes", what)
    yield from _judge_devices(members)
    for name in members[0].versions:
        yield from _compare(name, [member.versions[name] for member in members], members)


def _judge_devices(members: Sequence[Member]) -> Iterator[Finding]:
    kinds = [_device_kind(member) for member in members]
    yield from _compare("device", kinds, members, always=True)
    users: dict[str, list[Member]] = {}
    for member in members:
        if member.gpu is not None and member.gpu.uuid:
            users.setdefault(member.gpu.uuid, []).append(member)
    for uuid, sharing in users.items():
        if len(sharing) > 1:
            what = f"{join_names([member.label for member in sharing])} use the same GPU, {uuid}"
            remedy = "start one process for each GPU, or let every process see all GPUs of its node"
            yield problem("shared GPU", what, remedy)


def _device_kind(member: Member) -> str:
    gpu = member.gpu
    return member.device.upper() if gpu is None else f"{gpu.name}, {format_bytes(gpu.memory)}"


def _compare(
    name: str, values: Sequence[str | None], members: Sequence[Member], *, always: bool = False
) -> Iterator[Finding]:
    """The common value; or the processes whose value differs from the most frequent one."""
    common, count = Counter(values).most_common(1)[0]
    if count == len(values):
        if always or common is not None:
            yield Finding(name, str(common))
        return
    others: dict[str | None, list[str]] = {}
    for value, member in zip(values, members, strict=True):
        if value != common:
            others.setdefault(value, []).append(member.label)
    differing = [
        f"{value} on {join_names(labels, limit=_MAX_NAMES)}" for value, labels in others.items()
    ]
    remedy = (
        "install the same version on all nodes"
        if name != "device"
        else "use the same kind of device on all nodes"
    )
    yield problem(name, f"{common} on {count}, but {'; '.join(differing)}", remedy)
