"""`gristmill prepare --engine slurm` on a real Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


HELD = """
import os, sys, time
from pathlib import Path
words = getattr(sys, "orig_argv", [])
if words[3:4] == ["prepare"] and words[-2:] == ["--part", "2"]:
    from gristmill.text.prepare import journal
    real = journal.Journal.save
    def save(self, *arguments):
        real(self, *arguments)
        try:
            marker = open(os.environ["HELD_PART"], "x")
        except FileExistsError:
            return
        marker.write(str(os.getpid()))
        marker.close()
        time.sleep(600)
    journal.Journal.save = save
"""
"""Holds part 2 at the first moment from which it can resume, once."""


def texts(folder: Path, *, lines: int) -> Path:
    folder.mkdir()
    for number in range(8):
        rows = [{"text": f"grain {number} {line} " * (line % 7 + 1)} for line in range(lines)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepare(source: Path, output: Path) -> list[str]:
    program = [sys.executable, "-m", "gristmill", "prepare", str(source)]
    return [*program, "-t", "bytes", "-o", str(output)]


def parts(source: Path, output: Path, *more: str) -> list[str]:
    return [*prepare(source, output), "--parts", "8", "--engine", "slurm", *more]


def same_bytes(one: Path, other: Path) -> None:
    for ending in (".bin", ".starts", ".json", ".ledger.json"):
        assert Path(f"{one}{ending}").read_bytes() == Path(f"{other}{ending}").read_bytes(), ending


def test_an_array_gives_the_bytes_of_one_process(slurm: SlurmCluster, tmp_path: Path) -> None:
    source = texts(tmp_path / "texts", lines=200)
    subprocess.run(prepare(source, tmp_path / "whole"), check=True, capture_output=True)
    command = parts(source, tmp_path / "set", "--at-once", "4", "--launch", "time=1h")
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same_bytes(tmp_path / "set", tmp_path / "whole")
    assert not list(tmp_path.glob("*part*")) and not list(tmp_path.glob(".set.jobs*"))


@pytest.mark.slow
def test_a_coordinator_that_is_killed_finds_its_array_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    source = texts(tmp_path / "texts", lines=200)
    subprocess.run(prepare(source, tmp_path / "whole"), check=True, capture_output=True)
    # No more than one node at a time, so that it takes a while.
    command = parts(source, tmp_path / "set", "--at-once", "1", "--launch", "exclusive=true")
    first = subprocess.Popen(command, env=slurm.environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("set.part-*.json")):
        assert time.monotonic() < deadline and first.poll() is None, list(tmp_path.iterdir())
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert slurm.run("squeue", "-h", "-r"), "the array was over before"
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same_bytes(tmp_path / "set", tmp_path / "whole")
    jobs = slurm.run("scontrol", "show", "job", "--oneliner").splitlines()
    assert len([line for line in jobs if f"{tmp_path}/.set.jobs/" in line]) == 8, "one array alone"


@pytest.mark.slow
def test_a_part_whose_job_is_cancelled_runs_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    source = texts(tmp_path / "texts", lines=200)
    subprocess.run(prepare(source, tmp_path / "whole"), check=True, capture_output=True)
    command = parts(source, tmp_path / "set", "--at-once", "1", "--launch", "exclusive=true")
    running = subprocess.Popen(
        command, env=slurm.environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (ids := slurm.run("squeue", "-h", "-r", "-t", "PD", "-o", "%A_%a|%F_%K").split()):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.1)
    slurm.cancel(ids[-1].partition("|")[2])
    out, said = running.communicate(timeout=600)
    assert running.returncode == 0, out + said
    assert "attempt 2 of 3 begins" in said
    same_bytes(tmp_path / "set", tmp_path / "whole")


@pytest.mark.slow
def test_a_part_that_is_killed_runs_again_once(slurm: SlurmCluster, tmp_path: Path) -> None:
    source = texts(tmp_path / "texts", lines=200)
    subprocess.run(prepare(source, tmp_path / "whole"), check=True, capture_output=True)
    (tmp_path / "sitecustomize.py").write_text(HELD)
    held = tmp_path / "held"
    found = os.environ.get("PYTHONPATH", "")
    around = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{found}", "HELD_PART": str(held)}
    running = subprocess.Popen(
        parts(source, tmp_path / "set", "--at-once", "2"),
        env=slurm.environment | around,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not (held.exists() and held.read_text()):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.1)
    os.kill(int(held.read_text()), signal.SIGKILL)
    out, said = running.communicate(timeout=600)
    assert running.returncode == 0, out + said
    again = [line for line in said.splitlines() if line.startswith("part ") and "begins" in line]
    assert again == ["part 2/8 ended with exit status 137; attempt 2 of 3 begins"], said
    same_bytes(tmp_path / "set", tmp_path / "whole")
    jobs = slurm.run("scontrol", "show", "job", "--oneliner").splitlines()
    mine = [line for line in jobs if f"{tmp_path}/.set.jobs/" in line]
    assert len(mine) == 9, "each part once, and one of them once more"
