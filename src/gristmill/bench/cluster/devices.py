"""Compares the devices of all processes: speed, errors, and peer access between GPUs.

All devices multiply matrices at the same time, as in training, since the GPUs of a node share its
power and cooling.
"""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gristmill.base.errors import Exit
from gristmill.bench.cluster.members import CheckContext, Member, expected_hardware, join_names
from gristmill.bench.cluster.nvml import gpu_health
from gristmill.bench.finding import Finding, problem

SLOW = 0.9
"""Share of the median speed; a GPU below is slower than GPUs of its kind normally vary."""
_XID = re.compile(r"NVRM: Xid.*")
_ROUNDS = 3


def measure_devices(context: CheckContext) -> list[dict[str, Any]]:
    """The measurements of each process by rank; on rank 0."""
    device = context.world.device
    device.matrix_rate()  # brings the clock to that under full load
    context.control.barrier()
    rates = [device.matrix_rate() for _ in range(_ROUNDS)]
    own: dict[str, Any] = {
        "flops": statistics.median(rate.flops for rate in rates),
        "format": rates[0].format,
        "peak": device.peak_flops(rates[0].format, tf32=True),
    }
    gpu = context.member.gpu
    if gpu is not None:
        own["health"] = gpu_health(gpu.uuid)
        if context.is_node_leader:
            own["peer_access"] = _peer_access(gpu.visible)
            own["xids"] = _xids()
    return context.control.gather(own)


def _peer_access(count: int) -> list[list[bool]]:
    """Which GPUs of this node can access each other's memory directly."""
    return [
        [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)]
        for a in range(count)
    ]


def _xids() -> list[str] | None:
    """GPU errors in the kernel log; None if this user may not read it."""
    try:
        done = subprocess.run(("dmesg",), capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return _XID.findall(done.stdout)[-20:]


# ------------------------------------------------------------------ findings


def judge_devices(
    results: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """Which devices are slower than the others, and which have errors."""
    yield from _judge_speed(results, members)
    for member, result in zip(members, results, strict=True):
        yield from _judge_health(result.get("health", {}), member)
        yield from _judge_node(result, member)


def _judge_speed(
    results: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    median = statistics.median(result["flops"] for result in results)
    peak, dtype = results[0]["peak"], results[0]["format"]
    what = f"median of {median / 1e12:.3g} TFLOP/s in large {dtype} matrix products"
    what += f", {median / peak:.0%} of the peak" if peak else ""
    slow = [
        f"{member.label}: {result['flops'] / median:.0%}{_clocks(result.get('health', {}))}"
        for member, result in zip(members, results, strict=True)
        if result["flops"] < SLOW * median
    ]
    # Processes on a CPU compete for its cores, with each other and with other programs.
    if slow and all(member.gpu is not None for member in members):
        remedy = "every step waits for the slowest GPU: check its clock, power limit and cooling, "
        remedy += "or exclude its node"
        yield problem("speed", f"{what}; slower: {join_names(slow)}", remedy)
    else:
        slowest = min(result["flops"] for result in results)
        what += f"; the slowest reaches {slowest / median:.0%} of it" if len(results) > 1 else ""
        yield Finding("speed", what)


def _clocks(health: Mapping[str, Any]) -> str:
    facts = [f"{health[name]:g} {unit}" for name, unit in _UNITS.items() if name in health]
    facts += [f"throttled: {', '.join(health['throttled'])}"] if health.get("throttled") else []
    return f" ({', '.join(facts)})" if facts else ""


_UNITS = {"mhz": "MHz", "watts": "W", "celsius": "C"}


def _judge_health(health: Mapping[str, Any], member: Member) -> Iterator[Finding]:
    remedy = "drain this node and have the GPU tested"
    if health.get("ecc_errors"):
        what = f"{health['ecc_errors']} uncorrected memory errors on {member.label}"
        yield problem("GPU memory", what, remedy, exit=Exit.DEVICE)
    if health.get("rows_failed"):
        what = f"no spare memory rows left on {member.label}"
        yield problem("GPU memory", what, remedy, exit=Exit.DEVICE)
    if health.get("rows_pending"):
        what = f"memory rows are pending replacement on {member.label}"
        yield problem("GPU memory", what, "reset the GPU (nvidia-smi -r) before the run")


def _judge_node(result: Mapping[str, Any], member: Member) -> Iterator[Finding]:
    access = result.get("peer_access") or []
    blocked = [
        f"{a} and {b}"
        for a, row in enumerate(access)
        for b, accessible in enumerate(row)
        if a < b and not accessible
    ]
    if blocked and not _has_nvlink(member):
        yield Finding("peer access", f"none between {len(blocked)} pairs of GPUs of {member.host}")
    elif blocked:
        what = f"GPUs {join_names(blocked)} of {member.host} cannot access each other's memory"
        remedy = "NCCL copies through host memory instead: see `nvidia-smi topo -p2p r`; virtual "
        yield problem("peer access", what, remedy + "machines and IOMMU may prevent peer access")
    elif len(access) > 1:
        yield Finding("peer access", f"between all {len(access)} GPUs of {member.host}")
    if result.get("xids"):
        what = f"{len(result['xids'])} Xid errors in the kernel log of {member.host}: "
        remedy = "look up their numbers in NVIDIA's list of Xid errors; reboot the node if in doubt"
        yield problem("Xid", what + result["xids"][-1], remedy)


def _has_nvlink(member: Member) -> bool:
    """Whether NVLink connects GPUs of this kind, according to the hardware table."""
    hardware = expected_hardware(member)
    return hardware is not None and hardware.inside.name.startswith("nvlink")
