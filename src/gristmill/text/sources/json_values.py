"""JSON values that are not one per line: an array of them, or one after another.

    [{"text": "one"}, "two"]         an array: each element is a row

    {                                concatenated values: each is a row
        "text": "one"
    }
    {"text": "two"}                  with or without commas between them

A row is an object with documents under its keys, or a string, which is the document itself. Where a
value ends is known only after parsing it, so the process that cuts also parses, and blocks carry
their rows. A position is a byte of the decompressed content, right after a value. Invalid JSON ends
the reading: without line ends, nothing says where the next value begins.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from gristmill.base.files import decompressed
from gristmill.text.sources.blocks import (
    BOM,
    ReadError,
    SourceFormat,
    TextBlock,
    TextRows,
    Value,
    check_encoding,
    too_long,
)
from gristmill.text.sources.lines import parse_object, values_of
from gristmill.text.sources.source import DAMAGE, LINE_LIMIT, ReadOptions, Reason, Source

_FIRST_READ = 1 << 10
_LONGEST_TOKEN = 12
"""An error this close to the end of the text may be due to a number, word or escape cut there."""
_BLANKS = re.compile(r"[ \t\r\n]*")
_BLANKS_AND_COMMAS = re.compile(r"[ \t\r\n,]*")
_WORD = re.compile(r'[^ \t\r\n,"\[\]{}]*')
_DECODER = json.JSONDecoder()
_REMEDY = "fix the file; if each line holds an object, name it .jsonl: then bad lines are dropped"


def json_format(path: Path) -> str:
    """The extension that suits a .json file: .jsonl if its first line holds a whole object."""
    try:
        with path.open("rb") as opened, decompressed(opened) as file:
            start = file.readline(_FIRST_READ).removeprefix(BOM)
            while start and not start.strip():
                start = file.readline(_FIRST_READ)
            start = start.lstrip()
            if start[:1] == b"[":
                return ".json-array"
            if start and start[:1] != b"{":
                return ".json-values"
            line = start if start.endswith(b"\n") else start + file.readline(LINE_LIMIT)
    except DAMAGE:
        # Reading the file raises the same, with its place.
        return ".jsonl"
    # Invalid UTF-8 concerns that line alone.
    readable = line.decode(errors="replace").encode()
    whole = not line or parse_object(readable, ("",)) != [Reason.INVALID_JSON]
    return ".jsonl" if whole else ".json-values"


def _cut(source: Source, options: ReadOptions, begin: int, *, array: bool) -> Iterator[TextBlock]:
    # Invalid UTF-8 becomes lone surrogates, so that it spoils one row only.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    position, text, at_end = begin, "", False
    with closing(source.open(begin)) as stream:
        while not at_end:
            # Growing reads, so that a long value is not parsed again for each piece of it.
            piece = stream.read(max(options.block_bytes, len(text)))
            at_end = not piece
            if position == 0 and not text:
                check_encoding(piece)
            text += decoder.decode(piece, final=at_end)
            rows, end = _parse(text, options, array=array, at_start=position == 0, at_end=at_end)
            size = _size(text[:end])
            if end or rows.failure or at_end:
                yield TextBlock(position, position + size, stream.disk, rows)
            if rows.failure:
                return
            text, position = text[end:], position + size


def _parse(
    text: str, options: ReadOptions, *, array: bool, at_start: bool, at_end: bool
) -> tuple[TextRows, int]:
    """The rows of all whole values, and where the last of them ends."""
    columns: list[list[Value]] = [[] for _ in options.keys]
    places: list[int] = []
    blanks = _BLANKS if array else _BLANKS_AND_COMMAS
    line = counted = end = 0
    place = int(at_start and text.startswith("\ufeff"))
    if array and at_start:
        # After the bracket that made this an array.
        place = _end_of(blanks, text, place) + 1
    needs_comma, after_comma, closed = array and not at_start, False, False
    try:
        while (place := _end_of(blanks, text, place)) < len(text):
            sign = text[place]
            if closed:
                raise ReadError("there is more text after the end of the array", _REMEDY)
            if array and sign == "]" and not after_comma:
                place, closed = place + 1, True
                continue
            if needs_comma:
                if sign != ",":
                    raise ReadError("expected a comma or the end of the array here", _REMEDY)
                place, needs_comma, after_comma = place + 1, False, True
                continue
            if sign in ",]}":
                raise ReadError("expected a value here", _REMEDY)
            line += text.count("\n", counted, place)
            counted = place
            value, end_of_value = _decode(text, place, options, at_end=at_end)
            if end_of_value is None:
                break
            places.append(line)
            if isinstance(value, str):
                # A string is the document itself.
                value = dict.fromkeys(options.keys, value)
            values = values_of(value, options.keys, check_surrogates=True)
            for column, found in zip(columns, values, strict=True):
                column.append(found)
            place = end = end_of_value
            needs_comma, after_comma = array, False
        if at_end and array and not closed:
            raise ReadError("the file ends before its array does", "the file is incomplete")
    except json.JSONDecodeError as error:
        # The column is counted from the beginning of the value if both are on the same line.
        offset = error.pos - max(text.rfind("\n", place, error.pos), place - 1)
        what = f"invalid JSON: {error.msg} at column {offset}"
        lines = text.count("\n", 0, error.pos)
        return TextRows(columns, places, lines, ReadError(what, _REMEDY)), end
    except ReadError as failure:
        return TextRows(columns, places, text.count("\n", 0, place), failure), end
    return TextRows(columns, places, text.count("\n", 0, end)), end


def _decode(text: str, begin: int, options: ReadOptions, *, at_end: bool) -> tuple[Any, int | None]:
    """The value that begins at a place, and its end; None if it may continue after the text."""
    value, end = None, None
    end_of_word = _end_of(_WORD, text, begin)
    try:
        if end_of_word < len(text) or at_end:
            value, end = _DECODER.raw_decode(text, begin)
            if end < end_of_word:
                raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        unterminated = error.msg.startswith("Unterminated string") or error.pos >= len(text)
        if at_end and unterminated:
            remedy = "the file is damaged or incomplete"
            raise ReadError("the value that begins here has no end", remedy) from error
        if at_end or not (unterminated or error.pos > len(text) - _LONGEST_TOKEN):
            raise
        end = None
    except (ValueError, RecursionError) as error:
        raise ReadError(f"invalid JSON: {error}", _REMEDY) from error
    length = (end or len(text)) - begin
    if 4 * length > options.line_limit and _size(text[begin : begin + length]) > options.line_limit:
        raise too_long(options)
    return value, end


def _end_of(pattern: re.Pattern[str], text: str, begin: int) -> int:
    found = pattern.match(text, begin)
    assert found is not None
    return found.end()


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


ARRAY = SourceFormat(functools.partial(_cut, array=True))
CONCATENATED = SourceFormat(functools.partial(_cut, array=False))
