"""Datasets of Hugging Face give their rows one by one, from any row on, and lose none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.text.sources import datasets as ours
from gristmill.text.sources.datasets import DatasetSource, DatasetSpec, parse_dataset
from gristmill.text.sources.source import ReadOptions, Reason

ROWS = [{"number": i, "text": f"text {i}"} for i in range(2500)]
ROWS[3]["text"] = None
ROWS[4]["text"] = ""
EXPECTED: list[str | Reason] = [
    Reason.WRONG_TYPE if row["text"] is None else str(row["text"]) or Reason.EMPTY_TEXT
    for row in ROWS
]


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("hf:wikitext", DatasetSpec("wikitext")),
        ("hf:a/b?split=test", DatasetSpec("a/b", split="test")),
        (
            "hf:a/b?config=sample-10BT&column=body%20text&split=all",
            DatasetSpec("a/b", config="sample-10BT", split="all", column="body text"),
        ),
        ("hf:./a folder", DatasetSpec("./a folder")),
        ("hf:./a@b", DatasetSpec("./a@b")),
        ("hf:a/b@v1.0?split=test", DatasetSpec("a/b", split="test", revision="v1.0")),
        ("hf:a@refs/pr/1", DatasetSpec("a", revision="refs/pr/1")),
    ],
)
def test_specs_are_read(text: str, spec: DatasetSpec) -> None:
    assert parse_dataset(text) == spec


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("hf:", ["the name is missing"]),
        ("hf:?split=", ["the name is missing", "'split' has no value"]),
        ("hf:a?spilt=x", ["'spilt' is not one of config, split, column"]),
        ("hf:a?split=x&split=y", ["'split' is given twice"]),
        ("hf:a?split", ["'split' has no value"]),
        ("hf:a/b/c", ["'a/b/c' is no name of a dataset on Hugging Face"]),
    ],
)
def test_all_mistakes_are_told_at_once(text: str, messages: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_dataset(text)
    assert [problem.what for problem in caught.value.problems] == messages


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"gristmill\[hub\]"):
        DatasetSource("hf:anything", ReadOptions())


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("datasets")


@pytest.fixture(params=["saved", "splits", "parquet", "json"])
def source(request: pytest.FixtureRequest, library: Any, tmp_path: Path) -> str:
    """The same rows in each kind of folder."""
    folder = tmp_path / "data"
    rows = library.Dataset.from_list(ROWS)
    match request.param:
        case "saved":
            rows.save_to_disk(folder)
        case "splits":
            library.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(folder)
        case "parquet":
            folder.mkdir()
            rows.select(range(1200)).to_parquet(folder / "train-0.parquet")
            rows.select(range(1200, 2500)).to_parquet(folder / "train-1.parquet")
        case "json":
            folder.mkdir()
            (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"hf:{folder}"


def test_rows_come_from_any_number_on(source: str) -> None:
    text = DatasetSource(source, ReadOptions())
    assert [row[0] for row in text.rows_from(0)] == EXPECTED
    for start in (1, 3, 999, 1000, 1001, 1200, 2499, 2500, 9999):
        assert [row[0] for row in text.rows_from(start)] == EXPECTED[start:]
    assert (text.name, text.column) == (source, "text")


def test_the_fingerprint_is_of_what_is_read(source: str) -> None:
    first = DatasetSource(source, ReadOptions())
    assert DatasetSource(source, ReadOptions()).fingerprint == first.fingerprint
    assert DatasetSource(f"{source}?column=text", ReadOptions()).fingerprint == first.fingerprint
    file = next(path for path in Path(source.removeprefix("hf:")).rglob("*") if path.is_file())
    os.utime(file, ns=(0, 0))
    assert DatasetSource(source, ReadOptions()).fingerprint != first.fingerprint


def test_mistakes_are_named(library: Any, tmp_path: Path) -> None:
    rows = library.Dataset.from_list([{"number": 1, "title": "a", "body": "b"}])
    library.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "data")
    source = f"hf:{tmp_path}/data"
    asked = DatasetSource(source, ReadOptions(keys=("title",)))
    assert [row[0] for row in asked.rows_from(0)] == ["a"]
    named = DatasetSource(f"{source}?column=body", ReadOptions(fields=("title", "number")))
    assert list(named.rows_from(0)) == [("b", "a", Reason.WRONG_TYPE)]
    with pytest.raises(UserError, match="no column 'url', which a filter asks for"):
        DatasetSource(f"{source}?column=body", ReadOptions(fields=("url",)))
    for query, message in {
        "column=number": "the column 'number' holds no text",
        "column=text": r"no column 'text'; the columns are: number \(int64\), title",
        "split=train": r"no column 'text'; the columns are: .*\n.*column=…, or --json-key",
        "split=dev": "no split 'dev': the splits are train, test",
    }.items():
        with pytest.raises(UserError, match=message):
            DatasetSource(f"{source}?{query}", ReadOptions())
    with pytest.raises(UserError, match="no such folder"):
        DatasetSource(f"hf:{tmp_path}/nothing", ReadOptions())
    library.Dataset.from_list([{"number": 1}]).save_to_disk(tmp_path / "numbers")
    with pytest.raises(UserError, match="no column 'text'; the columns are: number"):
        DatasetSource(f"hf:{tmp_path}/numbers", ReadOptions())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot be opened"):
        DatasetSource(f"hf:{tmp_path}/empty", ReadOptions())


def test_a_name_is_pinned_to_its_commit(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    commit = "abc"

    def info(self: Any, name: str, *, revision: str | None, timeout: float) -> Any:
        return SimpleNamespace(id=f"new-{name}", sha=commit, gated=False)

    def load(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        rows = library.Dataset.from_list(ROWS).to_iterable_dataset()
        return SimpleNamespace(as_streaming_dataset=lambda split: {"s": rows}[split])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setattr(library, "load_dataset_builder", load)
    text = DatasetSource("hf:someone/some?config=c&split=s", ReadOptions())
    assert asked == [(("new-someone/some", "c"), {"revision": "abc", "data_files": None})]
    assert [row[0] for row in text.rows_from(2400)] == EXPECTED[2400:]
    commit = "abd"
    assert (
        DatasetSource("hf:someone/some?config=c&split=s", ReadOptions()).fingerprint
        != text.fingerprint
    )


def test_the_network_can_fail_at_any_row(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        yield from ROWS[10:2010]
        raise ConnectionError("the line is dead\nand more")

    broken = library.IterableDataset.from_generator(rows)
    monkeypatch.setattr(ours, "open_hub", lambda datasets, spec: ours.OpenedDataset(broken, "abc"))
    text = DatasetSource("hf:someone/some", ReadOptions())
    with pytest.raises(UserError, match=r"after row [12],000: the line is dead\n") as caught:
        [row[0] for row in text.rows_from(0)]
    assert "someone/some" in str(caught.value)
    monkeypatch.undo()

    def refuse(self: Any, name: str, *, revision: str | None, timeout: float) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match="cannot be reached: no route to host"):
        DatasetSource("hf:someone/some", ReadOptions())
