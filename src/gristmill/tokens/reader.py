"""Reading ids from one file or many, memory-mapped, as one array.

A file holds ids after an optional header. A read within one file is a view, a read across files is
a copy. Files are mapped when they are first read, and only a limited number of maps is kept, since
each costs a file descriptor and a set may have thousands of files. A view keeps its map alive.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError
from gristmill.tokens.format import Starts, TokenSetInfo, file_of, stored

PIECE = 1 << 21
"""Tokens that are read at a time when a whole set is read."""

_MAPS = 128


@dataclass(frozen=True)
class TokenShard:
    """The ids in one file."""

    path: Path
    offset: int
    """Bytes before the first id."""
    tokens: int
    dtype: str


@dataclass(frozen=True)
class TokenFiles:
    """What a format finds in the files of a set."""

    shards: Sequence[TokenShard]
    starts: Starts
    """The positions at which documents begin."""
    sequence_lengths: npt.NDArray[Any] | None = None
    """Tokens of each sequence, empty ones included, in formats that split documents into some."""

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class IdRange(NamedTuple):
    """The smallest and the largest id of a set."""

    smallest: int
    largest: int


class TokenReader:
    """A finished token set, memory-mapped."""

    def __init__(self, info: TokenSetInfo, files: TokenFiles) -> None:
        assert files.tokens == info.tokens
        self.info = info
        self.document_starts = files.starts
        self.sequence_lengths = files.sequence_lengths
        self._dtype = stored(info.dtype)
        self._shards = [shard for shard in files.shards if shard.tokens]
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._ids = functools.lru_cache(maxsize=_MAPS)(self._map)

    def _map(self, number: int) -> npt.NDArray[Any]:
        shard = self._shards[number]
        return map_array(shard.path, self._dtype, offset=shard.offset, count=shard.tokens)

    def __len__(self) -> int:
        return self.info.tokens

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """The ids at positions start to start + count, in their stored type."""
        assert start >= 0 and count >= 0 and start + count <= self.info.tokens, (
            f"tokens {start} to {start + count} of {self.info.tokens}"
        )
        if count == 0:
            return np.empty(0, dtype=self._dtype)
        number = bisect_right(self._ends, start)
        inside = start - (self._ends[number - 1] if number else 0)
        if start + count <= self._ends[number]:
            return self._ids(number)[inside : inside + count]
        parts, wanted = list[npt.NDArray[Any]](), count
        while wanted:
            part = self._ids(number)[inside : inside + wanted]
            parts.append(part)
            wanted, number, inside = wanted - len(part), number + 1, 0
        return np.concatenate(parts)

    @property
    def sequence_starts(self) -> Starts | None:
        """The positions at which sequences begin, empty ones left out."""
        if self.sequence_lengths is None:
            return None
        lengths = self.sequence_lengths.astype(np.int64)
        return cast(Starts, (np.cumsum(lengths) - lengths)[lengths > 0])

    def locate(self, position: int) -> tuple[Path, int]:
        """The file that holds a position of the set, and the number of that token in the file."""
        number = bisect_right(self._ends, position)
        return self._shards[number].path, position - (self._ends[number - 1] if number else 0)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the ids."""
        return tuple(shard.path for shard in self._shards)


def map_array(path: Path, dtype: npt.DTypeLike, *, offset: int = 0, count: int) -> npt.NDArray[Any]:
    """Part of a file as an array, read when it is touched."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    # Slices of a plain array are far cheaper to take than slices of numpy's memmap class.
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def read_starts(prefix: Path) -> Starts:
    """The positions in PREFIX.starts."""
    path = file_of(prefix, ".starts")
    return cast(Starts, map_array(path, "<i8", count=file_size(path) // 8))


def file_size(path: Path) -> int:
    """The size of a file that a set cannot do without."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", where=path) from error


def piece_bounds(reader: TokenReader) -> Iterator[tuple[int, int]]:
    """The position and length of each piece in which a whole set is read."""
    for start in range(0, len(reader), PIECE):
        yield start, min(PIECE, len(reader) - start)


def pieces(reader: TokenReader) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The whole set in its order, a few MiB at a time, each piece with its position."""
    for start, count in piece_bounds(reader):
        yield start, reader.read(start, count)


def id_range(reader: TokenReader) -> IdRange:
    """The smallest and the largest id; reads every token once."""
    smallest, largest = zip(*((ids.min(), ids.max()) for _, ids in pieces(reader)), strict=True)
    return IdRange(int(min(smallest)), int(max(largest)))
