"""Who is there: what each process says of itself, and what differs between them.

    Member   one process: place, host, device, versions, network, as JSON
    Team     all of them, with the groups that checks exchange messages in

The members are told through the store of the rendezvous, before any process group exists: a missing
process, or two on one GPU, would keep groups from being made.
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

_FEW = 4


@dataclass(frozen=True)
class Gpu:
    """The GPU of a process."""

    name: str
    uuid: str
    memory: int
    """Bytes."""
    visible: int
    """How many GPUs the process sees."""


@dataclass(frozen=True)
class Member:
    """What a process says of itself."""

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
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}"


def _gpu(place: ProcessInfo, device: torch.device) -> Gpu | None:
    """The GPU that `open_world` will give to this process; None if there is none."""
    if device.type != "cuda":
        return None
    count = torch.cuda.device_count()
    # One that sees too few is given the first: as a second process on it, it is found out.
    own = place.local_rank if place.local_rank < count else 0
    properties = torch.cuda.get_device_properties(own)
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
    """The version of the NCCL that torch uses; None if it has none."""
    try:
        found = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError):
        return None
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


# ------------------------------------------------------------------ all of them


@dataclass
class Team:
    """All processes, as one of them sees them."""

    world: World
    control: ControlGroup
    members: Sequence[Member]
    """By rank."""
    folder: Path = field(default_factory=Path)
    """Where the run folder would be."""
    say: Callable[[str], None] = lambda message: None
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
    def me(self) -> Member:
        return self.members[self.world.rank]

    @property
    def leads_node(self) -> bool:
        return self.world.rank in self.leaders

    @property
    def on_gpus(self) -> bool:
        return self.world.device.kind == "cuda"

    def group(
        self, ranks: list[int], purpose: str, *, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """A group of these processes, this one among them; None if it is alone."""
        return self.world.groups.of(ranks, purpose=f"doctor: {purpose}", backend=backend)


def nodes_of(members: Sequence[Member]) -> dict[str, list[int]]:
    """The ranks of each host, in their order."""
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.host, []).append(member.rank)
    return nodes


def short_time(seconds: float) -> str:
    """A moment in words: "85 us", "4.7 ms"."""
    return f"{1e6 * seconds:.3g} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


def usual_hardware(member: Member) -> Hardware | None:
    """What the table of devices has for the GPU of a process."""
    gpu = member.gpu
    return None if gpu is None else match_hardware(gpu.name, memory=gpu.memory)


def named(names: Sequence[object], *, most: int = 8) -> str:
    """A list in words, cut if it is long."""
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# ------------------------------------------------------------------ what differs


def judge_members(members: Sequence[Member]) -> Iterator[Finding]:
    """Who is there, and what is not alike."""
    nodes = nodes_of(members)
    counts = sorted({len(ranks) for ranks in nodes.values()})
    each = "" if len(nodes) == 1 else f", {' or '.join(map(str, counts))} on each"
    hosts = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    what = f"{len(members)} on {hosts}{each}: {named(list(nodes))}"
    if len(counts) > 1:
        most = {host: len(ranks) for host, ranks in nodes.items() if len(ranks) != counts[-1]}
        fewer = named([f"{host} has {count}" for host, count in most.items()])
        yield problem(
            "processes", f"{what}; {fewer}", "layouts need the same number of processes on each"
        )
    else:
        yield Finding("processes", what)
    yield from _devices(members)
    for name in members[0].versions:
        yield from _differing(name, [member.versions[name] for member in members], members)


def _devices(members: Sequence[Member]) -> Iterator[Finding]:
    kinds = [_kind(member) for member in members]
    yield from _differing("device", kinds, members, always=True)
    users: dict[str, list[Member]] = {}
    for member in members:
        if member.gpu is not None and member.gpu.uuid:
            users.setdefault(member.gpu.uuid, []).append(member)
    for uuid, sharing in users.items():
        if len(sharing) > 1:
            what = f"{named([member.who for member in sharing])} use the same GPU, {uuid}"
            remedy = "start one process for each GPU, or let every process see all GPUs of its node"
            yield problem("shared GPU", what, remedy)


def _kind(member: Member) -> str:
    gpu = member.gpu
    return member.device.upper() if gpu is None else f"{gpu.name}, {format_bytes(gpu.memory)}"


def _differing(
    name: str, values: Sequence[str | None], members: Sequence[Member], *, always: bool = False
) -> Iterator[Finding]:
    """What all have in common; or who is different from most."""
    usual, count = Counter(values).most_common(1)[0]
    if count == len(values):
        if always or usual is not None:
            yield Finding(name, str(usual))
        return
    others: dict[str | None, list[str]] = {}
    for value, member in zip(values, members, strict=True):
        if value != usual:
            others.setdefault(value, []).append(member.who)
    unlike = [f"{value} on {named(who, most=_FEW)}" for value, who in others.items()]
    remedy = "install the same on all nodes" if name != "device" else "use nodes of one kind"
    yield problem(name, f"{usual} on {count}, but {'; '.join(unlike)}", remedy)
