"""Sources are processed in blocks: one process cuts them in order, any process can read one.

    cut(source, from a position)  ->  TextBlock ...   cheap, in one process, in order
    read(block)                   ->  TextRows        parsing and decoding, in any process

A block carries its content if the source cannot seek (compressed files, pipes), or its rows if
finding its end means parsing it. The rows of the source do not depend on where it is cut, so the
result does not depend on the number of workers, and work can resume at the end of any block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeAlias

from gristmill.base.files import decompressed
from gristmill.base.units import format_bytes
from gristmill.text.sources.source import ReadOptions, Reason, Source

BOM = b"\xef\xbb\xbf"
"""The byte order mark that some programs put before UTF-8."""
_OTHER_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_ENCODING_SAMPLE = 1 << 12

Value: TypeAlias = str | Reason
"""The text of a document, or why there is none."""


class ReadError(Exception):
    """Why a source cannot be read any further: what is wrong, and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy


@dataclass(frozen=True)
class TextBlock:
    """A range of a source."""

    begin: int
    """Where it begins, in units that depend on the format."""
    end: int
    """Where the next block begins."""
    disk: int
    """Bytes on disk up to its end, for progress."""
    content: Any = None
    """Bytes or `TextRows`, if the block carries them."""


@dataclass(frozen=True)
class TextRows:
    """The rows of a block; each row is one document per key, or a reason why not."""

    columns: Sequence[Sequence[Value]]
    """For each key, one value per row."""
    places: Sequence[int]
    """The line where each row begins, counted from the beginning of the block."""
    lines: int
    """The number of lines in the block."""
    failure: ReadError | None = None
    """Why reading stopped at the line after these."""


@dataclass(frozen=True)
class SourceFormat:
    """How sources of one format are cut and read."""

    cut: Callable[[Source, ReadOptions, int], Iterator[TextBlock]]
    """The blocks of a source from a position on."""
    read: Callable[[Source, TextBlock, ReadOptions], TextRows] | None = None
    """The rows of a block that does not carry them."""
    divisible: bool = False
    """Whether an uncompressed file may be cut at any byte."""


def too_long(options: ReadOptions) -> ReadError:
    """The error for a document over the limit."""
    return ReadError(
        f"one document is longer than {format_bytes(options.line_limit)}",
        remedy="split it, or choose another way to split the file into documents (--documents, "
        "--separator)",
    )


def damaged(error: Exception) -> ReadError:
    """The error for a file that the disk or a decompressor cannot read."""
    if isinstance(error, PermissionError):
        remedy = "let your user read it: chmod, or ask its owner"
        return ReadError(f"cannot be read: {error.strerror}", remedy)
    return ReadError(
        f"cannot read any further: {error}",
        remedy="the file is damaged or incomplete: copy it again from where it came",
    )


def check_encoding(start: bytes) -> None:
    """Refuse a file of UTF-16 or UTF-32 by its first bytes: only UTF-8 is text here."""
    name = next((name for mark, name in _OTHER_MARKS if start.startswith(mark)), None)
    by = f"it begins with the byte order mark of {name}"
    if name is None:
        # Every second byte of English in UTF-16 is zero.
        sample = start[:_ENCODING_SAMPLE]
        even, odd = (sample[side::2].count(0) / max(len(sample) // 2, 1) for side in (0, 1))
        if len(sample) < 8 or max(even, odd) < 0.4 or min(even, odd) > 0.05:
            return
        name, by = "UTF-16BE" if even > odd else "UTF-16LE", "every second byte is zero"
    raise ReadError(
        f"this file is {name}, not UTF-8: {by}",
        remedy=f"convert it: iconv -f {name} -t UTF-8 OLD > NEW",
    )


def failed_rows(options: ReadOptions, error: Exception) -> TextRows:
    """No rows, but the reason for that."""
    failure = error if isinstance(error, ReadError) else damaged(error)
    return TextRows([[] for _ in options.keys], (), 0, failure)


def cut_stream(
    source: Source, options: ReadOptions, begin: int, *, last_cut: Callable[[bytes], int]
) -> Iterator[TextBlock]:
    """Cut a stream; `last_cut` finds the last place in some bytes where a block may end.

    It returns 0 if there is none. The last block may end anywhere.
    """
    with closing(source.open(begin)) as stream:
        rest, position = b"", begin
        # Growing reads, so that a long line is not copied again for each piece of it.
        while piece := stream.read(
            max(options.block_bytes, min(len(rest), options.line_limit + 1 - len(rest)))
        ):
            rest += piece
            if cut := last_cut(rest):
                yield TextBlock(position, position + cut, stream.disk, rest[:cut])
                rest, position = rest[cut:], position + cut
            elif len(rest) > options.line_limit:
                raise too_long(options)
        if rest:
            yield TextBlock(position, position + len(rest), stream.disk, rest)


def after_last_line(content: bytes) -> int:
    """Where the last whole line ends."""
    return content.rfind(b"\n") + 1


def cut_lines(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    """Cut between lines; the reader finds the lines of a file that can seek."""
    if not source.can_seek:
        yield from cut_stream(source, options, begin, last_cut=after_last_line)
        return
    assert source.size is not None
    if begin and source.path:
        # The reader of the first block looks at its content, but another part may have that.
        with source.path.open("rb") as file:
            check_encoding(file.read(_ENCODING_SAMPLE))
    for start in range(begin, source.size, options.block_bytes):
        end = min(start + options.block_bytes, source.size)
        yield TextBlock(start, end, disk=end)


def content_of(source: Source, block: TextBlock, options: ReadOptions) -> bytes:
    """The content of a block, or the lines that begin in it, without a byte order mark."""
    content = block.content
    if content is None:
        assert source.path is not None
        with source.path.open("rb") as opened:
            file = opened if source.can_seek else decompressed(opened)
            first = max(block.begin - 1, 0)
            if first:
                file.seek(first)
            content = file.read(block.end - first)
            if block.begin:
                # Anything before the first newline belongs to a line that began earlier.
                _, _, content = content.partition(b"\n")
            if content and not content.endswith(b"\n"):
                content += file.readline(options.line_limit + 1)
    if block.begin:
        return bytes(content)
    check_encoding(content)
    return bytes(content.removeprefix(BOM))


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
