"""Text in lines: JSON lines and plain text.

    .jsonl .ndjson              an object on each line, documents under its keys
    .txt .md and all others     a document is a file, a line, a block between blank lines, or what
                                stands between two separators such as <|endoftext|>

Lines end at the byte 0x0A and nowhere else: U+2028 and its kin are text. A byte order mark is
skipped and CRLF reads as LF. Only "" is empty: a text of blanks is for a filter to judge.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gristmill.base.files import open_bytes
from gristmill.text.sources.blocks import (
    BOM,
    DAMAGE,
    Block,
    Failure,
    Kind,
    Rows,
    Value,
    after_last_line,
    content_of,
    cut_sought,
    cut_streamed,
    damaged,
    lines_before,
    single,
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


def _cut_lines(source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    if source.can_seek:
        return cut_sought(source, options, begin)
    return cut_streamed(source, options, begin, last_cut=after_last_line)


# ------------------------------------------------------------------ JSON lines


def _read_json(source: Source, block: Block, options: ReadOptions) -> Rows:
    lines, failure = _split(*content_of(source, block, options), options)
    keys = options.keys
    columns: list[list[Value]] = [[] for _ in keys]
    for line in lines:
        for column, value in zip(columns, parse_object(line, keys), strict=True):
            column.append(value)
    return Rows(columns, range(len(lines)), len(lines), failure)


def parse_object(line: bytes, keys: Sequence[str]) -> Sequence[Value]:
    """The text under each key of a JSON object."""
    if _parse_fast:
        try:
            return values_of(_parse_fast(line), keys, may_be_half=False)
        except ValueError:
            # It refuses more than the standard library does; so that both installations read the
            # same, the latter has the last word.
            pass
    found = _parse_slowly(line)
    if isinstance(found, Reason):
        return [found] * len(keys)
    return values_of(found, keys, may_be_half=b"\\u" in line)


def values_of(found: Any, keys: Sequence[str], *, may_be_half: bool = True) -> Sequence[Value]:
    """The text under each key of a value that JSON gave.

    `may_be_half` says that half a surrogate pair may stand alone, which JSON can write but UTF-8
    cannot.
    """
    if not isinstance(found, dict):
        return [Reason.WRONG_TYPE] * len(keys)
    return [_value(found, key, may_be_half) for key in keys]


def _value(found: dict[str, Any], key: str, may_be_half: bool) -> Value:
    try:
        text = found[key]
    except KeyError:
        return Reason.MISSING_KEY
    return checked(text, may_be_half=may_be_half)


def checked(text: object, *, may_be_half: bool = True) -> Value:
    """A value that must be a text, or why it is none."""
    if not isinstance(text, str):
        return Reason.WRONG_TYPE
    if may_be_half:
        try:
            text.encode()
        except UnicodeEncodeError:
            return Reason.INVALID_UTF8
    return text or Reason.EMPTY_TEXT


def _parse_slowly(line: bytes) -> Any:
    if not line.strip():
        return Reason.EMPTY_TEXT
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8
    except (ValueError, RecursionError):
        return Reason.INVALID_JSON


def _split(
    data: bytes, failure: Failure | None, options: ReadOptions
) -> tuple[list[bytes], Failure | None]:
    """The lines of a block without their ends, up to the first that is too long."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if lines and len(max(lines, key=len)) > options.line_limit:
        long = next(n for n, line in enumerate(lines) if len(line) > options.line_limit)
        return lines[:long], too_long(options)
    return lines, failure


JSON_LINES = Kind(cut=_cut_lines, read=_read_json, lines_before=lines_before)


# ------------------------------------------------------------------ plain text


def _decoded(content: bytes) -> Value:
    try:
        return content.decode() or Reason.EMPTY_TEXT
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8


def _read_lines(source: Source, block: Block, options: ReadOptions) -> Rows:
    lines, failure = _split(*content_of(source, block, options), options)
    values = [_decoded(line.removesuffix(b"\r")) for line in lines]
    return Rows(single(values, options), range(len(lines)), len(lines), failure)


def _after_last_blank(content: bytes) -> int:
    """A piece may be cut after each line that is blank and follows another."""
    cut = content.rfind(b"\n\n") + 2
    if cut > 1:
        return cut
    found = [match.end() for match in _BLANK_LINE.finditer(content)]
    return found[-1] if found else 0


def _read_blocks(source: Source, block: Block, options: ReadOptions) -> Rows:
    lines, failure = _split(*content_of(source, block, options), options)
    values: list[Value] = []
    places: list[int] = []
    first = size = 0
    for number, line in enumerate([*lines, b""]):
        if line.strip():
            size += len(line) + 1
            if size > options.line_limit:
                return Rows(single(values, options), places, first, too_long(options))
            continue
        if size:
            paragraph = b"\n".join(line.removesuffix(b"\r") for line in lines[first:number])
            values.append(_decoded(paragraph))
            places.append(first)
        first, size = number + 1, 0
    return Rows(single(values, options), places, len(lines), failure)


def _cut_separated(source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    assert options.separator
    mark = options.separator.encode()

    def after_last(content: bytes) -> int:
        return (content.rfind(mark) + len(mark)) if mark in content else 0

    return cut_streamed(source, options, begin, last_cut=after_last)


def _read_separated(source: Source, block: Block, options: ReadOptions) -> Rows:
    """Documents between separators, without the line end on either side of one."""
    assert options.separator
    data, failure = content_of(source, block, options)
    values: list[Value] = []
    places: list[int] = []
    parts = data.replace(b"\r\n", b"\n").split(options.separator.encode())
    line, last = 0, len(parts) - 1
    for number, part in enumerate(parts):
        if len(part) > options.line_limit:
            return Rows(single(values, options), places, line, too_long(options))
        inside = part.removeprefix(b"\n")
        # What follows the last separator is a document only if there is something.
        if number < last or inside.strip():
            values.append(_decoded(inside.removesuffix(b"\n")))
            places.append(line + len(part) - len(inside))
        line += part.count(b"\n")
    return Rows(single(values, options), places, line, failure)


def _cut_whole(source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    if source.size is not None:
        if begin == 0:
            yield Block(0, 1, disk=source.size)
        return
    stream = source.open()
    try:
        content = stream.read(options.line_limit + 1)
        yield Block(0, 1, disk=0, content=content)
    except DAMAGE as error:
        yield Block(0, 1, disk=0, content=damaged(error))
    finally:
        stream.close()


def _read_whole(source: Source, block: Block, options: ReadOptions) -> Rows:
    content = block.content if block.content is not None else _whole(source, options)
    if not isinstance(content, Failure) and len(content) > options.line_limit:
        content = too_long(options)
    if isinstance(content, Failure):
        return Rows([[]] * len(options.keys), (), 0, content)
    text = content.removeprefix(BOM).replace(b"\r\n", b"\n")
    return Rows(single([_decoded(text)], options), (0,), 1)


def _whole(source: Source, options: ReadOptions) -> bytes | Failure:
    assert source.path is not None
    try:
        with open_bytes(source.path) as file:
            return file.read(options.line_limit + 1)
    except DAMAGE as error:
        return damaged(error)


TEXT_BY_SPLIT = {
    DocumentSplit.FILE: Kind(cut=_cut_whole, read=_read_whole),
    DocumentSplit.LINE: Kind(cut=_cut_lines, read=_read_lines, lines_before=lines_before),
    DocumentSplit.BLANK: Kind(
        cut=functools.partial(cut_streamed, last_cut=_after_last_blank), read=_read_blocks
    ),
}
SEPARATED_TEXT = Kind(cut=_cut_separated, read=_read_separated)
