"""Tests of a run as an object, which is also what the command line uses."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gristmill
from gristmill import Model, Run
from gristmill.base.errors import Exit, UserError
from gristmill.base.locks import FolderLock
from gristmill.plan.calibration import Calibration, write_calibration
from gristmill.track.records import StepRecord


@pytest.fixture
def file(run_text: Callable[..., str], tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(run_text("run"))
    return file


@pytest.fixture
def run(file: Path) -> Run:
    return Run.open(file, 'train.until="4 steps"', 'checkpoint.every="2 steps"')


def test_a_run_from_its_file_to_what_comes_of_it(run: Run, tmp_path: Path) -> None:
    assert run.status == {}
    assert list(run.records()) == []
    outcome = run.train()
    assert (outcome.exit, outcome.step, outcome.folder) == (Exit.DONE, 4, run.folder)
    assert run.status["state"] == "done"
    steps = [record for record in run.records() if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [1, 2, 3, 4]

    # The folder is a run too, and goes on from where it is.
    longer = Run.open(run.folder, 'train.until="6 steps"')
    assert longer.train().step == 6
    assert longer.model().step == 6
    assert longer.model(checkpoint=4).step == 4

    text = longer.generate("the mill", tokens=5, temperature=0)
    assert text == longer.generate("the mill", tokens=5, temperature=0, cache=False)
    (tmp_path / "text.txt").write_text("the mill turns and grinds the corn")
    (held_out,) = longer.evaluate()
    (measured,) = longer.evaluate(text=str(tmp_path / "text.txt"), limit=10)
    assert math.isclose(
        held_out.measures["perplexity"].value, math.exp(held_out.measures["loss"].value)
    )
    assert measured.count == 10
    assert measured.settings == {"batch": 8, "limit": 10}
    assert [file.parent for file in measured.files] == [run.folder / "evals"]
    validated = longer.validate()
    assert validated.recorded is not None
    assert validated.record.loss == validated.recorded.loss
    assert longer.replay(5).repeats


def test_going_back_and_starting_over(run: Run) -> None:
    run.train()
    assert run.train(start_from="2").step == 4
    assert (run.folder / "set-aside").is_dir()
    assert run.train(fresh=True).step == 4
    assert len(list(run.folder.parent.glob(f"{run.folder.name}.old-*"))) == 1


def test_a_stop_that_is_already_asked_for_saves_and_resumes(run: Run) -> None:
    from gristmill.train.stop import StopRequest

    stop = StopRequest()
    stop.reason = "the test"
    assert run.train(stop=stop).exit is Exit.STOPPED
    assert run.train().exit is Exit.DONE


def test_what_cannot_be_opened_or_used_is_told(run: Run, file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optim\.lrr"):
        Run.open(file, "optim.lrr=1")
    with pytest.raises(UserError, match="cannot read the run file"):
        Run.open(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="this run has no checkpoint yet"):
        run.generate("the mill")
    run.train()
    with pytest.raises(UserError, match="temperature"):
        run.generate("the mill", temperature=-1)
    with pytest.raises(UserError, match="no chat template"):
        run.model().chat()
    with pytest.raises(UserError, match="'fp8' is no number format"):
        run.evaluate(precision=["fp32", "fp8"])
    with pytest.raises(UserError, match="a GGUF file holds no code"):
        run.model().export(tmp_path / "model.gguf", code=True)
    with pytest.raises(UserError, match="no checkpoint step-00000099"):
        run.model(checkpoint=99)


def test_a_model_is_loaded_when_it_is_first_used(run: Run, tmp_path: Path) -> None:
    run.train()
    model = Model.open(run.folder, device="cpu")
    assert "loaded" not in vars(model)
    model.export(tmp_path / "exported", check="files")
    assert "loaded" not in vars(model)
    same = Model.open(tmp_path / "exported")
    words = {"tokens": 8, "temperature": 0}
    assert same.generate("the corn", **words) == model.generate("the corn", **words)
    text = model.generate("the corn", **words)
    assert "".join(model.stream("the corn", **words)) == text
    # One text, not the set of its letters.
    assert model.generate("the corn", stop="no such text", **words) == text


def test_the_package_offers_both_and_imports_torch_for_neither() -> None:
    assert set(gristmill.__all__) == {"Model", "Run"}
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = gristmill.Trainer
    program = "import sys, gristmill; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_new_folder_that_another_process_has_locked_meanwhile_stays(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both saw that it was not there; the other one was quicker."""

    def refuse(lock: FolderLock) -> None:
        raise UserError("a run is training here")

    monkeypatch.setattr(FolderLock, "acquire", refuse)
    with pytest.raises(UserError, match="a run is training here"):
        run.train()
    assert (run.folder / "checkpoints").is_dir()


def test_a_new_folder_of_a_run_that_cannot_start_is_removed(file: Path) -> None:
    run = Run.open(file, 'data.tokenizer="no-such-tokenizer"')
    with pytest.raises(UserError):
        run.train()
    assert not run.folder.exists()


def test_a_run_says_what_was_planned_and_what_was_seen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcome = run.train()
    log = (outcome.folder / "train.log").read_text()
    # Processors differ too much to say anything before this one was measured.
    assert "planned" not in log
    write_calibration(Calibration("cpu", "processor", "2026-11-19T05:00:00+00:00"))
    Run.open(run.folder, 'train.until="8 steps"').train()
    lines = (outcome.folder / "train.log").read_text()[len(log) :].splitlines()
    (planned,) = [line for line in lines if "planned: " in line]
    assert planned.endswith("(cpu, measured here on 2026-11-19)")
    assert re.search(r"done at step 8 .* tok/s \(planned [\d.k]+\)", lines[-1])
    environment = json.loads((outcome.folder / "environment.json").read_text())
    assert environment["planned"]["tokens_per_second"] > 0
