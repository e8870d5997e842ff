"""A source is worked on in blocks: cut in order by one process, read by any.

    cut(source, from a position)  ->  Block  ...      cheap, in one place, in order
    read(block)                   ->  Rows            parsing and decoding, anywhere

A block says where it lies in its source, or carries its content where that cannot be sought, as in
compressed files and pipes. Where blocks are cut decides nothing: the rows of all blocks, end to
end, are the rows of the source. So any number of workers gives the same result, and work goes on
after an interruption at the position where a block ended.

    sought     lines that begin at the bytes [begin, end) of a plain file; the reader finds them
    streamed   pieces of a stream, each ending where a cut is safe: after a line, an empty line …
    whole      one file, one document
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from gristmill.base.units import format_bytes
from gristmill.text.sources.source import ReadOptions, Reason, Source, Stream

# What reading raises when a disk fails or a compressed file is cut or garbled.
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
BOM = b"\xef\xbb\xbf"
"""The byte order mark that some programs put before UTF-8."""
_PIECE = 1 << 16

Value: TypeAlias = str | Reason
"""The text of a document, or why there is none."""


@dataclass(frozen=True)
class Failure:
    """Why a source cannot be read on; its place is the line after the rows that came with it."""

    what: str
    remedy: str


class Content(NamedTuple):
    """The bytes of a block, and what kept the rest from being read."""

    data: bytes
    failure: Failure | None


@dataclass(frozen=True)
class Block:
    """A piece of a source."""

    begin: int
    """Where it begins, in units that only its kind knows."""
    end: int
    """Where the next one begins."""
    disk: int
    """Bytes of the file on the disk up to its end, for progress."""
    content: Any = None
    """What it holds, if the source cannot be sought."""


@dataclass(frozen=True)
class Rows:
    """What a block holds, row by row; a row is whatever is offered as one document."""

    columns: Sequence[Sequence[Value]]
    """For each key that was asked for, one value of each row."""
    places: Sequence[int]
    """The line where each row begins, counted from the beginning of the block."""
    lines: int
    """How many lines the block has."""
    failure: Failure | None = None


@dataclass(frozen=True)
class Kind:
    """How sources of one kind are cut and read."""

    cut: Callable[[Source, ReadOptions, int], Iterator[Block]]
    """The blocks of a source from a position on."""
    read: Callable[[Source, Block, ReadOptions], Rows]
    """The rows of a block."""
    lines_before: Callable[[Source, int], int] | None = None
    """How many lines begin before a byte of a plain file; given if positions are bytes of the file
    and reading may begin and end at any of them."""


def single(values: Sequence[Value], options: ReadOptions) -> Sequence[Sequence[Value]]:
    """The columns of a source without keys: the same text for each."""
    return [values] * len(options.keys)


def too_long(options: ReadOptions) -> Failure:
    """The failure of a document over the limit."""
    return Failure(
        f"one document is longer than {format_bytes(options.line_limit)}",
        remedy="split it, or choose another way to split the file into documents",
    )


def damaged(error: Exception) -> Failure:
    """The failure of a file that the disk or a decompressor refuses."""
    return Failure(
        f"cannot read on: {error}",
        remedy="the file is damaged or incomplete: copy it again from where it came",
    )


# ------------------------------------------------------------------ cutting


def cut_sought(source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    """Blocks of equal size that the reader seeks."""
    assert source.size is not None
    for start in range(begin, source.size, options.block_bytes):
        end = min(start + options.block_bytes, source.size)
        yield Block(start, end, disk=end)


def cut_streamed(
    source: Source,
    options: ReadOptions,
    begin: int,
    *,
    last_cut: Callable[[bytes], int],
) -> Iterator[Block]:
    """Pieces of a stream; `last_cut` finds the last place in a piece after which it may end.

    It returns 0 where there is none. The content of the last block may end anywhere.
    """
    stream = source.open()
    try:
        yield from _pieces(stream, options, begin, last_cut)
    except DAMAGE as error:
        yield Block(begin, begin, disk=stream.disk, content=damaged(error))
    finally:
        stream.close()


def _pieces(
    stream: Stream, options: ReadOptions, begin: int, last_cut: Callable[[bytes], int]
) -> Iterator[Block]:
    _skip(stream, begin)
    rest, position = b"", begin
    while piece := _read(stream, options.block_bytes):
        if isinstance(piece, Failure):
            yield Block(position, position + len(rest), stream.disk, content=(rest, piece))
            return
        rest += piece
        if cut := last_cut(rest):
            yield Block(position, position + cut, stream.disk, content=(rest[:cut], None))
            rest, position = rest[cut:], position + cut
        elif len(rest) > options.line_limit:
            yield Block(position, position, stream.disk, content=(b"", too_long(options)))
            return
    if rest:
        yield Block(position, position + len(rest), stream.disk, content=(rest, None))


def _read(stream: Stream, count: int) -> bytes | Failure:
    try:
        return stream.read(count)
    except DAMAGE as error:
        return damaged(error)


def _skip(stream: Stream, count: int) -> None:
    while count and (piece := stream.read(min(count, 1 << 20))):
        count -= len(piece)


def after_last_line(content: bytes) -> int:
    """A piece may be cut after each newline."""
    return content.rfind(b"\n") + 1


# ------------------------------------------------------------------ sought lines


def content_of(source: Source, block: Block, options: ReadOptions) -> Content:
    """The lines of a block, carried or sought, without a byte order mark."""
    content = block.content if block.content is not None else _sought(source, block, options)
    if isinstance(content, Failure):
        return Content(b"", content)
    data, failure = content
    return Content(data.removeprefix(BOM) if block.begin == 0 else data, failure)


def _sought(source: Source, block: Block, options: ReadOptions) -> tuple[bytes, Failure | None]:
    """The lines that begin inside a block of a plain file."""
    assert source.path is not None
    try:
        with source.path.open("rb") as file:
            first = block.begin - 1 if block.begin else 0
            file.seek(first)
            content = file.read(block.end - first)
            if block.begin:
                # What stands before the first newline belongs to a line that began earlier.
                skipped = content.find(b"\n") + 1
                content = content[skipped:] if skipped else b""
            if not content or content.endswith(b"\n"):
                return content, None
            rest = _rest_of_line(file, limit=options.line_limit)
            if rest is None:
                return content[: after_last_line(content)], too_long(options)
            return content + rest, None
    except OSError as error:
        return b"", damaged(error)


def _rest_of_line(file: BinaryIO, *, limit: int) -> bytes | None:
    """What follows up to a newline or the end; None if that is too much."""
    pieces, length = list[bytes](), 0
    while piece := file.read(_PIECE):
        end = piece.find(b"\n") + 1
        pieces.append(piece[:end] if end else piece)
        length += len(pieces[-1])
        if end:
            break
        if length > limit:
            return None
    return b"".join(pieces)


def lines_before(source: Source, position: int) -> int:
    """How many lines of a plain file begin before a byte."""
    if position == 0:
        return 0
    assert source.path is not None
    newlines, left = 0, position - 1
    with source.path.open("rb") as file:
        while left and (piece := file.read(min(left, 1 << 22))):
            newlines += piece.count(b"\n")
            left -= len(piece)
    return newlines + 1
