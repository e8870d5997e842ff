"""Going on from another run, stopping at intervals, and Megatron's rate after skipped steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StepRecord
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]
SHORT = 'train.until="9 steps"'


def said(folder: Path) -> str:
    records = read_metrics(folder / "metrics.jsonl")
    return "\n".join(record.text for record in records if isinstance(record, EventRecord))


def steps(folder: Path) -> list[StepRecord]:
    return [one for one in read_metrics(folder / "metrics.jsonl") if isinstance(one, StepRecord)]


def content(folder: Path) -> dict[str, str]:
    """Every file of a folder, by its hash."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def loading(folder: Path) -> str:
    return f"checkpoint.load={json.dumps(str(folder))}"


def test_a_run_goes_on_from_another(
    make_run: MakeRun, tmp_path: Path, stop_after: Callable[[int], None], runs: Runs
) -> None:
    whole, first = tmp_path / "whole", tmp_path / "first"
    Run(make_run(SHORT, "model.dropout=0.1", folder="whole")).train()
    stop_after(5)
    Run(make_run(SHORT, "model.dropout=0.1", folder="first")).train()
    before = content(first)
    stop_after(2)
    second = make_run(SHORT, "model.dropout=0.1", loading(first), folder="second")
    assert Run(second).train().step == 7
    assert f"resuming from {first / 'checkpoints' / 'step-00000005'}" in said(tmp_path / "second")
    # From now on its own checkpoint counts, wherever the other run is.
    stop_after(10**9)
    assert Run(second).train().exit is Exit.DONE
    assert "resuming from step-00000007" in said(tmp_path / "second")
    assert content(first) == before
    later = [one for one in runs.history(whole) if one["step"] > 5]
    assert [one for one in runs.history(tmp_path / "second") if one["step"] > 5] == later
    left, right = runs.tensors(whole), runs.tensors(tmp_path / "second")
    assert all(left[name].equal(right[name]) for name in left)


def test_another_run_with_other_data_or_another_model(
    make_run: MakeRun, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    stop_after(3)
    Run(make_run(SHORT, folder="first")).train()
    stop_after(10**9)
    load = loading(tmp_path / "first")
    Run(make_run(SHORT, load, "train.seed=4", folder="reseeded")).train()
    assert "train.seed was 1337 and is now 4: the run goes on with other data" in said(
        tmp_path / "reseeded"
    )
    assert steps(tmp_path / "reseeded")[0].step == 4
    with pytest.raises(UserError) as caught:
        Run(make_run(SHORT, load, "model.heads=1", folder="other")).train()
    assert "is of another model or optimizer" in str(caught.value)
    assert "model.heads: was 2 and is now 1" in str(caught.value)


def test_a_folder_without_a_checkpoint(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="2 steps"', loading(tmp_path / "none"), folder="new")).train()
    assert f"checkpoint.load {tmp_path / 'none'} holds no checkpoint; starting at step 0" in said(
        tmp_path / "new"
    )
    assert not (tmp_path / "none").exists()
    megatron = tmp_path / "megatron"
    megatron.mkdir()
    (megatron / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(UserError, match="a checkpoint of Megatron, of which only the weights"):
        Run(make_run(loading(megatron), folder="refused")).train()


def test_a_damaged_checkpoint_of_another_run_is_passed_over(
    make_run: MakeRun, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    Run(make_run('train.until="4 steps"', 'checkpoint.every="2 steps"', folder="first")).train()
    newest = first / "checkpoints" / "step-00000004" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    before = content(first)
    Run(make_run('train.until="5 steps"', loading(first), folder="second")).train()
    assert "passed over the damaged checkpoint" in said(tmp_path / "second")
    assert [one.step for one in steps(tmp_path / "second")] == [3, 4, 5]
    assert content(first) == before


def test_its_own_folder_is_no_other_run(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.load: has no effect on the run's own folder"):
        make_run(loading(tmp_path / "run"))


def test_a_run_stops_at_every_multiple(make_run: MakeRun, tmp_path: Path, runs: Runs) -> None:
    Run(make_run(SHORT, folder="whole")).train()
    parted = make_run(SHORT, 'train.exit_every="4 steps"', folder="parted")
    outcomes = [Run(parted).train() for _ in range(3)]
    assert [(one.exit, one.step) for one in outcomes] == [
        (Exit.STOPPED, 4),
        (Exit.STOPPED, 8),
        (Exit.DONE, 9),
    ]
    assert "stopping after train.exit_every = 4 steps" in said(tmp_path / "parted")
    runs.assert_same(tmp_path / "whole", tmp_path / "parted")


FP16 = (
    SHORT,
    'precision.compute="fp16"',
    # Far too high: several steps overflow before it fits.
    "precision.loss_scale.initial=1e6",
    "precision.loss_scale.hysteresis=1",
    'schedule.type="linear"',
    'schedule.warmup="4 steps"',
    'schedule.convention="megatron"',
    'track.log_format="megatron"',
)


def test_skipped_steps_hold_the_rate_and_the_log_is_megatrons(
    make_run: MakeRun,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    runs: Runs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_run(*FP16, folder="whole")
    Run(config).train()
    found, peak = steps(tmp_path / "whole"), config.optim.lr
    skips = [one.skipped for one in found]
    updates = [one.step - one.skipped for one in found]
    assert 2 < skips[-1] < 8, "some steps overflow, and some do not"
    before = [0, *updates[:-1]]
    expected = [peak * done / 4 if done <= 4 else peak * (9 - done) / 5 for done in before]
    assert [one.lr for one in found] == pytest.approx(expected)
    # Megatron prints what the next iteration has.
    assert [one.next_lr for one in found[:-1]] == [one.lr for one in found[1:]]
    assert [one.next_loss_scale for one in found[:-1]] == [one.loss_scale for one in found[1:]]
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:10] == " iteration"]
    assert f"learning rate: {found[-2].lr:.3E} |" in lines[-3]
    assert f"loss scale: {found[1].loss_scale:.1f} |" in lines[0]
    # How far the schedule has come is saved.
    stop_after(skips[-1] + 2)
    parted = make_run(*FP16, folder="parted")
    assert Run(parted).train().exit is Exit.STOPPED
    stop_after(10**9)
    Run(parted).train()
    runs.assert_same(tmp_path / "whole", tmp_path / "parted")
