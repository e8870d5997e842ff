"""Runs of several processes that stop and go on: on the same layout to the bit, on any other within
rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.stored import stored_tensors
from gristmill.config.schema import RunConfig
from gristmill.train.run import run_training
from gristmill.train.stop import StopRequest

if TYPE_CHECKING:
    from conftest import Runs

Crowd = Callable[..., list[Any]]
MakeRun = Callable[..., RunConfig]

SETTINGS = (
    'train.until="12 steps"',
    "model.layers=4",
    "model.width=32",
    "model.heads=4",
    "model.context=16",
    "train.batch=8",
    "train.accumulate=2",
    "optim.lr=1e-3",
    "optim.eps=1e-4",
    'validate.every="6 steps"',
    'checkpoint.every="100 steps"',
    'parallel.timeout="30s"',
)


def go_on(config: RunConfig, stop_at: int | None, asked: int | None = None) -> int:
    """Train until a step, at which one process or all of them are asked to stop."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    real, steps = StopRequest.check_time, 0

    def check(self: StopRequest, *, reserve: float) -> None:
        nonlocal steps
        steps += 1
        if steps == stop_at and asked in (None, rank):
            self.reason = "the test"
        real(self, reserve=reserve)

    StopRequest.check_time = check  # type: ignore[method-assign]
    try:
        return int(run_training(config).exit)
    finally:
        StopRequest.check_time = real  # type: ignore[method-assign]


LAYOUTS = [
    (1, ""),
    (2, "dp_shard=2"),
    (2, "tp=2"),
    (4, "pp=2 dp_replicate=2"),
    (2, "cp=2"),
    (4, "dp_shard=2 tp=2"),
    (1, ""),
    (2, 'pp=2 schedule="interleaved"'),
    (2, ""),
    (1, ""),
]


def words(settings: str) -> list[str]:
    return [f"parallel.{word}" for word in settings.split()]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_moves_from_layout_to_layout(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs, optimizer: str
) -> None:
    """Each layout makes one step more; Muon's moments are whole where its matrices are divided."""
    own = {
        "adamw": ("model.tie_head=true",),
        "muon": ('optim.type="muon"', 'optim.normalise="neurons"', "model.tie_head=false"),
    }[optimizer]
    settings = [word for word in SETTINGS if optimizer == "adamw" or "eps" not in word]
    settings = [*settings, *own, 'train.until="10 steps"', 'validate.every="1 steps"']
    run_training(make_run(*settings, folder="whole"))
    chosen = LAYOUTS if optimizer == "adamw" else LAYOUTS[1:6]
    for processes, layout in chosen:
        config = make_run(*settings, *words(layout), folder="moving")
        if processes == 1:
            go_on(config, 1)
        else:
            answers = crowd(processes, go_on, config, 1)
            assert set(answers) <= {int(Exit.STOPPED), int(Exit.DONE)}
    whole, moving = (
        [line for line in runs.history(tmp_path / name) if line["kind"] in ("step", "validation")]
        for name in ("whole", "moving")
    )
    done = len(moving)
    assert done >= 2 * len(chosen)
    for one, other in zip(whole[:done], moving, strict=True):
        assert one["step"] == other["step"] and one["samples"] == other["samples"]
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-5)


def test_the_same_layout_goes_on_to_the_bit(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    short = ('train.until="6 steps"', 'validate.every="3 steps"', "model.layers=2")
    settings = (*SETTINGS, *short, "model.dropout=0.1", *words("dp_shard=2 tp=2"))
    crowd(4, go_on, make_run(*settings, folder="whole"), None)
    answers = crowd(4, go_on, make_run(*settings, folder="halves"), 2, 2)
    assert answers == [int(Exit.STOPPED)] * 4, "one process was asked, and all stopped"
    assert stored_steps(tmp_path / "halves") == [3]
    crowd(4, go_on, make_run(*settings, folder="halves"), None)
    assert runs.history(tmp_path / "whole") == runs.history(tmp_path / "halves")
    one, other = (newest(tmp_path / name) for name in ("whole", "halves"))
    for kind in ("model", "optimizer"):
        left, right = stored_tensors(one, kind), stored_tensors(other, kind)
        assert left.keys() == right.keys()
        assert all(left[name].equal(right[name]) for name in left)


def stored_steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in CheckpointFolder(folder / "checkpoints").committed()]


def newest(folder: Path) -> Path:
    path = CheckpointFolder(folder / "checkpoints").newest_intact().path
    assert path is not None
    return path


def refused(config: RunConfig) -> str:
    try:
        run_training(config)
    except UserError as error:
        return str(error)
    return "nothing"


def test_what_one_process_cannot_have_is_refused_by_all(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path
) -> None:
    config = make_run(*SETTINGS)
    from gristmill.base.files import FolderLock

    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    answers = crowd(2, refused, config)
    lock.release()
    assert answers[0] == answers[1]
    assert "rank 0" in answers[0] and "in use by process" in answers[0]


def test_a_mesh_that_does_not_fit_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match="tp 3 asks for a multiple of 3 processes, and there is 1"):
        run_training(make_run("parallel.tp=3"))
