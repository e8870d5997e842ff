"""What the pods of a job in Kubernetes run, as processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from gristmill.base.errors import Exit
from gristmill.config.load import load_run
from gristmill.launch.jobs.kubernetes import Kubernetes
from gristmill.launch.jobs.submit import plan_training
from gristmill.launch.starting import free_port

if TYPE_CHECKING:
    from conftest import ClusterRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MakeClusterRun = Callable[..., "ClusterRun"]


def start_pods(run: ClusterRun, *, nodes: int, each: int) -> list[subprocess.Popen[str]]:
    words = [f"launch.nodes={nodes}", f"launch.processes_per_node={each}"]
    words += [f"launch.python={sys.executable}", "launch.container=any"]
    words += [f"launch.kubernetes.volumes={{ claim = '{run.file.parent}' }}"]
    config = load_run(run.file, words)
    text = next(iter(plan_training(config, Kubernetes(), "kubernetes").files.values()))
    [job] = [one for one in yaml.safe_load_all(text) if one["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    # What Kubernetes would mount there is beside the run file.
    command = [
        word.replace("/etc/gristmill", str(run.file.parent)) for word in container["command"]
    ]
    values = {one["name"]: one["value"] for one in container["env"]}
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **values, "JOB_COMPLETION_INDEX": str(pod)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=container["workingDir"],
            text=True,
        )
        for pod in range(nodes)
    ]


@pytest.mark.slow
def test_two_pods_train_as_one_process(cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=12)
    pods = start_pods(run, nodes=2, each=2)
    outputs = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    run.assert_as_alone()
    assert "4 processes" in (run.folder / "train.log").read_text()


@pytest.mark.slow
def test_pods_save_when_they_are_evicted_and_continue(cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5000)
    pods = start_pods(run, nodes=2, each=1)
    run.wait_for_step(5, lambda: all(pod.poll() is None for pod in pods))
    # One pod is asked to leave its node; the other stops with it.
    pods[1].send_signal(signal.SIGTERM)
    outputs = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [Exit.STOPPED, Exit.STOPPED], outputs
    saved = run.status()["step"]
    pods = start_pods(run, nodes=2, each=1)
    run.wait_for_step(saved + 5, lambda: all(pod.poll() is None for pod in pods))
    for pod in pods:
        pod.send_signal(signal.SIGTERM)
    for pod in pods:
        pod.communicate(timeout=300)
    assert f"step {saved}" in (run.folder / "train.log").read_text()


@pytest.mark.slow
def test_a_pod_that_lost_another_is_not_to_blame(cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5000)
    pods = start_pods(run, nodes=2, each=2)
    run.wait_for_step(5, lambda: all(pod.poll() is None for pod in pods))
    [victim] = [
        int(file.parent.name)
        for file in Path("/proc").glob("[0-9]*/environ")
        if _parent(file.parent) == pods[1].pid and b"\0RANK=3\0" in file.read_bytes()
    ]
    os.kill(victim, signal.SIGKILL)
    outputs = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [Exit.PEER, 128 + 9], outputs
    assert "rank 3 of 4" in outputs[1]


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
