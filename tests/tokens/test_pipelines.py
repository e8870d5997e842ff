"""Token files of datatrove and dolma, read as they are."""

from __future__ import annotations

import csv
import gzip
import itertools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.format import TokenReader
from gristmill.tokens.store import Reading, inspect_tokens, open_tokens, verify_tokens

Documents = list[list[int]]
ONE, TWO = [[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10, 11]]


def datatrove(path: Path, documents: Documents, *, width: int = 2, metadata: bool = True) -> None:
    """Write NAME.ds as datatrove's TokenizedFile does."""
    letter = {2: "H", 4: "I"}[width]
    ids = list(itertools.chain(*documents))
    path.write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    ends = list(itertools.accumulate(map(len, documents)))
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata:
        words = f"gpt2|{width}\n{len(ids)}\n{len(ids)} T"
        Path(f"{path}.metadata").write_text(words)


def dolma(path: Path, documents: Documents, *, width: int = 2) -> None:
    """Write NAME.npy and NAME.csv.gz as dolma's MemmapWriter does."""
    ids = np.array(list(itertools.chain(*documents)), dtype=f"<u{width}")
    path.write_bytes(ids.tobytes())
    with gzip.open(path.with_suffix(".csv.gz"), "wt", newline="") as file:
        rows, begin = csv.writer(file), 0
        for number, document in enumerate(documents):
            end = begin + len(document)
            rows.writerow((begin, end, f'an "id",\n{number}', "source.json.gz", number))
            begin = end


WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "datatrove": (".ds", datatrove),
    "dolma": (".npy", dolma),
}
each = pytest.mark.parametrize("format", WRITERS)


def write(folder: Path, format: str, *sets: Documents, **options: Any) -> list[Path]:
    folder.mkdir(exist_ok=True)
    ending, writer = WRITERS[format]
    paths = [folder / f"part-0-{number:05d}{ending}" for number in range(len(sets))]
    for path, documents in zip(paths, sets, strict=True):
        writer(path, documents, **options)
    return paths


def documents_of(reader: TokenReader) -> Documents:
    bounds = [*reader.document_starts.tolist(), len(reader)]
    return [reader.read(a, b - a).tolist() for a, b in itertools.pairwise(bounds)]


@each
@pytest.mark.parametrize("width", [2, 4])
def test_a_set_is_found_by_folder_prefix_and_file(tmp_path: Path, format: str, width: int) -> None:
    paths = write(tmp_path / "set", format, ONE, TWO, width=width)
    for place in (tmp_path / "set", tmp_path / "set" / "part-0"):
        reader = open_tokens(place)
        assert reader.info.format == format and reader.info.dtype == f"uint{8 * width}"
        assert documents_of(reader) == ONE + TWO
        assert reader.info.documents == 5 and reader.info.tokens == 11
        assert verify_tokens(place) == []
    assert documents_of(open_tokens(paths[1])) == TWO
    assert inspect_tokens(tmp_path / "set").largest_id == 11
    # The id between documents is not needed, and not used.
    assert documents_of(open_tokens(tmp_path / "set", Reading(end_of_text=4))) == ONE + TWO


@each
def test_it_is_converted_and_merged(tmp_path: Path, format: str) -> None:
    write(tmp_path / "a", format, ONE)
    write(tmp_path / "b", format, TWO)
    convert_tokens([tmp_path / "a"], tmp_path / "copy", format="megatron")
    assert documents_of(open_tokens(tmp_path / "copy")) == ONE
    # That of the first is only read, so the new set is flat.
    info = convert_tokens([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert info.format == "flat" and documents_of(open_tokens(tmp_path / "both")) == ONE + TWO
    with pytest.raises(UserError, match="known are flat"):
        convert_tokens([tmp_path / "a"], tmp_path / "no", format=format)


@given(
    sets=st.lists(
        st.lists(st.lists(st.integers(0, 65535), max_size=4), max_size=5), min_size=1, max_size=4
    ),
    width=st.sampled_from([2, 4]),
    format=st.sampled_from(sorted(WRITERS)),
)
def test_every_id_is_in_its_document(
    tmp_path_factory: pytest.TempPathFactory, sets: list[Documents], width: int, format: str
) -> None:
    written = [document for documents in sets for document in documents if document]
    folder = tmp_path_factory.mktemp("property")
    write(folder, format, *sets, width=width)
    if written:
        assert documents_of(open_tokens(folder)) == written
    else:
        with pytest.raises(UserError, match="holds no tokens"):
            open_tokens(folder)


def test_the_fingerprint_changes_with_ids_and_with_documents(tmp_path: Path) -> None:
    prints = set()
    for number, documents in enumerate([ONE, [[1, 2], [3, 4], [5, 6]], [[1, 2, 3], [4], [5, 7]]]):
        for format in WRITERS:
            folder = tmp_path / f"{format}-{number}"
            write(folder, format, documents)
            prints.add(open_tokens(folder).info.fingerprint)
    assert len(prints) == 6


def test_an_index_says_the_width_where_no_metadata_do(tmp_path: Path) -> None:
    for width in (2, 4):
        folder = tmp_path / str(width)
        write(folder, "datatrove", ONE, width=width, metadata=False)
        reader = open_tokens(folder)
        assert documents_of(reader) == ONE and reader.info.dtype == f"uint{8 * width}"


def test_dolma_leaves_files_full_of_nothing(tmp_path: Path) -> None:
    first, _ = write(tmp_path / "set", "dolma", [], ONE, width=4)
    first.write_bytes(bytes(4000))
    reader = open_tokens(tmp_path / "set")
    assert documents_of(reader) == ONE and reader.info.dtype == "uint32"


@each
def test_without_the_file_beside_it_the_width_is_asked_for(tmp_path: Path, format: str) -> None:
    (path,) = write(tmp_path / "set", format, ONE, width=4)
    for ending in (".ds.index", ".ds.metadata", ".csv.gz"):
        Path(f"{path.with_suffix('')}{ending}").unlink(missing_ok=True)
    with pytest.raises(UserError, match="--dtype uint16 or uint32"):
        open_tokens(tmp_path / "set", Reading(format))
    reader = open_tokens(tmp_path / "set", Reading(format, "uint32", 4))
    assert documents_of(reader) == [[1, 2, 3, 4], [5, 6]]
    assert open_tokens(tmp_path / "set", Reading(format, "uint32")).info.documents == 1


def test_arrays_of_numpy_are_not_taken_for_dolma(tmp_path: Path) -> None:
    np.save(tmp_path / "x_000001.npy", np.array([1, 2, 3], "<u2"))
    dolma(tmp_path / "other.npy", ONE)
    (tmp_path / "other.npy").unlink()
    assert open_tokens(tmp_path / "x").info.format == "npy"
    with pytest.raises(UserError, match="--from npy"):
        open_tokens(tmp_path / "x", Reading("dolma", "uint16"))


def spoil_index(ends: list[int]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))

    return spoil


def spoil_rows(*rows: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.with_suffix(".csv.gz").write_bytes(gzip.compress("".join(rows).encode()))

    return spoil


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("format", "damage", "words"),
    [
        ("datatrove", cut, "the file is cut short: 10 bytes, and its index promises 12"),
        ("datatrove", spoil_index([3, 4, 7]), "cut short"),
        ("datatrove", spoil_index([3, 2, 6]), "document 1 ends before it begins"),
        ("datatrove", lambda p: Path(f"{p}.index").write_bytes(b"123"), "no whole number of ends"),
        ("datatrove", lambda p: Path(f"{p}.metadata").write_text("gpt2|3\n"), "the bytes of an id"),
        ("datatrove", lambda p: Path(f"{p}.loss").write_bytes(b"111111"), "masks are not read"),
        ("dolma", cut, "10 bytes, and part-0-00000.csv.gz says 6 ids"),
        ("dolma", spoil_rows("0,3,a,b,0\n", "4,6,a,b,0\n"), "document 1 goes from 4 to 6"),
        ("dolma", spoil_rows("0,3,a,b,0\n", "some text\n"), "row 2 does not begin with"),
        (
            "dolma",
            lambda p: p.with_suffix(".csv.gz").write_bytes(gzip.compress(b"0,6,a,b,0\n" * 9)[:-9]),
            "row 1 does not begin|document 1 goes",
        ),
    ],
)
def test_damage_is_found_when_a_set_is_opened(
    tmp_path: Path, format: str, damage: Callable[[Path], None], words: str
) -> None:
    (path,) = write(tmp_path / "set", format, ONE)
    damage(path)
    with pytest.raises(UserError, match=words):
        open_tokens(tmp_path / "set")
    assert verify_tokens(tmp_path / "set")


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "set", "datatrove", ONE)
    datatrove(tmp_path / "set" / "z.ds", TWO, width=4)
    with pytest.raises(UserError, match="keep the two sets apart"):
        open_tokens(tmp_path / "set")
    datatrove(tmp_path / "set" / "z.ds", TWO)
    (tmp_path / "set" / "z.ds.index").unlink()
    with pytest.raises(UserError, match=r"documents end is missing"):
        open_tokens(tmp_path / "set")
