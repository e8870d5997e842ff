"""Every document of a prepared set names the line where it begins."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PartNumber, PrepareRequest, parse_holdout
from gristmill.text.sources.source import DocumentSplit, ReadOptions
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.origins import open_origins
from gristmill.tokens.store import open_tokens

BYTES = ByteTokenizer()
SMALL = ReadOptions(block_bytes=300)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Files of lines, some of which give no document."""
    dice = random.Random(1)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        rows = [
            "nonsense" if dice.random() < 0.2 else json.dumps({"text": f"{name} {n} " + "é" * n})
            for n in range(60)
        ]
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder


def check(prefix: Path) -> int:
    """Compare each document with the line that it names; returns how many there are."""
    reader, origins = open_tokens(prefix), open_origins(prefix)
    assert origins is not None
    bounds = [*reader.document_starts.tolist(), len(reader)]
    assert origins.documents == len(bounds) - 1
    for document in range(origins.documents):
        source, line = origins.of(document)
        begin, end = bounds[document : document + 2]
        text = BYTES.decode(reader.read(begin, end - begin - 1).tolist())
        assert json.loads(Path(source).read_text().splitlines()[line - 1])["text"] == text
    return origins.documents


def make(sources: Path, output: Path, **options: Any) -> None:
    settings: dict[str, Any] = {"options": SMALL, "workers": 1, **options}
    prepare(PrepareRequest([str(sources)], output, BYTES, **settings))


@pytest.mark.parametrize("format", ["flat", "megatron", "llmc"])
def test_each_document_has_its_line(corpus: Path, tmp_path: Path, format: str) -> None:
    make(corpus, tmp_path / "set", format=format)
    name = "set_text_document" if format == "megatron" else "set"
    assert check(tmp_path / name) > 100


def test_documents_that_are_held_out_too(corpus: Path, tmp_path: Path) -> None:
    make(corpus, tmp_path / "set", holdout=parse_holdout("8,2", seed=3))
    counts = [check(tmp_path / f"set_{split}") for split in ("train", "val")]
    assert min(counts) > 10


def test_parts_put_together_are_the_whole(corpus: Path, tmp_path: Path) -> None:
    make(corpus, tmp_path / "whole")
    parts = []
    for number in (1, 2, 3, 4):
        part = PartNumber(number, 4)
        make(corpus, tmp_path / "set", part=part)
        parts.append(tmp_path / f"set{part.suffix}")
    for part in parts:
        check(part)
    convert_tokens(parts, tmp_path / "merged")
    assert check(tmp_path / "merged") == check(tmp_path / "whole")
    content = [(tmp_path / f"{name}.origins").read_bytes() for name in ("merged", "whole")]
    assert content[0] == content[1]


def test_paragraphs_have_the_line_where_they_begin(tmp_path: Path) -> None:
    text = "one\nmore\n\n\ntwo\n\nthree\n"
    (tmp_path / "text.txt").write_text(text)
    options = ReadOptions(split=DocumentSplit.BLANK, block_bytes=5)
    make(tmp_path / "text.txt", tmp_path / "set", options=options)
    origins = open_origins(tmp_path / "set")
    assert origins is not None
    assert [origins.of(document).line for document in range(3)] == [1, 5, 7]
