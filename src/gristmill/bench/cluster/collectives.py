"""Bandwidth of collectives by message size, with checked results.

    algorithm bandwidth   bytes / seconds
    bus bandwidth         algorithm bandwidth times what a link carries per byte with n processes:
                          all-reduce 2 (n-1)/n; all-gather, reduce-scatter, all-to-all (n-1)/n;
                          broadcast 1. It compares with the speed of a link for any n.

The definitions are those of nccl-tests: `bytes` is the larger of input and output, and the time is
that of the slowest process.

Every process sends integers that follow from its rank and the position in the tensor, small enough
for exact sums in fp32. Each process therefore knows the correct result, which is compared before
and after the timing.

    all       all processes together
    inside    the processes of each node, all nodes at the same time
    across    processes with the same local rank on all nodes, all local ranks at the same time
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.errors import Exit
from gristmill.base.units import format_bytes
from gristmill.bench.cluster.members import (
    CheckContext,
    Member,
    expected_hardware,
    join_names,
    short_time,
)
from gristmill.bench.finding import Finding, problem

COLUMNS = 1024
"""Elements of a row; every message is a whole number of rows."""
_SECONDS = 0.3
"""Duration of each measurement."""
_MAX_CALLS = 100
FAR_BELOW = 0.5
"""Share of the expected bandwidth of a kind of GPU; less indicates a fault."""
FAR_SLOWER = 0.7
"""Share of the median; slower links are reported."""


@dataclass(frozen=True)
class Sizes:
    """Message sizes in bytes."""

    all_reduce: Sequence[int]
    others: Sequence[int]

    @classmethod
    def of(cls, *, on_gpus: bool, limit: int | None = None) -> Sizes:
        """Up to `limit` bytes, if given."""
        steps = [12, 16, 20, 24, 27, 30] if on_gpus else [12, 16, 20, 24]
        sizes = [2**power for power in steps]
        two = [2**20, 2**26] if on_gpus else [2**16, 2**22]
        limit = limit or max(sizes)
        all_reduce = [size for size in sizes if size <= limit] or sizes[:1]
        return cls(all_reduce, [size for size in two if size <= limit] or sizes[:1])


# Torch 2.13 renamed both.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Collective:
    """A kind of collective: how to call it, and the correct result.

    Input and output consist of equal chunks. A chunk holds `factor * pattern`, where the pattern
    follows from the position alone."""

    name: str
    call: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]
    """Takes output, input and group."""
    bus_factor: Callable[[int], float]
    """Bus bandwidth over algorithm bandwidth."""
    input_factors: Callable[[int, int], list[int]]
    """The factor of each input chunk, for a rank of n processes."""
    output_factors: Callable[[int, int], list[int]]
    """The factor of each output chunk, for a rank of n processes."""
    chunks: tuple[Callable[[int], int], Callable[[int], int]]
    """The number of chunks of input and output, 1 or n."""


def _factor(rank: int) -> int:
    """Sums over up to 4,000 processes stay below 2^24, so fp32 is exact."""
    return rank % 64 + 1


def _total(n: int) -> int:
    return sum(map(_factor, range(n)))


def _all_reduce(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(output, group=group)


def _all_gather(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    if output.is_cuda:
        _gather_flat(output, input, group=group)
    else:
        dist.all_gather(list(output.chunk(group.size())), input, group=group)


def _reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    _reduce_scatter_flat(output, input, group=group)


def _all_to_all(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(output, input, group=group)


def _broadcast(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.broadcast(output, group=group, group_src=0)


def _n(n: int) -> int:
    return n


def _1(n: int) -> int:
    return 1


def _all_but_own(n: int) -> float:
    return (n - 1) / n


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(
            "all-reduce",
            _all_reduce,
            lambda n: 2 * (n - 1) / n,
            lambda rank, n: [_factor(rank)],
            lambda rank, n: [_total(n)],
            (_1, _1),
        ),
        Collective(
            "all-gather",
            _all_gather,
            _all_but_own,
            lambda rank, n: [_factor(rank)],
            lambda rank, n: [_factor(peer) for peer in range(n)],
            (_1, _n),
        ),
        Collective(
            "reduce-scatter",
            _reduce_scatter,
            _all_but_own,
            lambda rank, n: [_factor(rank)] * n,
            lambda rank, n: [_total(n)],
            (_n, _1),
        ),
        Collective(
            "all-to-all",
            _all_to_all,
            _all_but_own,
            lambda rank, n: [_factor(rank + peer) for peer in range(n)],
            lambda rank, n: [_factor(peer + rank) for peer in range(n)],
            (_n, _n),
        ),
        Collective(
            "broadcast",
            _broadcast,
            lambda n: 1.0,
            lambda rank, n: [_factor(rank)],
            lambda rank, n: [_factor(0)],
            (_1, _1),
        ),
    )
}
IN_PLACE = ("all-reduce", "broadcast")


# ------------------------------------------------------------------ measurement


def measure_collectives(context: CheckContext, sizes: Sizes | None = None) -> list[dict[str, Any]]:
    """A row for each collective, scope and size; on rank 0."""
    sizes = sizes or Sizes.of(on_gpus=context.on_gpus)
    rows = []
    for scope, ranks, participates in _scopes(context):
        for name, collective in COLLECTIVES.items():
            for size in sizes.all_reduce if name == "all-reduce" else sizes.others:
                context.report_progress(f"{name} of {format_bytes(size)}, {scope}")
                group = context.group(ranks, scope) if participates else None
                own = None if group is None else _measure(context, collective, group, size)
                results = context.control.gather(own)
                if context.control.is_rank0:
                    rows += _rows(scope, name, results)
    return rows


def _scopes(context: CheckContext) -> Iterator[tuple[str, list[int], bool]]:
    """Each scope, the ranks of this process's group in it, and whether it participates."""
    rank, nodes = context.world.rank, list(context.nodes.values())
    world = list(range(len(context.members)))
    if len(world) > 1:
        yield "all", world, True
    if len(nodes) == 1:
        return
    if any(len(ranks) > 1 for ranks in nodes):
        yield "inside", next(ranks for ranks in nodes if rank in ranks), True
    if len(nodes) < len(world):
        local = next(ranks.index(rank) for ranks in nodes if rank in ranks)
        on_all = local < min(map(len, nodes))
        yield "across", [ranks[local] for ranks in nodes] if on_all else [rank], on_all


def _measure(
    context: CheckContext, collective: Collective, group: dist.ProcessGroup, size: int
) -> dict[str, Any]:
    """The time of a collective on this rank, and the number of wrong values."""
    device, n, rank = context.world.device, group.size(), group.rank()
    chunks = [count(n) for count in collective.chunks]
    rows = max(1, size // (4 * COLUMNS * max(chunks)))
    input, output = (
        torch.empty(count * rows, COLUMNS, device=device.torch_device) for count in chunks
    )
    sent, expected = collective.input_factors(rank, n), collective.output_factors(rank, n)

    def checked_call() -> tuple[int, float]:
        _fill(output if collective.name in IN_PLACE else input, sent)
        device.synchronize()
        began = time.monotonic()
        collective.call(output, input, group)
        device.synchronize()
        return _count_wrong(output, expected), time.monotonic() - began

    wrong = checked_call()[0]  # warms up
    wrong_again, seconds = checked_call()
    # Repeated sums would leave the range of fp32.
    input.zero_()
    output.zero_()
    calls = _agree_on_calls(context, group, seconds)
    device.synchronize()
    began = time.monotonic()
    for _ in range(calls):
        collective.call(output, input, group)
    device.synchronize()
    average = (time.monotonic() - began) / calls
    wrong += wrong_again + checked_call()[0]
    return {
        "ranks": n,
        "leads": rank == 0,
        "bytes": 4 * COLUMNS * rows * max(chunks),
        "calls": calls,
        "seconds": average,
        "wrong": wrong,
        "host": context.member.host,
        "rank": context.member.rank,
    }


def _agree_on_calls(context: CheckContext, group: dist.ProcessGroup, seconds: float) -> int:
    """The number of calls to time, equal on all ranks: a surplus call would wait forever."""
    calls = max(3, min(_MAX_CALLS, round(_SECONDS / max(seconds, 1e-6))))
    count = torch.tensor([calls], dtype=torch.int64, device=context.world.device.torch_device)
    dist.all_reduce(count, dist.ReduceOp.MIN, group=group)
    return int(count)


def _pattern(rows: int, device: torch.device) -> torch.Tensor:
    """A value from 1 to 92 for each position; adjacent rows and columns differ."""
    columns = torch.arange(COLUMNS, device=device) % 61
    return (1 + columns[None] + (torch.arange(rows, device=device) % 31)[:, None]).float()


def _fill(tensor: torch.Tensor, factors: Sequence[int]) -> None:
    chunks = tensor.chunk(len(factors))
    pattern = _pattern(len(chunks[0]), tensor.device)
    for chunk, factor in zip(chunks, factors, strict=True):
        torch.mul(pattern, factor, out=chunk)


def _count_wrong(tensor: torch.Tensor, factors: Sequence[int]) -> int:
    chunks = tensor.chunk(len(factors))
    pattern = _pattern(len(chunks[0]), tensor.device)
    pairs = zip(chunks, factors, strict=True)
    return sum(int((chunk != factor * pattern).sum()) for chunk, factor in pairs)


def _rows(
    scope: str, name: str, results: Sequence[Mapping[str, Any] | None]
) -> list[dict[str, Any]]:
    """The rows of a measurement from the results of all ranks: one per node for "inside", else one
    for all."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if result is not None:
            groups.setdefault(result["host"] if scope == "inside" else "", []).append(result)
    rows = []
    for host, group in groups.items():
        n, size = group[0]["ranks"], group[0]["bytes"]
        seconds = max(result["seconds"] for result in group)
        wrong = {str(result["rank"]): result["wrong"] for result in group if result["wrong"]}
        rows.append(
            {
                "collective": name,
                "scope": scope,
                **({"host": host} if host else {}),
                "processes": n,
                "bytes": size,
                "calls": group[0]["calls"],
                "seconds": seconds,
                "algorithm_bandwidth": size / seconds,
                "bus_bandwidth": COLLECTIVES[name].bus_factor(n) * size / seconds,
                "wrong": wrong,
            }
        )
    return rows


# ------------------------------------------------------------------ findings


def judge_collectives(
    rows: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """Wrong results first; then the bandwidth against the expected one of these GPUs."""
    if not rows:
        yield Finding("collectives", "skipped: there is only one process")
        return
    yield from _judge_results(rows, members)
    for scope in dict.fromkeys(row["scope"] for row in rows):
        yield from _judge_scope([row for row in rows if row["scope"] == scope], scope, members)


def _judge_results(
    rows: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    wrong = [row for row in rows if row["wrong"]]
    if not wrong:
        yield Finding("results", f"all values in {len(rows)} measurements are correct")
        return
    ranks = sorted({int(rank) for row in wrong for rank in row["wrong"]})
    first = wrong[0]
    count = sum(first["wrong"].values())
    what = f"{first['collective']} of {format_bytes(first['bytes'])} ({first['scope']}) returned "
    what += f"{count:,} wrong values; in {len(wrong)} of {len(rows)} measurements, on "
    what += join_names([members[rank].label for rank in ranks])
    remedy = "do not train here: a GPU, its memory or a link is faulty; exclude one node at a time "
    yield problem("results", what, remedy + "to find it", exit=Exit.DEVICE)


def _judge_scope(
    rows: Sequence[Mapping[str, Any]], scope: str, members: Sequence[Member]
) -> Iterator[Finding]:
    sums = [row for row in rows if row["collective"] == "all-reduce"]
    largest, smallest = max(row["bytes"] for row in sums), min(row["bytes"] for row in sums)
    large = [row for row in sums if row["bytes"] == largest]
    small = [row for row in sums if row["bytes"] == smallest]
    slowest = min(large, key=lambda row: row["bus_bandwidth"])
    rate = slowest["bus_bandwidth"]
    name = f"all-reduce {scope}"
    where = f" on {slowest['host']}, the slowest of {len(large)} nodes" if len(large) > 1 else ""
    what = f"{rate / 1e9:.3g} GB/s bus bandwidth at {format_bytes(largest)}{where}; "
    what += f"{short_time(max(row['seconds'] for row in small))} for {format_bytes(smallest)}"
    expected = _expected_bandwidth(scope, members)
    if expected is not None:
        what += f"; {expected / 1e9:.3g} GB/s expected"
    if expected is not None and rate < FAR_BELOW * expected:
        remedy = "run again with NCCL_DEBUG=INFO, which logs the transport: NVLink (P2P), "
        remedy += "InfiniBand (NET/IB) or sockets (NET/Socket)"
        yield problem(name, what, remedy)
        return
    median = statistics.median(row["bus_bandwidth"] for row in large)
    slow = [row["host"] for row in large if row["bus_bandwidth"] < FAR_SLOWER * median]
    if slow:
        what += f"; {join_names(slow)} far below the median of {median / 1e9:.3g} GB/s"
        yield problem(name, what, "check the links of this node, or exclude it")
    else:
        yield Finding(name, what)


def _expected_bandwidth(scope: str, members: Sequence[Member]) -> float | None:
    """Bytes per second of the links that limit a scope, from the hardware table; None on CPUs."""
    hardware = expected_hardware(members[0])
    if hardware is None:
        return None
    multi_node = len({member.host for member in members}) > 1
    # Over several nodes, the links between them limit a ring, but all links of a node serve it
    # together: only "inside" and "across" measure a single link.
    if scope == "all" and multi_node:
        return None
    return hardware.between.bandwidth if scope == "across" else hardware.inside.bandwidth
