"""How fast collectives are, by size, and whether what they compute is right.

    algorithm bandwidth   bytes / seconds
    bus bandwidth         the same, times what a link has to carry for one byte of n processes:
                          all-reduce 2 (n-1)/n; all-gather, reduce-scatter, all-to-all (n-1)/n;
                          broadcast 1. Comparable with the speed of the hardware, whatever n is.

Both are as nccl-tests define them, where `bytes` are those of the larger of input and output. The
time is that of the slowest process.

Every process sends whole numbers that follow from its rank and the place, small enough that fp32
adds them exactly; so each knows what it must receive, before and after the timing.

    all       all processes together
    inside    the processes of each node, all nodes at the same time
    across    the first processes of all nodes, the second ones, and so on, all at the same time
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
from gristmill.bench.cluster.members import Member, Team, named, short_time, usual_hardware
from gristmill.bench.finding import Finding, problem

COLUMNS = 1024
"""Numbers in a row; all sizes are whole rows of every process."""
_SECONDS = 0.3
"""For each measurement."""
_MOST_CALLS = 100
FAR_BELOW = 0.5
"""Of the usual bandwidth of a kind of GPU: less is a fault, and no difference of set-up."""
FAR_SLOWER = 0.7
"""Of the median; links below are named."""


@dataclass(frozen=True)
class Sizes:
    """What is measured, in bytes."""

    all_reduce: Sequence[int]
    others: Sequence[int]

    @classmethod
    def of(cls, *, on_gpus: bool, most: int | None = None) -> Sizes:
        """Up to `most` bytes, if given."""
        steps = [12, 16, 20, 24, 27, 30] if on_gpus else [12, 16, 20, 24]
        sizes = [2**power for power in steps]
        some = [2**20, 2**26] if on_gpus else [2**16, 2**22]
        limit = most or max(sizes)
        kept = [size for size in sizes if size <= limit] or sizes[:1]
        return cls(kept, [size for size in some if size <= limit] or sizes[:1])


# Torch 2.13 has renamed both.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], None]


@dataclass(frozen=True)
class Collective:
    """One kind of collective: how it is called, and what it must give.

    Numbers are `factor * pattern`, where the pattern follows from the place: of what a process
    sends in each of n equal parts, and of what it must receive."""

    name: str
    call: Call
    """With output, input and group."""
    bus: Callable[[int], float]
    """Bus bandwidth over algorithm bandwidth."""
    sends: Callable[[int, int], list[int]]
    """The factors of each part of the input of a rank of n processes."""
    receives: Callable[[int, int], list[int]]
    """Those of its output."""
    parts: tuple[Callable[[int], int], Callable[[int], int]]
    """Parts of input and output, of which the larger has n."""


def _factor(rank: int) -> int:
    """Sums of so many stay below 2^24 for 4,000 processes, so fp32 is exact."""
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


def _most_of(n: int) -> float:
    return (n - 1) / n


COLLECTIVES = {
    one.name: one
    for one in (
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
            _most_of,
            lambda rank, n: [_factor(rank)],
            lambda rank, n: [_factor(other) for other in range(n)],
            (_1, _n),
        ),
        Collective(
            "reduce-scatter",
            _reduce_scatter,
            _most_of,
            lambda rank, n: [_factor(rank)] * n,
            lambda rank, n: [_total(n)],
            (_n, _1),
        ),
        Collective(
            "all-to-all",
            _all_to_all,
            _most_of,
            lambda rank, n: [_factor(rank + part) for part in range(n)],
            lambda rank, n: [_factor(other + rank) for other in range(n)],
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


# ------------------------------------------------------------------ measuring


def measure_collectives(team: Team, sizes: Sizes | None = None) -> list[dict[str, Any]]:
    """A row for each collective, scope and size; on rank 0."""
    sizes = sizes or Sizes.of(on_gpus=team.on_gpus)
    rows = []
    for scope, ranks, takes_part in _scopes(team):
        for name, collective in COLLECTIVES.items():
            for size in sizes.all_reduce if name == "all-reduce" else sizes.others:
                team.say(f"{name} of {format_bytes(size)}, {scope}")
                group = team.group(ranks, scope) if takes_part else None
                own = None if group is None else _measure(team, collective, group, size)
                told = team.control.gather(own)
                if team.control.is_rank0:
                    rows += _rows(scope, name, told)
    return rows


def _scopes(team: Team) -> Iterator[tuple[str, list[int], bool]]:
    """Names of scopes, with the ranks of this process's group; and whether it is in one."""
    me, nodes = team.world.rank, list(team.nodes.values())
    everybody = list(range(len(team.members)))
    if len(everybody) > 1:
        yield "all", everybody, True
    if len(nodes) == 1:
        return
    if any(len(ranks) > 1 for ranks in nodes):
        yield "inside", next(ranks for ranks in nodes if me in ranks), True
    if len(nodes) < len(everybody):
        place = next(ranks.index(me) for ranks in nodes if me in ranks)
        fits = place < min(map(len, nodes))
        yield "across", [ranks[place] for ranks in nodes] if fits else [me], fits


def _measure(
    team: Team, collective: Collective, group: dist.ProcessGroup, size: int
) -> dict[str, Any]:
    """What one collective took here, and how many numbers were wrong."""
    device, n, rank = team.world.device, group.size(), group.rank()
    parts = [count(n) for count in collective.parts]
    rows = max(1, size // (4 * COLUMNS * max(parts)))
    input, output = (
        torch.empty(count * rows, COLUMNS, device=device.torch_device) for count in parts
    )
    sent, wanted = collective.sends(rank, n), collective.receives(rank, n)

    def attempt() -> tuple[int, float]:
        _fill(output if collective.name in IN_PLACE else input, sent)
        device.synchronize()
        began = time.monotonic()
        collective.call(output, input, group)
        device.synchronize()
        return _count_wrong(output, wanted), time.monotonic() - began

    wrong = attempt()[0]
    again, seconds = attempt()
    # Sums of sums would leave the range of fp32.
    input.zero_()
    output.zero_()
    calls = _agree(team, group, seconds)
    device.synchronize()
    began = time.monotonic()
    for _ in range(calls):
        collective.call(output, input, group)
    device.synchronize()
    spent = (time.monotonic() - began) / calls
    wrong += again + attempt()[0]
    return {
        "ranks": n,
        "leads": rank == 0,
        "bytes": 4 * COLUMNS * rows * max(parts),
        "calls": calls,
        "seconds": spent,
        "wrong": wrong,
        "host": team.me.host,
        "rank": team.me.rank,
    }


def _agree(team: Team, group: dist.ProcessGroup, seconds: float) -> int:
    """The number of calls to time: the same for all members, or the rest would wait for ever."""
    calls = max(3, min(_MOST_CALLS, round(_SECONDS / max(seconds, 1e-6))))
    told = torch.tensor([calls], dtype=torch.int64, device=team.world.device.torch_device)
    dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
    return int(told)


def _pattern(rows: int, device: torch.device) -> torch.Tensor:
    """A number for each place, from 1 to 92: neighbours differ, in rows and in columns."""
    columns = torch.arange(COLUMNS, device=device) % 61
    return (1 + columns[None] + (torch.arange(rows, device=device) % 31)[:, None]).float()


def _fill(tensor: torch.Tensor, factors: Sequence[int]) -> None:
    parts = tensor.chunk(len(factors))
    pattern = _pattern(len(parts[0]), tensor.device)
    for part, factor in zip(parts, factors, strict=True):
        torch.mul(pattern, factor, out=part)


def _count_wrong(tensor: torch.Tensor, factors: Sequence[int]) -> int:
    parts = tensor.chunk(len(factors))
    pattern = _pattern(len(parts[0]), tensor.device)
    return sum(
        int((part != factor * pattern).sum()) for part, factor in zip(parts, factors, strict=True)
    )


def _rows(scope: str, name: str, told: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
    """Rows of one measurement from what its processes tell: one for each node, or for all."""
    known = [one for one in told if one is not None]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in known:
        groups.setdefault(one["host"] if scope == "inside" else "", []).append(one)
    rows = []
    for host, members in groups.items():
        n, size = members[0]["ranks"], members[0]["bytes"]
        seconds = max(one["seconds"] for one in members)
        rows.append(
            {
                "collective": name,
                "scope": scope,
                **({"host": host} if host else {}),
                "processes": n,
                "bytes": size,
                "calls": members[0]["calls"],
                "seconds": seconds,
                "algorithm_bandwidth": size / seconds,
                "bus_bandwidth": COLLECTIVES[name].bus(n) * size / seconds,
                "wrong": {str(one["rank"]): one["wrong"] for one in members if one["wrong"]},
            }
        )
    return rows


# ------------------------------------------------------------------ findings


def judge_collectives(
    rows: Sequence[Mapping[str, Any]], members: Sequence[Member]
) -> Iterator[Finding]:
    """Wrong sums first; then how fast, beside what such GPUs usually reach."""
    if not rows:
        yield Finding("collectives", "one process has nobody to exchange with")
        return
    yield from _judge_sums(rows, members)
    for scope in dict.fromkeys(row["scope"] for row in rows):
        yield from _judge_scope([row for row in rows if row["scope"] == scope], scope, members)


def _judge_sums(rows: Sequence[Mapping[str, Any]], members: Sequence[Member]) -> Iterator[Finding]:
    wrong = [row for row in rows if row["wrong"]]
    if not wrong:
        yield Finding("results", f"all numbers of {len(rows)} measurements are right")
        return
    ranks = sorted({int(rank) for row in wrong for rank in row["wrong"]})
    first = wrong[0]
    count = sum(first["wrong"].values())
    what = f"{first['collective']} of {format_bytes(first['bytes'])} ({first['scope']}) gave "
    what += f"{count:,} wrong numbers; in {len(wrong)} of {len(rows)} measurements, on "
    what += named([members[rank].who for rank in ranks])
    remedy = "do not train here: a GPU, its memory or a link is faulty; leave out one node after "
    yield problem("results", what, remedy + "another to find it", exit=Exit.DEVICE)


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
    usual = _usual(scope, members)
    if usual is not None:
        what += f"; usually {usual / 1e9:.3g} GB/s"
    if usual is not None and rate < FAR_BELOW * usual:
        remedy = "run again with NCCL_DEBUG=INFO, which says by what NCCL sends: NVLink (P2P), "
        remedy += "InfiniBand (NET/IB) or sockets (NET/Socket)"
        yield problem(name, what, remedy)
        return
    median = statistics.median(row["bus_bandwidth"] for row in large)
    slow = [row["host"] for row in large if row["bus_bandwidth"] < FAR_SLOWER * median]
    if slow:
        what += f"; {named(slow)} far below the median of {median / 1e9:.3g} GB/s"
        yield problem(name, what, "look at the links of this node, or leave it out")
    else:
        yield Finding(name, what)


def _usual(scope: str, members: Sequence[Member]) -> float | None:
    """Bytes a second that the table has for the links that limit a scope; None on processors."""
    known = usual_hardware(members[0])
    if known is None:
        return None
    several = len({member.host for member in members}) > 1
    # On several nodes, the whole is limited by what is between them, but all links of a node serve
    # a ring together: only the scopes apart tell what a link does.
    if scope == "all" and several:
        return None
    return known.between.bandwidth if scope == "across" else known.inside.bandwidth
