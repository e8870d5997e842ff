"""JSON lines and plain text.

    .jsonl .ndjson              an object on each line, documents under its keys
    .txt .md and all others     a document is a file, a line, a paragraph between blank lines, or
                                the text between two separators such as <|endoftext|>

Only the byte 0x0A ends a line: U+2028 and the like are text. A byte order mark is skipped and CRLF
reads as LF. Only "" counts as empty: whitespace is left for a filter to judge.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from gristmill.base.files import open_bytes
from gristmill.text.sources.blocks import (
    BOM,
    ReadError,
    SourceFormat,
    TextBlock,
    TextRows,
    Value,
    content_of,
    cut_lines,
    cut_stream,
    too_long,
)
from gristmill.text.sources.source import DocumentSplit, ReadOptions, Reason, Source

try:
    import orjson
except ImportError:
    _parse_fast: Callable[[bytes], Any] | None = None
else:
    _parse_fast = orjson.loads

_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")


def _lines_of(
    source: Source, block: TextBlock, options: ReadOptions
) -> tuple[list[bytes], ReadError | None]:
    """The lines of a block without their ends, up to the first that is too long."""
    lines = content_of(source, block, options).split(b"\n")
    if not lines[-1]:
        lines.pop()
    if lines and len(max(lines, key=len)) > options.line_limit:
        long = next(n for n, line in enumerate(lines) if len(line) > options.line_limit)
        return lines[:long], too_long(options)
    return lines, None


# ------------------------------------------------------------------ JSON lines


def _read_json(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    lines, failure = _lines_of(source, block, options)
    columns: list[list[Value]] = [[] for _ in options.keys]
    for line in lines:
        for column, value in zip(columns, parse_object(line, options.keys), strict=True):
            column.append(value)
    return TextRows(columns, range(len(lines)), len(lines), failure)


def parse_object(line: bytes, keys: Sequence[str]) -> Sequence[Value]:
    """The text under each key of a JSON object."""
    if _parse_fast:
        try:
            return values_of(_parse_fast(line), keys, check_surrogates=False)
        except ValueError:
            # orjson refuses more than the standard library does. The latter decides, so that
            # installations with and without orjson read the same.
            pass
    if not line.strip():
        return [Reason.EMPTY_TEXT] * len(keys)
    try:
        return values_of(json.loads(line.decode()), keys, check_surrogates=b"\\u" in line)
    except UnicodeDecodeError:
        return [Reason.INVALID_UTF8] * len(keys)
    except (ValueError, RecursionError):
        return [Reason.INVALID_JSON] * len(keys)


def values_of(found: Any, keys: Sequence[str], *, check_surrogates: bool) -> Sequence[Value]:
    """The text under each key of a parsed JSON value."""
    if not isinstance(found, dict):
        return [Reason.WRONG_TYPE] * len(keys)
    return [
        text_or_reason(found[key], check_surrogates) if key in found else Reason.MISSING_KEY
        for key in keys
    ]


def text_or_reason(value: object, check_surrogates: bool) -> Value:
    """The value if it is usable text, or why it is not.

    JSON can spell a lone surrogate, and bytes that are not UTF-8 are decoded to some. UTF-8 has no
    form for them.
    """
    if not isinstance(value, str):
        return Reason.WRONG_TYPE
    if check_surrogates:
        try:
            value.encode()
        except UnicodeEncodeError:
            return Reason.INVALID_UTF8
    return value or Reason.EMPTY_TEXT


JSON_LINES = SourceFormat(cut_lines, _read_json, divisible=True)


# ------------------------------------------------------------------ plain text


def decoded(content: bytes) -> Value:
    """Bytes as text, or why they are none."""
    try:
        return content.decode() or Reason.EMPTY_TEXT
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8


def _read_lines(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    lines, failure = _lines_of(source, block, options)
    values = [decoded(line.removesuffix(b"\r")) for line in lines]
    return TextRows([values] * len(options.keys), range(len(lines)), len(lines), failure)


def _after_last_blank(content: bytes) -> int:
    cut = content.rfind(b"\n\n") + 2
    if cut > 1:
        return cut
    return max((match.end() for match in _BLANK_LINE.finditer(content)), default=0)


def _read_paragraphs(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    lines, failure = _lines_of(source, block, options)
    values: list[Value] = []
    places: list[int] = []
    columns = [values] * len(options.keys)
    first = size = 0
    for number, line in enumerate([*lines, b""]):
        if line.strip():
            size += len(line) + 1
            if size > options.line_limit:
                return TextRows(columns, places, first, too_long(options))
            continue
        if size:
            paragraph = b"\n".join(line.removesuffix(b"\r") for line in lines[first:number])
            values.append(decoded(paragraph))
            places.append(first)
        first, size = number + 1, 0
    return TextRows(columns, places, len(lines), failure)


def _cut_separated(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    assert options.separator
    mark = options.separator.encode()

    def after_last(content: bytes) -> int:
        return (content.rfind(mark) + len(mark)) if mark in content else 0

    return cut_stream(source, options, begin, last_cut=after_last)


def _read_separated(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    """Documents between separators, without the newline on either side of one."""
    assert options.separator
    values: list[Value] = []
    places: list[int] = []
    columns = [values] * len(options.keys)
    content = content_of(source, block, options).replace(b"\r\n", b"\n")
    parts = content.split(options.separator.encode())
    line, last = 0, len(parts) - 1
    for number, part in enumerate(parts):
        if len(part) > options.line_limit:
            return TextRows(columns, places, line, too_long(options))
        inside = part.removeprefix(b"\n")
        # Nothing but whitespace after the last separator is no document.
        if number < last or inside.strip():
            values.append(decoded(inside.removesuffix(b"\n")))
            places.append(line + len(part) - len(inside))
        line += part.count(b"\n")
    return TextRows(columns, places, line)


def _cut_whole(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    if source.size is None:
        with closing(source.open()) as stream:
            yield TextBlock(0, 1, disk=0, content=stream.read(options.line_limit + 1))
    elif begin == 0:
        yield TextBlock(0, 1, disk=source.size)


def _read_whole(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    content = block.content
    if content is None:
        assert source.path is not None
        with open_bytes(source.path) as file:
            content = file.read(options.line_limit + 1)
    if len(content) > options.line_limit:
        raise too_long(options)
    value = decoded(content.removeprefix(BOM).replace(b"\r\n", b"\n"))
    return TextRows([[value]] * len(options.keys), (0,), 1)


TEXT_BY_SPLIT = {
    DocumentSplit.FILE: SourceFormat(_cut_whole, _read_whole),
    DocumentSplit.LINE: SourceFormat(cut_lines, _read_lines, divisible=True),
    DocumentSplit.BLANK: SourceFormat(
        functools.partial(cut_stream, last_cut=_after_last_blank), _read_paragraphs
    ),
}
SEPARATED_TEXT = SourceFormat(_cut_separated, _read_separated)
