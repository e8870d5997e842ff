"""Parquet and Arrow: types of text, row groups and batches, nulls, damage, going on."""

from __future__ import annotations

import gzip
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import Reason

arrow = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")
ipc = pytest.importorskip("pyarrow.ipc")
parquet = pytest.importorskip("pyarrow.parquet")

ReadBlocks = Callable[..., Any]
SIZES = [1, 64, 1 << 20]


def write_parquet(table: Any, path: Path, rows: int) -> None:
    parquet.write_table(table, path, row_group_size=rows)


def write_file(table: Any, path: Path, rows: int) -> None:
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_stream(table: Any, path: Path, rows: int) -> None:
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def write_feather(table: Any, path: Path, rows: int) -> None:
    feather.write_feather(table, path, compression="zstd", chunksize=rows)


Write = Callable[[Any, Path, int], None]
KINDS: dict[str, Write] = {
    "a.parquet": write_parquet,
    "file.arrow": write_file,
    "stream.arrow": write_stream,
    "a.feather": write_feather,
}
each_kind = pytest.mark.parametrize("name", KINDS)


def written(folder: Path, name: str, table: Any, *, rows: int = 3) -> Path:
    KINDS[name](table, folder / name, rows)
    return folder / name


# ------------------------------------------------------------------ rows


@each_kind
@pytest.mark.parametrize("size", SIZES)
def test_columns_and_reasons(tmp_path: Path, read_blocks: ReadBlocks, name: str, size: int) -> None:
    not_utf8 = arrow.array([b"fine", b"b\xffd", b"", None, "ü".encode()] * 2).view(arrow.string())
    titles = arrow.array([str(n) for n in range(10)])
    table = arrow.table({"n": list(range(10)), "text": not_utf8, "title": titles})
    path = written(tmp_path, name, table)
    reading = read_blocks(path, keys=("title", "text"), block_bytes=size)
    texts = ["fine", Reason.INVALID_UTF8, Reason.EMPTY_TEXT, Reason.WRONG_TYPE, "ü"] * 2
    assert reading.failure is None
    assert reading.rows == [(n + 1, (str(n), text)) for n, text in enumerate(texts)]
    assert read_blocks(path, keys=("text", "text")).rows[0] == (1, ("fine", "fine"))


@each_kind
@pytest.mark.parametrize(
    "kind",
    [
        arrow.string(),
        arrow.large_string(),
        arrow.dictionary(arrow.int8(), arrow.string()),
        arrow.dictionary(arrow.int32(), arrow.large_string()),
        arrow.string_view(),
    ],
    ids=str,
)
def test_types_of_text(tmp_path: Path, read_blocks: ReadBlocks, name: str, kind: Any) -> None:
    texts = ["one", "a text that is not short at all", "one", None, ""] * 3
    table = arrow.table({"text": arrow.array(texts, arrow.string()).cast(kind)})
    expected = [Reason.WRONG_TYPE if t is None else t or Reason.EMPTY_TEXT for t in texts]
    path = written(tmp_path, name, table)
    for size in SIZES:
        assert read_blocks(path, block_bytes=size).values == expected


@each_kind
def test_no_rows(tmp_path: Path, read_blocks: ReadBlocks, name: str) -> None:
    path = written(tmp_path, name, arrow.table({"text": arrow.array([], arrow.string())}))
    reading = read_blocks(path)
    assert reading.rows == [] and reading.failure is None


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.none() | st.text(max_size=20), max_size=20),
    st.sampled_from(list(KINDS)),
    st.integers(1, 8),
    st.integers(1, 100),
)
def test_where_blocks_are_cut_decides_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    read_blocks: ReadBlocks,
    texts: list[str | None],
    name: str,
    rows: int,
    size: int,
) -> None:
    table = arrow.table({"text": arrow.array(texts, arrow.string())})
    path = written(tmp_path_factory.mktemp("in"), name, table, rows=rows)
    expected = [Reason.WRONG_TYPE if t is None else t or Reason.EMPTY_TEXT for t in texts]
    assert read_blocks(path).values == expected
    small = read_blocks(path, block_bytes=size)
    assert small.values == expected
    for block in small.blocks:
        rest = read_blocks(path, begin=block.end, line=block.end + 1, block_bytes=size)
        assert rest.rows == small.rows[block.end :]


def test_large_row_groups_come_in_slices(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    random.seed(0)
    texts = [random.randbytes(50).hex() for _ in range(1000)]
    path = written(tmp_path, "a.parquet", arrow.table({"text": texts}), rows=600)
    assert [(b.begin, b.end, b.content) for b in read_blocks(path).blocks] == [
        (0, 600, None),
        (600, 1000, None),
    ]
    sliced = read_blocks(path, block_bytes=2000)
    assert sliced.values == texts
    assert max(block.end - block.begin for block in sliced.blocks) < 30
    assert all(block.content is not None for block in sliced.blocks)
    assert read_blocks(path, begin=7).values == texts[7:]


@each_kind
def test_progress(tmp_path: Path, read_blocks: ReadBlocks, name: str) -> None:
    path = written(tmp_path, name, arrow.table({"text": ["word " * 50] * 50}), rows=7)
    disks = [block.disk for block in read_blocks(path, block_bytes=500).blocks]
    assert disks == sorted(disks) and len(set(disks)) > 5
    assert 0.8 * path.stat().st_size < disks[-1] <= path.stat().st_size


# ------------------------------------------------------------------ what ends the reading


@each_kind
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"title": ["x"], "n": [1]}, "there is no column 'text'; the columns are: title, n"),
        ({"text": [1]}, "the column 'text' holds no text; its type is int64"),
        ({"text": [b"x"]}, "the column 'text' holds no text; its type is binary"),
        ({"text": [["x"]]}, "the column 'text' holds no text; its type is list"),
        ({"text": [{"text": "x"}]}, "the column 'text' holds no text; its type is struct"),
    ],
)
def test_hopeless_tables(tmp_path: Path, name: str, columns: dict[str, Any], words: str) -> None:
    path = written(tmp_path, name, arrow.table(columns))
    with pytest.raises(UserError) as caught:
        list(SourceReader([str(path)]))
    assert words in caught.value.problems[0].what
    assert caught.value.problems[0].where == f"{path}:1"
    assert caught.value.exit is Exit.DATA


@each_kind
@pytest.mark.parametrize("size", SIZES)
def test_a_text_over_the_limit(
    tmp_path: Path, read_blocks: ReadBlocks, name: str, size: int
) -> None:
    table = arrow.table({"text": ["a"] * 4 + ["x" * 100, "b"]})
    path = written(tmp_path, name, table)
    assert len(read_blocks(path, block_bytes=size, line_limit=100).rows) == 6
    reading = read_blocks(path, block_bytes=size, line_limit=99)
    assert reading.failure is not None and "longer than 99 B" in reading.failure.what
    assert reading.values == ["a"] * 4 and reading.lines[-1] == 5


@each_kind
def test_compressed_as_a_whole(tmp_path: Path, read_blocks: ReadBlocks, name: str) -> None:
    path = written(tmp_path, name, arrow.table({"text": ["x"]}))
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    reading = read_blocks(packed)
    assert reading.failure is not None and "compressed as a whole" in reading.failure.what


def test_feather_of_old(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    path = tmp_path / "a.feather"
    path.write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    failure = read_blocks(path).failure
    assert failure is not None and "version 1" in failure.what


@each_kind
def test_damage_is_told_and_breaks_nothing(
    tmp_path: Path, read_blocks: ReadBlocks, name: str
) -> None:
    texts = [f"text {n} " * 5 for n in range(60)]
    text = arrow.array(texts, arrow.string())
    if name == "file.arrow":
        text = text.dictionary_encode()
    path = written(tmp_path, name, arrow.table({"text": text}), rows=20)
    content = path.read_bytes()
    random.seed(0)
    failures = 0
    for _ in range(150):
        broken = bytearray(content)
        broken[random.randrange(len(broken))] ^= 1 << random.randrange(8)
        path.write_bytes(broken)
        # A flipped letter is found by nobody, and rows before a failure may be any.
        failures += read_blocks(path).failure is not None
    assert failures
    for size in (0, 1, 7, 20, len(content) // 2):
        path.write_bytes(content[:size])
        failure = read_blocks(path).failure
        assert failure is not None and "damaged or incomplete" in failure.remedy


def test_a_damaged_row_group_is_told_with_its_row(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    texts = [f"text {n} " * 5 for n in range(60)]
    path = tmp_path / "a.parquet"
    table = arrow.table({"text": texts})
    checked = {"write_page_checksum": True, "use_dictionary": False}
    parquet.write_table(table, path, row_group_size=20, **checked)
    group = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[group.data_page_offset + group.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    for size in SIZES:
        reading = read_blocks(path, block_bytes=size)
        assert reading.values == texts[:20] and reading.lines[-1] == 21
        assert reading.failure is not None and "damaged" in reading.failure.remedy


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.parquet", arrow.table({"text": ["x"]}))
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="needs the package 'pyarrow'") as caught:
        list(SourceReader([str(path)]))
    assert caught.value.problems[0].remedy == "pip install 'gristmill[parquet]'"


@each_kind
def test_prepared_by_one_process_or_two(
    tmp_path: Path, name: str, prepared_alike: Callable[..., None]
) -> None:
    texts = ["one", "zwei ü", None, "three"] * 5
    path = written(tmp_path, name, arrow.table({"text": texts, "title": texts[::-1]}))
    prepared_alike(path, kept=15)
