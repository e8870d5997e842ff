"""Every pair of nodes: how fast they exchange, and who is far slower than the rest.

One process of each node takes part; on a single node, all of its processes. Who meets whom follows
a round-robin tournament: n nodes meet in n - 1 rounds (n, if n is odd, and one rests), so that
every round has as many pairs as possible, and none disturbs another within a node.

    latency     half the time of a small message there and back
    bandwidth   bytes a second in each direction, both at the same time
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.errors import Exit
from gristmill.base.units import format_bytes
from gristmill.bench.cluster.collectives import FAR_SLOWER
from gristmill.bench.cluster.members import Member, Team, named, short_time
from gristmill.bench.finding import Finding, problem
from gristmill.distributed.control import ControlGroup

_SMALL, _ON_GPUS, _ON_CPUS = 1024, 2**26, 2**22
"""Bytes of messages."""
_PINGS, _TIMES = 20, 5


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each of so many meets each other once."""
    places = list(range(count + count % 2))
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < count])
        places = [places[0], places[-1], *places[1:-1]]  # all but the first move on
    return rounds


def measure_pairs(team: Team, *, size: int | None = None) -> list[dict[str, Any]]:
    """A row for each pair; on rank 0."""
    chosen = team.leaders if len(team.nodes) > 1 else list(range(len(team.members)))
    found: list[dict[str, Any]] = []
    if team.world.rank in chosen and len(chosen) > 1:
        group = team.group(chosen, "pairs")
        assert group is not None
        quiet = ControlGroup(team.group(chosen, "pairs' control", backend="gloo"))
        size = size or (_ON_GPUS if team.on_gpus else _ON_CPUS)
        me = chosen.index(team.world.rank)
        # NCCL needs all members for the first call in a group.
        dist.all_reduce(torch.zeros(1, device=team.world.device.torch_device), group=group)
        rounds = tournament(len(chosen))
        for number, pairs in enumerate(rounds, 1):
            team.say(f"pairs, round {number} of {len(rounds)}")
            quiet.barrier()
            for a, b in pairs:
                if me in (a, b):
                    other = b if me == a else a
                    row = _meet(team, group, chosen[other], first=me == a, size=size)
                    found.append({"ranks": [chosen[a], chosen[b]], "round": number, **row})
    return _merged(team.control.gather(found))


def _merged(told: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each pair, from what both of it tell."""
    pairs: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for rows in told:
        for row in rows:
            pairs.setdefault(tuple(row["ranks"]), []).append(row)
    return [
        {
            **both[0],
            "latency": max(row["latency"] for row in both),
            "bandwidth": min(row["bandwidth"] for row in both),
            "wrong": sum(row["wrong"] for row in both),
        }
        for both in pairs.values()
    ]


def _meet(
    team: Team, group: dist.ProcessGroup, other: int, *, first: bool, size: int
) -> dict[str, Any]:
    """What this process and another measure together."""
    device, rank = team.world.device, team.world.rank
    small = torch.zeros(_SMALL // 4, device=device.torch_device)
    mine = torch.full((size // 4,), float(rank % 1021 + 1), device=device.torch_device)
    theirs = torch.empty_like(mine)

    def ping() -> None:
        send, receive = _send(small, other, group), _receive(small, other, group)
        for operation in (send, receive) if first else (receive, send):
            _wait([operation])
        device.synchronize()

    def exchange() -> None:
        _wait([_send(mine, other, group), _receive(theirs, other, group)])
        device.synchronize()

    for work in (ping, exchange):
        work()
    pings = [_seconds(ping) for _ in range(_PINGS)]
    exchanges = [_seconds(exchange) for _ in range(_TIMES)]
    wrong = int((theirs != float(other % 1021 + 1)).sum())
    return {
        "bytes": size,
        "latency": min(pings) / 2,
        "bandwidth": size / statistics.median(exchanges),
        "wrong": wrong,
    }


def _seconds(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _send(tensor: torch.Tensor, other: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(dist.isend, tensor, other, group)


def _receive(tensor: torch.Tensor, other: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(dist.irecv, tensor, other, group)


def _wait(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


# ------------------------------------------------------------------ findings


def judge_pairs(rows: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> Iterator[Finding]:
    """Which pairs are far slower than the median, and whom they have in common."""
    if not rows:
        yield Finding("pairs", "there is nobody to meet")
        return
    several = len({member.host for member in members}) > 1
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        what = f"what {named([_named(row, members, several) for row in wrong])} received was not "
        remedy = "do not train here: a device or a link between them is faulty"
        yield problem("pairs", what + "what was sent", remedy, exit=Exit.DEVICE)
    median = statistics.median(row["bandwidth"] for row in rows)
    delay = statistics.median(row["latency"] for row in rows)
    what = (
        f"{len(rows)} pairs of {'nodes' if several else 'processes'}: {median / 1e9:.3g} GB/s in "
    )
    what += f"each direction at {format_bytes(rows[0]['bytes'])}, {short_time(delay)}, the medians"
    slow = [row for row in rows if row["bandwidth"] < FAR_SLOWER * median]
    if not slow:
        least = min(rows, key=lambda row: row["bandwidth"])
        what += f"; the slowest, {_named(least, members, several)}, has "
        yield Finding("pairs", f"{what}{least['bandwidth'] / median:.0%}")
        return
    slow.sort(key=lambda row: row["bandwidth"])
    each = [f"{_named(row, members, several)} {row['bandwidth'] / median:.0%}" for row in slow]
    remedy = _common(slow, rows, members, several)
    good = not several and all(member.gpu is None for member in members)
    if good:  # processes on one machine take turns on its cores
        yield Finding("pairs", f"{what}; slowest: {named(each)}")
    else:
        yield problem("pairs", f"{what}; far slower: {named(each)}", remedy)


def _common(
    slow: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    members: Sequence[Member],
    several: bool,
) -> str:
    """Whom to look at: one that is slow with most others has a fault of its own."""
    counts = {
        rank: sum(rank in row["ranks"] for row in slow)
        for rank in {rank for row in rows for rank in row["ranks"]}
    }
    others = len(counts) - 1
    guilty = [rank for rank, count in sorted(counts.items()) if 2 * count > others > 1]
    if guilty:
        names = named([_name(members[rank], several) for rank in guilty])
        return f"{names} is slow with most others: look at its links, or leave it out"
    return "look at the cables and switches between them, or leave one of them out"


def _name(member: Member, several: bool) -> str:
    return member.host if several else f"rank {member.rank}"


def _named(row: Mapping[str, Any], members: Sequence[Member], several: bool) -> str:
    a, b = (members[rank] for rank in row["ranks"])
    return f"{_name(a, several)} and {_name(b, several)}"
