"""How far the clocks of the nodes are apart.

Rank 0 asks a process of every node for its time, and takes the middle between question and answer
for the moment at which it was told:

    rank 0   t0 ──────────────── t1        offset = told - (t0 + t1) / 2, wrong by (t1 - t0) / 2
                  \\          /                         at most
    other          ── told ──

The quickest of some answers is the surest. Nothing of a run's arithmetic depends on clocks, and
heartbeats are judged by the reader's own; what does is in `WHAT_SUFFERS`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.units import format_seconds
from gristmill.bench.cluster.members import Team, named, short_time
from gristmill.bench.finding import Finding, problem

_ASKED = 20
MOST = 1.0
"""Seconds by which clocks may be apart."""
WHAT_SUFFERS = (
    (1.0, "lines in the logs of several nodes cannot be put in order"),
    (
        60.0,
        "`prepare --status` and `watch` take what works on another node for ended, or the reverse",
    ),
    (300.0, "a run with a time limit stops too early, or too late to save"),
)
"""From how many seconds on, what goes wrong."""


def measure_clocks(team: Team) -> dict[str, Any]:
    """For the first process of each node: seconds that its clock is ahead of rank 0's, and by how
    much this may be wrong."""
    group, me = team.control.group, team.world.rank
    found: dict[str, Any] = {}
    for host, ranks in team.nodes.items():
        other = ranks[0]
        if other == 0:
            continue
        assert group is not None
        if me == 0:
            found[host] = min((_ask(other, group) for _ in range(_ASKED)), key=_doubt)
        elif me == other:
            for _ in range(_ASKED):
                _answer(group)
    return found


def _doubt(answer: Mapping[str, float]) -> float:
    return answer["error"]


def _ask(other: int, group: dist.ProcessGroup) -> dict[str, float]:
    told = torch.zeros(1, dtype=torch.float64)
    began = time.time()
    dist.send(told, group=group, group_dst=other)
    dist.recv(told, group=group, group_src=other)
    ended = time.time()
    return {"offset": float(told) - (began + ended) / 2, "error": (ended - began) / 2}


def _answer(group: dist.ProcessGroup) -> None:
    told = torch.zeros(1, dtype=torch.float64)
    dist.recv(told, group=group, group_src=0)
    told.fill_(time.time())
    dist.send(told, group=group, group_dst=0)


def judge_clocks(found: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    """Whether clocks are near enough to each other."""
    if not found:
        yield Finding("clocks", "one node, one clock")
        return
    # Any two nodes may be further apart than each of them is from rank 0's.
    low = min(0.0, *(answer["offset"] for answer in found.values()))
    high = max(0.0, *(answer["offset"] for answer in found.values()))
    doubt = max(answer["error"] for answer in found.values())
    what = f"at most {short_time(high - low)} apart, known to {short_time(doubt)}"
    if high - low - 2 * doubt <= MOST:
        yield Finding("clocks", what)
        return
    apart = [
        f"{host} is {format_seconds(abs(answer['offset']))} "
        f"{'ahead' if answer['offset'] > 0 else 'behind'}"
        for host, answer in found.items()
        if abs(answer["offset"]) > MOST / 2
    ]
    suffers = [text for seconds, text in WHAT_SUFFERS if high - low > seconds]
    remedy = "let all nodes take their time from the same server (chrony, ntpd)"
    yield problem("clocks", f"{named(apart)}: {'; '.join(suffers)}", remedy)
