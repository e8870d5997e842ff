"""Token files of other programs, which come without a manifest."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.tokens import format as reading
from gristmill.tokens.format import NewSet, TokenFiles, TokenReader, TokenSetInfo, TokenShard
from gristmill.tokens.store import (
    Reading,
    create_tokens,
    document_starts,
    inspect_tokens,
    open_tokens,
    verify_tokens,
)


def documents_of(reader: TokenReader) -> list[list[int]]:
    bounds = [*reader.document_starts.tolist(), len(reader)]
    return [reader.read(a, b - a).tolist() for a, b in itertools.pairwise(bounds)]


def llmc(path: Path, ids: list[int]) -> None:
    header = struct.pack("<3i", 20240520, 1, len(ids)) + bytes(253 * 4)
    path.write_bytes(header + np.array(ids, dtype="<u2").tobytes())


def npy(path: Path, ids: list[int]) -> None:
    np.save(path, np.array(ids, dtype="<u2"))


@pytest.mark.parametrize(("ending", "save"), [(".bin", llmc), (".npy", npy)])
def test_shards_are_found_by_prefix_folder_and_file(
    tmp_path: Path, ending: str, save: object
) -> None:
    assert callable(save)
    folder = tmp_path / "data"
    folder.mkdir()
    for number, ids in ((10, [6]), (9, [4, 5]), (2, [1, 2, 3])):
        save(folder / f"fineweb_train_{number:06d}{ending}", ids)
    everything = [1, 2, 3, 4, 5, 6]
    for place in (folder / "fineweb_train", folder):
        reader = open_tokens(place)
        assert reader.info.format == {".bin": "llmc", ".npy": "npy"}[ending]
        assert reader.read(0, 6).tolist() == everything
        assert reader.document_starts.tolist() == [0]
    one = open_tokens(folder / f"fineweb_train_000009{ending}")
    assert one.read(0, 2).tolist() == [4, 5]
    assert verify_tokens(folder) == []


def test_shards_are_put_in_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (0, 2, 10, 9):
        npy(tmp_path / f"s_{number}.npy", [number])
    (tmp_path / "s_more.npy").write_bytes(b"another file")
    assert open_tokens(tmp_path / "s").read(0, 4).tolist() == [0, 2, 9, 10]


def test_a_plain_file_opens_when_asked(tmp_path: Path) -> None:
    np.array([1, 2, 65535], dtype="<u2").tofile(tmp_path / "train.bin")
    for place in (tmp_path / "train", tmp_path / "train.bin"):
        reader = open_tokens(place, Reading(format="flat"))
        assert reader.read(0, 3).tolist() == [1, 2, 65535]
        assert (reader.info.format, reader.info.dtype) == ("flat", "uint16")
    np.array([1, 70000], dtype="<u4").tofile(tmp_path / "large.bin")
    wide = open_tokens(tmp_path / "large", Reading(format="flat", dtype="uint32"))
    assert wide.read(0, 2).tolist() == [1, 70000]
    with pytest.raises(UserError, match="unfinished"):
        open_tokens(tmp_path / "train")


def test_a_plain_file_with_half_an_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"12345")
    with pytest.raises(UserError, match="5 bytes are no whole number of uint16 ids"):
        open_tokens(tmp_path / "train", Reading(format="flat"))


@pytest.mark.parametrize(
    ("name", "format", "dtype", "words"),
    [
        ("none", None, None, "there is no token set here"),
        ("none", "npy", None, "there is no token set of the format npy here"),
        ("plain", "cake", None, "'cake' is not known; known are flat, llmc, megatron, "),
        ("plain", "flat", "float32", "one of uint8, int8"),
        ("shard", None, "uint16", "the format npy state how their ids are stored"),
        ("empty", "flat", None, "holds no tokens"),
        ("nothing", None, None, "holds no tokens"),
        ("ours", "npy", None, "already says how to read it: it is flat"),
        ("ours", "flat", "uint32", "already says how to read it"),
    ],
)
def test_what_cannot_be_opened(
    tmp_path: Path, name: str, format: str | None, dtype: str | None, words: str
) -> None:
    (tmp_path / "plain.bin").write_bytes(b"1234")
    (tmp_path / "empty.bin").write_bytes(b"")
    npy(tmp_path / "shard_1.npy", [1])
    npy(tmp_path / "nothing_1.npy", [])
    spec = {"fingerprint": "x"}
    writer = create_tokens(
        NewSet(tmp_path / "ours", vocab_size=9, end_of_text=None, tokenizer=spec)
    )
    writer.add([1])
    writer.finish()
    with pytest.raises(UserError, match=words):
        open_tokens(tmp_path / name, Reading(format=format, dtype=dtype))


def test_an_empty_shard_among_others_is_skipped(tmp_path: Path) -> None:
    for number, ids in enumerate(([], [1, 2], [], [3], [])):
        npy(tmp_path / f"s_{number}.npy", ids)
    assert open_tokens(tmp_path / "s").read(0, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("ids", "documents"),
    [
        ([1, 2, 9, 3, 9], [[1, 2, 9], [3, 9]]),
        ([1, 2, 9, 3], [[1, 2, 9], [3]]),
        ([9, 1, 2, 9, 3], [[9, 1, 2], [9, 3]]),
        ([1, 9, 9, 2], [[1, 9], [9], [2]]),
        ([1, 2], [[1, 2]]),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 100])
def test_documents_are_cut_at_an_id(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ids: list[int],
    documents: list[list[int]],
    piece: int,
) -> None:
    monkeypatch.setattr(reading, "PIECE", piece)
    npy(tmp_path / "s_1.npy", ids)
    reader = open_tokens(tmp_path / "s", Reading(end_of_text=9))
    assert documents_of(reader) == documents
    assert (reader.info.documents, reader.info.end_of_text) == (len(documents), 9)
    assert inspect_tokens(tmp_path / "s", Reading(end_of_text=9)).info == reader.info


@given(st.lists(st.integers(0, 3), min_size=1))
def test_every_id_is_in_one_document(ids: list[int]) -> None:
    class Row(TokenReader):
        def read(self, start: int, count: int) -> np.ndarray:
            return np.array(ids[start : start + count])

    info = TokenSetInfo("flat", "int64", len(ids), 1, None, None, None, "")
    shard = TokenShard(Path("none"), 0, len(ids), "int64")
    starts = document_starts(Row(info, TokenFiles([shard], np.zeros(1, np.int64))), between=0)
    assert starts[0] == 0
    assert (np.diff(starts, append=len(ids)) > 0).all()
    assert len(starts) <= ids.count(0) + 1


def test_an_unfinished_set_of_ours_is_not_taken_for_a_foreign_one(tmp_path: Path) -> None:
    npy(tmp_path / "s_1.npy", [1])
    (tmp_path / "s.starts").write_bytes(bytes(8))
    with pytest.raises(UserError, match="unfinished"):
        open_tokens(tmp_path / "s")


def test_a_neighbour_with_a_shorter_name_is_no_obstacle(tmp_path: Path) -> None:
    writer = create_tokens(
        NewSet(tmp_path / "wiki", vocab_size=9, end_of_text=None, tokenizer={"fingerprint": "x"})
    )
    writer.add([1])
    writer.finish()
    npy(tmp_path / "wiki.v2_1.npy", [5])
    assert open_tokens(tmp_path / "wiki.v2").read(0, 1).tolist() == [5]
