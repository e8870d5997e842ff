"""`gristmill launch --on slurm` on a real Slurm: submitted, requeued, cancelled, swept, chained."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.base.errors import Exit

if TYPE_CHECKING:
    from conftest import ClusterRun
    from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

MakeClusterRun = Callable[..., "ClusterRun"]
FOUR = ("launch.nodes=2", "launch.processes_per_node=2")


def launch(
    slurm: SlurmCluster, *words: str, cwd: Path, exit: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gristmill", "launch", *words]
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == exit, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def submit(slurm: SlurmCluster, run: ClusterRun, *words: str) -> str:
    """Submit a run; the id of its job."""
    told = launch(slurm, str(run.file), "--on", "slurm", "--json", *words, cwd=run.file.parent)
    ids: list[str] = json.loads(told.stdout)["ids"]
    return ids[0]


def log_of(run: ClusterRun, job: str) -> str:
    log = run.folder / f"logs/job-{job}.log"
    return log.read_text() if log.exists() else ""


def test_two_nodes_with_two_processes_each(
    slurm: SlurmCluster, cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=12)
    job = submit(slurm, run, *FOUR)
    assert slurm.wait(job).state == "COMPLETED", log_of(run, job)
    run.assert_as_alone()
    said = launch(slurm, "status", str(run.folder), cwd=run.file.parent).stdout
    assert f"job {job} (slurm): COMPLETED" in said and "done at step 12" in said
    assert "step 12/12" in launch(slurm, "logs", str(run.folder), cwd=run.file.parent).stdout


@pytest.mark.slow
def test_torchrun_on_each_node(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=12)
    job = submit(slurm, run, *FOUR, "launch.starter=torchrun")
    assert slurm.wait(job).state == "COMPLETED", log_of(run, job)
    run.assert_as_alone()


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["tasks", "torchrun"])
def test_a_job_whose_time_is_nearly_over_is_queued_again(
    slurm: SlurmCluster, cluster_run: MakeClusterRun, starter: str
) -> None:
    # What Slurm sends `stop_early` before the limit, sent now.
    run = cluster_run(steps=400)
    job = submit(slurm, run, *FOUR, "launch.time=1h", f"launch.starter={starter}")
    run.wait_for_step(15, lambda: slurm.job(job).state in ("PENDING", "RUNNING"))
    slurm.cancel(job, "--batch", "--signal=USR1")
    done = slurm.wait(job, "COMPLETED", timeout=600)
    log = log_of(run, job)
    assert done.restarts == 1, log
    assert "stopped and saved; queueing the job again" in log
    assert log.count("resuming from step-") == 1, log
    run.assert_as_alone()


@pytest.mark.slow
def test_the_time_limit_itself(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    # More than any machine does in that time; it ends once it has gone on in the next.
    run = cluster_run(steps=1_000_000)
    job = submit(slurm, run, *FOUR, "launch.time=2m", "launch.stop_early=30s")
    deadline = time.monotonic() + 600
    while "queueing the job again" not in log_of(run, job):
        assert time.monotonic() < deadline, log_of(run, job)
        time.sleep(1)
    run.wait_for_step(max(run.losses()) + 5, lambda: True)
    assert slurm.job(job).restarts >= 1
    slurm.cancel(job)
    slurm.wait(job)
    losses = run.losses()
    assert list(losses) == list(range(1, len(losses) + 1))


@pytest.mark.slow
def test_cancel_saves_and_the_run_goes_on(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=300)
    job = submit(slurm, run, *FOUR, "launch.time=1h")
    run.wait_for_step(15, lambda: slurm.job(job).state in ("PENDING", "RUNNING"))
    here = run.file.parent
    words = (str(run.file), "--on", "slurm", *FOUR)
    refused = launch(slurm, *words, cwd=here, exit=Exit.REFUSED)
    assert f"this run is job {job} already: RUNNING" in refused.stderr
    launch(slurm, "cancel", str(run.folder), cwd=here)
    assert slurm.wait(job).state == "CANCELLED"
    reached = run.status()["step"]
    assert run.status()["state"] == "stopped" and 15 <= reached < 300, log_of(run, job)
    said = launch(slurm, "status", str(run.folder), cwd=here, exit=Exit.STOPPED).stdout
    assert "CANCELLED" in said and f"stopped at step {reached}" in said
    again = submit(slurm, run, *FOUR)
    assert slurm.wait(again).state == "COMPLETED", log_of(run, again)
    assert f"resuming from step-{reached:08d}" in log_of(run, again)
    run.assert_as_alone()


def test_a_wrong_setting_ends_with_its_exit_status(
    slurm: SlurmCluster, cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=10)
    tokens = run.file.parent / "none"
    words = (f"data.paths={tokens}", "launch.restarts=3")
    job = submit(slurm, run, *words)
    ended = slurm.wait(job)
    assert (ended.state, ended.exit_code) == ("FAILED", Exit.DATA), log_of(run, job)
    assert "restarting" not in log_of(run, job)
    said = launch(slurm, "status", str(run.folder), cwd=run.file.parent, exit=Exit.STOPPED).stdout
    assert "exit status 65 (bad data)" in said


@pytest.mark.slow
def test_a_process_that_crashes_is_restarted(
    slurm: SlurmCluster, cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=400)
    job = submit(slurm, run, *FOUR, "launch.restarts=1")
    run.wait_for_step(15, lambda: slurm.job(job).state in ("PENDING", "RUNNING"))
    slurm.run("scancel", "--signal=KILL", f"{job}.0")
    assert slurm.wait(job).state == "COMPLETED", log_of(run, job)
    assert "restarting all processes (1 of 1)" in log_of(run, job)
    run.assert_as_alone()


@pytest.mark.slow
def test_a_lost_node_is_replaced(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=600)
    job = submit(slurm, run, *FOUR)
    run.wait_for_step(15, lambda: slurm.job(job).state in ("PENDING", "RUNNING"))
    lost = slurm.job(job).nodes[1]
    slurm.kill_node(lost)
    try:
        done = slurm.wait(job, "COMPLETED", timeout=600)
    finally:
        slurm.start_node(lost)
    assert done.restarts == 1 and lost not in done.nodes, log_of(run, job)
    run.assert_as_alone()


@pytest.mark.slow
def test_a_more_urgent_job_comes_first(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=600)
    job = submit(slurm, run, "launch.nodes=4", "launch.exclusive=true")
    run.wait_for_step(15, lambda: slurm.job(job).state in ("PENDING", "RUNNING"))
    words = ("--partition=urgent", "--nodes=4", "--exclusive")
    urgent = slurm.submit("sleep 1", *words, cwd=run.file.parent)
    assert slurm.wait(urgent).state == "COMPLETED"
    done = slurm.wait(job, "COMPLETED", timeout=600)
    log = log_of(run, job)
    assert done.restarts == 1 and "stopped and saved at step" in log, log
    run.assert_as_alone()


@pytest.mark.slow
def test_a_sweep_is_an_array(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=6)
    text = run.text.replace(f'folder = "{run.folder}"\n', "")
    run.file.write_text(text)
    here = run.file.parent
    words = (str(run.file), "--on", "slurm", "--sweep", "optim.lr=1e-3,2e-3")
    told = launch(slurm, *words, "--sweep", "train.seed=1,2", "--json", cwd=here)
    (job,) = json.loads(told.stdout)["ids"]
    for task in range(1, 5):
        assert slurm.wait(f"{job}_{task}").state == "COMPLETED"
    names = {folder.name for folder in (here / "runs").iterdir()}
    each = {f"tiny-lr-{lr}-seed-{seed}" for lr in ("1e-3", "2e-3") for seed in (1, 2)}
    assert names == {*each, "tiny-sweep"}
    rates = {
        name: next(
            json.loads(line)["lr"]
            for line in (here / "runs" / name / "metrics.jsonl").read_text().splitlines()
            if '"kind": "step"' in line
        )
        for name in each
    }
    assert sorted(set(rates.values())) == [1e-3, 2e-3]


@pytest.mark.slow
def test_jobs_in_a_chain(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=6)
    hold = slurm.submit("sleep 5", cwd=run.file.parent)
    words = (str(run.file), "--on", "slurm", "--after", hold, "--json")
    then = ("--then", f"report {run.folder}")
    told = launch(slurm, *words, *then, cwd=run.file.parent)
    train, report = json.loads(told.stdout)["ids"]
    assert slurm.job(train).state == "PENDING"
    assert slurm.wait(report).state == "COMPLETED"
    assert (run.folder / "report.html").is_file()
