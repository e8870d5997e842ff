"""Tables: .csv and .tsv, Parquet and Arrow, documents in the named columns of each record.

    title,text                    the first record names the columns
    One,"A text, quoted.          a quoted cell may hold delimiters and line ends,
    It says ""yes""."             and a quote written twice
    Two,5" of rain                elsewhere a quote is an ordinary character

The delimiter of .tsv is the tab; of .csv it is the comma, semicolon or tab, whichever occurs most
often in the first line. Lines end with LF or CRLF. An empty line is an empty row; a record with too
few cells lacks the last columns. The header is a block without rows.

Where a record ends depends on every quote before it, so one process finds the ends with a pattern;
workers parse the records with the `csv` module. pyarrow's CSV reader is no substitute: it does not
tell at which byte and line a record begins, so work could not be resumed or lines be named, and one
invalid byte fails a whole batch.

    .parquet             row groups, each with its columns one after another, and a footer
    .arrow .feather      record batches: a file with a footer, or a stream

Rows take the place of lines: a position is the number of rows before it. Only the requested columns
are read. A small row group is one block, read by a worker. Reading cannot begin in the middle of a
large row group or a record batch, so the process that cuts slices it into blocks, and memory is
bounded whatever the size of the file. All offsets are validated before use, since pyarrow would
follow a damaged one anywhere. Nulls and bytes are not text.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gristmill.base.errors import on_one_line, optional
from gristmill.base.units import format_bytes
from gristmill.text.sources.lines import decoded, text_or_reason
from gristmill.text.sources.source import (
    BOM,
    ReadError,
    ReadOptions,
    Reason,
    Source,
    SourceFormat,
    TextBlock,
    TextRows,
    Value,
    after_last_line,
    check_encoding,
    cut_stream,
    damaged,
    too_long,
)

_HEADER_LIMIT = 1 << 20
_QUOTED = re.compile(rb'"[^"]*"?')
_MAX_NAMES = 20
_MAX_NAME_LENGTH = 40


def missing_column(key: str, columns: Sequence[str], texts: Sequence[str] = ()) -> ReadError:
    """The failure of a table without a requested column; `texts` are those that hold text, if that
    is known."""
    length = _MAX_NAME_LENGTH
    names = [on_one_line(name) for name in columns[:_MAX_NAMES]]
    shown = [name if len(name) <= length else f"{name[:length]}…" for name in names]
    more = f" and {len(columns) - _MAX_NAMES} more" if len(columns) > _MAX_NAMES else ""
    return ReadError(
        f"there is no column {key!r}; the columns are: {', '.join(shown)}{more}",
        remedy="name the column that holds the text: --json-key"
        + (f" {texts[0]!r}, which is the only one of strings" if len(texts) == 1 else ""),
    )


def _unclosed() -> ReadError:
    return ReadError(
        "a quoted cell of the record that begins here has no end",
        remedy="close the quote, or write quotes inside a cell twice",
    )


@functools.cache
def _record(delimiter: str, repeat: str = "") -> re.Pattern[bytes]:
    """Matches one whole record, or as many as there are.

    record    cell (delimiter cell)* [CR, and anything that follows it] LF
    cell      " (anything but a quote | "")* " other*    or    other*
    """
    sign = re.escape(delimiter.encode())
    other = b"[^" + sign + b"\r\n]*+"
    cell = b'(?:"(?:[^"]++|"")*+"' + other + b'|(?!")' + other + b")"
    record = cell + b"(?:" + sign + cell + b")*+" + b"(?:\r[^\n]*+)?+\n"
    return re.compile(b"(?:" + record + b")" + repeat.encode())


def _after_last_record(content: bytes, *, delimiter: str) -> int:
    if b'"' not in content:
        return after_last_line(content)
    match = _record(delimiter, "*+").match(content)
    assert match is not None
    return match.end()


@dataclass(frozen=True)
class _Header:
    """The first record of a table."""

    columns: Sequence[str]
    delimiter: str
    size: int
    """Its bytes, including a byte order mark and the line end."""
    lines: int


def _cut(
    source: Source, options: ReadOptions, begin: int, *, delimiters: Sequence[str]
) -> Iterator[TextBlock]:
    header = _header_of(source, options, delimiters)
    if header is None:
        return
    if begin == 0:
        rows = TextRows([[] for _ in options.columns], (), header.lines)
        yield TextBlock(0, header.size, disk=0, content=rows)
    last_cut = functools.partial(_after_last_record, delimiter=header.delimiter)
    for block in cut_stream(source, options, max(begin, header.size), last_cut=last_cut):
        yield replace(block, content=(header, block.content))


def _header_of(source: Source, options: ReadOptions, delimiters: Sequence[str]) -> _Header | None:
    """The header; None for an empty file."""
    with closing(source.open()) as stream:
        content = stream.read(_HEADER_LIMIT)
    if not content:
        return None
    check_encoding(content)
    data = content.removeprefix(BOM)
    first_line = _QUOTED.sub(b"", data.partition(b"\n")[0])
    delimiter = max(delimiters, key=lambda sign: first_line.count(sign.encode()))
    match = _record(delimiter).match(data if len(content) == _HEADER_LIMIT else data + b"\n")
    if match is None and len(content) == _HEADER_LIMIT:
        raise ReadError(
            f"the first record is longer than {format_bytes(_HEADER_LIMIT)}",
            remedy="check that this is a table whose first record names the columns",
        )
    if match is None:
        raise _unclosed()
    try:
        columns = next(_csv_reader([match[0].decode(errors="replace")], delimiter, options))
    except csv.Error:
        raise ReadError(
            "there is a carriage return inside the first line",
            remedy="end the lines of the file with LF or CRLF, or quote the cell",
        ) from None
    for key in options.columns:
        if key not in columns:
            raise missing_column(key, columns)
    size = min(len(content) - len(data) + match.end(), len(content))
    return _Header(columns, delimiter, size, match[0].count(b"\n"))


def _read(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    header, data = block.content
    data += b"" if data.endswith(b"\n") else b"\n"
    try:
        text, valid = data.decode(), True
    except UnicodeDecodeError:
        text, valid = data.decode(errors="surrogateescape"), False
    lines = list(io.StringIO(text, newline="\n"))
    reader = _csv_reader(lines, header.delimiter, options)
    indices = [header.columns.index(key) for key in options.columns]
    columns: list[list[Value]] = [[] for _ in indices]
    places: list[int] = []
    while reader.line_num < len(lines):
        place = reader.line_num
        try:
            record = next(reader)
            absent = Reason.MISSING_KEY if record else Reason.EMPTY_TEXT
            values = [
                text_or_reason(record[n], check_surrogates=not valid) if n < len(record) else absent
                for n in indices
            ]
        except csv.Error:
            values = [Reason.INVALID_CSV] * len(indices)
        if len(data) > options.line_limit:
            written = "".join(lines[place : reader.line_num]).encode(errors="surrogateescape")
            if len(written) - 1 > options.line_limit:
                return TextRows(columns, places, place, too_long(options))
        if reader.line_num > len(lines):
            return TextRows(columns, places, place, _unclosed())
        places.append(place)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return TextRows(columns, places, len(lines))


def _csv_reader(lines: Sequence[str], delimiter: str, options: ReadOptions) -> Any:
    """Iterates over records; an open quote makes it read one line more than there are."""
    csv.field_size_limit(max(csv.field_size_limit(), 2 * options.line_limit))
    return csv.reader(itertools.chain(lines, ("\n",)), delimiter=delimiter)


CSV = SourceFormat(functools.partial(_cut, delimiters=(",", ";", "\t")), _read)
TSV = SourceFormat(functools.partial(_cut, delimiters=("\t",)), _read)


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
    for key in options.columns:
        indices = schema.get_all_field_indices(key)
        if not indices:
            texts = [field.name for field in schema if str(field.type) in _bytes_by_text()]
            raise missing_column(key, schema.names, texts)
        if len(indices) > 1:
            raise ReadError(
                f"there are {len(indices)} columns {key!r}", remedy="give each a name of its own"
            )
        kind = schema.field(indices[0]).type
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
    texts: list[list[bytes | None]] = []
    for key in options.columns:
        column = table.column(key)
        chunks = column.chunks if hasattr(column, "chunks") else [column]
        texts.append([text for chunk in chunks for text in _as_bytes(chunk).to_pylist()])
    sizes = [max(len(text or b"") for text in row) for row in zip(*texts, strict=True)]
    count = next((n for n, size in enumerate(sizes) if size > options.line_limit), len(sizes))
    columns = [
        [Reason.WRONG_TYPE if text is None else decoded(text) for text in column[:count]]
        for column in texts
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


@contextmanager
def _open_parquet(source: Source) -> Iterator[Any]:
    with ExitStack() as stack:
        place = source.path or stack.enter_context(source.open_file())
        # Without the last two options, a row group would be loaded whole.
        yield stack.enter_context(
            _pyarrow("pyarrow.parquet").ParquetFile(
                place, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER
            )
        )


@contextmanager
def _open_arrow(source: Source) -> Iterator[Any]:
    arrow = _pyarrow()
    if source.path:
        with arrow.OSFile(str(source.path)) as handle:
            yield handle
        return
    with source.open_file() as file:
        yield arrow.PythonFile(file, mode="r")


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
        columns=list(set(options.columns)),
        use_threads=False,
    )
    position = group.begin
    for batch in batches:
        yield from _slices(batch, options, position, begin)
        position += batch.num_rows


def _read_parquet(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    with _opening(source), _open_parquet(source) as file:
        groups = _row_groups(file)
        number = next(group.number for group in groups if group.begin == block.begin < group.end)
        table = file.read_row_group(number, columns=list(set(options.columns)), use_threads=False)
        return _rows(table, options)


def _cut_arrow(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    with _opening(source), _open_arrow(source) as handle:
        ipc = _pyarrow("pyarrow.ipc")
        start = handle.read(len(_ARROW_FILE))
        if start.startswith(_OLD_FEATHER):
            raise ReadError("this is version 1 of Feather", remedy="write it again as .arrow")
        is_file = start == _ARROW_FILE
        open_either = ipc.open_file if is_file else ipc.open_stream
        handle.seek(0)
        schema = open_either(handle).schema
        _check_columns(schema, options)
        fields = sorted({schema.get_field_index(key) for key in options.columns})
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
