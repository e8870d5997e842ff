"""The flat format: bytes on disk, what the reader refuses, and what an interruption leaves."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.tokens.format import NewSet, TokenReader, TokenSetInfo, dtype_for
from gristmill.tokens.store import create_tokens, open_tokens

SPEC = {"type": "test", "fingerprint": "f" * 64}


def write(prefix: Path, documents: list[list[int]], **options: Any) -> TokenSetInfo:
    settings = {"vocab_size": 257, "end_of_text": 256, "tokenizer": SPEC} | options
    writer = create_tokens(NewSet(prefix, **settings))
    for document in documents:
        writer.add(document)
    return writer.finish()


def documents_of(reader: TokenReader) -> list[list[int]]:
    bounds = [*reader.document_starts.tolist(), len(reader)]
    return [reader.read(a, b - a).tolist() for a, b in itertools.pairwise(bounds)]


def test_bytes_on_disk(tmp_path: Path) -> None:
    info = write(tmp_path / "set.v1", [[1, 2, 256], [3]])
    tokens = (tmp_path / "set.v1.bin").read_bytes()
    assert tokens == b"\x01\x00\x02\x00\x00\x01\x03\x00"
    assert (tmp_path / "set.v1.starts").read_bytes() == bytes(8) + b"\x03" + bytes(7)
    manifest = json.loads((tmp_path / "set.v1.json").read_text())
    assert manifest["files"][".bin"] == {"bytes": 8, "sha256": hashlib.sha256(tokens).hexdigest()}
    assert manifest["tokenizer"] == SPEC
    assert info == TokenSetInfo(
        format="flat",
        dtype="uint16",
        tokens=4,
        documents=2,
        vocab_size=257,
        end_of_text=256,
        tokenizer="f" * 64,
        fingerprint=hashlib.sha256(tokens).hexdigest(),
    )
    assert open_tokens(tmp_path / "set.v1").info == info
    assert sorted(os.listdir(tmp_path)) == ["set.v1.bin", "set.v1.json", "set.v1.starts"]


@settings(deadline=None)
@given(
    vocab_size=st.sampled_from([2, 257, 65536, 65537, 2**32]),
    data=st.data(),
)
def test_documents_come_back(
    tmp_path_factory: pytest.TempPathFactory, vocab_size: int, data: st.DataObject
) -> None:
    document = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=20)
    documents = data.draw(st.lists(document, min_size=1, max_size=10))
    prefix = tmp_path_factory.mktemp("set") / "set"
    write(prefix, documents, vocab_size=vocab_size, end_of_text=None)
    reader = open_tokens(prefix)
    assert documents_of(reader) == documents
    assert reader.read(0, 1).dtype == np.dtype(dtype_for(vocab_size))
    assert reader.document_starts.dtype == np.int64
    assert len(reader) == sum(map(len, documents))


def test_dtype_is_the_narrowest() -> None:
    assert dtype_for(65536) == "uint16"
    assert dtype_for(65537) == "uint32"


@pytest.mark.parametrize("bad", [-1, 257, 65536 + 1, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, bad: int) -> None:
    writer = create_tokens(
        NewSet(tmp_path / "set", vocab_size=257, end_of_text=256, tokenizer=SPEC)
    )
    for ids in ([1, bad], np.array([1, bad])):
        with pytest.raises(UserError, match=f"the id {bad} is outside the vocabulary"):
            writer.add(ids)
    writer.add([7])
    assert writer.finish().tokens == 1


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 5), (4, 1), (5, 0), (0, -1)])
def test_reads_outside_are_refused(tmp_path: Path, start: int, count: int) -> None:
    write(tmp_path / "set", [[1, 2, 3], [4]])
    reader = open_tokens(tmp_path / "set")
    assert reader.read(4, 0).size == 0
    with pytest.raises(AssertionError):
        reader.read(start, count)


@pytest.mark.parametrize("suffix", [".bin", ".starts"])
def test_cut_longer_and_missing_files_are_refused(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "set", [[1, 2, 3], [4]])
    path = tmp_path / f"set{suffix}"
    content = path.read_bytes()
    for damaged, words in ((content[:-1], "cut short"), (content + b"\0", "too long")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=words) as caught:
            open_tokens(tmp_path / "set")
        assert caught.value.exit is Exit.DATA
        assert caught.value.problems[0].where == str(path)
    path.unlink()
    with pytest.raises(UserError, match="missing"):
        open_tokens(tmp_path / "set")


def unsealed(path: Path) -> str:
    """A manifest as earlier programs wrote it, which has no checksum of its own."""
    return re.sub(r',\s+"seal": "[0-9a-f]{64}"', "", path.read_text())


def test_counts_must_fit_the_files(tmp_path: Path) -> None:
    write(tmp_path / "set", [[1, 2, 3], [4]])
    path = tmp_path / "set.json"
    path.write_text(unsealed(path).replace('"tokens": 4', '"tokens": 3'))
    with pytest.raises(UserError, match="hold 4 tokens in 2 documents"):
        open_tokens(tmp_path / "set")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"version": 1', '"version": 9', "version 9"),
        ('"dtype": "uint16"', '"dtype": "float"', "damaged"),
        ('"documents": 2', '"papers": 2', "damaged"),
        ('".starts":', '"/../other.starts":', "a file is named"),
        ('"kind": "gristmill token set"', '"kind": "cake"', "not the manifest"),
        ('"format": "flat"', '"format": "round"', "'round' is not known; known are flat"),
        ("{", "", "not valid JSON"),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    write(tmp_path / "set", [[1, 2, 3], [4]])
    path = tmp_path / "set.json"
    text = unsealed(path)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=words) as caught:
        open_tokens(tmp_path / "set")
    assert caught.value.exit is Exit.DATA


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    writer = create_tokens(NewSet(tmp_path / "set", vocab_size=9, end_of_text=None, tokenizer=SPEC))
    writer.add([1, 2])
    assert not list(tmp_path.glob("set*"))
    writer.abandon()
    assert not os.listdir(tmp_path)


def test_an_existing_set_is_kept_unless_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "set", [[1, 2, 3]])
    with pytest.raises(UserError, match="already a token set") as caught:
        write(tmp_path / "set", [[4]])
    assert caught.value.exit is Exit.REFUSED
    abandoned = create_tokens(
        NewSet(tmp_path / "set", vocab_size=9, end_of_text=None, tokenizer=SPEC, overwrite=True)
    )
    abandoned.abandon()
    assert documents_of(open_tokens(tmp_path / "set")) == [[1, 2, 3]]
    write(tmp_path / "set", [[4]], overwrite=True)
    assert documents_of(open_tokens(tmp_path / "set")) == [[4]]


def test_a_foreign_json_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"text": "mine"}\n')
    with pytest.raises(UserError, match="not part of a token set"):
        write(tmp_path / "corpus", [[1]], overwrite=True)
    assert (tmp_path / "corpus.json").read_text() == '{"text": "mine"}\n'


def test_an_interrupted_overwrite_leaves_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "set", [[1, 2, 3]])
    writer = create_tokens(
        NewSet(tmp_path / "set", vocab_size=9, end_of_text=None, tokenizer=SPEC, overwrite=True)
    )
    writer.add([4, 5, 6])

    def power_cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("gristmill.tokens.writer.os.replace", power_cut)
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    with pytest.raises(UserError, match="unfinished"):
        open_tokens(tmp_path / "set")
