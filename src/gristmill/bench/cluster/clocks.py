"""Clock offsets between the nodes.

Rank 0 asks one process of every node for its time, and assumes that the remote clock was read
halfway between the request and the reply:

    rank 0   t0 ──────────────── t1        offset = remote - (t0 + t1) / 2
                  \\          /             error  = (t1 - t0) / 2 at most
    other        ── remote ──

Of several replies the fastest one counts, since its error is the smallest. Training does not depend
on clocks, and heartbeats are judged by the reader's own clock; `CONSEQUENCES` lists what does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.units import format_seconds
from gristmill.bench.cluster.members import CheckContext, join_names, short_time
from gristmill.bench.finding import Finding, problem

_SAMPLES = 20
MAX_OFFSET = 1.0
"""Seconds by which clocks may differ."""
CONSEQUENCES = (
    (1.0, "log lines of several nodes cannot be put in order"),
    (
        60.0,
        "`prepare --status` and `watch` may take running work on another node for finished, or the "
        "reverse",
    ),
    (300.0, "a run with a time limit may stop too early, or too late to save"),
)
"""What goes wrong above an offset in seconds."""


def measure_clocks(context: CheckContext) -> dict[str, Any]:
    """The offset from rank 0's clock and its error in seconds, for the first process of each
    node."""
    group, rank = context.control.group, context.world.rank
    offsets: dict[str, Any] = {}
    for host, ranks in context.nodes.items():
        peer = ranks[0]
        if peer == 0:
            continue
        assert group is not None
        if rank == 0:
            samples = [_request_time(peer, group) for _ in range(_SAMPLES)]
            offsets[host] = min(samples, key=lambda sample: sample["error"])
        elif rank == peer:
            for _ in range(_SAMPLES):
                _reply_time(group)
    return offsets


def _request_time(peer: int, group: dist.ProcessGroup) -> dict[str, float]:
    remote = torch.zeros(1, dtype=torch.float64)
    began = time.time()
    dist.send(remote, group=group, group_dst=peer)
    dist.recv(remote, group=group, group_src=peer)
    ended = time.time()
    return {"offset": float(remote) - (began + ended) / 2, "error": (ended - began) / 2}


def _reply_time(group: dist.ProcessGroup) -> None:
    remote = torch.zeros(1, dtype=torch.float64)
    dist.recv(remote, group=group, group_src=0)
    remote.fill_(time.time())
    dist.send(remote, group=group, group_dst=0)


def judge_clocks(offsets: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    """Whether the clocks are close enough to each other."""
    if not offsets:
        yield Finding("clocks", "one node, one clock")
        return
    # Two nodes may be further apart from each other than either is from rank 0.
    low = min(0.0, *(clock["offset"] for clock in offsets.values()))
    high = max(0.0, *(clock["offset"] for clock in offsets.values()))
    error = max(clock["error"] for clock in offsets.values())
    what = f"at most {short_time(high - low)} apart, measured to within {short_time(error)}"
    if high - low - 2 * error <= MAX_OFFSET:
        yield Finding("clocks", what)
        return
    deviations = [
        f"{host} is {format_seconds(abs(clock['offset']))} "
        f"{'ahead' if clock['offset'] > 0 else 'behind'}"
        for host, clock in offsets.items()
        if abs(clock["offset"]) > MAX_OFFSET / 2
    ]
    consequences = [text for seconds, text in CONSEQUENCES if high - low > seconds]
    remedy = "synchronize all nodes with the same time server (chrony, ntpd)"
    yield problem("clocks", f"{join_names(deviations)}: {'; '.join(consequences)}", remedy)
