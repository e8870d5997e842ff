"""JSON lines and plain text.

    .jsonl .ndjson              an object on each line, documents under its keys; the key meta.text
                                is "text" of the object under "meta", unless there is a "meta.text"
    .txt .md and all others     a document is a file, a line, a paragraph between blank lines, or
                                the text between two separators such as <|endoftext|>

Only the byte 0x0A ends a line: U+2028 and the like are text. A byte order mark is skipped and CRLF
reads as LF. Only "" counts as empty: whitespace is left for a filter to judge.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from gristmill.text.sources.blocks import (
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


def _read(
    source: Source,
    block: TextBlock,
    options: ReadOptions,
    *,
    split: Callable[[bytes, ReadOptions], Iterable[tuple[int, bytes]]],
    parse: Callable[[bytes, Sequence[str]], Sequence[Value]],
) -> TextRows:
    """Split a block into documents, each with the line where it begins, and parse them."""
    content = content_of(source, block, options)
    columns: list[list[Value]] = [[] for _ in options.keys]
    places: list[int] = []
    for place, document in split(content, options):
        if len(document) > options.line_limit:
            return TextRows(columns, places, place, too_long(options))
        places.append(place)
        for column, value in zip(columns, parse(document, options.keys), strict=True):
            column.append(value)
    return TextRows(columns, places, content.count(b"\n"))


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
        text_or_reason(found[key], check_surrogates)
        if key in found
        else _nested_text(found, key, check_surrogates)
        for key in keys
    ]


def _nested_text(found: Any, key: str, check_surrogates: bool) -> Value:
    """The text under the key "meta.text": that of "text" in the object under "meta"."""
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return Reason.MISSING_KEY
        found = found[name]
    return text_or_reason(found, check_surrogates)


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


def decoded(content: bytes) -> Value:
    """Bytes as text, or why they are none."""
    try:
        return content.decode() or Reason.EMPTY_TEXT
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8


def _lines(content: bytes, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for place, line in enumerate(lines):
        yield place, line.removesuffix(b"\r")


def _after_last_blank(content: bytes) -> int:
    cut = content.rfind(b"\n\n") + 2
    if cut > 1:
        return cut
    return max((match.end() for match in _BLANK_LINE.finditer(content)), default=0)


def _paragraphs(content: bytes, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    lines = [line for _, line in _lines(content, options)]
    first = 0
    for number, line in enumerate([*lines, b""]):
        if not line.strip():
            if first < number:
                yield first, b"\n".join(lines[first:number])
            first = number + 1


def _cut_separated(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    assert options.separator
    mark = options.separator.encode()

    def last_cut(content: bytes) -> int:
        return content.rfind(mark) + len(mark) if mark in content else 0

    return cut_stream(source, options, begin, last_cut=last_cut)


def _separated(content: bytes, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    """Documents between separators, without the newline on either side of one."""
    assert options.separator
    *documents, rest = content.replace(b"\r\n", b"\n").split(options.separator.encode())
    # Nothing but whitespace after the last separator is no document.
    line = 0
    for document in [*documents, rest] if rest.strip() else documents:
        inside = document.removeprefix(b"\n")
        yield line + len(document) - len(inside), inside.removesuffix(b"\n")
        line += document.count(b"\n")


def _cut_whole(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    limit = options.line_limit + 1
    if source.size is None:
        with closing(source.open()) as stream:
            yield TextBlock(0, limit, disk=0, content=stream.read(limit))
    elif begin == 0:
        yield TextBlock(0, limit, disk=source.size)


def _whole(content: bytes, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    content = content.replace(b"\r\n", b"\n")
    if options.portion is not None:
        # What is not UTF-8 is dropped as a whole.
        with suppress(UnicodeDecodeError):
            text = content.decode()
            begin, end = (int(len(text) * share) for share in options.portion)
            content = text[begin:end].encode()
    yield 0, content


_read_text = functools.partial(_read, parse=lambda text, keys: [decoded(text)] * len(keys))
JSON_LINES = SourceFormat(
    cut_lines, functools.partial(_read, split=_lines, parse=parse_object), divisible=True
)
TEXT_BY_SPLIT = {
    DocumentSplit.FILE: SourceFormat(_cut_whole, functools.partial(_read_text, split=_whole)),
    DocumentSplit.LINE: SourceFormat(
        cut_lines, functools.partial(_read_text, split=_lines), divisible=True
    ),
    DocumentSplit.BLANK: SourceFormat(
        functools.partial(cut_stream, last_cut=_after_last_blank),
        functools.partial(_read_text, split=_paragraphs),
    ),
}
SEPARATED_TEXT = SourceFormat(_cut_separated, functools.partial(_read_text, split=_separated))
