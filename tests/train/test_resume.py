"""A run that was stopped goes on as if it never had been."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.base.locks import FolderLock
from gristmill.checkpoint.layout import Best, CheckpointFolder, step_of
from gristmill.checkpoint.model import open_stored
from gristmill.config.load import load_run
from gristmill.config.schema import RunConfig
from gristmill.strategies.spmd import Spmd
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.training import train_tokenizer
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StepRecord, ValidationRecord
from gristmill.train.run import Run
from gristmill.train.stop import StopRequest
from gristmill.train.validation import Validate

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]


def events(folder: Path) -> str:
    records = read_metrics(folder / "metrics.jsonl")
    return "\n".join(record.text for record in records if isinstance(record, EventRecord))


SOAP = 'optim.preconditioner.type="soap"'
KFAC = (
    'optim.preconditioner.type="kfac"',
    # So that runs are stopped between two updates of both.
    "optim.preconditioner.factor_every=2",
    "optim.preconditioner.inverse_every=3",
)


FP16 = ('precision.compute="fp16"', "precision.loss_scale.window=2")
MUON = 'optim.type="muon"'

RESUMED = {
    "plain": [],
    "dropout": ["model.dropout=0.2", 'train.recompute="full"'],
    "accumulate": ["train.accumulate=2", 'data.order="random"'],
    "fp16": [*FP16],
    "foreground": ['schedule.type="warmup-stable-decay"', "checkpoint.background=false"],
    "muon": [MUON, 'optim.momentum_warmup="9 steps"', 'optim.normalise="neurons"'],
    "accum": ['optim.type="accum-adamw"', "optim.accum=3"],
    "kfac": [*KFAC, 'optim.preconditioner.method="eigen"'],
    "sgd": ['optim.type="sgd"'],
    "soap": [SOAP, "optim.preconditioner.basis_every=3"],
}
MORE_RESUMED = {
    "bf16": ['precision.compute="bf16"'],
    "muon-heads": [MUON, "optim.cautious=true", "model.kv_heads=1", "model.tie_head=false"],
    "muon-fp16": [MUON, *FP16],
    "accum-fp16": ['optim.type="accum-adam"', *FP16],
    "kfac-fp16": [*KFAC, 'precision.compute="fp16"'],
    "kfac-muon": [*KFAC, MUON, 'optim.preconditioner.sides="input"'],
    "soap-muon-fp16": [SOAP, MUON, *FP16],
}
"""Where there is time for them."""


@pytest.mark.parametrize(
    "settings",
    [
        *(pytest.param(words, id=name) for name, words in RESUMED.items()),
        *(
            pytest.param(words, id=name, marks=pytest.mark.slow)
            for name, words in MORE_RESUMED.items()
        ),
    ],
)
def test_stopped_and_resumed_equals_uninterrupted(
    make_run: MakeRun,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    settings: list[str],
    runs: Runs,
) -> None:
    whole, parted = make_run(*settings, folder="whole"), make_run(*settings, folder="parted")
    assert Run(whole).train().exit is Exit.DONE
    stop_after(5)
    first = Run(parted).train()
    assert first.exit is Exit.STOPPED
    assert first.step == 5  # nothing is lost by a polite stop
    stop_after(2)
    assert Run(parted).train().step == 7
    stop_after(10**9)
    assert Run(parted).train().exit is Exit.DONE
    runs.assert_same(tmp_path / "whole", tmp_path / "parted")


def test_the_records_of_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    outcome = Run(make_run()).train()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [r for r in records if isinstance(r, StepRecord)]
    validations = [r for r in records if isinstance(r, ValidationRecord)]
    assert [r.step for r in steps] == list(range(1, 13))
    assert [r.step for r in validations] == [0, 4, 8, 12]
    assert steps[-1].tokens == 12 * 4 * 24
    assert validations[-1].loss < validations[0].loss
    assert outcome.best_loss == min(r.loss for r in validations)
    assert all(r.tokens_per_second > 0 and r.grad_norm > 0 for r in steps)
    folder = tmp_path / "run"
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    assert json.loads((folder / "environment.json").read_text())["torch"] == torch.__version__
    assert (folder / "origin.txt").read_text().count("\n") == 1
    assert "step 12" in (folder / "train.log").read_text()


def test_the_best_checkpoint_is_the_one_with_the_best_loss(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """Also when the end of the run was saved before it was validated."""
    Run(make_run('validate.every="5 steps"', 'checkpoint.every="4 steps"')).train()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = {r.loss: r.step for r in records if isinstance(r, ValidationRecord)}
    best = CheckpointFolder(tmp_path / "run" / "checkpoints").best()
    assert best is not None
    assert best.step == losses[min(losses)] == 12
    assert best.loss == min(losses)


@pytest.mark.parametrize("keep", ["true", "false"])
def test_the_best_loss_is_known_though_the_run_was_killed_before_it_was_marked(
    make_run: MakeRun,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    runs: Runs,
    keep: str,
) -> None:
    """A later loss that is worse, but better than the one marked last, is not the best."""
    losses, mark = iter([9.0, 5.0, 3.0, 4.0]), CheckpointFolder.mark_best

    def mark_early(self: CheckpointFolder, best: Best) -> None:
        if best.step < 8:
            mark(self, best)

    monkeypatch.setattr(Spmd, "evaluate", lambda self, batches: next(losses))
    setting = f"checkpoint.keep_best={keep}"
    Run(make_run(setting, folder="whole")).train()
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFolder, "mark_best", mark_early)
        stop_after(8)
        losses = iter([9.0, 5.0, 3.0])
        Run(make_run(setting, folder="killed")).train()
    stop_after(10**9)
    losses = iter([4.0])
    Run(make_run(setting, folder="killed")).train()
    runs.assert_same(tmp_path / "whole", tmp_path / "killed")
    whole, killed = (
        CheckpointFolder(tmp_path / one / "checkpoints") for one in ("whole", "killed")
    )
    assert killed.best() == whole.best() == (Best(8, 3.0) if keep == "true" else None)


def test_a_stop_in_the_last_step_loses_no_validation(
    make_run: MakeRun, tmp_path: Path, runs: Runs, stop_after: Callable[[int], None]
) -> None:
    """Whoever asks to stop while the last step runs gets a run that is complete."""
    plain = make_run('train.until="10 steps"', folder="plain")
    Run(plain).train()
    stop_after(10)
    stopped = make_run('train.until="10 steps"')
    assert Run(stopped).train().exit is Exit.DONE
    runs.assert_same(tmp_path / "plain", tmp_path / "run")
    assert [line["step"] for line in runs.history(tmp_path / "run")][-1] == 10
    assert runs.history(tmp_path / "run")[-1]["kind"] == "validation"


def test_a_kill_before_the_last_validation_is_made_good(
    make_run: MakeRun, tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step was saved, the last validation is still to be made."""
    words = ('train.until="10 steps"', 'checkpoint.every="5 steps"')
    Run(make_run(*words, folder="plain")).train()
    real = Validate.at_end

    def killed(self: Validate, *, finished: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Validate, "at_end", killed)
    with pytest.raises(KeyboardInterrupt):
        Run(make_run(*words)).train()
    monkeypatch.setattr(Validate, "at_end", real)
    assert Run(make_run(*words)).train().exit is Exit.DONE
    assert "nothing to do" not in events(tmp_path / "run")
    runs.assert_same(tmp_path / "plain", tmp_path / "run")


def test_a_complete_run_has_nothing_to_do(make_run: MakeRun, tmp_path: Path, runs: Runs) -> None:
    config = make_run()
    Run(config).train()
    before = runs.history(tmp_path / "run")
    assert Run(config).train().exit is Exit.DONE
    assert "nothing to do" in events(tmp_path / "run")
    assert runs.history(tmp_path / "run") == before
    longer = make_run('train.until="14 steps"')
    assert Run(longer).train().step == 14
    assert "changed: train.until from '12 steps' to '14 steps'" in events(tmp_path / "run")


def test_a_written_run_file_runs_again_as_it_is(
    make_run: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    from gristmill.config.load import load_run

    config = make_run()
    Run(config).train()
    again = load_run(tmp_path / "run" / "run.toml", [f"folder={tmp_path / 'again'}"])
    Run(again).train()
    runs.assert_same(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_skipped_and_said_so(
    make_run: MakeRun,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    name: str,
    runs: Runs,
) -> None:
    whole, config = make_run(folder="whole"), make_run()
    Run(whole).train()
    stop_after(8)
    Run(config).train()
    file = tmp_path / "run" / "checkpoints" / "step-00000008" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    stop_after(10**9)
    Run(config).train()
    text = events(tmp_path / "run")
    assert "resuming from step-00000006" in text
    assert "skipped damaged checkpoint step-00000008" in text
    assert f"{name}: has changed bytes" in text
    assert (tmp_path / "run/checkpoints/damaged-step-00000008").is_dir()
    runs.assert_same(tmp_path / "whole", tmp_path / "run")


def test_all_checkpoints_damaged_is_an_error_that_changes_nothing(
    make_run: MakeRun, tmp_path: Path
) -> None:
    config = make_run()
    Run(config).train()
    root = tmp_path / "run" / "checkpoints"
    for path in root.glob("step-*"):
        (path / "MANIFEST").write_text("")
    names = sorted(path.name for path in root.iterdir())
    with pytest.raises(UserError) as error:
        Run(config).train()
    assert error.value.exit is Exit.STORAGE
    assert "every checkpoint of this run is damaged" in str(error.value)
    assert "--fresh" in str(error.value)
    assert sorted(path.name for path in root.iterdir()) == names


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.width=32", "model.width: was 16 and is now 32"),
        ("model.layers=3", "model.layers: was 2 and is now 3"),
        ("train.seed=2", "train.seed: was 1337 and is now 2"),
        ('optim.type="muon"', "optim.type: was 'adamw' and is now 'muon'"),
        (SOAP, "optim.preconditioner.type: was None and is now 'soap'"),
        ("data.sequence=12", "data.sequence: was 24 and is now 12"),
        ('data.split="80,20"', "data.split (tokens): was"),
    ],
)
def test_a_different_run_is_refused_with_the_fields(
    make_run: MakeRun, tmp_path: Path, setting: str, message: str
) -> None:
    Run(make_run('train.until="3 steps"')).train()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(UserError) as error:
        Run(make_run('train.until="3 steps"', setting)).train()
    assert message in str(error.value)
    assert "--fresh" in str(error.value)
    after = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert before == after


def forget_setting(folder: Path, name: str) -> None:
    """Write the newest checkpoint again as a program that did not know a setting would have."""
    rewrite_state(folder, lambda state: state["identity"].pop(name))


def rewrite_state(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Commit the newest checkpoint again with another state.json."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    newest = checkpoints.committed()[-1]
    staging = checkpoints.begin(step_of(newest))
    shutil.copytree(newest, staging, dirs_exist_ok=True)
    shutil.rmtree(newest)
    (staging / "MANIFEST").unlink()
    state = json.loads((staging / "state.json").read_text())
    change(state)
    (staging / "state.json").write_text(json.dumps(state))
    checkpoints.commit(staging)


def test_a_run_from_before_a_setting_existed_goes_on(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="6 steps"')).train()
    forget_setting(tmp_path / "run", "model.embedding_norm")
    assert Run(make_run()).train().step == 12


def test_a_run_from_before_a_setting_was_taken_out_goes_on(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    Run(make_run('train.until="6 steps"')).train()

    def remember(state: dict[str, Any]) -> None:
        for name, value in (("shortcut", False), ("shifted_keys", 0)):
            state["identity"][f"model.{name}"] = state["settings"]["model"][name] = value

    rewrite_state(folder, remember)
    file = folder / "run.toml"
    gone = "[model]\nshortcut = false\nshifted_keys = 0"
    file.write_text(file.read_text().replace("[model]", gone))
    assert open_stored(str(folder)).step == 6
    assert Run(load_run(file, ['train.until="12 steps"'])).train().step == 12


def test_a_run_that_used_a_setting_that_was_taken_out_is_refused(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    Run(make_run('train.until="6 steps"')).train()

    def remember(state: dict[str, Any]) -> None:
        state["identity"]["model.shifted_keys"] = state["settings"]["model"]["shifted_keys"] = 4

    rewrite_state(folder, remember)
    with pytest.raises(UserError, match=r"model\.shifted_keys: was 4 and is now None"):
        Run(make_run()).train()
    with pytest.raises(UserError, match=r"settings\.model\.shifted_keys: Extra inputs"):
        open_stored(str(folder), checkpoint="6")
    file = folder / "run.toml"
    file.write_text(file.read_text().replace("[model]", "[model]\nshifted_keys = 4"))
    start = (f"model.start={folder}", f"folder={tmp_path / 'other'}")
    with pytest.raises(UserError, match=r"model\.shifted_keys.*: there is no such setting"):
        make_run(*start)
    with pytest.raises(UserError, match="have 4, but the setting is gone"):
        make_run(*start, "model.shifted_keys=0")


def test_other_micro_batches_are_said_to_round_otherwise(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="3 steps"')).train()
    Run(make_run('train.until="6 steps"', "train.accumulate=1")).train()
    assert "within rounding" not in events(tmp_path / "run")
    Run(make_run("train.accumulate=2")).train()
    said = "micro_batch was 4 and is now 2: losses agree only within rounding"
    assert said in events(tmp_path / "run")


@pytest.mark.parametrize(("processes", "said"), [(None, False), (8, True)])
def test_a_checkpoint_that_does_not_say_its_layout_goes_on(
    make_run: MakeRun, tmp_path: Path, processes: int | None, said: bool
) -> None:
    """It has the number of processes, if that was not 1."""
    Run(make_run('train.until="3 steps"')).train()

    def forget(state: dict[str, Any]) -> None:
        del state["layout"], state["micro_batch"]
        if processes is not None:
            state["processes"] = processes

    rewrite_state(tmp_path / "run", forget)
    assert Run(make_run('train.until="6 steps"', "train.accumulate=2")).train().step == 6
    words = "processes was 8 and is now 1: losses agree only within rounding"
    assert (words in events(tmp_path / "run")) == said
    assert ("within rounding" in events(tmp_path / "run")) == said


def test_a_setting_that_did_not_exist_cannot_be_changed(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="6 steps"')).train()
    forget_setting(tmp_path / "run", "model.embedding_norm")
    with pytest.raises(UserError, match=r"model\.embedding_norm: was False and is now True"):
        Run(make_run("model.embedding_norm=true")).train()


def test_another_tokenizer_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="3 steps"')).train()
    texts = ["the mill turns and grinds the corn into flour. " * 20] * 30
    learned = train_tokenizer(iter(texts), vocab_size=262)
    documents = [Document(text, "test") for text in texts]
    prepare_documents(documents, tokenizer=learned, output=tmp_path / "other")
    with pytest.raises(UserError) as error:
        Run(make_run('train.until="3 steps"', f"data.paths={tmp_path / 'other'}")).train()
    for line in (
        "model.vocab: was 257 and is now 262",
        "tokenizer: was",
        "data.paths (content): was",
    ):
        assert line in str(error.value)


def test_fresh_moves_the_old_run_aside(make_run: MakeRun, tmp_path: Path, runs: Runs) -> None:
    config = make_run('train.until="3 steps"')
    Run(config).train()
    Run(make_run('train.until="3 steps"', "train.seed=2")).train(fresh=True)
    (old,) = tmp_path.glob("run.old-*")
    assert (old / "checkpoints/step-00000003/MANIFEST").is_file()
    assert runs.history(old) != runs.history(tmp_path / "run")


def test_a_folder_in_use_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}") as error:
        Run(make_run()).train()
    assert error.value.exit is Exit.REFUSED
    lock.release()
    assert Run(make_run()).train().exit is Exit.DONE


@pytest.mark.parametrize("what", ["moved", "moved, and another run in its place", "deleted"])
def test_a_run_whose_folder_is_taken_away_stops_and_makes_no_other(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    config = make_run('train.until="8 steps"', 'checkpoint.every="2 steps"')
    real, seen = StopRequest.check_time, 0

    def check(self: StopRequest, *, reserve: float) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            if what == "deleted":
                shutil.rmtree(run)
            else:
                run.rename(elsewhere)
            if "another" in what:
                Run(make_run('train.until="1 steps"')).train()
        real(self, reserve=reserve)

    monkeypatch.setattr(StopRequest, "check_time", check)
    with pytest.raises(UserError, match="moved or deleted") as caught:
        Run(config).train()
    assert caught.value.exit is Exit.STORAGE
    assert ("elsewhere" in str(caught.value)) == (what != "deleted")
    if "another" in what:
        assert CheckpointFolder(run / "checkpoints").committed()[-1].name == "step-00000001"
        assert json.loads((run / "status.json").read_text())["state"] == "done"
    else:
        assert not run.exists()
    if what != "deleted":
        monkeypatch.setattr(StopRequest, "check_time", real)
        again = make_run('train.until="8 steps"', folder="elsewhere")
        assert Run(again).train().step == 8


@pytest.mark.parametrize("done", [0, 5])
def test_a_signal_while_starting_saves_or_loses_nothing(
    make_run: MakeRun,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    runs: Runs,
    done: int,
) -> None:
    Run(make_run(folder="whole")).train()
    config = make_run()
    if done:
        stop_after(done)
        Run(config).train()
    enter = StopRequest.__enter__

    def interrupted(self: StopRequest) -> StopRequest:
        enter(self)
        os.kill(os.getpid(), signal.SIGTERM)
        return self

    with monkeypatch.context() as patched:
        patched.setattr(StopRequest, "__enter__", interrupted)
        outcome = Run(config).train()
    assert outcome.exit is Exit.STOPPED
    assert outcome.step == done
    stop_after(10**9)
    assert Run(config).train().exit is Exit.DONE
    runs.assert_same(tmp_path / "whole", tmp_path / "run")


def test_the_time_limit_stops_with_a_save(make_run: MakeRun, tmp_path: Path) -> None:
    config = make_run('train.until="100k steps"', 'train.time_limit="2s"')
    outcome = Run(config).train()
    assert outcome.exit is Exit.STOPPED
    assert 0 < outcome.step < 100_000
    assert "stopping after the time limit" in events(tmp_path / "run")
    newest = CheckpointFolder(tmp_path / "run" / "checkpoints").newest_intact().path
    assert newest is not None
    assert newest.name == f"step-{outcome.step:08d}"


def test_start_from_another_run(make_run: MakeRun, tmp_path: Path, runs: Runs) -> None:
    Run(make_run(folder="first")).train()
    second = make_run(
        f"model.start={tmp_path / 'first'}", 'train.until="4 steps"', "optim.lr=1e-9",
        folder="second",
    )  # fmt: skip
    Run(second).train()
    first_end = runs.history(tmp_path / "first")[-1]
    second_start = runs.history(tmp_path / "second")[0]
    assert second_start["kind"] == "validation"
    assert second_start["loss"] == first_end["loss"]


def test_training_that_breaks_down_stops(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run("train.bad_steps=3", 'checkpoint.every="1 steps"')
    from gristmill.models.gpt import GPT

    real, calls = GPT.run_blocks, 0

    def broken(self: GPT, *args: Any) -> torch.Tensor:
        nonlocal calls
        hidden = real(self, *args)
        calls += self.training
        return hidden * torch.nan if calls > 5 and self.training else hidden

    monkeypatch.setattr(GPT, "run_blocks", broken)
    message = "3 steps in a row, up to step 8, were not finite"
    with pytest.raises(UserError, match=message) as error:
        Run(config).train()
    assert "lower optim.lr" in str(error.value)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
    steps = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if isinstance(r, StepRecord)]
    assert [r.skipped for r in steps] == [0, 0, 0, 0, 0, 1, 2, 3]
    assert [r.nan for r in steps][-1] == 3
