"""A small sample of the fault campaign: nothing is lost, different or unclear."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_of_the_fault_campaign() -> None:
    """In a process of its own, which forks: this one has threads by now. One of several processes
    is disturbed in tests of their own."""
    groups = ["training", "TERM", "damaged", "disk", "poisoned", "preparing", "hostile", "wrong"]
    command = [sys.executable, "faults.py", "--count", "3", "--seed", "11", "--group", *groups]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # Damage that happens to change nothing is not counted.
    assert re.search(r"3[1-3] faults, 0 of them bad", done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_of_files_that_were_made_to_harm() -> None:
    groups = ["harm: checkpoints", "harm: tokenizers", "strange values"]
    command = [sys.executable, "faults.py", "--count", "5", "--seed", "12", "--group", *groups]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 faults, 0 of them bad" in done.stdout
