"""`gristmill bench` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gristmill.base.errors import Exit, UserError
from gristmill.bench.measure import BenchResult, Speed, Subject
from gristmill.cli.bench import _lines
from gristmill.cli.main import app
from gristmill.distributed.device import MatrixRate

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


def bench(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", "run.toml", *words])


@pytest.mark.parametrize("place", ["nowhere/figures.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("gristmill.bench.measure.measure_run", never)
    error = bench("--random-tokens", "--json", place).exception
    assert isinstance(error, UserError)
    assert f"--json {place}: " in str(error) and len(error.problems) == 1


def test_random_tokens_of_a_single_id_are_refused(folder: Path) -> None:
    error = bench("--random-tokens", "model.vocab=1").exception
    assert isinstance(error, UserError)
    assert "model.vocab: random tokens need two ids or more" in str(error)


def test_what_is_compiled_is_said() -> None:
    for compiled, recorded, words in (
        (None, False, "cpu, fp32"),
        ("model", False, "cpu, fp32, compiled as a whole"),
        ("blocks", False, "cpu, fp32, compiled block by block"),
        ("blocks", True, "cpu, fp32, compiled block by block, CUDA graphs"),
    ):
        subject = Subject("small", 1, 1, 1, 1, 300, "cpu", "fp32", compiled, True, recorded)
        speed = Speed(1, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, None, 1.0, 1.0, None, None)
        matrix = MatrixRate(1.0, 8, "fp32")
        found = BenchResult(subject=subject, speed=speed, matrix=matrix)
        lines = list(_lines(found))
        assert f"device      {words}" in lines
        assert any(line.endswith(", compiling") for line in lines) is (compiled is not None)


def test_without_token_files_it_says_how_to_measure_all_the_same(folder: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "run.toml"])
    assert isinstance(result.exception, UserError)
    assert result.exception.exit is Exit.DATA
    assert "--random-tokens" in str(result.exception)
