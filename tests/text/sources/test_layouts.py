"""Texts of other pipelines, read as they are: datatrove's, dolma's and FineWeb's."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import Document

TEXTS = ["The mill turns.", "Water\nruns.", "Grüße"]


def datatrove_jsonl() -> bytes:
    rows = [
        {
            "text": text,
            "id": f"<urn:uuid:{n}>",
            "media": [],
            "metadata": {"dump": "x", "text": "no"},
        }
        for n, text in enumerate(TEXTS)
    ]
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def dolma_json() -> bytes:
    rows = [
        {"id": str(n), "text": text, "source": "books", "added": "2024-05-01", "metadata": {"a": 1}}
        for n, text in enumerate(TEXTS)
    ]
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())


def table(columns: dict[str, Any]) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(arrow.table(columns), file, compression="zstd")
    return file.getvalue()


def datatrove_parquet() -> bytes:
    return table({"text": TEXTS, "id": ["a", "b", "c"], "metadata": [{"url": "u", "n": 1}] * 3})


def fineweb_parquet() -> bytes:
    names = ("id", "dump", "url", "date", "file_path", "language")
    words = {name: [f"{name} {n}" for n in range(3)] for name in names}
    return table({"text": TEXTS, **words, "language_score": [0.9] * 3, "token_count": [4, 5, 6]})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("00000.jsonl.gz", datatrove_jsonl),
        ("books-0001.json.gz", dolma_json),
        ("00000.parquet", datatrove_parquet),
        ("000_00000.parquet", fineweb_parquet),
    ],
)
def test_their_texts_are_found(tmp_path: Path, name: str, make: Any) -> None:
    (tmp_path / name).write_bytes(make())
    items = list(SourceReader([str(tmp_path / name)]))
    assert [item.text for item in items if isinstance(item, Document)] == TEXTS
    assert len(items) == 3


def test_the_only_column_of_strings_is_named_but_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(table({"n": [1, 2, 3], "content": TEXTS}))
    with pytest.raises(UserError, match="--json-key 'content', which is the only one of strings"):
        list(SourceReader([str(file)]))
    file.write_bytes(table({"url": TEXTS, "content": TEXTS}))
    with pytest.raises(UserError, match=r"--json-key$"):
        list(SourceReader([str(file)]))
