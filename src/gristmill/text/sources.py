"""Text from files, globs, folders and standard input, one document or one dropped line at a time.

    name without .gz .bz2 .xz .zst        a document is
    .jsonl .ndjson .json                  the string under one key of the object on each line
    .txt .md and all others               a file, a line, or a block between blank lines

A kind of file is one function and one row of `READERS`. Lines end at the byte 0x0A and nowhere
else: U+2028 and its kin are text. A byte order mark is skipped and CRLF reads as LF. Whatever does
not become a document is yielded as `Dropped`, so that nothing vanishes uncounted. Only "" is empty:
a text of blanks is for a filter to judge. The name of standard input or of a pipe says nothing, so
the first byte decides: "{" begins JSON lines, anything else is plain text. Standard input is not
decompressed, since `zcat` is at hand.
"""

from __future__ import annotations

import enum
import glob
import io
import itertools
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import open_bytes
from gristmill.base.units import format_bytes

STDIN = "-"
LINE_LIMIT = 256 << 20
_BOM = b"\xef\xbb\xbf"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BUFFER = 1 << 18
# What reading raises when a disk fails or a compressed file is cut or garbled.
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Reason(enum.Enum):
    """Why a line did not become a document."""

    INVALID_JSON = "invalid json"
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

    json_key: str = "text"
    split: DocumentSplit = DocumentSplit.FILE
    line_limit: int = LINE_LIMIT


class Source:
    """One file to read, or standard input."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.name = "<stdin>" if path is None else str(path)
        self.size = path.stat().st_size if path and path.is_file() else None
        """Bytes on the disk; None for what is not a regular file, such as a pipe."""
        self._stream: BinaryIO | None = None
        self._lines: io.BufferedReader | None = None

    def lines(self) -> io.BufferedReader:
        """The content, decompressed."""
        if self._lines is None:
            self._stream = open_bytes(self.path) if self.path else sys.stdin.buffer
            # The decompressors' own readline is slow, and not all of them have one.
            buffered = isinstance(self._stream, io.BufferedReader)
            self._lines = cast(
                io.BufferedReader,
                self._stream if buffered else io.BufferedReader(cast(Any, self._stream), _BUFFER),
            )
        return self._lines

    def _file(self) -> BinaryIO | None:
        """The open file below the decompressor, where that can be told."""
        # The decompressors of the standard library keep the file they read in these attributes.
        stream = self._stream
        return getattr(stream, "fileobj", None) or getattr(stream, "_fp", None) or stream

    @property
    def position(self) -> int:
        """How many bytes of a regular file have been read, compressed as they are."""
        file = self._file()
        known = self.size is not None and isinstance(file, io.BufferedReader)
        return file.tell() if file and known else 0

    def close(self) -> None:
        file = self._file()
        if self.path and self._lines and file:
            self._lines.close()
            file.close()
        self._stream = self._lines = None


Reader: TypeAlias = Callable[[Source, ReadOptions], Iterator[Item]]


class SourceReader:
    """Iterates over all items of some sources, once, and knows how far it has come."""

    def __init__(self, sources: Sequence[Source], options: ReadOptions) -> None:
        self.sources = tuple(sources)
        self._options = options
        self._finished = 0
        self._current: Source | None = None
        self._items = self._read()

    def __iter__(self) -> Iterator[Item]:
        return self._items

    @property
    def bytes_total(self) -> int | None:
        """The size of all files on the disk; not known with standard input."""
        sizes = [source.size for source in self.sources if source.size is not None]
        return sum(sizes) if len(sizes) == len(self.sources) else None

    @property
    def bytes_done(self) -> int:
        """How much of it has been read."""
        return self._finished + (self._current.position if self._current else 0)

    def _read(self) -> Iterator[Item]:
        for source in self.sources:
            self._current = source
            try:
                yield from _reader_for(source)(source, self._options)
            finally:
                source.close()
            self._current = None
            self._finished += source.size or 0


def open_sources(
    paths: Sequence[str],
    *,
    json_key: str = "text",
    split: DocumentSplit = DocumentSplit.FILE,
    line_limit: int = LINE_LIMIT,
) -> SourceReader:
    """Find all files now; read them as the result is iterated over."""
    sources = [source for path in paths for source in _find(path)]
    options = ReadOptions(json_key=json_key, split=split, line_limit=line_limit)
    return SourceReader(sources, options)


def _find(path: str) -> list[Source]:
    if path == STDIN:
        return [Source(None)]
    place = Path(path)
    if place.is_dir():
        found = sorted(file for file in place.rglob("*") if _is_visible(file, below=place))
        missing = "this folder holds no files"
    elif place.exists():
        return [Source(place)]
    else:
        matches = map(Path, glob.glob(path, recursive=True))
        found = sorted(file for file in matches if file.is_file())
        missing = "no file matches" if glob.has_magic(path) else "no such file or folder"
    if not found:
        raise UserError(missing, where=path, exit=Exit.DATA)
    return [Source(file) for file in found]


def _is_visible(file: Path, *, below: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(below).parts)
    return not hidden and file.is_file()


def _reader_for(source: Source) -> Reader:
    if source.path is None or source.size is None:
        return read_json_lines if source.lines().peek(1)[:1] == b"{" else read_text
    name = source.path.name.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return READERS.get(Path(name).suffix, read_text)


def read_json_lines(source: Source, options: ReadOptions) -> Iterator[Item]:
    """One JSON object per line; the document is the string under `json_key`."""
    for number, line in _lines(source, options):
        origin = f"{source.name}:{number}"
        found = _parse(line, key=options.json_key)
        yield Dropped(found, origin) if isinstance(found, Reason) else Document(found, origin)


def _parse(line: bytes, *, key: str) -> str | Reason:
    if not line.strip():
        return Reason.EMPTY_TEXT
    try:
        value = json.loads(line.decode())
        text = value[key] if isinstance(value, dict) else None
    except UnicodeDecodeError:
        return Reason.INVALID_UTF8
    except KeyError:
        return Reason.MISSING_KEY
    except (ValueError, RecursionError):
        return Reason.INVALID_JSON
    if not isinstance(text, str):
        return Reason.WRONG_TYPE
    if b"\\u" in line and not _is_unicode(text):
        return Reason.INVALID_UTF8
    return text or Reason.EMPTY_TEXT


def _is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair stands alone, which JSON can write but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_text(source: Source, options: ReadOptions) -> Iterator[Item]:
    """Plain text: a document per file, line or block between blank lines."""
    for number, content in _SPLITTERS[options.split](source, options):
        origin = f"{source.name}:{number}"
        try:
            text = content.decode()
        except UnicodeDecodeError:
            yield Dropped(Reason.INVALID_UTF8, origin)
            continue
        yield Document(text, origin) if text else Dropped(Reason.EMPTY_TEXT, origin)


READERS: Mapping[str, Reader] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json_lines,
    ".txt": read_text,
    ".md": read_text,
}


def _split_file(source: Source, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    try:
        content = source.lines().read(options.line_limit + 1)
    except _DAMAGE as error:
        raise _damaged(source, number=1, error=error) from error
    _check_length(len(content), source=source, number=1, options=options)
    yield 1, content.removeprefix(_BOM).replace(b"\r\n", b"\n")


def _split_lines(source: Source, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    for number, line in _lines(source, options):
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _split_blocks(source: Source, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    block: list[bytes] = []
    first = size = 0
    for number, line in _split_lines(source, options):
        if line.strip():
            first = first if block else number
            block.append(line)
            size += len(line) + 1
            _check_length(size, source=source, number=first, options=options)
        elif block:
            yield first, b"\n".join(block)
            block, size = [], 0
    if block:
        yield first, b"\n".join(block)


_SPLITTERS: Mapping[DocumentSplit, Callable[[Source, ReadOptions], Iterator[tuple[int, bytes]]]] = {
    DocumentSplit.FILE: _split_file,
    DocumentSplit.LINE: _split_lines,
    DocumentSplit.BLANK: _split_blocks,
}


def _lines(source: Source, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    """The lines of a source with their numbers, each with its end."""
    for number in itertools.count(1):
        try:
            line = source.lines().readline(options.line_limit + 1)
        except _DAMAGE as error:
            raise _damaged(source, number=number, error=error) from error
        if not line:
            return
        _check_length(len(line), source=source, number=number, options=options)
        yield number, line.removeprefix(_BOM) if number == 1 else line


def _check_length(length: int, *, source: Source, number: int, options: ReadOptions) -> None:
    if length > options.line_limit:
        raise UserError(
            f"one document is longer than {format_bytes(options.line_limit)}",
            where=f"{source.name}:{number}",
            remedy="split it, or choose another way to split the file into documents",
            exit=Exit.DATA,
        )


def _damaged(source: Source, *, number: int, error: Exception) -> UserError:
    return UserError(
        f"cannot read on: {error}",
        where=f"{source.name}:{number}",
        remedy="the file is damaged or incomplete: copy it again from where it came",
        exit=Exit.DATA,
    )
