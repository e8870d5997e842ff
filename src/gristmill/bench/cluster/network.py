"""How nodes are connected: interface, MTU, InfiniBand, limits, and variables of NCCL and Gloo.

Every process tells what it sees; nothing is sent but that.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from gristmill.base.process import Address
from gristmill.base.units import format_bytes
from gristmill.bench.cluster.members import Member, Team, named
from gristmill.bench.finding import Finding, problem

_NETS, _INFINIBAND, _MEMORY = (
    Path("/sys/class/net"),
    Path("/sys/class/infiniband"),
    Path("/dev/shm"),
)
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
_OWN = ("NCCL_DEBUG_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_HOSTID")
"""Variables that differ between processes by their nature."""
_LITTLE_SHARED = 512 * 2**20
"""Bytes of /dev/shm; containers have 64 MiB if nobody asks for more."""
_LITTLE_LOCKED = 2**30
"""Bytes that a process may lock in memory; InfiniBand locks the buffers that it sends from."""


def measure_network(team: Team) -> list[dict[str, Any]]:
    """What each process sees, by rank; on rank 0."""
    return team.control.gather(local_network(team.world.place.address))


def local_network(address: Address | None, *, nets: Path = _NETS) -> dict[str, Any]:
    """The network as this process sees it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "interface": _interface(address, nets),
        "infiniband": _infiniband(),
        "locked_memory": None if soft == resource.RLIM_INFINITY else soft,
        "shared_memory": shutil.disk_usage(_MEMORY).total if _MEMORY.is_dir() else None,
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
    }


def _interface(address: Address | None, nets: Path) -> dict[str, Any] | None:
    """The interface by which this host reaches the rendezvous, and is reached there."""
    if address is None:
        return None
    try:
        family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == own for known in addresses):
            return {
                "name": name,
                "address": own,
                "mtu": _number(nets / name / "mtu"),
                "megabits": _number(nets / name / "speed"),
            }
    return {"name": None, "address": own, "mtu": None, "megabits": None}


def _number(file: Path) -> int | None:
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _infiniband() -> list[dict[str, str]]:
    """InfiniBand ports (or Ethernet ports with RDMA) of this host."""
    found = []
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        values = {
            name: _text(port / name).partition(":")[2].strip() or _text(port / name)
            for name in ("state", "rate", "link_layer")
        }
        found.append({"device": f"{port.parts[-3]}:{port.name}", **values})
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


# ------------------------------------------------------------------ findings


def judge_network(
    seen: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """What nodes do not have alike, and what they have but do not use."""
    several = len({member.host for member in members}) > 1
    yield from _judge_interfaces(seen, members, several=several)
    yield from _judge_infiniband(seen, members, several=several)
    yield from _judge_memory(seen, members)
    yield from _judge_variables(seen, members)


def _judge_interfaces(
    seen: Sequence[Mapping[str, Any]], members: Sequence[Member], *, several: bool
) -> Iterator[Finding]:
    by_host = {member.host: facts["interface"] for member, facts in zip(members, seen, strict=True)}
    known = {host: link for host, link in by_host.items() if link is not None}
    if not known:
        yield Finding("network", "no interface is known that reaches the rendezvous")
        return
    first = next(iter(known.values()))
    speed = f", {first['megabits'] / 1000:g} Gbit/s" if first["megabits"] else ""
    yield Finding("network", f"{first['name']}, MTU {first['mtu']}{speed}")
    if not several:
        return
    for what, unit in (("mtu", "MTU"), ("megabits", "Mbit/s")):
        values = Counter(link[what] for link in known.values() if link[what] is not None)
        if len(values) > 1:
            usual = values.most_common(1)[0][0]
            unlike = [
                f"{link[what]} on {host}"
                for host, link in known.items()
                if link[what] not in (None, usual)
            ]
            remedy = "give all nodes, and the switches between them, the same MTU"
            if what == "megabits":
                remedy = "look for a bad cable or port; a collective is as fast as its slowest link"
            yield problem("network", f"{unit} {usual} on most, but {named(unlike)}", remedy)
    loopback = [host for host, link in known.items() if link["name"] in ("lo", "lo0")]
    others = [host for host in known if host not in loopback]
    if loopback and others:
        what = f"the rendezvous address leads {named(loopback)} to itself, and others elsewhere"
        remedy = "set MASTER_ADDR to a name or address of the first node that all nodes know alike"
        yield problem("rendezvous", what, remedy)


def _judge_infiniband(
    seen: Sequence[Mapping[str, Any]], members: Sequence[Member], *, several: bool
) -> Iterator[Finding]:
    active: dict[str, list[str]] = {}
    for member, facts in zip(members, seen, strict=True):
        ports = [port for port in facts["infiniband"] if "ACTIVE" in port["state"].upper()]
        active[member.host] = [port["device"] for port in ports]
    if not any(active.values()):
        return
    counts = Counter(len(ports) for ports in active.values())
    usual = counts.most_common(1)[0][0]
    yield Finding("InfiniBand", f"{usual} active ports on most nodes")
    fewer = [f"{host} has {len(ports)}" for host, ports in active.items() if len(ports) < usual]
    if fewer:
        remedy = "look for a port that is down: ibstat"
        yield problem(
            "InfiniBand", f"{usual} active ports on most nodes, but {named(fewer)}", remedy
        )
    unused = [
        member.who
        for member, facts in zip(members, seen, strict=True)
        if active[member.host] and facts["variables"].get("NCCL_IB_DISABLE", "0") != "0"
    ]
    if unused and several:
        remedy = "unset NCCL_IB_DISABLE: without InfiniBand, NCCL sends everything over sockets"
        yield problem("InfiniBand", f"NCCL_IB_DISABLE is set for {named(unused)}", remedy)
    limited = [
        f"{format_bytes(facts['locked_memory'])} for {member.who}"
        for member, facts in zip(members, seen, strict=True)
        if active[member.host]
        and facts["locked_memory"] is not None
        and facts["locked_memory"] < _LITTLE_LOCKED
    ]
    if limited:
        remedy = "set `ulimit -l unlimited` where the processes start"
        yield problem("locked memory", f"limited to {named(limited, most=4)}", remedy)


def _judge_memory(
    seen: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """NCCL and workers of loaders exchange data through /dev/shm."""
    sizes = {
        member.host: facts["shared_memory"]
        for member, facts in zip(members, seen, strict=True)
        if facts["shared_memory"] is not None and member.gpu is not None
    }
    small = [
        f"{format_bytes(size)} on {host}" for host, size in sizes.items() if size < _LITTLE_SHARED
    ]
    if small:
        remedy = "give containers more: --shm-size 8g, or launch.shared_memory on Kubernetes"
        yield problem("/dev/shm", f"only {named(small)}", remedy)
    elif sizes:
        yield Finding("/dev/shm", f"{format_bytes(min(sizes.values()))} or more")


def _judge_variables(
    seen: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    names = sorted({name for facts in seen for name in facts["variables"]})
    alike = []
    for name in names:
        values = [facts["variables"].get(name) for facts in seen]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            alike.append(f"{name}={usual}")
        elif name not in _OWN:
            unlike = [
                f"{value if value is not None else 'not set'} for {member.who}"
                for member, value in zip(members, values, strict=True)
                if value != usual
            ]
            most = "not set" if usual is None else usual
            remedy = "set it alike for all processes: launch.environment"
            yield problem(
                "variables", f"{name} is {most} for most, {named(unlike, most=4)}", remedy
            )
    if alike:
        yield Finding("variables", named(alike, most=12))
