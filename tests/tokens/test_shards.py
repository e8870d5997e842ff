"""Sets of several files: llm.c's and NumPy's."""

from __future__ import annotations

import io
import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.tokens import format as reading
from gristmill.tokens.format import NewSet, TokenReader, TokenSetInfo
from gristmill.tokens.store import Reading, create_tokens, open_tokens, verify_tokens

SPEC = {"type": "test", "fingerprint": "f" * 64}
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12]]
KINDS = [("llmc", 10), ("llmc", 65537), ("npy", 10), ("npy", 65537)]


def write(prefix: Path, documents: list[list[int]], **options: Any) -> TokenSetInfo:
    settings = {"vocab_size": 100, "end_of_text": None, "tokenizer": SPEC} | options
    writer = create_tokens(NewSet(prefix, **settings))
    for document in documents:
        writer.add(document)
    return writer.finish()


def documents_of(reader: TokenReader) -> list[list[int]]:
    bounds = [*reader.document_starts.tolist(), len(reader)]
    return [reader.read(a, b - a).tolist() for a, b in itertools.pairwise(bounds)]


def llmc(ids: list[int], letter: str = "H") -> bytes:
    """A file of llm.c, packed number by number."""
    magic, version = {"H": (20240520, 1), "I": (20240801, 7)}[letter]
    header = struct.pack("<3i", magic, version, len(ids)) + bytes(253 * 4)
    return header + struct.pack(f"<{len(ids)}{letter}", *ids)


def npy(ids: list[int], dtype: str = "<u2") -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(ids, dtype=dtype))
    return buffer.getvalue()


@pytest.mark.parametrize(("vocab_size", "letter"), [(65536, "H"), (65537, "I"), (2**32, "I")])
def test_the_files_are_what_llm_c_writes(tmp_path: Path, vocab_size: int, letter: str) -> None:
    write(tmp_path / "s", DOCUMENTS, format="llmc", shard_size=5, vocab_size=vocab_size)
    for number, ids in enumerate([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]], 1):
        assert (tmp_path / f"s_{number:06d}.bin").read_bytes() == llmc(ids, letter)
    assert len(os.listdir(tmp_path)) == 5


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_the_files_are_what_numpy_writes(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    write(tmp_path / "s", DOCUMENTS, format="npy", shard_size=5, vocab_size=vocab_size)
    for number, ids in enumerate([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]], 1):
        assert (tmp_path / f"s_{number:06d}.npy").read_bytes() == npy(ids, dtype)


@pytest.mark.parametrize("format", ["llmc", "npy"])
def test_the_last_file_may_be_full(tmp_path: Path, format: str) -> None:
    write(tmp_path / "s", DOCUMENTS, format=format, shard_size=6)
    assert len(list(tmp_path.glob("s_*"))) == 2
    assert verify_tokens(tmp_path / "s") == []


@pytest.mark.parametrize("format", ["llmc", "npy"])
def test_the_content_is_the_same_in_any_layout(tmp_path: Path, format: str) -> None:
    flat = write(tmp_path / "flat", DOCUMENTS)
    for size in (1, 5, 100):
        info = write(tmp_path / f"s{size}", DOCUMENTS, format=format, shard_size=size)
        assert info.fingerprint == flat.fingerprint
        assert open_tokens(tmp_path / f"s{size}").info == info


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1),
    size=st.integers(1, 20),
    format=st.sampled_from(["llmc", "npy"]),
    data=st.data(),
)
def test_reads_across_borders_are_right(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    size: int,
    format: str,
    data: st.DataObject,
) -> None:
    prefix = tmp_path_factory.mktemp("set") / "set"
    write(prefix, documents, format=format, shard_size=size)
    reader = open_tokens(prefix)
    ids = [id for document in documents for id in document]
    assert documents_of(reader) == documents
    for _ in range(5):
        start = data.draw(st.integers(0, len(ids)))
        count = data.draw(st.integers(0, len(ids) - start))
        found = reader.read(start, count)
        assert found.tolist() == ids[start : start + count]
        assert found.dtype == np.uint16


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAPS", 2)
    ids = [number % 100 for number in range(40)]
    write(tmp_path / "s", [ids], format="npy", shard_size=1)
    reader = open_tokens(tmp_path / "s")
    views = [reader.read(number, 1) for number in range(40)]
    assert [int(view[0]) for view in views] == ids
    assert reader.read(0, 40).tolist() == ids
    assert reader._ids.cache_info().currsize == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("format", ["llmc", "npy"])
def test_an_overwritten_set_leaves_no_files_behind(tmp_path: Path, format: str) -> None:
    write(tmp_path / "s", DOCUMENTS, format=format, shard_size=2)
    with pytest.raises(UserError, match=r"already a token set here \(s.json, s.starts, s_0") as c:
        write(tmp_path / "s", DOCUMENTS, format=format, shard_size=5)
    assert c.value.exit is Exit.REFUSED
    write(tmp_path / "s", DOCUMENTS, format=format, shard_size=6, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 4
    assert verify_tokens(tmp_path / "s") == []
    write(tmp_path / "s", [[1]], format="megatron", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["s.bin", "s.idx", "s.json"]
    write(tmp_path / "s", [[1]], overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["s.bin", "s.json", "s.starts"]


@pytest.mark.parametrize("format", ["llmc", "npy"])
def test_abandoning_removes_every_file(tmp_path: Path, format: str) -> None:
    writer = create_tokens(
        NewSet(
            tmp_path / "s",
            vocab_size=100,
            end_of_text=None,
            tokenizer=SPEC,
            format=format,
            shard_size=2,
        )
    )
    writer.add([1, 2, 3, 4, 5])
    assert not list(tmp_path.glob("s*"))
    writer.abandon()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("old", [[], DOCUMENTS])
def test_an_interrupted_writer_leaves_an_unfinished_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, old: list[list[int]]
) -> None:
    if old:
        write(tmp_path / "s", old, format="npy", shard_size=2)
    real, calls = os.replace, itertools.count()

    def power_cut(*names: Any) -> None:
        if next(calls) == step:
            raise KeyboardInterrupt
        real(*names)

    with monkeypatch.context() as patch:
        patch.setattr("gristmill.tokens.writer.os.replace", power_cut)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "s", DOCUMENTS, format="npy", shard_size=5, overwrite=True)
    words = "unfinished" if old or step else "there is no token set"
    with pytest.raises(UserError, match=words):
        open_tokens(tmp_path / "s")


@pytest.mark.parametrize(
    ("format", "size", "words"),
    [
        ("flat", 5, "the format flat is one file of ids; of several are llmc, npy"),
        ("megatron", 5, "the format megatron is one file of ids"),
        ("llmc", 0, "holds 1 to 2,147,483,647 tokens, not 0"),
        ("llmc", 2**31, "not 2,147,483,648"),
    ],
)
def test_shard_sizes_that_make_no_sense(tmp_path: Path, format: str, size: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        write(tmp_path / "s", DOCUMENTS, format=format, shard_size=size)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("s_1.bin", llmc([1])[:900], "header is cut short: 900 of 1024"),
        ("s_1.bin", llmc([1, 2])[:-1], "cut short: 1027 bytes, and its header promises 1028"),
        ("s_1.bin", llmc([1, 2]) + b"\0", "too long"),
        ("s_1.bin", struct.pack("<3i", 20240520, 3, 1) + bytes(1014), "version 3 of this format"),
        ("s_1.bin", struct.pack("<3i", 20240520, 1, -1) + bytes(1014), "promises -1 tokens"),
        ("s_1.bin", struct.pack("<3i", 20240521, 1, 1) + bytes(1014), "it begins with 20240521"),
        ("s_1.npy", npy([1, 2])[:-1], "cut short"),
        ("s_1.npy", npy([1, 2]) + b"\0", "too long"),
        ("s_1.npy", npy([1, 2])[:40], "header of the array is damaged"),
        ("s_1.npy", b"not an array at all", "not a NumPy array"),
        ("s_1.npy", npy([1, 2], "<f4"), "of <f4 is no row of ids"),
        ("s_1.npy", npy([1, 2], ">u2"), "of >u2 is no row of ids"),
        ("s_1.npy", npy([[1, 2]]), "no row of ids"),  # type: ignore[list-item]
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    format = "llmc" if name.endswith(".bin") else "npy"
    with pytest.raises(UserError) as caught:
        open_tokens(tmp_path / "s", Reading(format))
    assert words in str(caught.value)
    assert caught.value.exit is Exit.DATA
    assert caught.value.problems[0].where == str(tmp_path / name)


def test_an_array_of_objects_is_refused_and_not_run(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    np.save(tmp_path / "s_1.npy", np.array([Canary()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="no row of ids"):
        open_tokens(tmp_path / "s")
    assert not (tmp_path / "ran").exists()


def test_files_of_one_set_store_ids_alike(tmp_path: Path) -> None:
    (tmp_path / "s_1.npy").write_bytes(npy([1]))
    (tmp_path / "s_2.npy").write_bytes(npy([1], "<u4"))
    with pytest.raises(UserError, match=r"s_2.npy: its ids are uint32, and those of .*s_1.npy are"):
        open_tokens(tmp_path / "s")


@pytest.mark.parametrize("format", ["llmc", "npy"])
def test_verification_reads_every_file(tmp_path: Path, format: str) -> None:
    write(tmp_path / "s", DOCUMENTS, format=format, shard_size=5)
    assert verify_tokens(tmp_path / "s") == []
    path = sorted(tmp_path.glob("s_*"))[1]
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"\x63\0")
    assert [(p.where, "checksum" in p.what) for p in verify_tokens(tmp_path / "s")] == [
        (str(path), True)
    ]
    path.unlink()
    assert "missing" in verify_tokens(tmp_path / "s")[0].what


def test_a_manifest_without_shards_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "s", DOCUMENTS, format="npy")
    path = tmp_path / "s.json"
    manifest = json.loads(path.read_text().replace("_000001.npy", ".starts"))
    del manifest["seal"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"names no \.npy files"):
        open_tokens(tmp_path / "s")
