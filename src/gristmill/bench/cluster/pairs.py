"""Bandwidth and latency of every pair of nodes, and pairs far slower than the rest.

One process of each node takes part; on a single node, all of its processes. The pairs follow a
round-robin schedule: n nodes take n - 1 rounds (n rounds if n is odd, with one node idle in each).
A node is in one pair at a time, so pairs do not compete for its links.

    latency     half the round-trip time of a small message
    bandwidth   bytes per second in each direction, with both directions at the same time
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
from gristmill.bench.cluster.members import CheckContext, Member, join_names, short_time
from gristmill.bench.finding import Finding, problem
from gristmill.distributed.control import ControlGroup

_SMALL, _LARGE_GPU, _LARGE_CPU = 1024, 2**26, 2**22
"""Message sizes in bytes."""
_PINGS, _EXCHANGES = 20, 5


def round_robin(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two of `count` participants meet once."""
    order = list(range(count + count % 2))
    rounds = []
    for _ in range(len(order) - 1):
        half = len(order) // 2
        pairs = zip(order[:half], reversed(order[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < count])
        order = [order[0], order[-1], *order[1:-1]]  # rotates all but the first
    return rounds


def measure_pairs(context: CheckContext, *, size: int | None = None) -> list[dict[str, Any]]:
    """A row for each pair; on rank 0."""
    ranks = context.leaders if len(context.nodes) > 1 else list(range(len(context.members)))
    rows: list[dict[str, Any]] = []
    if context.world.rank in ranks and len(ranks) > 1:
        group = context.group(ranks, "pairs")
        assert group is not None
        control = ControlGroup(context.group(ranks, "pairs' control", backend="gloo"))
        size = size or (_LARGE_GPU if context.on_gpus else _LARGE_CPU)
        index = ranks.index(context.world.rank)
        # NCCL needs all ranks of a group in its first call.
        dist.all_reduce(torch.zeros(1, device=context.world.device.torch_device), group=group)
        rounds = round_robin(len(ranks))
        for number, pairs in enumerate(rounds, 1):
            context.report_progress(f"pairs, round {number} of {len(rounds)}")
            control.barrier()
            for a, b in pairs:
                if index in (a, b):
                    peer = ranks[b if index == a else a]
                    row = _measure_pair(context, group, peer, first=index == a, size=size)
                    rows.append({"ranks": [ranks[a], ranks[b]], "round": number, **row})
    return _merge(context.control.gather(rows))


def _merge(gathered: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each pair, from the measurements of its two processes."""
    pairs: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for rows in gathered:
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


def _measure_pair(
    context: CheckContext, group: dist.ProcessGroup, peer: int, *, first: bool, size: int
) -> dict[str, Any]:
    """Latency and bandwidth between this process and a peer."""
    device, rank = context.world.device, context.world.rank
    small = torch.zeros(_SMALL // 4, device=device.torch_device)
    outgoing = torch.full((size // 4,), float(rank % 1021 + 1), device=device.torch_device)
    incoming = torch.empty_like(outgoing)

    def ping() -> None:
        send, receive = _send(small, peer, group), _receive(small, peer, group)
        for operation in (send, receive) if first else (receive, send):
            _wait([operation])
        device.synchronize()

    def exchange() -> None:
        _wait([_send(outgoing, peer, group), _receive(incoming, peer, group)])
        device.synchronize()

    for warm_up in (ping, exchange):
        warm_up()
    pings = [_seconds(ping) for _ in range(_PINGS)]
    exchanges = [_seconds(exchange) for _ in range(_EXCHANGES)]
    wrong = int((incoming != float(peer % 1021 + 1)).sum())
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


def _send(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(dist.isend, tensor, peer, group)


def _receive(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp:
    return dist.P2POp(dist.irecv, tensor, peer, group)


def _wait(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


# ------------------------------------------------------------------ findings


def judge_pairs(rows: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> Iterator[Finding]:
    """Which pairs are far slower than the median, and which nodes they have in common."""
    if not rows:
        yield Finding("pairs", "skipped: there is only one process")
        return
    multi_node = len({member.host for member in members}) > 1
    wrong = [row for row in rows if row["wrong"]]
    if wrong:
        names = join_names([_pair_name(row, members, multi_node) for row in wrong])
        what = f"messages between {names} arrived corrupted"
        remedy = "do not train here: a device or a link between them is faulty"
        yield problem("pairs", what, remedy, exit=Exit.DEVICE)
    median = statistics.median(row["bandwidth"] for row in rows)
    latency = statistics.median(row["latency"] for row in rows)
    pairs = f"{len(rows)} {'pair' if len(rows) == 1 else 'pairs'}"
    what = f"{pairs} of {'nodes' if multi_node else 'processes'}: median of "
    what += f"{median / 1e9:.3g} GB/s in each direction at {format_bytes(rows[0]['bytes'])}, "
    what += f"{short_time(latency)} latency"
    slow = [row for row in rows if row["bandwidth"] < FAR_SLOWER * median]
    if not slow:
        slowest = min(rows, key=lambda row: row["bandwidth"])
        what += f"; the slowest, {_pair_name(slowest, members, multi_node)}, reaches "
        yield Finding("pairs", f"{what}{slowest['bandwidth'] / median:.0%}")
        return
    slow.sort(key=lambda row: row["bandwidth"])
    shares = [
        f"{_pair_name(row, members, multi_node)} {row['bandwidth'] / median:.0%}" for row in slow
    ]
    if not multi_node and all(member.gpu is None for member in members):
        # Processes on one CPU compete for its cores.
        yield Finding("pairs", f"{what}; slowest: {join_names(shares)}")
    else:
        remedy = _remedy(slow, rows, members, multi_node)
        yield problem("pairs", f"{what}; far slower: {join_names(shares)}", remedy)


def _remedy(
    slow: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    members: Sequence[Member],
    multi_node: bool,
) -> str:
    """What to check: a node that is slow with most others is itself at fault."""
    counts = {
        rank: sum(rank in row["ranks"] for row in slow)
        for rank in {rank for row in rows for rank in row["ranks"]}
    }
    others = len(counts) - 1
    suspects = [rank for rank, count in sorted(counts.items()) if 2 * count > others > 1]
    if suspects:
        names = join_names([_process_name(members[rank], multi_node) for rank in suspects])
        return f"{names} is slow with most others: check its links, or exclude it"
    return "check the cables and switches between them, or exclude one of them"


def _process_name(member: Member, multi_node: bool) -> str:
    return member.host if multi_node else f"rank {member.rank}"


def _pair_name(row: Mapping[str, Any], members: Sequence[Member], multi_node: bool) -> str:
    a, b = (members[rank] for rank in row["ranks"])
    return f"{_process_name(a, multi_node)} and {_process_name(b, multi_node)}"
