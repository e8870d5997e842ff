"""Tables as text: .csv and .tsv, documents in the named columns of each record.

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
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from gristmill.base.units import format_bytes
from gristmill.text.sources.blocks import (
    BOM,
    ReadError,
    SourceFormat,
    TextBlock,
    TextRows,
    Value,
    after_last_line,
    check_encoding,
    cut_stream,
    too_long,
)
from gristmill.text.sources.lines import text_or_reason
from gristmill.text.sources.source import ReadOptions, Reason, Source

_HEADER_LIMIT = 1 << 20
_QUOTED = re.compile(rb'"[^"]*"?')
_MAX_NAMES = 20
_MAX_NAME_LENGTH = 40


def missing_column(key: str, columns: Sequence[str]) -> ReadError:
    """The failure of a table without a requested column."""
    length = _MAX_NAME_LENGTH
    shown = [name if len(name) <= length else f"{name[:length]}…" for name in columns[:_MAX_NAMES]]
    more = f" and {len(columns) - _MAX_NAMES} more" if len(columns) > _MAX_NAMES else ""
    return ReadError(
        f"there is no column {key!r}; the columns are: {', '.join(shown)}{more}",
        remedy="name the column that holds the text: --json-key",
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
    found = _record(delimiter, "*+").match(content)
    assert found is not None
    return found.end()


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
        rows = TextRows([[] for _ in options.keys], (), header.lines)
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
    delimiter = max(delimiters, key=lambda one: first_line.count(one.encode()))
    found = _record(delimiter).match(data if len(content) == _HEADER_LIMIT else data + b"\n")
    if found is None and len(content) == _HEADER_LIMIT:
        raise ReadError(
            f"the first record is longer than {format_bytes(_HEADER_LIMIT)}",
            remedy="check that this is a table whose first record names the columns",
        )
    if found is None:
        raise _unclosed()
    try:
        columns = next(_csv_reader([found[0].decode(errors="replace")], delimiter, options))
    except csv.Error:
        raise ReadError(
            "there is a carriage return inside the first line",
            remedy="end the lines of the file with LF or CRLF, or quote the cell",
        ) from None
    for key in options.keys:
        if key not in columns:
            raise missing_column(key, columns)
    size = min(len(content) - len(data) + found.end(), len(content))
    return _Header(columns, delimiter, size, found[0].count(b"\n"))


def _read(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    header, data = block.content
    data += b"" if data.endswith(b"\n") else b"\n"
    try:
        text, valid = data.decode(), True
    except UnicodeDecodeError:
        text, valid = data.decode(errors="surrogateescape"), False
    lines = list(io.StringIO(text, newline="\n"))
    reader = _csv_reader(lines, header.delimiter, options)
    indices = [header.columns.index(key) for key in options.keys]
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
