"""JSON values that are not one to a line: an array of them, or one after the other.

    [{"text": "one"}, "two"]         an array: each element is a row

    {                                loose values: each is a row
        "text": "one"
    }
    {"text": "two"}                  with commas between them or without

A row is an object, documents under its keys, or a text, which is the document itself. An object
that holds an array is one row all the same: nothing guesses which of its parts were meant.

The process that cuts looks at brackets and quotes only, and so finds where values begin and end;
what stands in them is parsed by whoever reads the block. A position is a byte of the content,
decompressed, right after a value. Memory holds a block and the longest value.

What is not JSON ends the reading with its place: without line ends to hold on to, nobody can say
where the next value begins. Whether a file named .json is one of these or JSON lines is seen from
its beginning, by `shape_of`.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    damaged,
    too_long,
)
from gristmill.text.sources.lines import JSON_LINES, checked, parse_object
from gristmill.text.sources.source import ReadOptions, Reason, Source, Stream

_GLANCE = 1 << 10
_NOT_BLANK = re.compile(rb"[^ \t\r\n]")
_BLANKS = rb"[ \t\r\n]*+"
_SHORT_TEXT = rb'"[^"\\]{0,200}+(?:\\.[^"\\]{0,200}+){0,8}+"'
_PLAIN = rb'(?:[^"\[\]{}]++|' + _SHORT_TEXT + rb")*+"
_FLAT = rb"(\{" + _PLAIN + rb"\}|" + _SHORT_TEXT + rb")"
_UP_TO_STRUCTURE = re.compile(_PLAIN, re.DOTALL)
_END_OF_WORD = re.compile(rb'[ \t\r\n,"\[\]{}]')
_QUOTE, _BACKSLASH, _OPENING = b'"'[0], b"\\"[0], b"[{"
_REMEDY = (
    "mend the file; if each of its lines is an object, name it .jsonl: then bad lines are left out"
)


# ------------------------------------------------------------------ what a file is


class Shape(enum.Enum):
    """How values are laid out in a file of JSON."""

    LINES = "lines"
    ARRAY = "array"
    LOOSE = "loose"


def shape_of(source: Source, options: ReadOptions) -> Shape:
    """How a regular file is laid out: a whole object on its first line means JSON lines."""
    try:
        return _shape(source.name, source.identity, options.line_limit)
    except DAMAGE:
        # Whoever reads the file meets the same, and can say where.
        return Shape.LINES


@functools.lru_cache(maxsize=1024)
def _shape(name: str, identity: Sequence[object], limit: int) -> Shape:
    """The shape of a file; its identity tells apart what had the same name."""
    with open_bytes(Path(name)) as file:
        start = file.readline(_GLANCE).removeprefix(BOM)
        while start and not start.strip():
            start = file.readline(_GLANCE)
        start = start.lstrip()
        if start[:1] == b"[":
            return Shape.ARRAY
        if start and start[:1] != b"{":
            return Shape.LOOSE
        line = start if start.endswith(b"\n") else start + file.readline(limit)
    # Bytes that are not UTF-8 are a matter of that line alone.
    readable = line.decode(errors="replace").encode()
    whole = not line or parse_object(readable, ("",)) != [Reason.INVALID_JSON]
    return Shape.LINES if whole else Shape.LOOSE


# ------------------------------------------------------------------ where values are


class _Expect(enum.Enum):
    """What may come next between values."""

    OPENING = "the beginning of an array is expected here"
    FIRST = "a value or the end of the array is expected here"
    NEXT = "a value is expected here"
    COMMA = "a comma or the end of the array is expected here"
    NOTHING = "here is more after the end of the array"
    LOOSE = "the beginning of a value is expected here"


_BY_SIGN: Mapping[tuple[_Expect, bytes], _Expect] = {
    (_Expect.OPENING, b"["): _Expect.FIRST,
    (_Expect.FIRST, b"]"): _Expect.NOTHING,
    (_Expect.COMMA, b"]"): _Expect.NOTHING,
    (_Expect.COMMA, b","): _Expect.NEXT,
    (_Expect.LOOSE, b","): _Expect.LOOSE,
}
_FLAT_VALUE: Mapping[_Expect, re.Pattern[bytes]] = {
    _Expect.COMMA: re.compile(_BLANKS + b"," + _BLANKS + _FLAT, re.DOTALL),
    _Expect.LOOSE: re.compile(_BLANKS + b",?+" + _BLANKS + _FLAT, re.DOTALL),
}
"""A short text, or an object that holds no other and no long text, with what stands before it."""
_AFTER_VALUE: Mapping[_Expect, _Expect] = {
    _Expect.FIRST: _Expect.COMMA,
    _Expect.NEXT: _Expect.COMMA,
    _Expect.LOOSE: _Expect.LOOSE,
}


@dataclass(frozen=True)
class _Piece:
    """What a block carries."""

    data: bytes
    spans: Sequence[tuple[int, int]]
    """Where in the data each value begins and ends."""
    failure: Failure | None


class _Scanner:
    """Finds values in content that comes piece by piece; every byte is looked at once."""

    def __init__(self, expect: _Expect, options: ReadOptions, *, at_start: bool) -> None:
        self.failure: Failure | None = None
        self._expect = expect
        self._options = options
        self._at_start = at_start
        self._data = bytearray()
        self._position = 0
        """Up to here it has been scanned."""
        self._spans: list[tuple[int, int]] = []
        self._begin: int | None = None
        """Where the value under way begins."""
        self._depth = 0
        self._in_text = False

    def feed(self, piece: bytes | Failure | None) -> None:
        """Scan some more, or learn that there is no more, or why it cannot be read."""
        if not piece:
            self._finish()
            return
        if isinstance(piece, Failure):
            self.failure = piece
            return
        if self._at_start and piece.startswith(BOM):
            self._position = len(BOM)
        self._at_start = False
        self._data += piece
        while self.failure is None and self._advance():
            pass
        if self._begin is not None and len(self._data) - self._begin > self._options.line_limit:
            self._fail(too_long(self._options), at=self._begin)

    def _finish(self) -> None:
        if self._begin is not None and not self._depth and not self._in_text:
            self._end_value(len(self._data))
        if self._begin is not None:
            what = "the value that begins here has no end"
            self._fail(Failure(what, remedy="the file is damaged or incomplete"), at=self._begin)
        elif self._expect not in (_Expect.LOOSE, _Expect.NOTHING):
            what = "the file ends before its array does"
            self._fail(Failure(what, remedy="the file is incomplete"), at=len(self._data))

    def take(self) -> _Piece | None:
        """The values that were found since the last time, with all that stands before them."""
        if not self._spans:
            return None
        end = self._spans[-1][1]
        piece = _Piece(bytes(self._data[:end]), self._spans, None)
        del self._data[:end]
        self._position -= end
        self._spans = []
        if self._begin is not None:
            self._begin -= end
        return piece

    def rest(self) -> _Piece:
        """What stands after the last value, up to a failure."""
        return _Piece(bytes(self._data), (), self.failure)

    def _fail(self, failure: Failure, *, at: int) -> None:
        self.failure = failure
        self._begin = None
        del self._data[at:]

    def _advance(self) -> bool:
        """Scan up to the next thing of meaning; whether there was one."""
        if self._begin is None:
            self._take_flat_values()
            return self._between()
        return self._inside() if self._depth or self._in_text else self._word()

    def _take_flat_values(self) -> None:
        """Values of the common kind, which are found much faster than others."""
        pattern = _FLAT_VALUE.get(self._expect)
        data, position, limit = self._data, self._position, self._options.line_limit
        while pattern and (found := pattern.match(data, position)):
            begin, end = found.span(1)
            if end - begin > limit:
                break
            self._spans.append((begin, end))
            position = end
        self._position = position

    def _between(self) -> bool:
        """From the end of a value up to the beginning of the next."""
        found = _NOT_BLANK.search(self._data, self._position)
        if found is None:
            self._position = len(self._data)
            return False
        place, sign = found.start(), bytes(found[0])
        follows = _BY_SIGN.get((self._expect, sign))
        if follows is not None:
            self._expect, self._position = follows, place + 1
        elif self._expect in _AFTER_VALUE and sign not in (b",", b"]", b"}"):
            self._begin = place
            self._depth = int(sign in (b"{", b"["))
            self._in_text = sign == b'"'
            self._position = place + 1
        else:
            self._fail(Failure(self._expect.value, remedy=_REMEDY), at=place)
        return True

    def _inside(self) -> bool:
        """Up to the end of an object, an array or a text."""
        data, position, depth, in_text = self._data, self._position, self._depth, self._in_text
        while depth or in_text:
            if in_text:
                position = data.find(b'"', position) + 1
                if not position:
                    break
                in_text = data[position - 2] == _BACKSLASH and _is_escaped(data, position - 1)
            else:
                found = _UP_TO_STRUCTURE.match(data, position)
                assert found is not None
                if found.end() == len(data):
                    position = 0
                    break
                position = found.end() + 1
                sign = data[position - 1]
                if sign == _QUOTE:
                    in_text = True
                else:
                    depth += 1 if sign in _OPENING else -1
        self._position, self._depth, self._in_text = position or len(data), depth, in_text
        if position:
            self._end_value(position)
        return position > 0

    def _word(self) -> bool:
        """Up to the end of a number, true, false or null."""
        found = _END_OF_WORD.search(self._data, self._position)
        self._position = found.start() if found else len(self._data)
        if found:
            self._end_value(self._position)
        return found is not None

    def _end_value(self, end: int) -> None:
        assert self._begin is not None
        if end - self._begin > self._options.line_limit:
            self._fail(too_long(self._options), at=self._begin)
            return
        self._spans.append((self._begin, end))
        self._begin = None
        self._expect = _AFTER_VALUE[self._expect]


def _is_escaped(data: bytearray, place: int) -> bool:
    """Whether an odd number of backslashes stands before a place."""
    before = place
    while data[before - 1] == _BACKSLASH:
        before -= 1
    return (place - before) % 2 == 1


# ------------------------------------------------------------------ cutting


def _cut(
    source: Source, options: ReadOptions, begin: int, *, first: _Expect, later: _Expect
) -> Iterator[Block]:
    stream = source.open()
    scanner = _Scanner(later if begin else first, options, at_start=begin == 0)
    position = begin
    try:
        for piece in _pieces(stream, options, begin):
            scanner.feed(piece)
            if values := scanner.take():
                end = position + len(values.data)
                yield Block(position, end, stream.disk, content=values)
                position = end
            if scanner.failure:
                break
        # Its end is its beginning, since only after a value is it known what must follow.
        yield Block(position, position, stream.disk, content=scanner.rest())
    finally:
        stream.close()


def _pieces(stream: Stream, options: ReadOptions, begin: int) -> Iterator[bytes | Failure | None]:
    """The content from a position on, and at last nothing, or why there is no more."""
    try:
        while begin and (skipped := stream.read(min(begin, 1 << 20))):
            begin -= len(skipped)
        while piece := stream.read(max(options.block_bytes, len(BOM))):
            yield piece
        yield None
    except DAMAGE as error:
        yield damaged(error)


# ------------------------------------------------------------------ reading


def _read(source: Source, block: Block, options: ReadOptions) -> Rows:
    piece: _Piece = block.content
    columns: list[list[Value]] = [[] for _ in options.keys]
    places: list[int] = []
    line = counted = 0
    for begin, end in piece.spans:
        line += piece.data.count(b"\n", counted, begin)
        counted = begin
        value = piece.data[begin:end]
        found = _values(value, options.keys)
        if Reason.INVALID_JSON in found:
            fault = _fault(value)
            return Rows(columns, places, line + fault.line, fault.failure)
        places.append(line)
        for column, text in zip(columns, found, strict=True):
            column.append(text)
    return Rows(columns, places, piece.data.count(b"\n"), piece.failure)


def _values(value: bytes, keys: Sequence[str]) -> Sequence[Value]:
    """The text under each key of an object, or of a text itself."""
    if value[:1] != b'"':
        return parse_object(value, keys)
    try:
        text: Value = checked(json.loads(value.decode()))
    except UnicodeDecodeError:
        text = Reason.INVALID_UTF8
    except ValueError:
        text = Reason.INVALID_JSON
    return [text] * len(keys)


@dataclass(frozen=True)
class _Fault:
    """What is wrong in a value, and in which of its lines, counted from 0."""

    failure: Failure
    line: int


def _fault(value: bytes) -> _Fault:
    try:
        json.loads(value.decode())
    except json.JSONDecodeError as error:
        what, line = f"invalid JSON: {error.msg} at column {error.colno}", error.lineno - 1
    except (ValueError, RecursionError) as error:
        what, line = f"invalid JSON: {error}", 0
    else:
        raise AssertionError("a value that was refused is fine")
    return _Fault(Failure(what, remedy=_REMEDY), line)


def _kind(**expect: Any) -> Kind:
    return Kind(cut=functools.partial(_cut, **expect), read=_read)


JSON_BY_SHAPE: Mapping[Shape, Kind] = {
    Shape.LINES: JSON_LINES,
    Shape.ARRAY: _kind(first=_Expect.OPENING, later=_Expect.COMMA),
    Shape.LOOSE: _kind(first=_Expect.LOOSE, later=_Expect.LOOSE),
}
