"""`gristmill launch --on pbs` and `--on mpi`: a stand-in for PBS, and a real Open MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.base.errors import Exit
from gristmill.base.process import JOB_BEGAN

if TYPE_CHECKING:
    from conftest import ClusterRun
    from pbs_cluster import PbsCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MakeClusterRun = Callable[..., "ClusterRun"]
FOUR = ("launch.nodes=2", "launch.processes_per_node=2")


def launch(
    environment: Mapping[str, str], *words: str, cwd: Path, exit: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gristmill", "launch", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == exit, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def submit(environment: Mapping[str, str], run: ClusterRun, *words: str) -> str:
    told = launch(environment, str(run.file), "--json", *words, cwd=run.file.parent)
    ids: list[str] = json.loads(told.stdout)["ids"]
    return ids[0]


@pytest.mark.slow
def test_pbs_trains_on_two_nodes(pbs: PbsCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=6)
    words = (*FOUR, "launch.account=abc", "launch.queue=prod", "launch.time=1h")
    words = (*words, 'launch.filesystems=["home"]', 'launch.resources={ system = "polaris" }')
    job = submit(pbs.environment, run, "--on", "pbs", *words)
    done = pbs.wait(job)
    log = (run.folder / f"logs/job-{job}.log").read_text()
    assert done.exit_status == 0, log
    run.assert_as_alone()
    said = launch(pbs.environment, "status", str(run.folder), cwd=run.file.parent).stdout
    assert f"job {job} (pbs): finished" in said and "done at step 6" in said
    shown = launch(pbs.environment, "logs", str(run.folder), cwd=run.file.parent).stdout
    assert "step 6/6" in shown


@pytest.mark.slow
def test_pbs_continues_in_another_job_when_the_time_is_over(
    pbs: PbsCluster, cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=12)
    # To the first job, and to no other, its time seems to be over, however fast this machine is.
    over = f"[ -e {run.file}.seen ] || {{ touch {run.file}.seen; export {JOB_BEGAN}=1; }}"
    words = (*FOUR, "launch.time=1h", f"launch.setup={json.dumps([over])}")
    first = submit(pbs.environment, run, "--on", "pbs", *words)
    ids, deadline = run.folder / "job/ids", time.monotonic() + 600
    while not (run.folder / "status.json").is_file() or run.status()["state"] != "done":
        assert time.monotonic() < deadline, [pbs.job(id) for id in ids.read_text().split()]
        time.sleep(0.5)
    jobs = ids.read_text().split()
    assert jobs[0] == first and len(jobs) == 2
    # A job that has a successor has done its part.
    assert [pbs.wait(job).exit_status for job in jobs] == [Exit.DONE] * len(jobs)
    assert list(run.losses()) == list(range(1, run.steps + 1))
    run.assert_as_alone()


@pytest.mark.slow
def test_pbs_cancels_politely(pbs: PbsCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5000)
    job = submit(pbs.environment, run, "--on", "pbs", *FOUR)
    run.wait_for_step(5, lambda: pbs.job(job).state in ("Q", "R"))
    launch(pbs.environment, "cancel", str(run.folder), cwd=run.file.parent)
    pbs.wait(job)
    assert run.status()["state"] == "stopped"
    assert (run.folder / "job/ids").read_text().split() == [job]


def mpi_environment() -> dict[str, str]:
    return os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def state_of(run: ClusterRun, environment: Mapping[str, str]) -> str:
    words = [sys.executable, "-m", "gristmill", "launch", "status", str(run.folder), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    phase: str = json.loads(done.stdout)["job"]["phase"]
    return phase


@pytest.mark.slow
def test_mpiexec_trains_in_the_background(mpiexec: list[str], cluster_run: MakeClusterRun) -> None:
    run, environment = cluster_run(steps=12), mpi_environment()
    submit(environment, run, "--on", "mpi", "launch.processes_per_node=2")
    run.wait_for_step(12, lambda: True)
    while state_of(run, environment) == "running":
        time.sleep(0.2)
    assert run.status()["state"] == "done"
    assert "2 processes" in (run.folder / "train.log").read_text()
    run.assert_as_alone()


@pytest.mark.slow
def test_mpiexec_is_cancelled_politely(mpiexec: list[str], cluster_run: MakeClusterRun) -> None:
    run, environment = cluster_run(steps=5000), mpi_environment()
    submit(environment, run, "--on", "mpi", "launch.processes_per_node=2")
    run.wait_for_step(5, lambda: state_of(run, environment) == "running")
    launch(environment, "cancel", str(run.folder), cwd=run.file.parent)
    deadline = time.monotonic() + 120
    while state_of(run, environment) == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    (log,) = (run.folder / "logs").glob("job-*.log")
    assert run.status()["state"] == "stopped", log.read_text()
    assert "asking the processes to save and stop" in log.read_text()
