"""Parts of a preparation as tasks of Ray: a head and two nodes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.launch import tasks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
SOURCE = str(Path(tasks.__file__).parents[2])
HELD = """
import os, sys, time
from pathlib import Path
words = getattr(sys, "orig_argv", [])
if words[3:4] == ["prepare"] and words[-2:] == ["--part", "2"]:
    from gristmill.text.prepare import journal
    real = journal.Journal.save
    def save(self, *arguments):
        real(self, *arguments)
        marker = Path("held")
        if not marker.exists():
            status = Path(f"/proc/{os.getppid()}/status").read_text()
            marker.write_text(status.partition("PPid:")[2].split()[0])
            time.sleep(600)
    journal.Journal.save = save
"""
"""Holds part 2 at the first moment from which it can resume, and tells which raylet runs it."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray", reason="needs the extra ray: pip install 'gristmill[ray]'")
    from ray.cluster_utils import Cluster

    (tmp_path / "sitecustomize.py").write_text(HELD)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{SOURCE}")
    # The head has no room for parts, so that a node that runs one can be killed.
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made, nodes
    made.shutdown()


def prepare(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gristmill", "prepare", "in", "-t", "bytes", *words]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def files_of(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_node_killed_in_mid_run(tmp_path: Path, cluster: Any) -> None:
    made, nodes = cluster
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"text": "x" * (1 + n % 37)}) for n in range(200)]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    words = ["--parts", "4", "--engine", "ray", "--ray-address", made.address]
    process = prepare(tmp_path, "-o", "many/set", *words)
    held = tmp_path / "held"
    while not held.exists() or not held.read_text():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    raylet = int(held.read_text())
    (lost,) = [node for node in nodes if raylet == node.all_processes["raylet"][0].process.pid]
    made.remove_node(lost, allow_graceful=False)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    assert "part 2/4 ended with its machine; attempt 2 of 3 begins" in said
    # Nothing of Ray's own messages.
    notes = ("4 parts", "part 2/4 ended", "preparing: ", "part ")
    assert all(line.startswith(notes) for line in said.splitlines()), said
    whole = prepare(tmp_path, "-o", "one/set")
    assert whole.wait() == 0
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")


def test_no_cluster_there(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra ray: pip install 'gristmill[ray]'")
    (tmp_path / "in").write_text("text")
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "-m", "gristmill", "prepare", "in", "-o", "out/set", "-t", "bytes"]
    command += ["--parts", "4", "--engine", "ray", "--ray-address", "127.0.0.1:1"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 78
    assert result.stderr.startswith("error: --ray-address 127.0.0.1:1: no Ray cluster can be")
    assert len(result.stderr.splitlines()) == 2
