"""What text is read from: a file, a pipe, a dataset; and the words for what is found there.

How the content of a source becomes documents is decided by its kind, see `reading`. Here are the
names that all kinds share.
"""

from __future__ import annotations

import enum
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import is_compressed, open_bytes

LINE_LIMIT = 256 << 20
BLOCK_BYTES = 2 << 20
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BUFFER = 1 << 18
PIPED_ARRAY = "["
"""Stands for the ending of a name where a pipe brings a JSON array."""
_BY_FIRST_BYTE = {b"{": ".jsonl", b"[": PIPED_ARRAY}


class Reason(enum.Enum):
    """Why a line did not become a document."""

    INVALID_JSON = "invalid json"
    INVALID_CSV = "invalid csv"
    MISSING_KEY = "missing key"
    WRONG_TYPE = "wrong type"
    INVALID_UTF8 = "invalid utf-8"
    EMPTY_TEXT = "empty text"


class DocumentSplit(enum.Enum):
    """What one document is in a plain text file."""

    FILE = "file"
    LINE = "line"
    BLANK = "blank"


@dataclass(frozen=True)
class Document:
    """One raw text, and the place it came from."""

    text: str
    origin: str
    """The file and the line where it begins, as file:line, lines counted from 1."""


@dataclass(frozen=True)
class Dropped:
    """A line, block or file that gave no document."""

    reason: Reason
    origin: str


Item: TypeAlias = Document | Dropped


@dataclass(frozen=True)
class ReadOptions:
    """How sources are read."""

    keys: tuple[str, ...] = ("text",)
    """The keys or columns that hold text; each gives documents of its own."""
    split: DocumentSplit = DocumentSplit.FILE
    separator: str | None = None
    """What stands between documents in plain text, instead of `split`."""
    line_limit: int = LINE_LIMIT
    """The most bytes of one document."""
    block_bytes: int = BLOCK_BYTES
    """About how much text is worked on at a time."""


class Source:
    """One file to read, or standard input."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.name = "<stdin>" if path is None else str(path)
        self.size = path.stat().st_size if path and path.is_file() else None
        """Bytes on the disk; None for what is not a regular file, such as a pipe."""
        self._stream = Stream(self) if self.size is None else None
        self.ending = self._ending()
        """The ending of the name, without that of a compression."""
        self.can_seek = self.size is not None and not _is_compressed(cast(Path, path))
        """Whether any part of the content can be read without what comes before."""

    def _ending(self) -> str:
        if self._stream:
            # The name of a pipe says nothing, so the first byte decides.
            return _BY_FIRST_BYTE.get(self._stream.peek()[:1], ".txt")
        name = cast(Path, self.path).name.lower()
        for suffix in _COMPRESSED:
            name = name.removesuffix(suffix)
        return Path(name).suffix

    @property
    def repeatable(self) -> bool:
        """Whether the content can be read again."""
        return self.size is not None

    @property
    def identity(self) -> tuple[object, ...]:
        """What changes with the content: name, size and time of the last change."""
        changed = self.path.stat().st_mtime_ns if self.path and self.size is not None else None
        return self.name, self.size, changed

    def open(self) -> Stream:
        """The content, decompressed, from its beginning; of a pipe, once."""
        return self._stream or Stream(self)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_stream": None}


def _is_compressed(path: Path) -> bool:
    try:
        return is_compressed(path)
    except OSError as error:
        raise UserError(
            f"cannot read: {error.strerror}", where=str(path), exit=Exit.DATA
        ) from error


class Stream:
    """The content of a source, read from its beginning to its end."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._raw: BinaryIO = open_bytes(source.path) if source.path else sys.stdin.buffer
        # The decompressors' own reading is slow in small pieces, and some cannot peek.
        plain = isinstance(self._raw, io.BufferedReader)
        self._buffered = cast(
            io.BufferedReader,
            self._raw if plain else io.BufferedReader(cast(Any, self._raw), _BUFFER),
        )

    def read(self, count: int) -> bytes:
        return self._buffered.read(count)

    def peek(self) -> bytes:
        """Some of the next bytes; none at the end."""
        return self._buffered.peek(1)

    @property
    def disk(self) -> int:
        """How many bytes of a regular file have been read, compressed as they are."""
        file = self._file()
        known = self._source.size is not None and isinstance(file, io.BufferedReader)
        return file.tell() if file and known else 0

    def _file(self) -> BinaryIO | None:
        """The open file below the decompressor, where that can be told."""
        # The decompressors of the standard library keep the file they read in these attributes.
        raw = self._raw
        return getattr(raw, "fileobj", None) or getattr(raw, "_fp", None) or raw

    def close(self) -> None:
        file = self._file()
        if self._source.path and file:
            self._buffered.close()
            file.close()
