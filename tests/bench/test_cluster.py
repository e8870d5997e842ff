"""`doctor --cluster` with real processes on simulated nodes."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import Exit
from gristmill.base.process import Address, ProcessInfo
from gristmill.bench.cluster.runner import CheckRunner

HURRY = """
import torch
torch.set_num_threads(1)
from gristmill.bench.cluster import collectives, runner, shared_folder, watchdog
from gristmill.distributed.device import Device, MatrixRate
Device.matrix_rate = lambda self: MatrixRate(1e9, 64, "fp32")
watchdog._GRACE = 1.0
collectives._SECONDS = 0.002
collectives.Sizes.of = classmethod(lambda cls, **kwargs: cls([4096, 65536], [65536]))
shared_folder._SPEED_BYTES, shared_folder.MIN_SPEED, shared_folder.MAX_DELAY = 2**20, 0.0, 60.0
"""
HOST = "import socket; socket.gethostname = lambda: {host!r}\n"
NODES = ("mill0", "mill0", "mill1", "mill1")


class Cluster:
    """Processes as a launcher would start them."""

    def __init__(self, begin: Callable[..., Any], folder: Path) -> None:
        self.begin, self.document = begin, folder / "doctor.json"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.started: list[Any] = []

    def start(
        self,
        rank: int,
        *words: object,
        nodes: tuple[str, ...] = NODES,
        first: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        local = nodes[:rank].count(nodes[rank])
        values = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        document = ("--json", self.document) if rank == 0 else ()
        self.started.append(
            self.begin(
                *("doctor", "--cluster", "--device", "cpu", *document, *words),
                env={**os.environ, **values, **(env or {})},
                first=HOST.format(host=nodes[rank]) + HURRY + first,
            )
        )

    def end(self, *, stopped: bool = False) -> tuple[list[int], dict[str, Any], str]:
        """Statuses, the document, and what rank 0 printed. The last may be stopped for good."""
        if stopped:
            self.started[0].process.join(240)
            self.started[-1].process.kill()
        done = [process.end() for process in self.started]
        self.errors = [process.stderr for process in done]
        assert self.document.is_file(), "\n".join(self.errors)
        statuses = [process.returncode for process in done]
        return statuses, json.loads(self.document.read_text()), done[0].stdout


@pytest.fixture
def cluster(begin_gristmill: Callable[..., Any], tmp_path: Path) -> Cluster:
    return Cluster(begin_gristmill, tmp_path)


def problems(document: Mapping[str, Any]) -> dict[str, str]:
    return {
        finding["name"]: finding["what"]
        for check in document["checks"].values()
        for finding in check["findings"]
        if not finding["good"]
    }


def test_two_nodes_of_two_processes(cluster: Cluster, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for rank in range(4):
        cluster.start(rank, "--folder", shared)
    statuses, document, said = cluster.end()
    # Two links on two nodes that share a CPU may differ: nothing else may be wrong.
    assert problems(document).keys() <= {"all-reduce inside"}, cluster.errors
    assert len(set(statuses)) == 1 and statuses[0] == document["exit"] in (0, 1)
    assert (document["format"], document["kind"]) == (1, "gristmill doctor --cluster")
    assert document["complete"] and document["good"] == (statuses[0] == 0)
    assert [member["host"] for member in document["members"]] == list(NODES)
    assert [member["rank"] for member in document["members"]] == [0, 1, 2, 3]
    assert list(document["checks"]) == [
        *("processes", "network", "clocks", "folder", "devices", "collectives", "pairs")
    ]
    for check in document["checks"].values():
        assert check.keys() == {"seconds", "numbers", "findings"} and check["findings"]
        assert check["findings"][0].keys() == {"name", "what", "good", "remedy"}

    numbers = {name: check["numbers"] for name, check in document["checks"].items()}
    rows = numbers["collectives"]
    sizes = {(row["scope"], row["collective"], row["bytes"], row.get("host")) for row in rows}
    assert len(sizes) == len(rows) == (2 + 4) * 4
    assert {row["processes"] for row in rows if row["scope"] == "all"} == {4}
    assert {row["host"] for row in rows if row["scope"] == "inside"} == {"mill0", "mill1"}
    assert all(row["wrong"] == {} and row["seconds"] > 0 for row in rows)
    factors = {"all-reduce": 1.5, "all-gather": 0.75, "broadcast": 1.0}
    for row in rows:
        if row["scope"] == "all" and row["collective"] in factors:
            ratio = row["bus_bandwidth"] / row["algorithm_bandwidth"]
            assert ratio == pytest.approx(factors[row["collective"]])
            assert row["algorithm_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])
    assert [row["ranks"] for row in numbers["pairs"]] == [[0, 2]]
    assert numbers["clocks"].keys() == {"mill1"}
    # It is the same clock, so only what the measurement itself cannot tell may be left.
    clock = numbers["clocks"]["mill1"]
    assert abs(clock["offset"]) <= clock["error"] + 1e-3
    assert numbers["folder"]["shared"] and len(numbers["folder"]["processes"]) == 4
    assert [result["refused"] for result in numbers["folder"]["processes"]] == [
        None,
        True,
        True,
        True,
    ]
    assert list(shared.iterdir()) == [], "nothing stays in the folder"
    assert len(numbers["network"]) == len(numbers["devices"]) == 4
    assert "4 on 2 nodes, 2 on each: mill0, mill1" in said


WRONG = """
import torch.distributed as dist
right = dist.all_reduce
def wrong(tensor, *given, **named):
    work = right(tensor, *given, **named)
    if tensor.dtype == torch.float32:
        tensor.view(-1)[7] += 1
    return work
dist.all_reduce = wrong
"""


def test_a_wrong_sum_is_the_worst_that_is_found(cluster: Cluster) -> None:
    nodes = ("mill0", "mill1", "mill2")
    for rank in range(3):
        first = WRONG if rank == 1 else ""
        cluster.start(rank, "--only", "collectives", nodes=nodes, first=first)
    statuses, document, said = cluster.end()
    assert statuses == [Exit.DEVICE] * 3 and not document["good"]
    # Two sizes and "all" only, since each node has one process; three attempts each.
    assert "all-reduce of 4 KiB (all) returned 3 wrong values; in 2 of 6 measurements" in said
    assert "rank 1 on mill1" in problems(document)["results"]
    assert "rank 0" not in problems(document)["results"]
    wrong = [row["wrong"] for row in document["checks"]["collectives"]["numbers"] if row["wrong"]]
    assert wrong == [{"1": 3}, {"1": 3}]


def test_a_process_that_was_not_started_is_named(cluster: Cluster) -> None:
    for rank in (0, 1, 3):
        cluster.start(rank, "--start-timeout", "5s")
    statuses, document, said = cluster.end()
    assert statuses == [Exit.PEER] * 3
    assert "rank 2 of 4 did not join within 5 seconds; the others are on mill0, mill1" in said
    assert document["exit"] == Exit.PEER and not document["complete"]
    assert document["members"][2] is None and document["members"][3]["host"] == "mill1"


INSTEAD = """
import os, signal, time
usual = runner.CHECKS["clocks"].measure
runner.CHECKS["clocks"] = runner.Check({measure}, lambda *args: [], {limit})
"""


@pytest.mark.parametrize(
    ("act", "limit", "says"),
    [
        ("time.sleep(600)", 2, "rank 2 on mill1 did not finish within 2 seconds; rank 2 on mill1"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 2, "rank 2 on mill1 did not respond within 2"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            300,
            "rank 2 on mill1 did not respond; error of",
        ),
        ("1 / 0", 300, "rank 2 on mill1 failed; error of rank 2 on mill1: ZeroDivisionError"),
    ],
)
def test_a_process_that_does_not_finish_a_check_is_named(
    act: str, limit: int, says: str, cluster: Cluster
) -> None:
    checks = ("--only", "network", "--only", "clocks")
    for rank in range(3):
        measure = f"lambda team: {act}" if rank == 2 else "usual"
        first = INSTEAD.format(measure=measure, limit=limit)
        cluster.start(rank, *checks, nodes=NODES[:3], first=first)
    statuses, document, said = cluster.end(stopped="SIGSTOP" in act)
    assert statuses[:2] == [Exit.PEER] * 2
    assert problems(document)["clocks"].startswith(says) and says in said
    assert not document["complete"] and "network" in document["checks"], "what was found is kept"


def test_a_folder_that_is_not_shared_is_found(cluster: Cluster, tmp_path: Path) -> None:
    for rank in range(4):
        folder = tmp_path / NODES[rank]
        folder.mkdir(exist_ok=True)
        quick = "shared_folder.VISIBLE_TIMEOUT = 0.5\n"
        cluster.start(rank, "--only", "folder", "--folder", folder, first=quick)
    statuses, document, _ = cluster.end()
    assert statuses == [Exit.STORAGE] * 4
    found = problems(document)["folder"]
    assert "is not shared: mill1 did not see what rank 0 on mill0 wrote there" in found


def test_variables_that_differ_are_found(cluster: Cluster) -> None:
    for rank in range(2):
        env = {"NCCL_IB_HCA": "mlx5_0"} if rank else {"NCCL_DEBUG": "INFO"}
        cluster.start(
            rank, "--only", "network", nodes=("mill0", "mill1"), env={**env, "UCX_TLS": "tcp"}
        )
    statuses, document, said = cluster.end()
    assert statuses == [1, 1]
    assert problems(document).keys() == {"variables"}
    assert "UCX_TLS=tcp" in said and "NCCL_IB_HCA is not set for most" in said


def test_alone_on_a_machine(
    gristmill: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--processes", 2, "--device", "cpu", "--json", "found.json")
    done = gristmill("doctor", "--cluster", *words, "--only", "network", "--only", "pairs")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["good"] and len(document["members"]) == 2
    assert [row["ranks"] for row in document["checks"]["pairs"]["numbers"]] == [[0, 1]]
    assert "1 pair of processes" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


def check_alone(port: int) -> dict[str, Any]:
    """The document of the only process."""
    documents: list[Any] = []
    checks = ("network", "clocks", "collectives", "pairs")
    runner = CheckRunner(Path(), device="cpu", checks=checks, on_document=documents.append)
    assert runner.run(ProcessInfo(address=Address("127.0.0.1", port))) == 0
    return dict(documents[0])


def test_one_process_skips_collectives_and_pairs(
    crowd: Callable[..., list[Any]], cluster: Cluster
) -> None:
    (document,) = crowd(1, check_alone, cluster.port)
    assert document["good"] and document["complete"]
    assert document["checks"]["collectives"]["numbers"] == []
    assert document["checks"]["pairs"]["findings"][0]["what"].startswith("skipped")


@pytest.mark.parametrize("on", ["slurm", "pbs", "mpi"])
def test_the_job_of_a_run_becomes_one_that_checks_the_nodes(
    on: str, gristmill: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line in the guide."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        'name = "tiny"\npreset = "gpt2-nano"\ndata.paths = "tokens"\n'
        'train = { until = "20 steps", batch = 192 }\n'
        "launch = { nodes = 2, gpus_per_node = 4 }\n"
    )
    options = ["launch.hostfile=hosts"] if on == "mpi" else ["launch.time=1h"]
    done = gristmill("launch", "run.toml", "--on", on, "--dry-run", *options)
    assert done.returncode == 0, done.stderr
    changed, times = re.subn(
        r" train .*\.toml$", " doctor --cluster --json cluster.json", done.stdout, flags=re.M
    )
    assert times == 1 and "-m gristmill doctor --cluster --json cluster.json" in changed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cluster", "--only", "links"), "there is no check 'links'"),
        (("--cluster", "--folder", "nowhere"), "there is no such folder"),
        (("--cluster", "--json", "nowhere/found.json"), "there is no folder nowhere"),
        (("--cluster", "--timeout", "2s"), "2s is too short"),
        (("--cluster", "--start-timeout", "soon"), "'soon' is not a time"),
        (("--processes", "2"), "is for --cluster"),
        (("--json", "found.json"), "is for --cluster"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: tuple[str, ...], says: str, gristmill: Callable[..., Any]
) -> None:
    done = gristmill("doctor", *words)
    assert done.returncode in (Exit.USAGE, Exit.CONFIG) and says in done.stderr
