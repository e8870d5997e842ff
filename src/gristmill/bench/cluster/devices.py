"""The devices of all processes beside each other: speed, errors, and access of GPUs to each other.

All multiply matrices at the same time, as in training: GPUs of a node share its power and cooling.
"""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gristmill.base.errors import Exit
from gristmill.bench.cluster.members import Member, Team, named, usual_hardware
from gristmill.bench.cluster.nvml import gpu_health
from gristmill.bench.finding import Finding, problem

SLOW = 0.9
"""Of the median speed; a GPU below is slower than its kind by more than their usual spread."""
_XID = re.compile(r"NVRM: Xid.*")
_ROUNDS = 3


def measure_devices(team: Team) -> list[dict[str, Any]]:
    """What each process found, by rank; on rank 0."""
    device = team.world.device
    device.matrix_rate()  # brings the clock to that of full load
    team.control.barrier()
    rates = [device.matrix_rate() for _ in range(_ROUNDS)]
    own: dict[str, Any] = {
        "flops": statistics.median(rate.flops for rate in rates),
        "format": rates[0].format,
        "peak": device.peak_flops(rates[0].format, tf32=True),
    }
    gpu = team.me.gpu
    if gpu is not None:
        own["health"] = gpu_health(gpu.uuid)
        if team.leads_node:
            own["peer_access"] = _peer_access(gpu.visible)
            own["xids"] = _xids()
    return team.control.gather(own)


def _peer_access(count: int) -> list[list[bool]]:
    """Which GPUs of this node read each other's memory directly."""
    return [
        [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)]
        for a in range(count)
    ]


def _xids() -> list[str] | None:
    """Errors of GPUs in the kernel's log; None if this user may not read it."""
    try:
        done = subprocess.run(("dmesg",), capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return _XID.findall(done.stdout)[-20:]


# ------------------------------------------------------------------ findings


def judge_devices(
    seen: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """Who is slower than the others, and which GPUs have errors."""
    yield from _judge_speed(seen, members)
    for member, one in zip(members, seen, strict=True):
        yield from _judge_health(one.get("health", {}), member)
        yield from _judge_node(one, member)


def _judge_speed(seen: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> Iterator[Finding]:
    median = statistics.median(one["flops"] for one in seen)
    peak = seen[0]["peak"]
    what = f"{median / 1e12:.3g} TFLOP/s in large {seen[0]['format']} products, the median"
    what += f", {median / peak:.0%} of the peak" if peak else ""
    slow = [
        f"{member.who}: {one['flops'] / median:.0%}{_clocks(one.get('health', {}))}"
        for member, one in zip(members, seen, strict=True)
        if one["flops"] < SLOW * median
    ]
    # Processes on processors take cores from each other, and others from them.
    if slow and all(member.gpu is not None for member in members):
        remedy = "all wait for the slowest: look at its clock, power limit and cooling, or leave "
        yield problem("speed", f"{what}; slower: {named(slow)}", remedy + "its node out")
    else:
        least = min(one["flops"] for one in seen)
        what += f"; the slowest has {least / median:.0%} of it" if len(seen) > 1 else ""
        yield Finding("speed", what)


def _clocks(health: Mapping[str, Any]) -> str:
    facts = [f"{health[name]:g} {unit}" for name, unit in _UNITS.items() if name in health]
    facts += [f"throttled: {', '.join(health['throttled'])}"] if health.get("throttled") else []
    return f" ({', '.join(facts)})" if facts else ""


_UNITS = {"mhz": "MHz", "watts": "W", "celsius": "C"}


def _judge_health(health: Mapping[str, Any], member: Member) -> Iterator[Finding]:
    remedy = "drain this node and have the GPU tested"
    if health.get("ecc_errors"):
        what = f"{health['ecc_errors']} memory errors that were not corrected on {member.who}"
        yield problem("GPU memory", what, remedy, exit=Exit.DEVICE)
    if health.get("rows_failed"):
        what = f"no spare memory rows are left on {member.who}"
        yield problem("GPU memory", what, remedy, exit=Exit.DEVICE)
    if health.get("rows_pending"):
        what = f"memory rows wait to be replaced on {member.who}"
        yield problem("GPU memory", what, "reset the GPU (nvidia-smi -r) before the run")


def _judge_node(one: Mapping[str, Any], member: Member) -> Iterator[Finding]:
    access = one.get("peer_access") or []
    without = [
        f"{a} and {b}"
        for a, row in enumerate(access)
        for b, reached in enumerate(row)
        if a < b and not reached
    ]
    if without and not _has_nvlink(member):
        yield Finding("peer access", f"{len(without)} pairs of GPUs of {member.host} have none")
    elif without:
        what = f"GPUs {named(without)} of {member.host} do not reach each other's memory"
        remedy = "without peer access NCCL goes through host memory: see `nvidia-smi topo -p2p r`; "
        yield problem("peer access", what, remedy + "virtual machines and IOMMU may prevent it")
    elif len(access) > 1:
        yield Finding("peer access", f"all {len(access)} GPUs of {member.host} reach each other")
    if one.get("xids"):
        what = f"{len(one['xids'])} Xid errors in the kernel's log of {member.host}: "
        remedy = "look the numbers up in NVIDIA's list of Xid errors; restart the node if in doubt"
        yield problem("Xid", what + one["xids"][-1], remedy)


def _has_nvlink(member: Member) -> bool:
    """Whether GPUs of this kind are connected by NVLink, as far as the table knows."""
    known = usual_hardware(member)
    return known is not None and known.inside.name.startswith("nvlink")
