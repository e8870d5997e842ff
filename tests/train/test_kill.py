"""Runs that are really killed, at random moments and in the middle of saving, and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.config.schema import RunConfig
from gristmill.train.run import run_training

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]
SETTINGS = ('train.until="30 steps"', "model.dropout=0.1", "train.accumulate=2")


def in_child(work: Callable[[], None]) -> int:
    """Run something in a process of its own; returns its process number."""
    child = os.fork()
    if child:
        return child
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"child failed: {error!r}\n".encode())
        os._exit(1)


def wait_for(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def steps_done(folder: Path) -> int:
    """The last step in the records of a run that may be running."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def kill_after(child: int, folder: Path, *, steps: int, pause: float) -> None:
    """Wait until a run has made some more steps and a moment has passed, then kill it."""
    goal = steps_done(folder) + steps
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while steps_done(folder) < goal and os.waitid(os.P_PID, child, look) is None:
        time.sleep(0.002)
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)


def test_killed_at_random_moments(make_run: MakeRun, tmp_path: Path, runs: Runs) -> None:
    assert wait_for(in_child(lambda: run_training(make_run(*SETTINGS, folder="whole")))) == 0
    config = make_run(*SETTINGS, folder="killed")
    rng, kills = random.Random(11), 0
    while True:
        child = in_child(lambda: run_training(config))
        kill_after(child, tmp_path / "killed", steps=rng.randint(4, 9), pause=rng.uniform(0, 0.02))
        code = wait_for(child)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    runs.assert_same(tmp_path / "whole", tmp_path / "killed")


def kill_at(operation: str, number: int) -> None:
    """Arrange that this process is killed instead of its n-th flush or rename of a checkpoint."""
    real, seen = getattr(os, operation), 0

    def deadly(*args: object, **kwargs: object) -> object:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, operation, deadly)


@pytest.mark.parametrize(
    ("operation", "number"),
    [("rename", 1), ("rename", 3), ("fsync", 9), ("fsync", 14), ("fsync", 23), ("replace", 7)],
)
def test_killed_while_saving(
    make_run: MakeRun, tmp_path: Path, runs: Runs, operation: str, number: int
) -> None:
    settings = ('train.until="8 steps"', 'checkpoint.every="2 steps"')
    assert wait_for(in_child(lambda: run_training(make_run(*settings, folder="whole")))) == 0
    config = make_run(*settings, folder="killed")

    def deadly() -> None:
        kill_at(operation, number)
        run_training(config)

    assert wait_for(in_child(deadly)) == -signal.SIGKILL
    assert len(runs.history(tmp_path / "killed")) < len(runs.history(tmp_path / "whole"))
    assert wait_for(in_child(lambda: run_training(config))) == 0
    runs.assert_same(tmp_path / "whole", tmp_path / "killed")
    leftovers = [p.name for p in (tmp_path / "killed/checkpoints").iterdir() if p.name[0] == "."]
    assert leftovers == []
