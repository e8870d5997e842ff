"""Files of a run folder that only record the run: damage in them never keeps it from resuming."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint import writer
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.model import open_stored
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, ValidationRecord
from gristmill.train.checkpoints import Checkpoint
from gristmill.train.meter import StepEvent
from gristmill.train.run import Run

MakeRun = Callable[..., RunConfig]
SETTINGS = ('train.until="6 steps"', 'checkpoint.every="3 steps"', 'validate.every="3 steps"')


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keeper")


@pytest.fixture
def run(keeper: Path, make_run: MakeRun, tmp_path: Path) -> Path:
    """A run of 6 steps; trained once for all tests here."""
    if not (keeper / "run").exists():
        Run(make_run(*SETTINGS)).train()
        shutil.move(tmp_path / "run", keeper / "run")
    shutil.copytree(keeper / "run", tmp_path / "run")
    return tmp_path / "run"


def warnings(run: Path) -> list[str]:
    records = read_metrics(run / "metrics.jsonl")
    events = [one for one in records if isinstance(one, EventRecord)]
    return [one.text for one in events if one.level == "warning"]


def best_of_records(run: Path) -> float:
    records = read_metrics(run / "metrics.jsonl")
    return min(one.loss for one in records if isinstance(one, ValidationRecord))


DAMAGE = {
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
    "list": b"[]",
    "half": b'{"step": 6, "lo',
    "nested": b"[" * 50_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_records_do_not_block_a_resume(run: Path, make_run: MakeRun, damage: str) -> None:
    names = ["status.json", "origin.txt", "environment.json", "run.toml", "checkpoints/best.json"]
    for name in names:
        (run / name).write_bytes(DAMAGE[damage])
    outcome = Run(make_run(*SETTINGS, 'train.until="7 steps"')).train()
    assert outcome.exit is Exit.DONE
    assert outcome.best_loss == best_of_records(run)
    told = warnings(run)
    assert any(one.startswith("best.json is damaged (") for one in told)
    assert (run / "checkpoints/damaged-best.json").read_bytes() == DAMAGE[damage]
    if damage != "nothing":  # an empty file is valid TOML
        assert any(one.startswith("run.toml is damaged (") for one in told)
        assert (run / "damaged-run.toml").read_bytes() == DAMAGE[damage]
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert (run / "origin.txt").read_bytes().startswith(DAMAGE[damage])
    assert "torch" in json.loads((run / "environment.json").read_text())


@pytest.mark.parametrize("late", [False, True], ids=["saved", "after the save"])
def test_the_best_loss_is_rebuilt(
    run: Path, make_run: MakeRun, rewrite: Callable[..., None], late: bool
) -> None:
    """From the checkpoint; or from the records, if the last validation came after its save."""
    folder = CheckpointFolder(run / "checkpoints")
    before = folder.best()
    assert before is not None and before.step == 6
    if late:
        rewrite(folder.path(6), lambda content: content.state.update(best=None))
    folder.best_file.write_text(json.dumps({"step": 6, "loss": 1.0, "seal": "0" * 64}))
    with pytest.raises(UserError, match=r"best\.json: has changed bytes"):
        open_stored(str(run), checkpoint="best")
    assert Run(make_run(*SETTINGS)).train().best_loss == before.loss
    assert folder.best() == before
    assert open_stored(str(run), checkpoint="best").step == 6


def test_damaged_lines_of_the_metrics_are_moved(run: Path, make_run: MakeRun) -> None:
    file = run / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    bad = [b"\xff" + lines[2], b'{"kind": "step"}\n']
    file.write_bytes(b"".join([*lines[:2], bad[0], *lines[3:-1], bad[1], lines[-1]]))
    Run(make_run(*SETTINGS, 'train.until="7 steps"')).train()
    assert "moved 2 damaged lines of metrics.jsonl to damaged-metrics.jsonl" in warnings(run)
    assert (run / "damaged-metrics.jsonl").read_bytes() == b"".join(bad)
    kept = file.read_bytes().splitlines(keepends=True)
    assert kept[: len(lines) - 2] == [*lines[:2], *lines[3:-1]]


def test_a_tokenizer_that_is_not_that_of_the_model_is_refused(run: Path) -> None:
    other = run.parent / "other"
    from gristmill.text.tokenizers.training import train_tokenizer

    train_tokenizer(iter(["the mill turns " * 30] * 20), vocab_size=260).save(other)
    shutil.rmtree(run / "tokenizer")
    shutil.copytree(other, run / "tokenizer")
    with pytest.raises(UserError, match="not the tokenizer that this model was trained with"):
        open_stored(str(run))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("state", ["done", "running", None])
def test_a_run_without_its_checkpoints_does_not_start_over(
    run: Path, make_run: MakeRun, state: str | None
) -> None:
    """Whether its status or only its records tell that there were some."""
    shutil.rmtree(run / "checkpoints")
    if state is None:
        (run / "status.json").unlink()
    else:
        (run / "status.json").write_text(json.dumps({"state": state, "step": 6}))
    if state == "done":
        (run / "metrics.jsonl").write_text("")
    before = contents(run)
    with pytest.raises(UserError, match="none of its checkpoints is here") as error:
        Run(make_run(*SETTINGS)).train()
    assert error.value.exit is Exit.STORAGE
    assert "--fresh" in str(error.value) and "came to step 6" in str(error.value)
    assert contents(run) == before
    assert Run(make_run(*SETTINGS)).train(fresh=True).step == 6
    (old,) = run.parent.glob("run.old-*")
    assert {path.relative_to(old) for path in contents(old)} >= {
        path.relative_to(run) for path in before
    }


def test_a_run_that_never_saved_starts_over_and_says_so(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Checkpoint, event: StepEvent) -> bool:
        if event.after.steps == 2:
            raise KeyboardInterrupt
        return False

    config = make_run(*SETTINGS)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "due", killed)
        with pytest.raises(KeyboardInterrupt):
            Run(config).train()
    assert Run(make_run(*SETTINGS)).train().step == 6
    assert "the run came to step 2, but no checkpoint was saved; starting over at step 0" in (
        warnings(tmp_path / "run")
    )


def test_fresh_moves_a_run_aside_that_has_no_settings_left(run: Path, make_run: MakeRun) -> None:
    (run / "run.toml").unlink()
    for number in (1, 2):
        Run(make_run('train.until="1 steps"')).train(fresh=True)
        assert len(list(run.parent.glob("run.old-*"))) == number
    first, *_ = sorted(run.parent.glob("run.old-*"))
    assert (first / "checkpoints/step-00000006").is_dir()


def test_a_checkpoint_that_could_not_be_saved_is_a_warning(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = iter([0, 10**9])

    def check(folder: Path, needed: int) -> None:
        if next(rooms) < needed:
            raise UserError("no room", exit=Exit.STORAGE)

    monkeypatch.setattr(writer, "require_checkpoint_room", check)
    assert Run(make_run(*SETTINGS)).train().exit is Exit.DONE
    assert warnings(tmp_path / "run") == ["checkpoint at step 3 was not saved: no room"]
