"""Findings for simulated measurements: GPUs, InfiniBand, slow links."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit
from gristmill.base.process import Address
from gristmill.bench.cluster.clocks import judge_clocks
from gristmill.bench.cluster.collectives import (
    COLLECTIVES,
    COLUMNS,
    Sizes,
    _count_wrong,
    _fill,
    judge_collectives,
)
from gristmill.bench.cluster.devices import judge_devices
from gristmill.bench.cluster.members import Gpu, Member, judge_members
from gristmill.bench.cluster.network import judge_network, local_network
from gristmill.bench.cluster.pairs import judge_pairs, round_robin
from gristmill.bench.cluster.runner import CHECKS, Report
from gristmill.bench.cluster.shared_folder import judge_folder
from gristmill.bench.cluster.watchdog import CheckState, LostCheck, StackPosition
from gristmill.bench.finding import Finding
from gristmill.cli import cluster

VERSIONS = {"torch": "2.11.0+cu130", "nccl": "2.28.9", "driver": "580.65.06"}


def members(nodes: int, each: int, *, name: str = "NVIDIA H100 80GB HBM3") -> list[Member]:
    """Processes with a GPU each."""
    return [
        Member(
            rank=rank,
            local_rank=rank % each,
            host=f"n{rank // each}",
            device="cuda",
            gpu=Gpu(name, f"GPU-{rank}", 80 * 2**30, each),
            versions=VERSIONS,
        )
        for rank in range(nodes * each)
    ]


def bad(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings if not finding.good}


# ------------------------------------------------------------------ members


def test_common_values_are_reported_once_and_others_with_their_rank() -> None:
    team = members(2, 4)
    assert bad(judge_members(team)) == {}
    assert [finding.what for finding in judge_members(team)][:2] == [
        "8 on 2 nodes, 4 on each: n0, n1",
        "NVIDIA H100 80GB HBM3, 80 GiB",
    ]
    team[5] = replace(team[5], versions={**VERSIONS, "nccl": "2.27.3"})
    assert bad(judge_members(team))["nccl"].what == "2.28.9 on 7, but 2.27.3 on rank 5 on n1"
    unequal = bad(judge_members(members(2, 4)[:7]))
    assert unequal["processes"].what == "7 on 2 nodes, 3 or 4 on each: n0, n1; n1 has 3"


def test_two_processes_on_one_gpu() -> None:
    team = members(2, 2)
    team[3] = replace(team[3], gpu=team[2].gpu)
    found = bad(judge_members(team))
    assert found.keys() == {"shared GPU"}
    assert found["shared GPU"].what.startswith("rank 2 on n1, rank 3 on n1 use the same GPU")


# ------------------------------------------------------------------ network


def network(**changed: Any) -> dict[str, Any]:
    link = {"name": "ib0", "address": "10.0.0.1", "mtu": 9000, "megabits": 100_000}
    port = {"device": "mlx5_0:1", "state": "ACTIVE", "rate": "400", "link_layer": "InfiniBand"}
    setup = {
        "interface": link,
        "infiniband": [port],
        "locked_memory": None,
        "shared_memory": 2**36,
        "variables": {},
    }
    return {**setup, **changed}


@pytest.mark.parametrize(
    ("changed", "name", "says"),
    [
        ({"interface": {"name": "eth0", "mtu": 1500, "megabits": None}}, "network", "1500 on n1"),
        ({"interface": {"name": "ib0", "mtu": 9000, "megabits": 1000}}, "network", "1000 on n1"),
        (
            {"variables": {"NCCL_IB_DISABLE": "1"}},
            "InfiniBand",
            "NCCL_IB_DISABLE is set",
        ),
        ({"infiniband": []}, "InfiniBand", "n1 has 0"),
        ({"locked_memory": 65536}, "locked memory", "64 KiB for rank 1 on n1"),
        ({"shared_memory": 2**26}, "/dev/shm", "64 MiB on n1"),
        (
            {"variables": {"NCCL_ALGO": "Ring"}},
            "variables",
            "not set for most, but Ring for",
        ),
    ],
)
def test_a_node_that_is_set_up_differently(changed: dict[str, Any], name: str, says: str) -> None:
    team = members(3, 1)
    assert bad(judge_network([network()] * 3, team)) == {}
    found = bad(judge_network([network(), network(**changed), network()], team))
    assert says in found[name].what and found[name].remedy


def test_the_interface_of_this_machine() -> None:
    setup = local_network(Address("127.0.0.1", 1))
    assert setup["interface"]["address"] == "127.0.0.1"
    assert setup["interface"]["name"].startswith("lo")
    assert local_network(None)["interface"] is None
    assert local_network(Address("no.such.host.invalid", 1))["interface"] is None


# ------------------------------------------------------------------ clocks


def test_clocks() -> None:
    def clocks(*offsets: float, error: float = 1e-4) -> dict[str, dict[str, float]]:
        return {f"n{i}": {"offset": o, "error": error} for i, o in enumerate(offsets, 1)}

    assert bad(judge_clocks({})) == {} == bad(judge_clocks(clocks(0.2, -0.3)))
    # Neither is a second from rank 0, but they are from each other.
    assert (
        "n1 is 0.7s ahead, n2 is 0.7s behind" in bad(judge_clocks(clocks(0.7, -0.7)))["clocks"].what
    )
    far = bad(judge_clocks(clocks(0.0, 400.0)))["clocks"].what
    assert far.startswith("n2 is 6m40s ahead: ") and far.count(";") == 2
    assert bad(judge_clocks(clocks(1.5, error=0.4))) == {}, "it may be 0.7 s"


# ------------------------------------------------------------------ the folder


def folder(**changed: Any) -> dict[str, Any]:
    usual = {"written": 0.01, "mixtures": 0, "listed": 0.02, "refused": True, "let_in": None}
    usual |= {"speed": 1e9}
    first = {**usual, "refused": None}
    return {
        "folder": "/work/runs",
        "refused": None,
        "shared": True,
        "processes": [first, {**usual, **changed}],
    }


@pytest.mark.parametrize(
    ("changed", "name", "says"),
    [
        ({"written": 4.0}, "folder", "rank 1 on n1 saw what rank 0 wrote to /work/runs only after"),
        ({"listed": None}, "folder", "only after 10.0s"),
        ({"mixtures": 2}, "replacing", "rank 1 on n1 read a partial or missing file"),
        ({"refused": False}, "locks", "rank 1 on n1 could lock what rank 0 on n0 had locked"),
        ({"refused": None}, "locks", "does not support locks"),
        ({"let_in": False}, "locks", "rank 1 on n1 could not lock what rank 0 had released"),
        ({"speed": 1e6}, "disk speed", "1 MB/s write speed on n1, the slowest of 2 nodes"),
    ],
)
def test_a_folder_that_does_not_behave(changed: dict[str, Any], name: str, says: str) -> None:
    team = members(2, 1)
    assert bad(judge_folder(folder(), team)) == {}
    found = bad(judge_folder(folder(**changed), team))
    assert found.keys() == {name} and says in found[name].what


def test_a_folder_where_nothing_can_be_written() -> None:
    found = {"folder": "/work/runs", "refused": "Read-only file system"}
    (finding,) = judge_folder(found, members(2, 1))
    assert finding.exit is Exit.STORAGE and "Read-only file system" in finding.what


# ------------------------------------------------------------------ devices


def devices(flops: float = 7e14, **more: Any) -> dict[str, Any]:
    return {"flops": flops, "format": "bf16", "peak": 9.89e14, **more}


def test_devices() -> None:
    team = members(2, 2)
    assert bad(judge_devices([devices()] * 4, team)) == {}
    health = {"mhz": 1095, "watts": 350.2, "celsius": 86, "throttled": ["thermal"]}
    slow = bad(judge_devices([devices()] * 3 + [devices(5e14, health=health)], team))["speed"]
    assert "rank 3 on n1: 71% (1095 MHz, 350.2 W, 86 C, throttled: thermal)" in slow.what
    cpus = [replace(member, gpu=None) for member in team]
    assert bad(judge_devices([devices()] * 3 + [devices(5e14)], cpus)) == {}
    broken = devices(health={"ecc_errors": 3}, xids=["NVRM: Xid (PCI:0000:19:00): 79"])
    found = bad(judge_devices([broken, *[devices()] * 3], team))
    assert found["GPU memory"].exit is Exit.DEVICE and "79" in found["Xid"].what


def test_gpus_that_do_not_reach_each_other() -> None:
    access = {"peer_access": [[True, False], [False, True]]}
    found = bad(judge_devices([devices(**access), devices()], members(1, 2)))
    assert "GPUs 0 and 1 of n0 cannot access" in found["peer access"].what
    gaming = members(1, 2, name="NVIDIA GeForce RTX 4090")
    assert bad(judge_devices([devices(**access), devices()], gaming)) == {}, "they never do"


# ------------------------------------------------------------------ collectives


def row(scope: str, rate: float, *, host: str = "", wrong: Any = (), size: int = 2**30) -> Any:
    return {
        "collective": "all-reduce",
        "scope": scope,
        **({"host": host} if host else {}),
        "processes": 8,
        "bytes": size,
        "seconds": size / rate,
        "bus_bandwidth": rate,
        "wrong": dict(wrong),
    }


def test_slow_links_and_wrong_sums() -> None:
    team = members(4, 8)
    hosts = [row("inside", 4e11, host=f"n{node}") for node in range(4)]
    small = [row("inside", 1e8, host=f"n{node}", size=4096) for node in range(4)]
    across = [row("across", 4e10), row("across", 1e8, size=4096)]
    assert bad(judge_collectives([*small, *hosts, *across], team)) == {}
    hosts[2] = row("inside", 2.5e11, host="n2")
    found = bad(judge_collectives([*small, *hosts, *across], team))
    assert found.keys() == {"all-reduce inside"}
    assert "n2 far below the median of 400 GB/s" in found["all-reduce inside"].what
    sockets = bad(judge_collectives([row("across", 2e9), *across[1:]], team))["all-reduce across"]
    assert "2 GB/s bus bandwidth" in sockets.what and "NET/Socket" in (sockets.remedy or "")
    wrong = bad(judge_collectives([row("all", 1e11, wrong={"9": 5}), *across], team))["results"]
    assert wrong.exit is Exit.DEVICE and wrong.what.endswith("on rank 9 on n1")


@pytest.mark.parametrize("n", [2, 3, 8, 1500])
def test_expected_values_are_exact_in_fp32(n: int) -> None:
    """By plain sums over the ranks, at the largest value of the pattern."""
    for collective in COLLECTIVES.values():
        for rank in {0, 1, n - 1}:
            chunks = [count(n) for count in collective.chunks]
            assert len(collective.input_factors(rank, n)) == chunks[0]
            assert len(collective.output_factors(rank, n)) == chunks[1]
            assert max(collective.output_factors(rank, n)) * 92 < 2**24
    sent = [COLLECTIVES["reduce-scatter"].input_factors(rank, n)[1] for rank in range(n)]
    assert COLLECTIVES["reduce-scatter"].output_factors(1, n) == [sum(sent)]
    crossed = [COLLECTIVES["all-to-all"].input_factors(rank, n)[1] for rank in range(n)]
    assert COLLECTIVES["all-to-all"].output_factors(1, n) == crossed


def test_a_wrong_value_is_counted_at_any_position() -> None:
    tensor = torch.empty(6, COLUMNS)
    _fill(tensor, [3, 5])
    assert _count_wrong(tensor, [3, 5]) == 0
    assert _count_wrong(tensor, [5, 3]) == tensor.numel()
    assert _count_wrong(tensor.roll(1, dims=1), [3, 5]) > tensor.numel() / 2
    assert _count_wrong(tensor.roll(1, dims=0), [3, 5]) > tensor.numel() / 2
    tensor[4, 77] += 1
    assert _count_wrong(tensor, [3, 5]) == 1
    tensor[2, 5] = math.nan
    assert _count_wrong(tensor, [3, 5]) == 2


def test_sizes() -> None:
    assert max(Sizes.of(on_gpus=True).all_reduce) == 2**30
    assert Sizes.of(on_gpus=False, limit=2**16).all_reduce == [2**12, 2**16]


# ------------------------------------------------------------------ pairs


@pytest.mark.parametrize("count", range(2, 12))
def test_every_pair_meets_once(count: int) -> None:
    rounds = round_robin(count)
    assert len(rounds) == count - 1 + count % 2
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(combinations(range(count), 2))
    for pairs in rounds:
        active = [participant for pair in pairs for participant in pair]
        assert len(active) == len(set(active)) == count - count % 2


def pair(a: int, b: int, rate: float = 4e10, *, wrong: int = 0) -> dict[str, Any]:
    values = {"ranks": [a, b], "bytes": 2**26, "latency": 1e-5, "bandwidth": rate}
    return {**values, "wrong": wrong}


def test_slow_pairs_are_named_and_the_node_they_have_in_common() -> None:
    team = members(5, 1)
    pairs = list(combinations(range(5), 2))
    assert bad(judge_pairs([pair(a, b) for a, b in pairs], team)) == {}
    link = bad(
        judge_pairs([pair(a, b, 1e10 if (a, b) == (1, 3) else 4e10) for a, b in pairs], team)
    )
    assert "far slower: n1 and n3 25%" in link["pairs"].what
    assert "cables and switches" in (link["pairs"].remedy or "")
    one_node = [pair(a, b, 1e10 if 2 in (a, b) else 4e10) for a, b in pairs]
    node = bad(judge_pairs(one_node, team))
    assert (node["pairs"].remedy or "").startswith("n2 is slow with most others")
    wrong = [pair(a, b, wrong=int(b == 4 and a == 0)) for a, b in pairs]
    found = [finding for finding in judge_pairs(wrong, team) if not finding.good]
    assert found[0].exit is Exit.DEVICE and "between n0 and n4 arrived corrupted" in found[0].what
    assert statistics.median(row["bandwidth"] for row in wrong) == 4e10


# ------------------------------------------------------------------ the whole


def test_the_worst_finding_gives_the_status() -> None:
    report = Report()
    assert report.exit == 0
    for status in (1, Exit.STORAGE, Exit.PEER, Exit.DEVICE):
        report.add("folder", [Finding("folder", "bad", False, "do", status)], None, 0.0)
        assert report.exit == status
    assert report.as_json()["good"] is False and report.as_json()["complete"] is False


def test_the_likely_cause_of_a_check_that_did_not_finish() -> None:
    team = members(4, 1)
    waiting = StackPosition("pairs.py:9, in ping", True)
    busy = StackPosition("folder.py:7, in write", False)

    def cause(ranks: list[CheckState | None], **changed: StackPosition | None) -> str:
        answers = dict.fromkeys(range(4), waiting)
        answers |= {int(name[1:]): position for name, position in changed.items()}
        positions = {rank: answer for rank, answer in answers.items() if answer is not None}
        states = {rank: state for rank, state in enumerate(ranks) if state is not None}
        return LostCheck("pairs", 60.0, states, positions).finding(team).what

    begun, ended = CheckState("begun"), CheckState("ended")
    lost = CheckState("failed", "RuntimeError: closed by peer", caused_by_peer=True)
    own = CheckState("failed", "ValueError: no")
    assert cause([begun, begun, begun, None]) == (
        "rank 3 on n3 did not reach this check within 60 seconds"
        "; rank 3 on n3 is at pairs.py:9, in ping"
    )
    assert cause([begun] * 4, r1=None) == "rank 1 on n1 did not respond within 60 seconds"
    assert cause([begun] * 4, r2=busy) == (
        "rank 2 on n2 did not finish within 60 seconds; rank 2 on n2 is at folder.py:7, in write"
    )
    assert cause([ended, begun, begun, ended]).startswith(
        "rank 1 on n1, rank 2 on n2 still waiting for each other after 60 seconds; rank 1 on n1 is"
    )
    assert cause([lost, begun, lost, lost], r1=None).startswith("rank 1 on n1 did not respond; ")
    assert cause([lost, begun, own, begun]) == (
        "rank 2 on n2 failed; error of rank 2 on n2: ValueError: no"
    )


def test_the_position_of_this_process() -> None:
    assert "test_cluster_findings" not in StackPosition.of_main_thread().location
    assert not StackPosition.of_main_thread().waiting


def test_the_command_line_knows_the_checks() -> None:
    assert tuple(CHECKS) == cluster.CHECKS
