"""Parquet and Arrow tables, documents in the named text columns.

    .parquet             row groups, each with its columns one after another, and a footer
    .arrow .feather      record batches: a file with a footer, or a stream

Rows take the place of lines: a position is the number of rows before it. Only the requested columns
are read. A small row group is one block, read by a worker. Reading cannot begin in the middle of a
large row group or a record batch, so the process that cuts slices it into blocks, and memory is
bounded whatever the size of the file. All offsets are validated before use, since pyarrow would
follow a damaged one anywhere. Nulls and bytes are not text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from gristmill.base.errors import optional
from gristmill.text.sources.blocks import (
    ReadError,
    SourceFormat,
    TextBlock,
    TextRows,
    damaged,
    too_long,
)
from gristmill.text.sources.lines import decoded
from gristmill.text.sources.source import ReadOptions, Reason, Source
from gristmill.text.sources.tables import missing_column

_SMALL = 8
"""A row group of at most this many blocks is read at once."""
_MAX_ROWS = 1 << 14
"""Per block. Equal texts may be stored once, so their size on disk says little."""
_MIN_ROWS = 64
"""Read together, even if they may fill several blocks."""
_BUFFER = 1 << 20
_ARROW_FILE = b"ARROW1"
_OLD_FEATHER = b"FEA1"


def _pyarrow(module: str = "pyarrow") -> Any:
    return optional(module, extra="parquet", purpose="reading .parquet and .arrow files")


@contextmanager
def _opening(source: Source) -> Iterator[None]:
    """Refuse a compressed file, and turn what pyarrow raises for a damaged one into a failure."""
    if not source.can_seek:
        raise ReadError(
            "this table is compressed as a whole, so that no part of it can be found",
            remedy="decompress the file; its columns may be compressed instead",
        )
    try:
        yield
    # Names that are not UTF-8 are decoded before anything is checked.
    except (UnicodeDecodeError, _pyarrow().ArrowException) as error:
        raise damaged(error) from error


def _check_columns(schema: Any, options: ReadOptions) -> None:
    """Refuse a table that lacks a text column."""
    for key in options.keys:
        found = schema.get_all_field_indices(key)
        if not found:
            raise missing_column(key, schema.names)
        if len(found) > 1:
            raise ReadError(
                f"there are {len(found)} columns {key!r}", remedy="give each a name of its own"
            )
        kind = schema.field(found[0]).type
        text = kind.value_type if _pyarrow().types.is_dictionary(kind) else kind
        if str(text) not in _bytes_by_text():
            raise ReadError(
                f"the column {key!r} holds no text; its type is {kind}",
                remedy="name a column of strings (--json-key), or convert this one",
            )


def _bytes_by_text() -> Mapping[str, Any]:
    """For each type of text, the type of the same bytes."""
    arrow = _pyarrow()
    return {
        "string": arrow.binary(),
        "large_string": arrow.large_binary(),
        "string_view": arrow.binary_view(),
    }


def _rows(table: Any, options: ReadOptions) -> TextRows:
    """The rows of a table or record batch, up to the first text that is too long."""
    found: list[list[bytes | None]] = []
    for key in options.keys:
        column = table.column(key)
        chunks = column.chunks if hasattr(column, "chunks") else [column]
        found.append([text for chunk in chunks for text in _as_bytes(chunk).to_pylist()])
    sizes = [max(len(text or b"") for text in row) for row in zip(*found, strict=True)]
    count = next((n for n, size in enumerate(sizes) if size > options.line_limit), len(sizes))
    columns = [
        [Reason.WRONG_TYPE if text is None else decoded(text) for text in column[:count]]
        for column in found
    ]
    return TextRows(columns, range(count), count, too_long(options) if count < len(sizes) else None)


def _as_bytes(array: Any) -> Any:
    """Texts as bytes, all offsets validated; whether the bytes are UTF-8 is decided row by row."""
    arrow = _pyarrow()
    if arrow.types.is_dictionary(array.type):
        array.indices.validate(full=True)
        words = _as_bytes(array.dictionary)
        # Building it anew checks the indices.
        return arrow.DictionaryArray.from_arrays(array.indices, words).dictionary_decode()
    array.validate()
    content = array.view(_bytes_by_text()[str(array.type)])
    content.validate(full=True)
    return content


def _rows_per_block(rows: int, size: int, options: ReadOptions) -> int:
    return max(1, min(_MAX_ROWS, rows * options.block_bytes // max(size, 1)))


def _slices(
    batch: Any, options: ReadOptions, position: int, begin: int, *, disk: int = 0
) -> Iterator[TextBlock]:
    """The rows of a batch that begins at `position`, from the row `begin` on, in blocks."""
    step = _rows_per_block(batch.num_rows, batch.get_total_buffer_size(), options)
    for first in range(max(begin - position, 0), batch.num_rows, step):
        part = batch.slice(first, step)
        start = position + first
        yield TextBlock(start, start + part.num_rows, disk, content=_rows(part, options))


def _open_parquet(source: Source) -> Any:
    # Without the last two options, a row group would be loaded whole.
    return _pyarrow("pyarrow.parquet").ParquetFile(
        source.path, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER
    )


class _RowGroup(NamedTuple):
    number: int
    begin: int
    """How many rows of the file come before it."""
    end: int
    size: int
    """Decompressed bytes of all its columns."""


def _row_groups(file: Any) -> Iterator[_RowGroup]:
    begin = 0
    for number in range(file.metadata.num_row_groups):
        # Metadata of single columns is not touched: if it is damaged, pyarrow ends the process
        # instead of raising an error.
        group = file.metadata.row_group(number)
        yield _RowGroup(number, begin, begin + group.num_rows, group.total_byte_size)
        begin += group.num_rows


def _cut_parquet(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    with _opening(source), _open_parquet(source) as file:
        _check_columns(file.schema_arrow, options)
        total = max(file.metadata.num_rows, 1)
        for group in _row_groups(file):
            for block in _blocks_of_group(file, group, options, begin):
                yield replace(block, disk=(source.size or 0) * block.end // total)


def _blocks_of_group(
    file: Any, group: _RowGroup, options: ReadOptions, begin: int
) -> Iterator[TextBlock]:
    rows = group.end - group.begin
    if begin >= group.end or not rows:
        return
    small = group.size <= _SMALL * options.block_bytes and rows <= _SMALL * _MAX_ROWS
    if small and begin <= group.begin:
        yield TextBlock(group.begin, group.end, disk=0)
        return
    batches = file.iter_batches(
        # The size is that of all columns; that of the requested ones is known once they are read.
        batch_size=max(_rows_per_block(rows, group.size, options), _MIN_ROWS),
        row_groups=[group.number],
        columns=list(set(options.keys)),
        use_threads=False,
    )
    position = group.begin
    for batch in batches:
        yield from _slices(batch, options, position, begin)
        position += batch.num_rows


def _read_parquet(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    with _opening(source), _open_parquet(source) as file:
        groups = _row_groups(file)
        number = next(one.number for one in groups if one.begin == block.begin < one.end)
        table = file.read_row_group(number, columns=list(set(options.keys)), use_threads=False)
        return _rows(table, options)


def _cut_arrow(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    with _opening(source), _pyarrow().OSFile(str(source.path)) as handle:
        ipc = _pyarrow("pyarrow.ipc")
        start = handle.read(len(_ARROW_FILE))
        if start.startswith(_OLD_FEATHER):
            raise ReadError("this is version 1 of Feather", remedy="write it again as .arrow")
        is_file = start == _ARROW_FILE
        open_either = ipc.open_file if is_file else ipc.open_stream
        handle.seek(0)
        schema = open_either(handle).schema
        _check_columns(schema, options)
        fields = sorted({schema.get_field_index(key) for key in options.keys})
        read_options = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        handle.seek(0)
        reader = open_either(handle, options=read_options)
        count = reader.num_record_batches if is_file else 0
        batches = map(reader.get_batch, range(count)) if is_file else reader
        row = 0
        for number, batch in enumerate(batches, 1):
            batch.validate()
            disk = (source.size or 0) * number // count if is_file else handle.tell()
            yield from _slices(batch, options, row, begin, disk=disk)
            row += batch.num_rows


PARQUET = SourceFormat(_cut_parquet, _read_parquet)
ARROW = SourceFormat(_cut_arrow)
