"""Parts of a preparation as arrays of Slurm, on stand-ins for its commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gristmill.config.load import load_launch
from gristmill.launch.tasks import SlurmTasks

SBATCH = "#!/bin/bash\necho x >> arrays; wc -l < arrays\n"
"""Counts the arrays from 1."""
SCONTROL = '#!/bin/bash\ncat "shown-${@: -1}"\n'
SCANCEL = '#!/bin/bash\necho "$@" > cancelled\n'
LINE = "JobId={} ArrayJobId={} ArrayTaskId={} JobState={} ExitCode={}\n"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmTasks:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        file = tmp_path / "bin" / name
        file.write_text(text)
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return SlurmTasks(
        ["true"], logs="log-%d", at_once=None, launch=load_launch(()), folder=tmp_path / "jobs"
    )


def show(array: int, states: dict[int, tuple[str, str]]) -> None:
    """What Slurm says of an array from now on."""
    lines = [LINE.format(array + n, array, n, *state) for n, state in states.items()]
    Path(f"shown-{array}").write_text("".join(lines))


RUNNING, DONE, KILLED = ("RUNNING", "0:0"), ("COMPLETED", "0:0"), ("FAILED", "137:0")


def test_a_part_that_was_killed_is_told_once(tasks: SlurmTasks) -> None:
    """Slurm shows an ended task for minutes; told at each poll, it would use up all attempts."""
    tasks.start([1, 2, 3, 4])
    show(1, {1: DONE, 2: KILLED, 3: RUNNING, 4: RUNNING})
    assert tasks.poll() == {1: 0, 2: 137}
    assert tasks.poll() == {} and tasks.running == {3, 4}
    tasks.start([2])
    show(2, {2: RUNNING})
    assert tasks.poll() == {} and tasks.running == {2, 3, 4}
    assert tasks.jobs() == {"arrays": {"1": [3, 4], "2": [2]}}
    show(2, {2: DONE})
    assert tasks.poll() == {2: 0}, "the second attempt, although the first array has ended with it"
    assert tasks.poll() == {}


def test_a_part_that_ends_in_two_arrays_at_once_leaves_both(tasks: SlurmTasks) -> None:
    """As after a preparation of an older version, which forgot which of them had ended."""
    show(1, {2: KILLED})
    show(2, {2: RUNNING})
    assert tasks.attach({"arrays": {"1": [2], "2": [2]}}) == {2}
    assert tasks.jobs() == {"arrays": {"2": [2]}}


def test_the_parts_that_are_cancelled_are_counted_once(tasks: SlurmTasks) -> None:
    tasks.start([1, 2, 3, 4])
    show(1, {1: KILLED, 2: KILLED, 3: RUNNING, 4: RUNNING})
    tasks.poll()
    tasks.start([1, 2])
    show(2, {1: RUNNING, 2: RUNNING})
    tasks.poll()
    assert tasks.stop() == "4 parts were cancelled; their work is kept"
    assert Path("cancelled").read_text().split() == ["1", "2"]
    assert tasks.jobs() == {}


def test_a_process_that_takes_over_asks_about_what_is_left(tasks: SlurmTasks) -> None:
    show(7, {1: DONE, 2: RUNNING, 3: ("PENDING", "0:0")})
    noted = json.loads(json.dumps({"arrays": {"7": [1, 2, 3]}}))
    assert tasks.attach(noted) == {2, 3} and tasks.running == {2}
