"""Runs that are really killed, at random moments and in the middle of saving, and started again."""

from __future__ import annotations

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


def test_killed_at_random_moments(make_run: MakeRun, tmp_path: Path, runs: Runs) -> None:
    assert wait_for(in_child(lambda: run_training(make_run(*SETTINGS, folder="whole")))) == 0
    started = time.monotonic()
    config = make_run(*SETTINGS, folder="killed")
    rng, kills = random.Random(11), 0
    while True:
        child = in_child(lambda: run_training(config))
        if kills < 12:
            time.sleep(rng.uniform(0.05, 1.2))
            os.kill(child, signal.SIGKILL)
        code = wait_for(child)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        assert time.monotonic() - started < 200
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
