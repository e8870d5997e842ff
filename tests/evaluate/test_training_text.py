"""The texts of tasks, by which a training text is checked, and what an evaluation says of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.cli.main import app
from gristmill.evaluate.core import CoreTask
from gristmill.evaluate.results import EvaluationResult, with_check
from gristmill.evaluate.tasks import open_tasks


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(task: str) -> list[str]:
    (opened,) = open_tasks([task])
    (found,) = opened.texts()
    return list(found.texts)


def test_texts_are_questions_with_their_answers(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", {"text": "The last word is this"})
    assert texts(f"lambada={rows}") == ["The last word is this"]
    choice = {"query": "Which?", "choices": ["no", "yes"], "gold": 1}
    assert texts(str(write(tmp_path / "b.jsonl", choice))) == ["Which? yes"]
    schema = {"context_options": ["He came", "She came"], "continuation": "late", "gold": 0}
    assert texts(str(write(tmp_path / "c.jsonl", schema))) == ["He came late"]
    assert texts(str(write(tmp_path / "d.jsonl", {"context": "a", "continuation": "b"}))) == ["a b"]


def test_texts_of_core() -> None:
    rows = {
        "multiple_choice": {"query": "Which?", "choices": ["no", "yes"], "gold": 1},
        "schema": {"context_options": ["He came", "She"], "continuation": "late", "gold": 0},
        "language_modeling": {"context": " One ", "continuation": "two"},
    }
    found = [CoreTask("n", kind, [row], 0, " - ", 0.5, {}).texts for kind, row in rows.items()]
    assert found == [["Which? - yes"], ["He came - late"], ["One - two"]]


def test_texts_of_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    yaml = pytest.importorskip("yaml")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = write(tmp_path / "rows.jsonl", {"q": "Which", "options": ["no", "yes"], "right": 1})
    settings = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}?",
        "doc_to_target": "{{right}}",
        "doc_to_choice": "options",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(settings))
    assert texts(str(tmp_path / "task.yaml")) == ["Which? yes"]


def result(**facts: Any) -> EvaluationResult:
    return EvaluationResult("quiz", {}, count=1, seconds=1.0, facts=facts)


def test_what_is_known_of_the_training_text(tmp_path: Path) -> None:
    assert with_check(result(data_sha256="a"), None).checked == "unknown"
    assert with_check(result(data_sha256="a"), tmp_path).checked == "unknown"

    def checked(given: EvaluationResult, tasks: Any) -> str | None:
        (tmp_path / "environment.json").write_text(json.dumps({"checked_tasks": tasks}))
        return with_check(given, tmp_path).checked

    assert checked(result(data_sha256="a"), None) == "unknown"
    assert checked(result(data_sha256="a"), {}) == "no"
    assert checked(result(data_sha256="a"), {"quiz": {"data_sha256": "b"}}) == "no"
    assert checked(result(data_sha256="a"), {"other name": {"data_sha256": "a"}}) == "yes"
    # Of tasks of the harness only the name is known.
    assert checked(result(), {"quiz": {"data_sha256": "b"}}) == "yes"
    both = {"core/a": {"data_sha256": "1"}, "core/b": {"data_sha256": "2"}}
    assert checked(result(data_sha256={"a": "1", "b": "2"}), both) == "yes"
    assert checked(result(data_sha256={"a": "1", "c": "3"}), both) == "no"
    text = EvaluationResult("text", {}, count=1, seconds=1.0, facts={}, kind="text")
    assert with_check(text, tmp_path).checked is None


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_from_text_to_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentence = "the mill turns and the corn is ground so that the flour is white and the bread good"
    write(Path("in.jsonl"), {"text": "The mill turns. " * 60}, {"text": f"Yes, {sentence}!"})
    write(Path("quiz.jsonl"), {"context": sentence, "continuation": "again"})
    write(Path("other.jsonl"), {"context": "the mill", "continuation": "turns"})
    prepare = ("prepare", "in.jsonl", "-t", "bytes", "-o")
    assert "contamination: quiz" in run(*prepare, "clean", "--decontaminate", "quiz.jsonl")
    run(*prepare, "plain")
    for name in ("clean", "plain"):
        Path(f"{name}.toml").write_text(
            f'name = "{name}"\nfolder = "{name}-run"\n'
            "[model]\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 128\n"
            f'[data]\npaths = "{name}"\nsplit = "7,3"\n[train]\nuntil = "1 steps"\nbatch = 1\n'
            '[runtime]\ndevice = "cpu"\nthreads = 1\n'
        )
        run("train", f"{name}.toml")
    said = run("evaluate", "clean-run", "plain-run", "--tasks", "quiz.jsonl,other.jsonl")
    yes = "was checked: documents with its items were dropped"
    assert f"quiz: the training text of clean-run {yes}" in said
    assert "quiz: the training text of plain-run was not checked against its items" in said
    assert "other: the training text of clean-run, plain-run was not checked" in said
    (file,) = Path("clean-run/evals").glob("*quiz.json")
    assert json.loads(file.read_text())["training_data_checked"] == "yes"
