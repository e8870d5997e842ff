"""Where text comes from (a file, a pipe, a dataset), and the types that all file formats share.

`reading` decides which format a source has and turns its content into documents.

Sources are processed in blocks: one process cuts them in order, any process can read one.

    cut(source, from a position)  ->  TextBlock ...   cheap, in one process, in order
    read(block)                   ->  TextRows        parsing and decoding, in any process

A block carries its content if the source cannot seek (compressed files, pipes), or its rows if
finding its end means parsing it. The rows of the source do not depend on where it is cut, so the
result does not depend on the number of workers, and work can resume at the end of any block.
"""

from __future__ import annotations

import enum
import io
import lzma
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from gristmill.base.files import DECOMPRESSED_PIECE, decompressed, is_compressed
from gristmill.base.units import format_bytes

# Raised by a failing disk, and by a truncated or corrupt compressed file.
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
LINE_LIMIT = 256 << 20
BLOCK_BYTES = 2 << 20
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BUFFER = 1 << 18
PATIENCE = 2.0
"""Seconds after which a wait for a pipe is told of."""
STDIN_NAME = "<stdin>"
_BY_FIRST_BYTE = {b"{": ".jsonl", b"[": ".json-array"}


@dataclass(frozen=True)
class Reason:
    """Why a line did not become a document: one of these, or what a later step found."""

    INVALID_JSON: ClassVar[Reason]
    INVALID_CSV: ClassVar[Reason]
    MISSING_KEY: ClassVar[Reason]
    WRONG_TYPE: ClassVar[Reason]
    INVALID_UTF8: ClassVar[Reason]
    EMPTY_TEXT: ClassVar[Reason]

    value: str
    sample: str = field(default="", compare=False)
    """The beginning of the text that was dropped, if there was one."""
    found: str = field(default="", compare=False)
    """What in particular was found in it, if that is to be listed for every text."""


Reason.INVALID_JSON = Reason("invalid json")
Reason.INVALID_CSV = Reason("invalid csv")
Reason.MISSING_KEY = Reason("missing key")
Reason.WRONG_TYPE = Reason("wrong type")
Reason.INVALID_UTF8 = Reason("invalid utf-8")
Reason.EMPTY_TEXT = Reason("empty text")
UNREADABLE = frozenset(
    (
        Reason.INVALID_JSON, Reason.INVALID_CSV, Reason.MISSING_KEY, Reason.WRONG_TYPE,
        Reason.INVALID_UTF8, Reason.EMPTY_TEXT,
    )
)  # fmt: skip
"""Reasons that are mistakes of a source; others are choices of a filter."""


class SkipReason(enum.Enum):
    """Why a file or folder was left out as a whole."""

    DAMAGED_FILE = "damaged file"
    UNREADABLE_FOLDER = "unreadable folder"
    LINKED_FOLDER = "linked folder"
    BROKEN_LINK = "broken link"
    SPECIAL_FILE = "special file"
    UNSEARCHED_FOLDER = "folder that a pattern matches"


class OnDamage(enum.Enum):
    """What to do about a file that cannot be read to its end."""

    STOP = "stop"
    SKIP = "skip"


class DocumentSplit(enum.Enum):
    """How a plain text file is split into documents."""

    FILE = "file"
    LINE = "line"
    BLANK = "blank"


@dataclass(frozen=True)
class Document:
    """One raw text and where it came from."""

    text: str
    origin: str
    """The file and the line where it begins, as file:line; the first line is 1."""


@dataclass(frozen=True)
class Dropped:
    """A line, paragraph or file that gave no document."""

    reason: Reason
    origin: str


@dataclass(frozen=True)
class Skipped:
    """A file or folder that was left out as a whole."""

    reason: SkipReason
    origin: str
    what: str
    """What is wrong with it."""


Item: TypeAlias = Document | Dropped
Note: TypeAlias = Callable[[str], None]
"""Receives a message for the user."""


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    keys: tuple[str, ...] = ("text",)
    """The keys or columns that hold text; each gives documents of its own."""
    split: DocumentSplit = DocumentSplit.FILE
    separator: str | None = None
    """The text between documents in plain text files; replaces `split`."""
    portion: tuple[float, float] | None = None
    """From where to where each plain text file is read, as shares of its characters; all of it if
    not given."""
    line_limit: int = LINE_LIMIT
    """The maximum size of one document in bytes."""
    block_bytes: int = BLOCK_BYTES
    """The approximate size of a block."""
    fields: tuple[str, ...] = ()
    """More keys or columns that are read: what filters ask of a row."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys of the columns of `TextRows`."""
        return (*self.keys, *self.fields)


def tell(message: str) -> None:
    """Tell the user something where no progress line is in the way."""
    print(f"note: {message}", file=sys.stderr, flush=True)


@contextmanager
def _telling_of_waits(name: str, note: Note) -> Iterator[None]:
    """Say what is waited for, if that takes long: a pipe that nobody writes to is like a hang."""
    text = f"{name}: waiting for another process to write to this pipe"
    if name == STDIN_NAME:
        text = f"{name}: waiting for text on standard input"
    timer = threading.Timer(PATIENCE, note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def extension_of(name: str) -> str:
    """The extension of a file name in small letters, without that of the compression."""
    name = name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return Path(name).suffix


class Source:
    """One file to read, or standard input; `note` is told what a pipe waits for."""

    unreadable: OSError | None = None
    """Why nothing of a file can be read."""

    def __init__(self, path: Path | None, *, note: Note = tell) -> None:
        self.path = path
        self.name = STDIN_NAME if path is None else str(path)
        self.size = path.stat().st_size if path and path.is_file() else None
        """Bytes on disk; None if this is not a regular file, such as a pipe."""
        self._stream: DecompressedStream | None = None
        self.extension = ".txt"
        """The file name extension without that of the compression, or what replaces it."""
        self.can_seek = False
        """Whether any part of the content can be read without what comes before."""
        if path is None or self.size is None:
            # The name of a pipe says nothing, so the first byte decides.
            with _telling_of_waits(self.name, note):
                self._stream = DecompressedStream(path.open("rb") if path else None, regular=False)
                self.extension = _BY_FIRST_BYTE.get(self._stream.peek(1)[:1], ".txt")
            return
        self.extension = extension_of(path.name)
        try:
            self.can_seek = not is_compressed(path)
        except OSError as error:
            self.unreadable = error

    @property
    def repeatable(self) -> bool:
        """Whether the content can be read again."""
        return self.size is not None

    @property
    def identity(self) -> tuple[object, ...]:
        """Changes with the content: name, size and modification time."""
        changed = self.path.stat().st_mtime_ns if self.path and self.size is not None else None
        return self.name, self.size, changed

    def open_file(self) -> io.BufferedReader:
        """The content of a file as it is stored."""
        assert self.path is not None
        return self.path.open("rb")

    def open(self, begin: int = 0) -> DecompressedStream:
        """The decompressed content from a byte on; a pipe can be opened only once."""
        stream = self._stream or DecompressedStream(self.open_file(), regular=True)
        while begin and (skipped := stream.read(min(begin, 1 << 20))):
            begin -= len(skipped)
        return stream

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stream": None}


class DecompressedStream:
    """The decompressed content of a source, read from beginning to end."""

    def __init__(self, file: io.BufferedReader | None, *, regular: bool) -> None:
        self._is_file = file is not None
        raw: Any = decompressed(file) if file else sys.stdin.buffer
        # What stands in for standard input need not be buffered.
        buffered = isinstance(raw, io.BufferedReader)
        self._reader: io.BufferedReader = raw if buffered else io.BufferedReader(raw, _BUFFER)
        self.peek = self._reader.peek
        self._file = file if regular else None
        self._compressed = file is not None and raw is not file
        self._left = b""
        self._failure: Exception | None = None

    def read(self, size: int) -> bytes:
        """As many bytes, or fewer at the end.

        Everything before the place of damage is returned first. That place depends on the steps in
        which a decompressor is read, so they are always the same, wherever reading resumes.
        """
        if not self._compressed:
            return self._reader.read(size)
        pieces, count = [self._left], len(self._left)
        while count < size and self._failure is None:
            try:
                piece = self._reader.read1(DECOMPRESSED_PIECE)
            except DAMAGE as error:
                self._failure = error
                break
            if not piece:
                break
            pieces.append(piece)
            count += len(piece)
        content = b"".join(pieces)
        if self._failure and not content:
            raise self._failure
        self._left = content[size:]
        return content[:size]

    @property
    def disk(self) -> int:
        """Bytes read from a regular file on disk, before decompression."""
        return self._file.tell() if self._file else 0

    def close(self) -> None:
        if self._is_file:
            self._reader.close()


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
    """For each key, and then each field, one value per row."""
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
    return TextRows([[] for _ in options.columns], (), 0, failure)


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
    if begin:
        # The reader of the first block looks at its content, but another part may have that.
        with source.open_file() as file:
            check_encoding(file.read(_ENCODING_SAMPLE))
    for start in range(begin, source.size, options.block_bytes):
        end = min(start + options.block_bytes, source.size)
        yield TextBlock(start, end, disk=end)


def content_of(source: Source, block: TextBlock, options: ReadOptions) -> bytes:
    """The content of a block, or the lines that begin in it, without a byte order mark."""
    content = block.content
    if content is None:
        with source.open_file() as opened:
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
    newlines, left = 0, position - 1
    with source.open_file() as file:
        while left and (piece := file.read(min(left, 1 << 22))):
            newlines += piece.count(b"\n")
            left -= len(piece)
    return newlines + 1
