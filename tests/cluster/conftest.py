"""Clusters to run on: a real Slurm and Open MPI, if installed, and a stand-in for PBS."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gristmill.config.load import load_text
from gristmill.train.run import Run


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


slurm_cluster = _load("slurm_cluster")
pbs_cluster = _load("pbs_cluster")

LIMIT = 300
"""Seconds that anything may take; all of it takes seconds where nothing else runs."""

RUN = """
name = "tiny"
folder = "{folder}"
model = {{ layers = 2, heads = 2, width = 16, context = 16 }}
data = {{ paths = "{tokens}", split = "90,10" }}
train = {{ until = "{steps} steps", batch = 8, accumulate = 1 }}
optim.lr = 1e-3
validate = {{ every = "{steps} steps", windows = 4 }}
checkpoint = {{ every = "10 steps", keep = 2 }}
runtime = {{ device = "cpu", threads = 1 }}
"""


class ClusterRun:
    """The run file of a small run, its command, and what it leaves behind."""

    def __init__(self, folder: Path, tokens: Path, *, steps: int) -> None:
        self.steps = steps
        self.folder = folder / "run"
        self.file = folder / "run.toml"
        self.text = RUN.format(folder=self.folder, tokens=tokens, steps=steps)
        self.file.write_text(self.text)
        self.command = [sys.executable, "-m", "gristmill", "train", str(self.file)]

    def losses(self) -> dict[int, float]:
        """The loss of every step so far."""
        metrics = self.folder / "metrics.jsonl"
        if not metrics.exists():
            return {}
        # The last line may be on its way.
        lines = metrics.read_text().rpartition("\n")[0].splitlines()
        records = [json.loads(line) for line in lines]
        return {one["step"]: one["loss"] for one in records if one["kind"] == "step"}

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return status

    def wait_for_step(self, step: int, alive: Callable[[], bool]) -> None:
        """Wait until the run has come so far."""
        deadline = time.monotonic() + LIMIT
        while max(self.losses(), default=0) < step:
            assert alive() and time.monotonic() < deadline, f"the run has not come to step {step}"
            time.sleep(0.1)

    def assert_as_alone(self) -> None:
        """All losses are those of one process, within rounding."""
        text = self.text.replace(str(self.folder), f"{self.folder}-alone")
        Run(load_text(text, place="alone.toml")).train()
        alone = ClusterRun.__new__(ClusterRun)
        alone.folder = Path(f"{self.folder}-alone")
        expected = alone.losses()
        assert list(expected) == list(range(1, self.steps + 1))
        assert self.losses() == pytest.approx(expected, abs=2e-5)


@pytest.fixture
def cluster_run(tmp_path: Path, tokens: Path) -> Callable[..., ClusterRun]:
    """A small run of so many steps."""

    def make(*, steps: int) -> ClusterRun:
        return ClusterRun(tmp_path, tokens, steps=steps)

    return make


@pytest.fixture(scope="session")
def slurm() -> Iterator[Any]:
    """A Slurm of four nodes, n1 to n4: a `SlurmCluster`."""
    reason = slurm_cluster.missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = slurm_cluster.SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def mpiexec() -> list[str]:
    """The beginning of a command line of Open MPI, on this machine alone."""
    found = shutil.which("mpiexec")
    hint = "run `make test-cluster`, or apt-get install openmpi-bin"
    if found is None:
        pytest.skip(f"Open MPI is not installed (no mpiexec): {hint}")
    version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if "Open" not in version:
        pytest.skip(f"{found} is not Open MPI: {hint}")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [found, *root, "--oversubscribe", "--bind-to", "none"]


@pytest.fixture
def pbs(tmp_path: Path) -> Iterator[Any]:
    """A stand-in for PBS with four nodes: a `PbsCluster`."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("the stand-in for PBS needs Linux: it finds the processes of a job in /proc")
    cluster = pbs_cluster.PbsCluster(tmp_path / "pbs")
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def pbs_job(pbs: Any, tmp_path: Path) -> Callable[..., Any]:
    """Run a batch script as PBS would, to its end."""

    def run(script: str, *, nodes: int = 2, ppn: int = 1) -> Any:
        file = tmp_path / "job.sh"
        file.write_text(script)
        return pbs.wait(pbs.submit(file, "-l", f"select={nodes}:mpiprocs={ppn}"))

    return run
