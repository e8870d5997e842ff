"""Megatron's format, byte for byte; the expected bytes are built here from its description."""

from __future__ import annotations

import itertools
import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.tokens import megatron
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.format import NewSet, TokenReader
from gristmill.tokens.store import create_tokens, inspect_tokens, open_tokens, verify_tokens

SPEC = {"type": "test", "fingerprint": "f" * 64}
CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}
NAMES = {"B": "uint8", "b": "int8", "h": "int16", "i": "int32", "q": "int64", "H": "uint16"}

Documents = list[list[list[int]]]
"""Documents of sequences of ids."""


def expected(documents: Documents, letter: str) -> tuple[bytes, bytes]:
    """The two files, packed number by number."""
    sequences = [sequence for document in documents for sequence in document]
    width = struct.calcsize(letter)
    ids = b"".join(struct.pack(f"<{len(s)}{letter}", *s) for s in sequences)
    pointers, bounds = [0], [0]
    for sequence in sequences:
        pointers.append(pointers[-1] + width * len(sequence))
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    index = b"MMIDIDX\0\0" + struct.pack("<QB", 1, CODES[letter])
    index += struct.pack("<QQ", len(sequences), len(bounds))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers[:-1])
    return ids, index + struct.pack(f"<{len(bounds)}q", *bounds)


def place(prefix: Path, documents: Documents, letter: str = "H") -> Path:
    """The files as Megatron would leave them."""
    ids, index = expected(documents, letter)
    Path(f"{prefix}.bin").write_bytes(ids)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def write(prefix: Path, documents: Documents, *, vocab_size: int) -> None:
    writer = create_tokens(
        NewSet(prefix, vocab_size=vocab_size, end_of_text=None, tokenizer=SPEC, format="megatron")
    )
    for document in documents:
        ids = np.array([id for sequence in document for id in sequence])
        begins = np.cumsum([0, *map(len, document[:-1])])
        writer.append(ids, starts=np.zeros(1, np.int64), sequences=begins)
    writer.finish()


def read(prefix: Path, suffix: str) -> bytes:
    return Path(f"{prefix}{suffix}").read_bytes()


def joined(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def documents_of(reader: TokenReader) -> list[list[int]]:
    bounds = [*reader.document_starts.tolist(), len(reader)]
    return [reader.read(a, b - a).tolist() for a, b in itertools.pairwise(bounds)]


SETS: dict[str, Documents] = {
    "one token": [[[7]]],
    "one document": [[[1, 2, 3]]],
    "a sequence each": [[[1, 2, 3]], [[4]], [[5, 6]]],
    "several sequences": [[[1, 2], [3]], [[4]], [[5], [6], [7, 8, 9]]],
}


@pytest.mark.parametrize(
    ("vocab_size", "letter"),
    [
        (10, "H"),
        (50257, "H"),
        (65499, "H"),
        (65500, "i"),
        (65536, "i"),
        (128256, "i"),
        (2**31, "i"),
    ],
)
@pytest.mark.parametrize("name", SETS)
def test_the_files_are_what_megatron_writes(
    tmp_path: Path, vocab_size: int, letter: str, name: str
) -> None:
    documents = [*SETS[name], [[vocab_size - 1, 0]]]
    write(tmp_path / "my-gpt2_text_document", documents, vocab_size=vocab_size)
    prefix = tmp_path / "my-gpt2_text_document"
    assert (read(prefix, ".bin"), read(prefix, ".idx")) == expected(documents, letter)
    assert sorted(os.listdir(tmp_path)) == [prefix.name + s for s in (".bin", ".idx", ".json")]
    reader = open_tokens(prefix)
    assert reader.info.dtype == NAMES[letter]
    assert (reader.info.vocab_size, reader.info.tokenizer) == (vocab_size, "f" * 64)
    assert documents_of(reader) == [joined(document) for document in documents]
    assert verify_tokens(prefix) == []


def test_documents_added_one_by_one(tmp_path: Path) -> None:
    writer = create_tokens(
        NewSet(tmp_path / "set", vocab_size=10, end_of_text=None, tokenizer=SPEC, format="megatron")
    )
    for ids in ([1, 2], [3], [4, 5, 6]):
        writer.add(ids)
    writer.finish()
    prefix = tmp_path / "set"
    wanted = expected([[[1, 2]], [[3]], [[4, 5, 6]]], "H")
    assert (read(prefix, ".bin"), read(prefix, ".idx")) == wanted


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_index_does_not_depend_on_how_the_ids_arrive(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sequence = st.lists(st.integers(0, 99), min_size=1, max_size=5)
    documents = data.draw(st.lists(st.lists(sequence, min_size=1, max_size=3), min_size=1))
    ids = np.array([id for document in documents for part in document for id in part])
    lengths = [[len(part) for part in document] for document in documents]
    starts = np.cumsum([0, *map(sum, lengths[:-1])])
    begins = np.cumsum([0, *joined(lengths)[:-1]])
    cuts = data.draw(st.sets(st.integers(1, len(ids))))
    prefix = tmp_path_factory.mktemp("set") / "set"
    writer = create_tokens(
        NewSet(prefix, vocab_size=100, end_of_text=None, tokenizer=SPEC, format="megatron")
    )
    for low, high in itertools.pairwise(sorted({0, len(ids)} | cuts)):
        inside = [places[(places >= low) & (places < high)] - low for places in (starts, begins)]
        writer.append(ids[low:high], starts=inside[0], sequences=inside[1])
    writer.finish()
    assert (read(prefix, ".bin"), read(prefix, ".idx")) == expected(documents, "H")
    reader = open_tokens(prefix)
    assert reader.sequence_starts is not None
    assert reader.sequence_starts.tolist() == begins.tolist()
    assert reader.document_starts.tolist() == starts.tolist()


@pytest.mark.parametrize("letter", CODES)
def test_files_of_megatron_open_without_a_manifest(tmp_path: Path, letter: str) -> None:
    prefix = place(tmp_path / "set.v1", SETS["several sequences"], letter)
    reader = open_tokens(prefix)
    assert reader.sequence_lengths is not None and reader.sequence_starts is not None
    info = reader.info
    assert (info.format, info.dtype, info.documents) == ("megatron", NAMES[letter], 3)
    assert (info.vocab_size, info.tokenizer, info.end_of_text) == (None, None, None)
    assert documents_of(reader) == [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert reader.sequence_lengths.tolist() == [2, 1, 1, 1, 1, 3]
    assert reader.sequence_starts.tolist() == [0, 2, 3, 4, 5, 6]
    assert verify_tokens(prefix) == []
    assert inspect_tokens(prefix).largest_id == 9
    for name in ("set.v1.bin", "set.v1.idx"):
        assert len(open_tokens(tmp_path / name)) == 9


def test_the_fingerprint_of_foreign_files_follows_their_content(tmp_path: Path) -> None:
    prints = [
        open_tokens(place(tmp_path / str(number), documents)).info.fingerprint
        for number, documents in enumerate([[[[1, 2]]], [[[1, 2]]], [[[1, 3]]], [[[1], [2]]]])
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("documents", "found"),
    [
        ([[], [[1, 2]], [], [], [[3]], []], [[1, 2], [3]]),
        ([[[]], [[1], [], [2]], [[], []], [[3]]], [[1, 2], [3]]),
        ([[[1]], [[]]], [[1]]),
    ],
)
def test_documents_without_tokens_are_left_out(
    tmp_path: Path, documents: Documents, found: list[list[int]]
) -> None:
    reader = open_tokens(place(tmp_path / "set", documents))
    assert documents_of(reader) == found
    assert reader.info.documents == len(found)


@pytest.mark.parametrize("documents", [[], [[]], [[[]]]])
def test_a_set_without_tokens_is_refused(tmp_path: Path, documents: Documents) -> None:
    with pytest.raises(UserError, match="holds no tokens"):
        open_tokens(place(tmp_path / "set", documents))


def patched(content: bytes, at: int, layout: str, *values: Any) -> bytes:
    return (
        content[:at] + struct.pack(f"<{layout}", *values) + content[at + struct.calcsize(layout) :]
    )


# The set has 4 sequences of 2, 1, 1 and 3 ids (uint16) in 3 documents; its index: header to byte
# 34, lengths to 50, pointers to 82, documents to 114.
DAMAGE: dict[str, tuple[str, Any, str]] = {
    "wrong magic": (".idx", lambda c: b"MMIDIDY" + c[7:], "not an index of Megatron"),
    "empty index": (".idx", lambda c: b"", "not an index of Megatron"),
    "cut header": (".idx", lambda c: c[:20], "cut short: 20 bytes"),
    "cut lengths": (".idx", lambda c: c[:40], "cut short: 40 bytes, and its header promises 114"),
    "cut by one byte": (".idx", lambda c: c[:-1], "cut short: 113 bytes"),
    "longer index": (".idx", lambda c: c + b"\0", "too long: 115 bytes"),
    "version": (".idx", lambda c: patched(c, 9, "Q", 2), "version 2"),
    "unknown type": (".idx", lambda c: patched(c, 17, "B", 9), "type code 9 is not known"),
    "fractions": (".idx", lambda c: patched(c, 17, "B", 6), "fractions"),
    "huge count": (".idx", lambda c: patched(c, 18, "Q", 2**62), "cut short"),
    "no documents": (".idx", lambda c: patched(c[:82], 26, "Q", 0), "document index is empty"),
    "negative length": (".idx", lambda c: patched(c, 34, "i", -2), "sequence 0 has the length -2"),
    "lengths": (".idx", lambda c: patched(c, 34, "i", 3), "sequence 1 begins at byte 4, and the"),
    "last length": (".idx", lambda c: patched(c, 46, "i", 4), "lengths in the index add up to 16"),
    "pointer beyond": (".idx", lambda c: patched(c, 74, "q", 99), "byte 99, and the ids have 14"),
    "negative pointer": (".idx", lambda c: patched(c, 74, "q", -8), "byte -8, and the ids have"),
    "pointer": (".idx", lambda c: patched(c, 58, "q", 2), "sequence 1 begins at byte 2, and the"),
    "first document": (".idx", lambda c: patched(c, 82, "q", 1), "from 1 to 4 instead of"),
    "last document": (".idx", lambda c: patched(c, 106, "q", 5), "from 0 to 5 instead of"),
    "document order": (".idx", lambda c: patched(c, 90, "q", 4), "document 1 ends before it"),
    "images": (".idx", lambda c: c + b"\0\1\0\0", "not text but images"),
    "cut ids": (".bin", lambda c: c[:-1], "cut short: 13 bytes, and the lengths in the index add"),
    "longer ids": (".bin", lambda c: c + b"\0\0", "too long: 16 bytes"),
    "empty ids": (".bin", lambda c: b"", "cut short: 0 bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    suffix, change, words = DAMAGE[name]
    prefix = place(tmp_path / "set", [[[1, 2], [3]], [[4]], [[5, 6, 7]]])
    content = read(prefix, suffix)
    assert len(content) == {".idx": 114, ".bin": 14}[suffix]
    Path(f"{prefix}{suffix}").write_bytes(change(content))
    with pytest.raises(UserError) as caught:
        open_tokens(prefix)
    assert words in str(caught.value)
    assert caught.value.exit is Exit.DATA
    assert [problem.what for problem in verify_tokens(prefix)] == [caught.value.problems[0].what]


def test_checks_reach_beyond_the_first_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "_PIECE", 2)
    documents: Documents = [[[number] * (1 + number % 3)] for number in range(9)]
    prefix = place(tmp_path / "set", documents)
    assert documents_of(open_tokens(prefix)) == [joined(document) for document in documents]
    index = read(prefix, ".idx")
    for at, words in ((34 + 4 * 9 + 8 * 7, "sequence 7"), (34 + 12 * 9 + 8 * 6, "document 6")):
        Path(f"{prefix}.idx").write_bytes(patched(index, at, "q", 8))
        with pytest.raises(UserError, match=words):
            open_tokens(prefix)


def test_a_missing_file_of_the_pair(tmp_path: Path) -> None:
    prefix = place(tmp_path / "set", SETS["one document"])
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(UserError, match=r"set\.bin: cannot read"):
        open_tokens(prefix)


def test_modes_of_text_are_accepted(tmp_path: Path) -> None:
    prefix = place(tmp_path / "set", [[[1, 2], [3]]])
    Path(f"{prefix}.idx").write_bytes(read(prefix, ".idx") + b"\0\0")
    assert documents_of(open_tokens(prefix)) == [[1, 2, 3]]


def test_negative_ids_are_found(tmp_path: Path) -> None:
    problems = verify_tokens(place(tmp_path / "set", [[[1, -5]]], "i"))
    assert ["id -5 at position 1 is outside any" in problem.what for problem in problems] == [True]


def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "set", [[[1, 2]], [[3]]], vocab_size=10)
    path = tmp_path / "set.json"
    manifest = json.loads(path.read_text())
    for key, value in (("tokens", 4), ("documents", 1), ("dtype", "int32")):
        changed = {**manifest, key: value}
        del changed["seal"]
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match="the files hold 3 tokens in 2 documents as uint16"):
            open_tokens(tmp_path / "set")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_flipped_bit_is_found(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "set", [[[1, 2]], [[3]]], vocab_size=10)
    path = tmp_path / f"set{suffix}"
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        problems = verify_tokens(tmp_path / "set")
        assert any("checksum" in p.what and p.where == str(path) for p in problems), position


def test_a_document_too_long_for_the_index_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.MegatronWriter, "_longest", 5)
    writer = create_tokens(
        NewSet(tmp_path / "set", vocab_size=10, end_of_text=None, tokenizer=SPEC, format="megatron")
    )
    writer.add([1] * 5)
    with pytest.raises(UserError, match=r"6 tokens or more(.|\n)*--end-of-text"):
        writer.append(np.ones(1, int), starts=np.zeros(0, np.int64))
    writer.abandon()
    assert not os.listdir(tmp_path)


def test_a_vocabulary_too_large_for_int32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ids below 2,147,483,648"):
        write(tmp_path / "set", [[[1]]], vocab_size=2**31 + 1)


@pytest.mark.parametrize("step", range(2))
def test_an_interrupted_overwrite_never_pairs_old_with_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    write(tmp_path / "set", [[[1, 2]], [[3]]], vocab_size=10)
    writer = create_tokens(
        NewSet(
            tmp_path / "set",
            vocab_size=10,
            end_of_text=None,
            tokenizer=SPEC,
            format="megatron",
            overwrite=True,
        )
    )
    writer.add([4, 5])
    writer.add([6])
    real, calls = os.replace, itertools.count()

    def power_cut(*names: Any) -> None:
        if next(calls) == step:
            raise KeyboardInterrupt
        real(*names)

    with monkeypatch.context() as patch:
        patch.setattr("gristmill.tokens.writer.os.replace", power_cut)
        with pytest.raises(KeyboardInterrupt):
            writer.finish()
    with pytest.raises(UserError, match="unfinished"):
        open_tokens(tmp_path / "set")


def old_files(prefix: Path, documents: Documents, letter: str = "i", **wrong: int) -> Path:
    """The files of the older format, packed number by number."""
    sequences = [sequence for document in documents for sequence in document]
    count, width = len(sequences), struct.calcsize(letter)
    bounds = list(itertools.accumulate(map(len, documents), initial=0))
    offsets = list(itertools.accumulate(map(len, sequences), initial=0))
    index = b"TNTIDX\0\0" + struct.pack(
        "<6Q",
        wrong.get("version", 1),
        wrong.get("code", CODES[letter]),
        wrong.get("width", width),
        count,
        wrong.get("sizes", count),
        len(bounds),
    )
    for numbers in (range(count + 1), offsets, map(len, sequences), bounds):
        index += b"".join(struct.pack("<q", number) for number in numbers)
    ids = b"".join(struct.pack(f"<{len(s)}{letter}", *s) for s in sequences)
    Path(f"{prefix}.bin").write_bytes(ids)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


@pytest.mark.parametrize("format", ["megatron-cached", "megatron-lazy"])
@pytest.mark.parametrize("name", SETS)
def test_the_older_format_is_written_byte_for_byte(tmp_path: Path, name: str, format: str) -> None:
    documents = [[one for one in document if one] for document in SETS[name]]
    documents = [document for document in documents if document]
    theirs = old_files(tmp_path / "theirs", documents)
    convert_tokens([theirs], tmp_path / "ours", format=format)
    for suffix in (".bin", ".idx"):
        written = Path(f"{tmp_path / 'ours'}{suffix}").read_bytes()
        assert written == Path(f"{theirs}{suffix}").read_bytes()
    reader = open_tokens(tmp_path / "ours")
    assert (reader.info.format, reader.info.dtype) == (format, "int32")
    assert documents_of(reader) == [joined(document) for document in documents]
    assert not verify_tokens(tmp_path / "ours")
    # Without the manifest, the files are recognised as they would be from Megatron-DeepSpeed.
    Path(f"{tmp_path / 'ours'}.json").unlink()
    assert documents_of(open_tokens(tmp_path / "ours")) == documents_of(reader)


def test_an_older_set_that_is_resumed_is_the_same(tmp_path: Path) -> None:
    new = NewSet(tmp_path / "a", 300, 0, SPEC, format="megatron-lazy")
    writer = create_tokens(new)
    for ids in ([1, 2, 0], [3, 0], [4, 5, 6, 0]):
        writer.add(ids)
    writer.finish()
    resumable = replace(new, prefix=tmp_path / "b", state={})
    writer = create_tokens(resumable)
    writer.add([1, 2, 0])
    state = writer.save()
    writer.add([9, 9, 9])
    writer.close()
    writer = create_tokens(replace(resumable, state=state))
    mark = writer.mark()
    writer.add([7])
    writer.rewind(mark)
    for ids in ([3, 0], [4, 5, 6, 0]):
        writer.add(ids)
    assert writer.save()["tokens"] == 9
    assert documents_of(writer.reader()) == [[1, 2, 0], [3, 0], [4, 5, 6, 0]]
    writer.finish()
    writer.abandon()
    for suffix in (".bin", ".idx"):
        assert (
            Path(f"{tmp_path / 'a'}{suffix}").read_bytes()
            == Path(f"{tmp_path / 'b'}{suffix}").read_bytes()
        )


@pytest.mark.parametrize("letter", ["i", "H", "q"])
@pytest.mark.parametrize("name", SETS)
def test_the_older_index_is_read(tmp_path: Path, name: str, letter: str) -> None:
    reader = open_tokens(old_files(tmp_path / "set", SETS[name], letter))
    assert documents_of(reader) == [joined(document) for document in SETS[name]]
    assert reader.sequence_lengths is not None and reader.sequence_starts is not None
    lengths = [len(sequence) for document in SETS[name] for sequence in document]
    assert reader.sequence_lengths.tolist() == lengths
    assert reader.sequence_starts.tolist() == [0, *np.cumsum(lengths)[:-1].tolist()]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"version": 3}, "version 3"),
        ({"code": 7}, "fractions"),
        ({"code": 11}, "code 11 is not known"),
        ({"width": 8}, "int32 has 8 bytes"),
        ({"sizes": 5}, "3 items have 5 dimensions"),
    ],
)
def test_damage_of_the_older_index_is_named(
    tmp_path: Path, wrong: dict[str, int], words: str
) -> None:
    prefix = old_files(tmp_path / "set", SETS["a sequence each"], **wrong)
    with pytest.raises(UserError, match=words):
        open_tokens(prefix)


def test_a_cut_or_wrong_older_index(tmp_path: Path) -> None:
    prefix = old_files(tmp_path / "set", SETS["a sequence each"])
    index = read(prefix, ".idx")
    for cut in (9, 40, len(index) - 1):
        Path(f"{prefix}.idx").write_bytes(index[:cut])
        with pytest.raises(UserError, match="cut short"):
            open_tokens(prefix)
    Path(f"{prefix}.idx").write_bytes(patched(index, 56 + 8 * 4 + 8, "q", 2))
    with pytest.raises(UserError, match="sequence 1 begins at byte 8, and the one before it ends"):
        open_tokens(prefix)


@pytest.mark.parametrize("made", ["old", "new"])
@pytest.mark.parametrize("name", ["one token", "several sequences"])
def test_all_that_an_index_can_prove_is_checked(tmp_path: Path, name: str, made: str) -> None:
    """Without a manifest a flipped bit may only move a boundary between two documents."""
    prefix = {"old": old_files, "new": place}[made](tmp_path / "set", SETS[name], "H")
    path, missed = Path(f"{prefix}.idx"), []
    content, documents = path.read_bytes(), len(SETS[name])
    sequences = [sequence for document in SETS[name] for sequence in document]
    for at in range(len(content)):
        flipped = content[at] ^ (1 << at % 7)
        path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        if not verify_tokens(prefix):
            missed.append(at)
            reader = open_tokens(prefix)
            assert reader.sequence_lengths is not None
            assert reader.sequence_lengths.tolist() == [len(one) for one in sequences]
            assert reader.read(0, len(reader)).tolist() == joined(sequences)
    # The first and the last entry of the document index are known.
    inner = range(len(content) - 8 * documents, len(content) - 8)
    assert {*missed} <= {*inner}
