"""`gristmill bench` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app

RUN = """
name = "small"
[model]
layers = 1
heads = 2
width = 16
context = 16
vocab = 300
[data]
paths = "tokens"
[train]
until = "4 steps"
batch = 2
[runtime]
device = "cpu"
threads = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tables_and_figures_are_printed_and_written(folder: Path) -> None:
    words = ["bench", "run.toml", "train.clip=0.5", "--random-tokens", "--steps", "2"]
    result = CliRunner().invoke(app, [*words, "--warm-up", "1", "--json", "figures.json"])
    assert result.exit_code == 0, result.output
    for word in ("tokens/s", "data wait", "backward", "matrix products", "aten::", "causal"):
        assert word in result.output
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["subject"]["name"] == "small"
    whole = sum(row["milliseconds"] for row in figures["stages"])
    assert whole == pytest.approx(figures["speed"]["milliseconds"])
    assert sorted(path.name for path in folder.iterdir()) == ["figures.json", "run.toml"]


def test_without_token_files_it_says_how_to_measure_all_the_same(folder: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "run.toml"])
    assert isinstance(result.exception, UserError)
    assert result.exception.exit is Exit.DATA
    assert "--random-tokens" in str(result.exception)
