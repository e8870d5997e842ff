"""JSON and plain text.

    .jsonl .ndjson              an object on each line, documents under its keys; the key meta.text
                                is "text" of the object under "meta", unless there is a "meta.text"
    .json                       the same, or an array of values, or values one after another
    .txt .md and all others     a document is a file, a line, a paragraph between blank lines, or
                                the text between two separators such as <|endoftext|>

Only the byte 0x0A ends a line: U+2028 and the like are text. A byte order mark is skipped and CRLF
reads as LF. Only "" counts as empty: whitespace is left for a filter to judge.

JSON values that are not one per line:

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from gristmill.base.files import decompressed
from gristmill.text.sources.source import (
    BOM,
    DAMAGE,
    LINE_LIMIT,
    DocumentSplit,
    ReadError,
    ReadOptions,
    Reason,
    Source,
    SourceFormat,
    TextBlock,
    TextRows,
    Value,
    check_encoding,
    content_of,
    cut_lines,
    cut_stream,
    too_long,
)

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


def values_of(value: Any, keys: Sequence[str], *, check_surrogates: bool) -> Sequence[Value]:
    """The text under each key of a parsed JSON value."""
    if not isinstance(value, dict):
        return [Reason.WRONG_TYPE] * len(keys)
    return [
        text_or_reason(value[key], check_surrogates)
        if key in value
        else _nested_text(value, key, check_surrogates)
        for key in keys
    ]


def _nested_text(value: Any, key: str, check_surrogates: bool) -> Value:
    """The text under the key "meta.text": that of "text" in the object under "meta"."""
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return Reason.MISSING_KEY
        value = value[name]
    return text_or_reason(value, check_surrogates)


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


_FIRST_READ = 1 << 10
_LONGEST_TOKEN = 12
"""An error this close to the end of the text may be due to a number, word or escape cut there."""
_BLANKS = re.compile(r"[ \t\r\n]*")
_BLANKS_AND_COMMAS = re.compile(r"[ \t\r\n,]*")
_WORD = re.compile(r'[^ \t\r\n,"\[\]{}]*')
_DECODER = json.JSONDecoder()
_REMEDY = "fix the file; if each line holds an object, name it .jsonl: then bad lines are dropped"


def json_format(source: Source) -> str:
    """The extension that suits a .json file: .jsonl if its first line holds a whole object."""
    try:
        with source.open_file() as opened, decompressed(opened) as file:
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
            for column, cell in zip(columns, values, strict=True):
                column.append(cell)
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
    match = pattern.match(text, begin)
    assert match is not None
    return match.end()


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


ARRAY = SourceFormat(functools.partial(_cut, array=True))
CONCATENATED = SourceFormat(functools.partial(_cut, array=False))
