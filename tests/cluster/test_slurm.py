"""Runs and preparations on a real Slurm of four nodes on this machine."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
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


@pytest.mark.slow
def test_tasks_of_two_nodes_train_as_one_process(
    slurm: SlurmCluster, cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=12)
    assert not {"MASTER_ADDR", "RANK", "WORLD_SIZE"} & slurm.environment.keys()
    slurm.run("srun", "--nodes=2", "--ntasks-per-node=2", *run.command)
    run.assert_as_alone()
    assert "4 processes" in (run.folder / "train.log").read_text()


@pytest.mark.slow
def test_a_cancelled_job_has_saved(slurm: SlurmCluster, cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5000)
    job = slurm.submit(f"exec srun {shlex.join(run.command)}", "-N2", "-n2", cwd=run.file.parent)
    run.wait_for_step(5, lambda: slurm.job(job).state in ("PENDING", "RUNNING"))
    slurm.cancel(job)
    slurm.wait(job, "CANCELLED")
    status, last = run.status(), max(run.losses())
    assert (status["state"], status["step"]) == ("stopped", last)
    assert (run.folder / f"checkpoints/step-{last:08d}").is_dir()


@pytest.mark.slow
def test_a_run_resumes_after_the_loss_of_a_node(
    slurm: SlurmCluster, cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=5000)
    train = shlex.join(run.command)
    options = ("--nodes=2", "--ntasks-per-node=1", "--requeue")
    job = slurm.submit(f"srun --kill-on-bad-exit=0 {train}", *options, cwd=run.file.parent)
    run.wait_for_step(12, lambda: slurm.job(job).state in ("PENDING", "RUNNING"))
    lost = slurm.job(job).nodes[1]
    slurm.kill_node(lost)
    try:
        slurm.wait(job, "PENDING")
        last = max(run.losses())
        assert last < run.steps, "the run was over before the node was lost"
        again = slurm.wait(job, "RUNNING")
        assert again.restarts == 1 and lost not in again.nodes
        run.wait_for_step(last + 1, lambda: slurm.job(job).state == "RUNNING")
        slurm.cancel(job)
        slurm.wait(job, "CANCELLED")
    finally:
        slurm.start_node(lost)
    assert list(run.losses()) == list(range(1, max(run.losses()) + 1))
    assert "resuming from step-" in (run.folder / "train.log").read_text()


def test_an_array_prepares_in_parts_what_one_process_does(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        lines = [{"text": f"grain {number} {line} " * (line % 7 + 1)} for line in range(400)]
        body = "".join(json.dumps(line) + "\n" for line in lines)
        (texts / f"{number}.jsonl").write_text(body)
    program = [sys.executable, "-m", "gristmill"]
    prepare = [*program, "prepare", str(texts), "-t", "bytes", "-o"]
    subprocess.run([*prepare, str(tmp_path / "whole")], check=True, capture_output=True)

    # In its first life, task 3 waits to be cancelled.
    command = shlex.join([*prepare, str(tmp_path / "set"), "--parts", "8"])
    wait = 'test "$SLURM_ARRAY_TASK_ID" != 3 || sleep 3600'
    job = slurm.submit(f"{wait}; exec {command}", "--array=1-8", cwd=tmp_path)
    slurm.wait(f"{job}_3", "RUNNING")
    slurm.cancel(f"{job}_3")
    states = {task: slurm.wait(f"{job}_{task}").state for task in range(1, 9)}
    assert states == {task: "CANCELLED" if task == 3 else "COMPLETED" for task in range(1, 9)}
    merge = [*program, "tokens", "merge", str(tmp_path / "set.part-*"), "-o", str(tmp_path / "set")]
    refused = subprocess.run(merge, capture_output=True, text=True)
    assert "1 of 8 parts are not given: .part-3-of-8" in refused.stderr, refused.stderr
    assert refused.returncode == Exit.DATA

    again = slurm.submit(command, "--array=3", cwd=tmp_path)
    assert slurm.wait(f"{again}_3").state == "COMPLETED"
    subprocess.run(merge, check=True, capture_output=True)
    for ending in (".bin", ".starts", ".json", ".ledger.json"):
        merged, whole = Path(f"{tmp_path}/set{ending}"), Path(f"{tmp_path}/whole{ending}")
        assert merged.read_bytes() == whole.read_bytes(), ending
