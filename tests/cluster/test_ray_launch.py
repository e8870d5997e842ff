"""Runs on a Ray of three nodes on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gristmill.base.errors import Exit

if TYPE_CHECKING:
    from conftest import ClusterRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install 'gristmill[ray]'", exc_type=ImportError
)
MakeClusterRun = Callable[..., "ClusterRun"]
LIMIT = 300


class RayCluster:
    """A head and two more nodes, with two cores each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 2, "object_store_memory": 80 << 20}
        head = {**size, "include_dashboard": True, "dashboard_port": 0}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            self._cluster.add_node(**size)
        self.address = f"http://{self._cluster.head_node.webui_url}"

    def stop(self) -> None:
        self._cluster.shutdown()

    def remove_node_with(self, processes: list[int]) -> None:
        """Kill a node that runs one of the processes, but not the head."""
        raylets = {
            one.all_processes["raylet"][0].process.pid: one for one in self._cluster.worker_nodes
        }
        for process in processes:
            while process > 1:
                if process in raylets:
                    self._cluster.remove_node(raylets[process], allow_graceful=False)
                    return
                process = parent(process)
        raise AssertionError(f"none of {processes} runs on any of {list(raylets)}")


def parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = RayCluster()
    try:
        yield made
    finally:
        made.stop()


def launch(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gristmill", "launch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def submit(run: ClusterRun, cluster: RayCluster, *words: str) -> None:
    size = ["launch.nodes=2", "launch.processes_per_node=2", f"launch.address={cluster.address}"]
    done = launch(run.file, "--on", "ray", *size, *words)
    assert done.returncode == 0, done.stderr
    # Ray's own messages are not for the user.
    assert not done.stderr and done.stdout.startswith("submitted job raysubmit_")


def job(run: ClusterRun) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(launch("status", run.folder, "--json").stdout)["job"]
    return found


def wait(run: ClusterRun) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT
    while (found := job(run))["phase"] != "ended":
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
    return found


def alive(run: ClusterRun) -> bool:
    return job(run)["phase"] != "ended"


def processes_of(run: ClusterRun) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train" in words and str(run.folder / "job/run.toml").encode() in words:
            found.append(int(entry.name))
    return found


def test_two_nodes_train_as_one_process(cluster: RayCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=12)
    submit(run, cluster)
    found, output = wait(run), launch("logs", run.folder)
    assert found["exit"] == 0, output.stdout
    run.assert_as_alone()
    assert "4 processes" in (run.folder / "train.log").read_text()
    names = [f"rank-{rank:05d}.log" for rank in range(4)]
    assert sorted(file.name for file in (run.folder / "logs").iterdir()) == names
    # The output is that of rank 0, without what Ray says.
    assert "step" in output.stdout and "entrypoint" not in output.stdout
    assert "raylet" not in output.stdout + output.stderr
    # More than the cluster has is a clear error, not a wait for ever.
    big = cluster_run(steps=12)
    words = ["launch.nodes=4", "launch.processes_per_node=2", f"launch.address={cluster.address}"]
    words += ["parallel.start_timeout=5s", f"folder={run.folder}-big"]
    assert launch(big.file, "--on", "ray", *words).returncode == 0
    big.folder = Path(f"{run.folder}-big")
    assert wait(big)["exit"] == Exit.PEER
    assert "Ray did not give 4 nodes with 2 CPU each" in launch("logs", big.folder).stdout


def test_a_cancelled_job_has_saved(cluster: RayCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5000)
    submit(run, cluster)
    run.wait_for_step(5, lambda: alive(run))
    refused = launch(run.file, "--on", "ray")
    assert refused.returncode == Exit.REFUSED and "already: RUNNING" in refused.stderr
    assert launch("cancel", run.folder).returncode == 0
    assert wait(run)["state"] == "STOPPED"
    assert run.status()["state"] == "stopped"
    assert (run.folder / f"checkpoints/step-{run.status()['step']:08d}").is_dir()


def test_a_run_survives_the_loss_of_a_node(
    cluster: RayCluster, cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=300)
    submit(run, cluster, "launch.restarts=1")
    # Asking Ray takes seconds, in which the run would come far.
    run.wait_for_step(25, lambda: True)
    cluster.remove_node_with(processes_of(run))
    found, output = wait(run), launch("logs", run.folder, "-n", "1000").stdout
    assert found["exit"] == 0, output
    assert "was lost" in output and "restarting all processes from step" in output
    run.assert_as_alone()


def test_no_cluster_is_one_clear_error(cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5)
    done = launch(run.file, "--on", "ray", "launch.address=http://127.0.0.1:9")
    assert done.returncode == Exit.PEER
    assert done.stderr.startswith("error: launch.address: no Ray cluster answers at")
    assert "Traceback" not in done.stderr and not run.folder.exists()
