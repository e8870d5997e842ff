"""Runs that are really killed, at random moments and in the middle of saving, and started again."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.config.schema import RunConfig
from gristmill.track.folder import RunFolder

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]
SETTINGS = ('train.until="30 steps"', "model.dropout=0.1", "train.accumulate=2")
SAVING = ('train.until="8 steps"', 'checkpoint.every="2 steps"')

CONTEXT = multiprocessing.get_context("forkserver")

WORK = """
import os, signal
silence = os.open(os.devnull, os.O_WRONLY)
os.dup2(silence, 1)

if deadly is not None:
    operation, number = deadly
    real, seen = getattr(os, operation), 0

    def instead(*args, **kwargs):
        global seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, operation, instead)

from gristmill.train.run import Run
Run(config).train()
"""


def in_child(config: RunConfig, *, deadly: tuple[str, int] | None = None) -> BaseProcess:
    """Train in a process of its own; `deadly` is the n-th call of an operation on files, instead of
    which it is killed."""
    names = {"config": config, "deadly": deadly}
    child = CONTEXT.Process(target=exec, args=(WORK, names))
    child.start()
    return child


def wait_for(child: BaseProcess) -> int:
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def steps_done(folder: Path) -> int:
    """The last step in the records of a run that may be running."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def kill_after(child: BaseProcess, folder: Path, *, steps: int, pause: float) -> None:
    """Wait until a run has made some more steps and a moment has passed, then kill it."""
    goal = steps_done(folder) + steps
    while steps_done(folder) < goal and child.is_alive():
        time.sleep(0.002)
    time.sleep(pause)
    child.kill()


KFAC = (
    'optim.preconditioner.type="kfac"',
    "optim.preconditioner.factor_every=2",
    "optim.preconditioner.inverse_every=5",
)
SOAP = (
    'optim.type="muon"',
    'optim.preconditioner.type="soap"',
    "optim.preconditioner.basis_every=3",
)


@pytest.mark.parametrize(
    "more",
    [(), *(pytest.param(one, marks=pytest.mark.slow) for one in (KFAC, SOAP))],
    ids=["adamw", "kfac", "soap-muon"],
)
def test_killed_at_random_moments(
    make_run: MakeRun, tmp_path: Path, runs: Runs, more: tuple[str, ...]
) -> None:
    assert wait_for(in_child(make_run(*SETTINGS, *more, folder="whole"))) == 0
    config = make_run(*SETTINGS, *more, folder="killed")
    rng, kills = random.Random(11), 0
    while True:
        child = in_child(config)
        kill_after(child, tmp_path / "killed", steps=rng.randint(4, 9), pause=rng.uniform(0, 0.02))
        code = wait_for(child)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    runs.assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Path]:
    """The run that others are compared with, once it was made."""
    return {}


@pytest.mark.parametrize(
    ("operation", "number"),
    [
        *(("rename", 1), ("fsync", 14), ("replace", 7)),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("rename", 3), ("fsync", 9), ("fsync", 23))
        ),
    ],
)
def test_killed_while_saving(
    make_run: MakeRun,
    tmp_path: Path,
    runs: Runs,
    undisturbed: dict[str, Path],
    operation: str,
    number: int,
) -> None:
    if not undisturbed:
        assert wait_for(in_child(make_run(*SAVING, folder="whole"))) == 0
        undisturbed["run"] = tmp_path / "whole"
    config, whole = make_run(*SAVING, folder="killed"), undisturbed["run"]
    assert wait_for(in_child(config, deadly=(operation, number))) == -signal.SIGKILL
    assert RunFolder(tmp_path / "killed").read_status().get("state") != "done"
    assert wait_for(in_child(config)) == 0
    runs.assert_same(whole, tmp_path / "killed")
    leftovers = [p.name for p in (tmp_path / "killed/checkpoints").iterdir() if p.name[0] == "."]
    assert leftovers == []
