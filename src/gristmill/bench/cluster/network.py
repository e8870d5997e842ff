"""The network setup of the nodes: interfaces, MTU, InfiniBand, limits, NCCL and Gloo variables.

Every process reports its own setup; no bandwidth is measured here.
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
from gristmill.bench.cluster.members import CheckContext, Member, join_names
from gristmill.bench.finding import Finding, problem

_NETWORK_DEVICES = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_SHARED_MEMORY = Path("/dev/shm")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
_PER_PROCESS = ("NCCL_DEBUG_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_HOSTID")
"""Variables that may differ between processes."""
_MIN_SHARED_MEMORY = 512 * 2**20
"""Bytes of /dev/shm; containers have 64 MiB by default."""
_MIN_LOCKED_MEMORY = 2**30
"""Bytes of memory that a process may lock; InfiniBand locks its send buffers."""


def measure_network(context: CheckContext) -> list[dict[str, Any]]:
    """The setup of each process by rank; on rank 0."""
    return context.control.gather(local_network(context.world.place.address))


def local_network(address: Address | None, *, sysfs: Path = _NETWORK_DEVICES) -> dict[str, Any]:
    """The network setup of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "interface": _interface(address, sysfs),
        "infiniband": _infiniband(),
        "locked_memory": None if soft == resource.RLIM_INFINITY else soft,
        "shared_memory": shutil.disk_usage(_SHARED_MEMORY).total
        if _SHARED_MEMORY.is_dir()
        else None,
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
    }


def _interface(address: Address | None, sysfs: Path) -> dict[str, Any] | None:
    """The interface through which this host reaches the rendezvous address."""
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
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return {
                "name": name,
                "address": own,
                "mtu": _read_number(sysfs / name / "mtu"),
                "megabits": _read_number(sysfs / name / "speed"),
            }
    return {"name": None, "address": own, "mtu": None, "megabits": None}


def _read_number(file: Path) -> int | None:
    try:
        number = int(file.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _infiniband() -> list[dict[str, str]]:
    """InfiniBand ports (or Ethernet ports with RDMA) of this host."""
    ports = []
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        values = {
            name: _read_text(port / name).partition(":")[2].strip() or _read_text(port / name)
            for name in ("state", "rate", "link_layer")
        }
        ports.append({"device": f"{port.parts[-3]}:{port.name}", **values})
    return ports


def _read_text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


# ------------------------------------------------------------------ findings


def judge_network(
    setups: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """Differences between nodes, and InfiniBand that is not used."""
    multi_node = len({member.host for member in members}) > 1
    yield from _judge_interfaces(setups, members, multi_node=multi_node)
    yield from _judge_infiniband(setups, members, multi_node=multi_node)
    yield from _judge_memory(setups, members)
    yield from _judge_variables(setups, members)


def _judge_interfaces(
    setups: Sequence[Mapping[str, Any]], members: Sequence[Member], *, multi_node: bool
) -> Iterator[Finding]:
    by_host = {
        member.host: setup["interface"] for member, setup in zip(members, setups, strict=True)
    }
    known = {host: link for host, link in by_host.items() if link is not None}
    if not known:
        yield Finding("network", "the interface that reaches the rendezvous is unknown")
        return
    first = next(iter(known.values()))
    speed = f", {first['megabits'] / 1000:g} Gbit/s" if first["megabits"] else ""
    yield Finding("network", f"{first['name']}, MTU {first['mtu']}{speed}")
    if not multi_node:
        return
    for what, unit in (("mtu", "MTU"), ("megabits", "Mbit/s")):
        values = Counter(link[what] for link in known.values() if link[what] is not None)
        if len(values) > 1:
            usual = values.most_common(1)[0][0]
            differing = [
                f"{link[what]} on {host}"
                for host, link in known.items()
                if link[what] not in (None, usual)
            ]
            remedy = "give all nodes, and the switches between them, the same MTU"
            if what == "megabits":
                remedy = "look for a bad cable or port: the slowest link limits every collective"
            yield problem("network", f"{unit} {usual} on most, but {join_names(differing)}", remedy)
    loopback = [host for host, link in known.items() if link["name"] in ("lo", "lo0")]
    others = [host for host in known if host not in loopback]
    if loopback and others:
        what = f"the rendezvous address resolves to the node itself on {join_names(loopback)}, but "
        what += "not on the other nodes"
        remedy = "set MASTER_ADDR to a name or address that leads to the first node from all nodes"
        yield problem("rendezvous", what, remedy)


def _judge_infiniband(
    setups: Sequence[Mapping[str, Any]], members: Sequence[Member], *, multi_node: bool
) -> Iterator[Finding]:
    active: dict[str, list[str]] = {}
    for member, setup in zip(members, setups, strict=True):
        ports = [port for port in setup["infiniband"] if "ACTIVE" in port["state"].upper()]
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
            "InfiniBand", f"{usual} active ports on most nodes, but {join_names(fewer)}", remedy
        )
    unused = [
        member.label
        for member, setup in zip(members, setups, strict=True)
        if active[member.host] and setup["variables"].get("NCCL_IB_DISABLE", "0") != "0"
    ]
    if unused and multi_node:
        remedy = "unset NCCL_IB_DISABLE: without InfiniBand, NCCL sends everything over sockets"
        yield problem("InfiniBand", f"NCCL_IB_DISABLE is set for {join_names(unused)}", remedy)
    limited = [
        f"{format_bytes(setup['locked_memory'])} for {member.label}"
        for member, setup in zip(members, setups, strict=True)
        if active[member.host]
        and setup["locked_memory"] is not None
        and setup["locked_memory"] < _MIN_LOCKED_MEMORY
    ]
    if limited:
        remedy = "set `ulimit -l unlimited` in the environment that starts the processes"
        yield problem("locked memory", f"limited to {join_names(limited, limit=4)}", remedy)


def _judge_memory(
    setups: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """NCCL and data loader workers exchange data through /dev/shm."""
    sizes = {
        member.host: setup["shared_memory"]
        for member, setup in zip(members, setups, strict=True)
        if setup["shared_memory"] is not None and member.gpu is not None
    }
    small = [
        f"{format_bytes(size)} on {host}"
        for host, size in sizes.items()
        if size < _MIN_SHARED_MEMORY
    ]
    if small:
        remedy = "give the containers more: --shm-size 8g, or launch.shared_memory on Kubernetes"
        yield problem("/dev/shm", f"only {join_names(small)}", remedy)
    elif sizes:
        yield Finding("/dev/shm", f"{format_bytes(min(sizes.values()))} or more")


def _judge_variables(
    setups: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    names = sorted({name for setup in setups for name in setup["variables"]})
    equal = []
    for name in names:
        values = [setup["variables"].get(name) for setup in setups]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            equal.append(f"{name}={usual}")
        elif name not in _PER_PROCESS:
            differing = [
                f"{value if value is not None else 'not set'} for {member.label}"
                for member, value in zip(members, values, strict=True)
                if value != usual
            ]
            common = "not set" if usual is None else usual
            remedy = "set the same value for all processes, with launch.environment"
            yield problem(
                "variables",
                f"{name} is {common} for most, but {join_names(differing, limit=4)}",
                remedy,
            )
    if equal:
        yield Finding("variables", join_names(equal, limit=12))
