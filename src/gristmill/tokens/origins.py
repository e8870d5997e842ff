"""Where each document of a token set comes from: the source and the line where it begins.

    PREFIX.origins
        header   8 bytes "GMORIGIN", then 4 numbers of 8 bytes, little-endian: version, documents,
                 documents of a chunk, position of the end part
        chunks   one after the other, each compressed with zlib: the origins of its documents
        end      compressed with zlib, JSON: {"sources": […], "chunks": [position, …]}

An origin is one number of 8 bytes, source << 40 | line. In a chunk stand the differences to the
document before, first the lowest bytes of all of them, then the second lowest, and so on: lines
that follow each other become rows of equal bytes, which compress to nearly nothing.

While a set is written, its origins lie plain in a hidden file, 8 bytes for each document, so that
they can be cut back as the ids are; they are compressed at the end.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError
from gristmill.tokens.format import COPY_AGAIN, FileFacts, file_of
from gristmill.tokens.hashed_file import HashedFile

ORIGINS_FILE = ".origins"
WIDTH = 8
"""Bytes of an origin while the set is written."""
_MAGIC, _VERSION = b"GMORIGIN", 1
_HEADER = struct.Struct("<8sQQQQ")
_CHUNK = 1 << 14
"""Documents of a chunk: what is read to find one of them."""
_LINE_BITS = 40

Packed = npt.NDArray[np.int64]
"""Origins as numbers."""


class DocumentOrigin(NamedTuple):
    """Where a document comes from."""

    source: str
    line: int
    """The line where it begins; the first is 1. Of a file that is one document, 1."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


def packed(source: int, lines: npt.NDArray[np.int64]) -> Packed:
    """The origins of documents of one source."""
    return (np.int64(source) << _LINE_BITS) | lines.astype(np.int64)


def moved(origins: Packed, sources: npt.NDArray[np.int64]) -> Packed:
    """The same lines, with other numbers for the sources."""
    lines = origins & ((1 << _LINE_BITS) - 1)
    changed: Packed = (sources[origins >> _LINE_BITS] << _LINE_BITS) | lines
    return changed


def source_numbers(origins: Packed) -> npt.NDArray[np.int64]:
    """The number of the source of each document."""
    return origins >> _LINE_BITS


def with_source(origins: Packed, source: int) -> Packed:
    """The same lines, of another source."""
    return packed(source, origins & ((1 << _LINE_BITS) - 1))


def write_origins(file: HashedFile, pieces: Iterable[bytes], sources: Sequence[str]) -> FileFacts:
    """Compress plain origins, given in pieces of any length, into a file that is empty. Sources
    that no document comes from are left out, so a part of a large preparation does not name all."""
    file.write(_HEADER.pack(_MAGIC, _VERSION, 0, _CHUNK, 0))
    numbers = np.full(len(sources), -1, np.int64)
    used: list[str] = []
    places, documents = list[int](), 0
    for chunk in _chunks(pieces):
        for number in np.unique(chunk >> _LINE_BITS).tolist():
            if numbers[number] < 0:
                numbers[number] = len(used)
                used.append(sources[number])
        places.append(file.bytes)
        documents += len(chunk)
        differences = np.diff(moved(chunk, numbers), prepend=0).astype("<i8")
        planes = differences.view(np.uint8).reshape(-1, WIDTH).T
        file.write(zlib.compress(planes.tobytes(), 9))
    end = file.bytes
    about = json.dumps({"sources": used, "chunks": places}, separators=(",", ":"))
    file.write(zlib.compress(about.encode("utf-8", "surrogateescape"), 9))
    return file.close_with(_HEADER.pack(_MAGIC, _VERSION, documents, _CHUNK, end))


def _chunks(pieces: Iterable[bytes]) -> Iterator[Packed]:
    rest = b""
    for piece in pieces:
        rest += piece
        while len(rest) >= WIDTH * _CHUNK:
            yield np.frombuffer(rest[: WIDTH * _CHUNK], "<i8").astype(np.int64)
            rest = rest[WIDTH * _CHUNK :]
    if rest:
        yield np.frombuffer(rest, "<i8").astype(np.int64)


@dataclass(frozen=True)
class OriginIndex:
    """The origins of a finished set."""

    path: Path
    documents: int
    sources: tuple[str, ...]
    chunk: int
    places: tuple[int, ...]
    """Where chunks begin, and where the last one ends."""

    def of(self, document: int) -> DocumentOrigin:
        """Where a document comes from."""
        number = int(self.between(document, document + 1)[0])
        return DocumentOrigin(self.sources[number >> _LINE_BITS], number & ((1 << _LINE_BITS) - 1))

    def between(self, begin: int, end: int) -> Packed:
        """The origins of documents `begin` to `end` (exclusive), as numbers."""
        assert 0 <= begin <= end <= self.documents
        first, last = begin // self.chunk, -(-end // self.chunk)
        found = [_read_chunk(self, number) for number in range(first, last)]
        if not found:
            return np.empty(0, np.int64)
        offset = first * self.chunk
        return np.concatenate(found)[begin - offset : end - offset]


@lru_cache(maxsize=8)
def _read_chunk(index: OriginIndex, number: int) -> Packed:
    begin, end = index.places[number : number + 2]
    try:
        with index.path.open("rb") as file:
            file.seek(begin)
            planes = zlib.decompress(file.read(end - begin))
        values = np.frombuffer(planes, np.uint8).reshape(WIDTH, -1).T
        return np.cumsum(np.ascontiguousarray(values).view("<i8").ravel()).astype(np.int64)
    except (OSError, ValueError, zlib.error) as error:
        raise _damaged(index.path, error) from error


class JoinedOrigins:
    """The origins of several sets that are put together, as those of one."""

    def __init__(self, indices: Sequence[OriginIndex]) -> None:
        self.indices = indices
        names = [name for index in indices for name in index.sources]
        self.sources = list(dict.fromkeys(names))
        number = {name: place for place, name in enumerate(self.sources)}
        self._numbers = [
            np.array([number[name] for name in index.sources], np.int64) for index in indices
        ]
        self._ends = list(itertools.accumulate(index.documents for index in indices))

    def between(self, begin: int, end: int) -> Packed:
        """The origins of documents `begin` to `end` (exclusive), counted over all sets."""
        parts = [np.empty(0, np.int64)]
        for index, numbers, last in zip(self.indices, self._numbers, self._ends, strict=True):
            first = last - index.documents
            low, high = max(begin, first), min(end, last)
            if low < high:
                parts.append(moved(index.between(low - first, high - first), numbers))
        return np.concatenate(parts)


def open_origins(prefix: Path) -> OriginIndex | None:
    """The origins of a set; None if nobody recorded them."""
    path = file_of(prefix, ORIGINS_FILE)
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            magic, version, documents, chunk, end = _HEADER.unpack(file.read(_HEADER.size))
            if magic != _MAGIC or version != _VERSION:
                raise ValueError(f"it begins with {magic!r}, version {version}")
            file.seek(end)
            about: Any = json.loads(zlib.decompress(file.read()))
        places = (*map(int, about["chunks"]), end)
        sources = tuple(map(str, about["sources"]))
        if len(places) != 1 + -(-documents // chunk):
            raise ValueError(f"{len(places) - 1} chunks for {documents} documents")
    except (OSError, struct.error, ValueError, KeyError, TypeError, zlib.error) as error:
        raise _damaged(path, error) from error
    return OriginIndex(path, documents, sources, chunk, places)


def _damaged(path: Path, error: Exception) -> DataError:
    what = f"the origins of documents are damaged: {error}"
    return DataError(what, where=path, remedy=COPY_AGAIN)
