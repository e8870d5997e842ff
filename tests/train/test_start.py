"""What the start of a run leaves behind, says and asks for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.plan.arithmetic import checkpoint_bytes
from gristmill.train.run import run_training

MakeRun = Callable[..., RunConfig]


def refuse(config: RunConfig, *, fresh: bool = False) -> None:
    with pytest.raises(UserError, match="nowhere"):
        run_training(config, fresh=fresh)


def test_a_refused_run_leaves_no_folder(make_run: MakeRun, tmp_path: Path) -> None:
    refuse(make_run("data.paths=nowhere"))
    assert not (tmp_path / "run").exists()


def test_what_was_there_before_a_refused_run_stays(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    refuse(make_run("data.paths=nowhere"))
    assert folder.is_dir()
    shutil.rmtree(folder)
    run_training(make_run('train.until="3 steps"'))
    before = sorted(folder.rglob("*"))
    refuse(make_run("data.paths=nowhere"))
    assert sorted(folder.rglob("*")) == before


def test_a_refused_fresh_start_keeps_only_the_old_run(make_run: MakeRun, tmp_path: Path) -> None:
    run_training(make_run('train.until="3 steps"'))
    refuse(make_run("data.paths=nowhere"), fresh=True)
    (old,) = tmp_path.glob("run.old-*")
    assert (old / "run.toml").is_file() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_is_as_large_as_announced(
    make_run: MakeRun, tmp_path: Path, optimizer: str
) -> None:
    config = make_run('train.until="3 steps"', f"optim.type={optimizer}", "model.width=64")
    run_training(config)
    taken = sum(
        (tmp_path / f"run/checkpoints/step-00000003/{name}.safetensors").stat().st_size
        for name in ("model", "optimizer")
    )
    announced = checkpoint_bytes(config, rows=resolve(config, vocab=257).padded_vocab)
    assert announced <= taken < 1.03 * announced


def test_momentum_that_rises_longer_than_the_run_is_said(make_run: MakeRun, tmp_path: Path) -> None:
    run_training(make_run('train.until="3 steps"', "optim.type=muon"))
    lines = (tmp_path / "run/train.log").read_text().splitlines()
    warnings = [line for line in lines if "optim.momentum_warmup, 300 steps, is longer" in line]
    assert len(warnings) == 1 and "warning" in warnings[0]
    run_training(make_run('train.until="3 steps"', folder="other"))
    assert "momentum" not in (tmp_path / "other/train.log").read_text()
