"""Where text comes from (a file, a pipe, a dataset), and the types that all file formats share.

`reading` decides which format a source has and turns its content into documents.
"""

from __future__ import annotations

import enum
import io
import lzma
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gristmill.base.files import DECOMPRESSED_PIECE, decompressed, is_compressed

# Raised by a failing disk, and by a truncated or corrupt compressed file.
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
LINE_LIMIT = 256 << 20
BLOCK_BYTES = 2 << 20
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BUFFER = 1 << 18
PATIENCE = 2.0
"""Seconds after which a wait for a pipe is told of."""
STDIN_NAME = "<stdin>"
_BY_FIRST_BYTE = {b"{": ".jsonl", b"[": ".json-array"}


class Reason(enum.Enum):
    """Why a line did not become a document."""

    INVALID_JSON = "invalid json"
    INVALID_CSV = "invalid csv"
    MISSING_KEY = "missing key"
    WRONG_TYPE = "wrong type"
    INVALID_UTF8 = "invalid utf-8"
    EMPTY_TEXT = "empty text"


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


class Source:
    """One file to read, or standard input; `note` is told what a pipe waits for."""

    unreadable: OSError | None = None
    """Why nothing of a file can be read."""

    def __init__(self, path: Path | None, *, note: Note = tell) -> None:
        self.path = path
        self.name = STDIN_NAME if path is None else str(path)
        self.size = path.stat().st_size if path and path.is_file() else None
        """Bytes on disk; None if this is not a regular file, such as a pipe."""
        self._stream: Stream | None = None
        self.extension = ".txt"
        """The file name extension without that of the compression, or what replaces it."""
        self.can_seek = False
        """Whether any part of the content can be read without what comes before."""
        if path is None or self.size is None:
            # The name of a pipe says nothing, so the first byte decides.
            with _telling_of_waits(self.name, note):
                self._stream = Stream(path, regular=False)
                self.extension = _BY_FIRST_BYTE.get(self._stream.peek(1)[:1], ".txt")
            return
        name = path.name.lower()
        for suffix in _COMPRESSED:
            name = name.removesuffix(suffix)
        self.extension = Path(name).suffix
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

    def open(self, begin: int = 0) -> Stream:
        """The decompressed content from a byte on; a pipe can be opened only once."""
        stream = self._stream or Stream(self.path, regular=True)
        while begin and (skipped := stream.read(min(begin, 1 << 20))):
            begin -= len(skipped)
        return stream

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stream": None}


class Stream:
    """The decompressed content of a source, read from beginning to end."""

    def __init__(self, path: Path | None, *, regular: bool) -> None:
        self._path = path
        raw: Any = decompressed(path.open("rb")) if path else sys.stdin.buffer
        # The decompressors of the standard library keep the file they read in these attributes.
        file = getattr(raw, "fileobj", None) or getattr(raw, "_fp", None) or raw
        self._file = file if regular and isinstance(file, io.BufferedReader) else None
        # Decompressors are slow at small reads, and some cannot peek.
        buffered = isinstance(raw, io.BufferedReader)
        self._reader: io.BufferedReader = raw if buffered else io.BufferedReader(raw, _BUFFER)
        self.peek = self._reader.peek
        self._compressed = file is not raw
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
        if self._path:
            self._reader.close()
