"""`generate`, `evaluate` and `export` on checkpoints that cannot be used, or not all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner, Result

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import open_stored
from gristmill.cli.main import app
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Content

Rewrite = Callable[..., None]
MakeRun = Callable[..., RunConfig]
COMMANDS = {
    "generate": ("generate", "RUN", "the", "-n", "3"),
    "evaluate": ("evaluate", "RUN", "--limit", "50"),
    "export": ("export", "RUN", "OUT", "--check", "files"),
}


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keeper")


@pytest.fixture
def run(keeper: Path, make_run: MakeRun, tmp_path: Path) -> Path:
    """A run with checkpoints at steps 3 and 6; trained once for all tests here."""
    if not (keeper / "run").exists():
        Run(make_run('train.until="6 steps"', 'validate.every="6 steps"')).train()
        shutil.move(tmp_path / "run", keeper / "run")
    shutil.copytree(keeper / "run", tmp_path / "run")
    return tmp_path / "run"


def invoke(command: str, run: Path) -> Result:
    places = {"RUN": str(run), "OUT": str(run / "exported")}
    return CliRunner().invoke(app, [places.get(word, word) for word in COMMANDS[command]])


def not_finite(content: Content) -> None:
    content.model["norm.weight"][3] = torch.nan
    content.model["norm.bias"][3] = torch.inf


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_with_nan_is_refused(run: Path, rewrite: Rewrite, command: str) -> None:
    rewrite(run / "checkpoints/step-00000006", not_finite)
    error = invoke(command, run).exception
    assert isinstance(error, UserError) and error.exit is Exit.DATA
    (problem,) = error.problems
    assert problem.what.startswith("NaN or infinite numbers in norm.")
    assert problem.where == str(run / "checkpoints/step-00000006")
    assert "--checkpoint" in str(problem.remedy)
    assert not (run / "exported").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_older_checkpoint_is_used_with_a_warning(run: Path, command: str) -> None:
    file = run / "checkpoints/step-00000006/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    result = invoke(command, run)
    assert result.exit_code == 0, result.output
    assert f"warning: step-00000006 is damaged ({file}: has changed bytes)" in result.stderr
    assert "using step-00000003 instead" in result.stderr
    assert "warning" not in result.stdout
    shutil.rmtree(run / "checkpoints/step-00000003")
    error = invoke(command, run).exception
    assert isinstance(error, UserError)
    assert "no intact checkpoint" in str(error) and "has changed bytes" in str(error)


def change_model(**settings: Any) -> Callable[[Content], None]:
    return lambda content: content.state["settings"]["model"].update(settings)


SETTINGS = {
    "layers": (change_model(layers=100_000), "100000 layers, but only 28 tensors are stored"),
    "width": (change_model(width=2**61), "no model has these sizes"),
    "heads": (change_model(heads="two"), "settings.model.heads"),
    "other width": (change_model(width=32), "embedding.weight has shape (384, 16), not (384, 32)"),
    "model": (lambda content: content.state["settings"].pop("model"), "settings.model"),
    "vocab": (lambda content: content.state["settings"].update(vocab=-1), "settings.vocab is -1"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_do_not_fit_the_weights(run: Path, rewrite: Rewrite, name: str) -> None:
    change, said = SETTINGS[name]
    rewrite(run / "checkpoints/step-00000006", change)
    stored = open_stored(str(run))
    assert stored.step == 3 and said in stored.notes[0]
    with pytest.raises(UserError) as error:
        open_stored(str(run), checkpoint="6")
    assert said in str(error.value)


def test_a_run_that_starts_from_another_says_that_its_newest_is_damaged(
    run: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    file = run / "checkpoints/step-00000006/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    Run(make_run(f"model.start={run}", 'train.until="1 steps"', folder="second")).train()
    records = read_metrics(tmp_path / "second/metrics.jsonl")
    events = [one for one in records if isinstance(one, EventRecord)]
    (warning,) = [one.text for one in events if one.level == "warning"]
    assert "using step-00000003 instead" in warning


def test_a_run_does_not_start_from_weights_with_nan(
    run: Path, make_run: MakeRun, rewrite: Rewrite
) -> None:
    rewrite(run / "checkpoints/step-00000006", not_finite)
    with pytest.raises(UserError, match="NaN or infinite numbers in norm"):
        Run(make_run(f"model.start={run}", 'train.until="1 steps"', folder="second")).train()
