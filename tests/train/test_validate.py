"""The validation of a run by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import ValidationRecord
from gristmill.track.sinks import line, scalars
from gristmill.train.run import Run
from gristmill.train.validate import validate_run


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_it_computes_what_the_run_computed(
    make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    config = make_run(
        'train.until="6 steps"', 'validate.every="2 steps"', 'checkpoint.every="2 steps"'
    )
    Run(config).train()
    before = content(folder)
    losses = {
        one.step: one.loss
        for one in read_metrics(folder / "metrics.jsonl")
        if isinstance(one, ValidationRecord)
    }
    newest = validate_run(config)
    assert newest.record.step == 6 and newest.record.loss == losses[6]
    assert newest.recorded is not None and newest.recorded.loss == losses[6]
    assert validate_run(config, checkpoint="4").record.loss == losses[4]
    assert content(folder) == before


def test_without_a_checkpoint_the_starting_weights_are_measured(
    make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_run('train.until="2 steps"')
    with pytest.raises(UserError, match="starts from random weights"):
        validate_run(config)
    trained = Run(config).train()
    other = make_run(f'model.start="{trained.folder}"', f'folder="{tmp_path / "other"}"')
    assert validate_run(other).record.loss == validate_run(config).record.loss
    assert validate_run(other).recorded is None
    assert not (tmp_path / "other").exists()


def test_the_loss_of_the_training_text(make_run: Callable[..., RunConfig], tmp_path: Path) -> None:
    """That of windows spread over it: the same as if it were the validation text."""
    usual = ('train.until="2 steps"', 'validate.every="1 steps"', "data.split=unset")
    text = f'data.validation="{make_run(*usual).data.paths}"'
    config = make_run(*usual, text, "validate.windows=7", "validate.train_windows=7")
    Run(config).train()
    records = [
        one
        for one in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if isinstance(one, ValidationRecord)
    ]
    assert [one.step for one in records] == [0, 1, 2]
    assert all(one.train_loss == one.loss for one in records)
    assert "| train loss " in line(records[0])
    assert scalars(records[0])["validation/train_loss"] == records[0].loss
    found = validate_run(config).record
    assert found.train_loss == found.loss == records[-1].loss


def test_a_run_without_validation_text(make_run: Callable[..., RunConfig]) -> None:
    Run(make_run('train.until="1 steps"', 'data.split="100,0"')).train()
    with pytest.raises(UserError, match="no validation text"):
        validate_run(make_run('train.until="1 steps"', 'data.split="100,0"'))
