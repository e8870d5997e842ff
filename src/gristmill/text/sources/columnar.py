"""Tables in columns: Parquet and Arrow, documents in the columns of text that are named.

    .parquet             row groups, each with the columns one after the other, and a footer
    .arrow .feather      record batches: as a file with a footer, or as a stream

Rows take the place of lines: a position is the number of rows before it. Only the columns that are
asked for are read.

    row group of moderate size      a block, read by whoever works on it
    large row group                 slices of it, read in order by the one who cuts: nobody can
                                    begin in the midst of a row group
    record batch                    likewise

So memory holds some row groups of moderate size, or one record batch, whatever the size of the
file. Nothing that a file says of itself is relied on before it is checked, since pyarrow would
follow a damaged offset to anywhere. A null is no text. Bytes are no text either, even if they look
like one: files say of text that it is text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gristmill.base.errors import optional
from gristmill.text.sources.blocks import Block, Failure, Kind, Rows, Value, damaged, too_long
from gristmill.text.sources.source import ReadOptions, Reason, Source
from gristmill.text.sources.tables import missing_column

_MODERATE = 8
"""A row group of this many blocks is read at once."""
_MOST_ROWS = 1 << 14
"""In a block; since equal texts may be stored once, their size says nothing of what they become."""
_LEAST_ROWS = 64
"""Read together, even if they might fill several blocks."""
_BUFFER = 1 << 20
_ARROW_FILE = b"ARROW1"
_OLD_FEATHER = b"FEA1"


def _pyarrow() -> Any:
    return optional("pyarrow", extra="parquet", purpose="reading .parquet and .arrow files")


def _damage() -> tuple[type[Exception], ...]:
    """What pyarrow raises for files that it cannot read."""
    # Names that are not UTF-8 are decoded before anything is checked.
    return OSError, UnicodeDecodeError, _pyarrow().ArrowException


def _nothing(options: ReadOptions, failure: Failure) -> Rows:
    return Rows([[] for _ in options.keys], (), 0, failure)


def _refusal(schema: Any, options: ReadOptions) -> Failure | None:
    """Why a table of this schema cannot give documents."""
    for key in options.keys:
        found = schema.get_all_field_indices(key)
        if not found:
            return missing_column(key, schema.names)
        if len(found) > 1:
            return Failure(
                f"there are {len(found)} columns {key!r}", remedy="give each a name of its own"
            )
        kind = schema.field(found[0]).type
        if not _is_text(kind):
            return Failure(
                f"the column {key!r} holds no text; its type is {kind}",
                remedy="name a column of strings, or convert this one",
            )
    return None


def _compressed() -> Failure:
    return Failure(
        "this table is compressed as a whole, so that no part of it can be found",
        remedy="decompress the file; its columns can be compressed in themselves",
    )


# ------------------------------------------------------------------ values


def _is_text(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return str(kind) in _bytes_by_text()


def _bytes_by_text() -> Mapping[str, Any]:
    """For each type of text, the type of the same bytes."""
    arrow = _pyarrow()
    return {
        "string": arrow.binary(),
        "large_string": arrow.large_binary(),
        "string_view": arrow.binary_view(),
    }


def _rows(columns: Mapping[str, Any], options: ReadOptions) -> Rows:
    """The rows of columns that were read, up to the first text that is too long."""
    found = [_bytes_of(columns[key]) for key in options.keys]
    sizes = [max(map(_size, one), default=0) for one in zip(*found, strict=True)]
    count = next((n for n, size in enumerate(sizes) if size > options.line_limit), len(sizes))
    values = [[_value(content) for content in one[:count]] for one in found]
    return Rows(values, range(count), count, too_long(options) if count < len(sizes) else None)


def _bytes_of(column: Any) -> list[bytes | None]:
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    return [content for chunk in chunks for content in _viewed(chunk).to_pylist()]


def _viewed(array: Any) -> Any:
    """Texts as bytes, all offsets checked; whether the bytes are UTF-8 is for each row to say."""
    arrow = _pyarrow()
    if arrow.types.is_dictionary(array.type):
        array.indices.validate(full=True)
        words = _viewed(array.dictionary)
        # Making it anew checks the indices.
        return arrow.DictionaryArray.from_arrays(array.indices, words).dictionary_decode()
    array.validate()
    content = array.view(_bytes_by_text()[str(array.type)])
    content.validate(full=True)
    return content


def _size(content: bytes | None) -> int:
    return len(content or b"")


def _value(content: bytes | None) -> Value:
    if content is None:
        return Reason.WRONG_TYPE
    try:
        return content.decode() or Reason.EMPTY_TEXT
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8


# ------------------------------------------------------------------ Parquet


@contextmanager
def _open_parquet(source: Source) -> Iterator[Any]:
    parquet = optional("pyarrow.parquet", extra="parquet", purpose="reading .parquet files")
    # Without these two, a row group would be loaded whole.
    reading = {"pre_buffer": False, "buffer_size": _BUFFER}
    with parquet.ParquetFile(source.path, page_checksum_verification=True, **reading) as file:
        yield file


@dataclass(frozen=True)
class _Group:
    """A row group."""

    number: int
    begin: int
    """How many rows of the file stand before it."""
    end: int
    size: int
    """Bytes of all its columns, decompressed."""


def _groups(file: Any) -> Iterator[_Group]:
    metadata, begin = file.metadata, 0
    for number in range(metadata.num_row_groups):
        # What it says of single columns is left alone: there pyarrow ends the process if the file
        # is damaged, instead of raising an error.
        group = metadata.row_group(number)
        yield _Group(number, begin, begin + group.num_rows, group.total_byte_size)
        begin += group.num_rows


def _cut_parquet(source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    if not source.can_seek:
        yield Block(begin, begin, disk=0, content=_nothing(options, _compressed()))
        return
    position = begin
    try:
        with _open_parquet(source) as file:
            failure = _refusal(file.schema_arrow, options)
            if failure:
                yield Block(begin, begin, disk=0, content=_nothing(options, failure))
                return
            for block in _parquet_blocks(source, file, options, begin):
                yield block
                position = block.end
    except _damage() as error:
        yield Block(position, position, disk=0, content=_nothing(options, damaged(error)))


def _parquet_blocks(source: Source, file: Any, options: ReadOptions, begin: int) -> Iterator[Block]:
    assert source.size is not None
    total = max(file.metadata.num_rows, 1)
    for group in _groups(file):
        rows = group.end - group.begin
        moderate = group.size <= _MODERATE * options.block_bytes and rows <= _MODERATE * _MOST_ROWS
        if moderate and begin <= group.begin < group.end:
            yield Block(group.begin, group.end, disk=source.size * group.end // total)
        elif begin < group.end:
            for block in _slices_of_group(file, group, options, begin):
                yield replace(block, disk=source.size * block.end // total)


def _slices_of_group(file: Any, group: _Group, options: ReadOptions, begin: int) -> Iterator[Block]:
    rows = _rows_together(group.end - group.begin, group.size, options)
    batches = file.iter_batches(
        # The size is that of all columns; what the chosen ones have is seen when they are there.
        batch_size=max(rows, _LEAST_ROWS),
        row_groups=[group.number],
        columns=_names(options),
        use_threads=False,
    )
    position = group.begin
    for batch in batches:
        yield from _slices(batch, options, position, begin, disk=0)
        position += batch.num_rows


def _read_parquet(source: Source, block: Block, options: ReadOptions) -> Rows:
    if block.content is not None:
        return _carried(source, block, options)
    try:
        with _open_parquet(source) as file:
            groups = _groups(file)
            number = next(one.number for one in groups if one.begin == block.begin < one.end)
            table = file.read_row_group(number, columns=_names(options), use_threads=False)
            return _rows({name: table.column(name) for name in table.column_names}, options)
    except _damage() as error:
        return _nothing(options, damaged(error))


# ------------------------------------------------------------------ Arrow


def _cut_arrow(source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    if not source.can_seek:
        yield Block(begin, begin, disk=0, content=_nothing(options, _compressed()))
        return
    position = begin
    try:
        with _pyarrow().OSFile(str(source.path)) as handle:
            opened = _open_arrow(source, handle, options)
            if isinstance(opened, Failure):
                yield Block(begin, begin, disk=0, content=_nothing(options, opened))
                return
            row = 0
            for batch, disk in opened:
                batch.validate()
                for block in _slices(batch, options, row, begin, disk=disk):
                    yield block
                    position = block.end
                row += batch.num_rows
    except _damage() as error:
        yield Block(position, position, disk=0, content=_nothing(options, damaged(error)))


def _open_arrow(
    source: Source, handle: Any, options: ReadOptions
) -> Iterator[tuple[Any, int]] | Failure:
    """The record batches of a file or stream, each with the bytes of the file up to its end."""
    ipc = optional("pyarrow.ipc", extra="parquet", purpose="reading .arrow files")
    start = handle.read(len(_ARROW_FILE))
    if start.startswith(_OLD_FEATHER):
        return Failure("this is Feather in its first version", remedy="write it anew as .arrow")
    is_file = start == _ARROW_FILE
    open_either = ipc.open_file if is_file else ipc.open_stream
    handle.seek(0)
    schema = open_either(handle).schema
    failure = _refusal(schema, options)
    if failure:
        return failure
    fields = sorted(schema.get_field_index(name) for name in _names(options))
    handle.seek(0)
    reading = ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    reader = open_either(handle, options=reading)
    return _batches_of_file(source, reader) if is_file else ((b, handle.tell()) for b in reader)


def _batches_of_file(source: Source, reader: Any) -> Iterator[tuple[Any, int]]:
    assert source.size is not None
    count = reader.num_record_batches
    for number in range(count):
        yield reader.get_batch(number), source.size * (number + 1) // count


# ------------------------------------------------------------------ slices


def _names(options: ReadOptions) -> Sequence[str]:
    return list(dict.fromkeys(options.keys))


def _rows_together(rows: int, size: int, options: ReadOptions) -> int:
    """How many rows make a block, if so many have this size."""
    return max(1, min(_MOST_ROWS, rows * options.block_bytes // max(size, 1)))


def _slices(
    batch: Any, options: ReadOptions, position: int, begin: int, *, disk: int
) -> Iterator[Block]:
    """The rows of a batch that begins at `position`, from the row `begin` on, in blocks."""
    step = _rows_together(batch.num_rows, batch.get_total_buffer_size(), options)
    for first in range(max(begin - position, 0), batch.num_rows, step):
        part = batch.slice(first, step)
        rows = _rows({name: part.column(name) for name in part.schema.names}, options)
        start = position + first
        yield Block(start, start + part.num_rows, disk, content=rows)


def _carried(source: Source, block: Block, options: ReadOptions) -> Rows:
    rows: Rows = block.content
    return rows


PARQUET = Kind(cut=_cut_parquet, read=_read_parquet)
ARROW = Kind(cut=_cut_arrow, read=_carried)
