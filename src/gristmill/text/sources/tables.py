"""Tables as text: .csv and .tsv, a row on each record, documents in the columns that are named.

    title,text                    the first record names the columns
    One,"A text, quoted.          a quoted cell may hold delimiters and line ends,
    It says ""yes""."             and a quote that is written twice
    Two,5" of rain                elsewhere a quote is a letter like any other

The delimiter of .tsv is the tab; of .csv it is the comma, the semicolon or the tab, whichever
stands most often in the first line. Lines end with LF or CRLF. A line without anything is an empty
row; a record with too few cells lacks the last columns.

Where a record ends depends on every quote before it, so one process finds that, by the pattern
below, which walks through a table as the `csv` module of the standard library does:

    record    cell (delimiter cell)* [CR, and what follows it in vain] LF
    cell      " (anything but a quote | "")* " letters*    or    letters*

The header is a block of its own, without rows, and its names travel with each of the others. A file
without one of the columns that are asked for is an error: none of its rows could ever give a
document.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gristmill.text.sources.blocks import (
    BOM,
    DAMAGE,
    Block,
    Failure,
    Kind,
    Rows,
    Value,
    after_last_line,
    cut_streamed,
    damaged,
    too_long,
)
from gristmill.text.sources.lines import checked
from gristmill.text.sources.source import ReadOptions, Reason, Source

_PIECE = 1 << 16
_QUOTED = re.compile(rb'"[^"]*"?')
_MOST_NAMES = 20
_LONGEST_NAME = 40


def missing_column(key: str, columns: Sequence[str]) -> Failure:
    """The failure of a table without a column that was asked for."""
    shown = [name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…" for name in columns]
    more = f" and {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
    return Failure(
        f"there is no column {key!r}; the columns are: {', '.join(shown[:_MOST_NAMES])}{more}",
        remedy="name the column that holds the text: --json-key",
    )


# ------------------------------------------------------------------ records


@functools.cache
def _record(delimiter: str) -> re.Pattern[bytes]:
    """One whole record."""
    return re.compile(_record_pattern(delimiter))


@functools.cache
def _records(delimiter: str) -> re.Pattern[bytes]:
    """As many whole records as there are."""
    return re.compile(b"(?:" + _record_pattern(delimiter) + b")*+")


def _record_pattern(delimiter: str) -> bytes:
    sign = re.escape(delimiter.encode())
    letters = b"[^" + sign + b"\r\n]*+"
    cell = b'(?:"(?:[^"]++|"")*+"' + letters + b'|(?!")' + letters + b")"
    return cell + b"(?:" + sign + cell + b")*+" + b"(?:\r[^\n]*+)?+\n"


def _after_last_record(content: bytes, *, delimiter: str) -> int:
    """A piece may be cut after each record."""
    if b'"' not in content:
        return after_last_line(content)
    found = _records(delimiter).match(content)
    assert found is not None
    return found.end()


# ------------------------------------------------------------------ cutting


@dataclass(frozen=True)
class _Header:
    """The first record of a table."""

    columns: Sequence[str]
    delimiter: str
    size: int
    """Its bytes, with a byte order mark and the line end."""
    lines: int


@dataclass(frozen=True)
class _Piece:
    """What a block carries."""

    header: _Header
    data: bytes
    failure: Failure | None


def _cut(
    source: Source, options: ReadOptions, begin: int, *, delimiters: Sequence[str]
) -> Iterator[Block]:
    header = _header_of(source, options, delimiters)
    if header is None:
        return
    if isinstance(header, Failure):
        yield Block(begin, begin, disk=0, content=header)
        return
    if begin == 0:
        yield Block(0, header.size, disk=0, content=_Piece(header, b"", None))
    last_cut = functools.partial(_after_last_record, delimiter=header.delimiter)
    for block in cut_streamed(source, options, max(begin, header.size), last_cut=last_cut):
        if not isinstance(block.content, Failure):
            block = replace(block, content=_Piece(header, *block.content))
        yield block


def _header_of(
    source: Source, options: ReadOptions, delimiters: Sequence[str]
) -> _Header | Failure | None:
    """The header; none of an empty file."""
    stream = source.open()
    data = b""
    try:
        while piece := stream.read(max(_PIECE, len(data))):
            data += piece
            found = _first_record(data, delimiters)
            if found:
                return _header(found, options, at_most=len(data))
            if len(data) > options.line_limit:
                return too_long(options)
        found = _first_record(data + b"\n", delimiters)
        if data and found:
            return _header(found, options, at_most=len(data))
        return _unclosed() if data else None
    except DAMAGE as error:
        return damaged(error)
    finally:
        stream.close()


@dataclass(frozen=True)
class _First:
    """The first record as it stands in the file."""

    data: bytes
    mark: int
    """The size of the byte order mark before it."""
    delimiter: str


def _first_record(content: bytes, delimiters: Sequence[str]) -> _First | None:
    """The first record, if it is whole."""
    data = content.removeprefix(BOM)
    line, end, _ = data.partition(b"\n")
    if not end:
        return None
    bare = _QUOTED.sub(b"", line)
    delimiter = max(delimiters, key=lambda one: bare.count(one.encode()))
    found = _record(delimiter).match(data)
    return _First(found[0], len(content) - len(data), delimiter) if found else None


def _header(first: _First, options: ReadOptions, *, at_most: int) -> _Header | Failure:
    """The header, if it has the columns that are asked for; its size is limited by the file's."""
    text = first.data.decode(errors="replace")
    try:
        columns = next(_csv_reader(text, first.delimiter, options))
    except csv.Error:
        return Failure(
            "a carriage return stands inside the first line",
            remedy="let the lines of the file end with LF or CRLF, or quote the cell",
        )
    for key in options.keys:
        if key not in columns:
            return missing_column(key, columns)
    size = min(first.mark + len(first.data), at_most)
    return _Header(tuple(columns), first.delimiter, size, first.data.count(b"\n"))


def _unclosed() -> Failure:
    return Failure(
        "a quoted cell of the record that begins here has no end",
        remedy="close the quote, or write quotes inside a cell twice",
    )


# ------------------------------------------------------------------ reading


def _read(source: Source, block: Block, options: ReadOptions) -> Rows:
    if isinstance(block.content, Failure):
        return Rows([[] for _ in options.keys], (), 0, block.content)
    piece: _Piece = block.content
    header, data, failure = piece.header, piece.data, piece.failure
    if block.begin == 0:
        return Rows([[] for _ in options.keys], (), header.lines)
    if failure:
        data = data[: _after_last_record(data, delimiter=header.delimiter)]
    if data and not data.endswith(b"\n"):
        data += b"\n"
    limited = _limited(data, options, header.delimiter)
    if limited < len(data):
        data, failure = data[:limited], too_long(options)
    return _rows(data, header, options, failure)


def _limited(data: bytes, options: ReadOptions, delimiter: str) -> int:
    """Where the first record begins that is too long; the end if there is none."""
    limit, begin = options.line_limit, 0
    if len(data) <= limit:
        return len(data)
    record = _record(delimiter)
    while found := record.match(data, begin):
        if found.end() - begin - 1 > limit:
            return begin
        begin = found.end()
    return begin if len(data) - begin > limit else len(data)


def _rows(data: bytes, header: _Header, options: ReadOptions, failure: Failure | None) -> Rows:
    text, may_be_half = _decoded(data)
    reader = _csv_reader(text, header.delimiter, options)
    indices = [header.columns.index(key) for key in options.keys]
    columns: list[list[Value]] = [[] for _ in indices]
    places: list[int] = []
    total = text.count("\n")
    while reader.line_num < total:
        place = reader.line_num
        try:
            record = next(reader)
            values = [_value(record, index, may_be_half) for index in indices]
        except csv.Error:
            values = [Reason.INVALID_CSV] * len(indices)
        if reader.line_num > total:
            return Rows(columns, places, place, failure or _unclosed())
        places.append(place)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return Rows(columns, places, total, failure)


class _Records(Protocol):
    """What the `csv` module makes."""

    line_num: int

    def __iter__(self) -> Iterator[list[str]]: ...
    def __next__(self) -> list[str]: ...


def _csv_reader(text: str, delimiter: str, options: ReadOptions) -> _Records:
    """Iterates over the records of a text, and a line more: who gets there missed a quote."""
    csv.field_size_limit(max(csv.field_size_limit(), options.line_limit))
    lines = itertools.chain(io.StringIO(text, newline="\n"), ("\n",))
    return csv.reader(lines, delimiter=delimiter)


def _decoded(data: bytes) -> tuple[str, bool]:
    """The text, and whether some of it stands for bytes that are not UTF-8."""
    try:
        return data.decode(), False
    except UnicodeDecodeError:
        return data.decode(errors="surrogateescape"), True


def _value(record: Sequence[str], index: int, may_be_half: bool) -> Value:
    if index < len(record):
        return checked(record[index], may_be_half=may_be_half)
    return Reason.MISSING_KEY if record else Reason.EMPTY_TEXT


def _kind(*delimiters: str) -> Kind:
    return Kind(cut=functools.partial(_cut, delimiters=delimiters), read=_read)


CSV = _kind(",", ";", "\t")
TSV = _kind("\t")
