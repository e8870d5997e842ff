"""Ids in one file or many, memory-mapped and read as one row.

A file holds a run of ids behind an optional header. A read inside one file is a view of it, a read
across a border is a copy. Files are mapped when they are first read, and only a limited number of
maps is kept, because each costs a file descriptor and a set may have thousands of files. A view
keeps its map alive for as long as it is held.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, UserError
from gristmill.tokens.format import Ids, Starts, TokenReader, TokenSetInfo, file_of, stored

PIECE = 1 << 21
"""Tokens that are taken at a time when a whole set is read."""

_MAPS = 128


@dataclass(frozen=True)
class Shard:
    """A run of ids in a file."""

    path: Path
    offset: int
    """Bytes before the first id."""
    tokens: int
    dtype: str


@dataclass(frozen=True)
class IdRange:
    """The smallest and the largest id of a set."""

    smallest: int
    largest: int


class MappedReader:
    """A token set whose ids lie in files as they are."""

    def __init__(self, info: TokenSetInfo, *, shards: Sequence[Shard], starts: Starts) -> None:
        assert sum(shard.tokens for shard in shards) == info.tokens
        self.info = info
        self._dtype = stored(info.dtype)
        self._shards = [shard for shard in shards if shard.tokens]
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._starts = starts
        self._ids = functools.lru_cache(maxsize=_MAPS)(self._map)

    def _map(self, number: int) -> npt.NDArray[Any]:
        shard = self._shards[number]
        return map_array(shard.path, self._dtype, offset=shard.offset, count=shard.tokens)

    def __len__(self) -> int:
        return self.info.tokens

    def read(self, start: int, count: int) -> Ids:
        """The ids at positions start to start + count, in their stored type."""
        assert start >= 0 and count >= 0 and start + count <= self.info.tokens, (
            f"tokens {start} to {start + count} of {self.info.tokens}"
        )
        if count == 0:
            return cast(Ids, np.empty(0, dtype=self._dtype))
        number = bisect_right(self._ends, start)
        inside = start - (self._ends[number - 1] if number else 0)
        if start + count <= self._ends[number]:
            return cast(Ids, self._ids(number)[inside : inside + count])
        parts, wanted = list[npt.NDArray[Any]](), count
        while wanted:
            part = self._ids(number)[inside : inside + wanted]
            parts.append(part)
            wanted, number, inside = wanted - len(part), number + 1, 0
        return cast(Ids, np.concatenate(parts))

    @property
    def document_starts(self) -> Starts:
        """The positions at which documents begin."""
        return self._starts

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
    """The content of PREFIX.starts, memory-mapped."""
    path = file_of(prefix, ".starts")
    return cast(Starts, map_array(path, "<i8", count=file_size(path) // 8))


def check_manifest(
    prefix: Path, info: TokenSetInfo, *, shards: Sequence[Shard], documents: int
) -> None:
    """Refuse files that hold something else than the manifest says."""
    tokens, dtype = sum(shard.tokens for shard in shards), shards[0].dtype
    if (tokens, documents, dtype) != (info.tokens, info.documents, info.dtype):
        raise UserError(
            f"the files hold {tokens} tokens in {documents} documents as {dtype}, and the manifest "
            f"says {info.tokens} in {info.documents} as {info.dtype}",
            where=str(prefix),
            remedy="prepare the set again",
            exit=Exit.DATA,
        )


def file_size(path: Path) -> int:
    """The size of a file that a set cannot do without."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(
            f"cannot read: {error.strerror}", where=str(path), exit=Exit.DATA
        ) from error


def pieces(reader: TokenReader) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """The whole set in its order, a few MiB at a time, each piece with its position."""
    for start in range(0, len(reader), PIECE):
        yield start, reader.read(start, min(PIECE, len(reader) - start))


def id_range(reader: TokenReader) -> IdRange:
    """The smallest and the largest id; reads every token once."""
    extremes = [(int(ids.min()), int(ids.max())) for _, ids in pieces(reader)]
    return IdRange(
        smallest=min(low for low, _ in extremes), largest=max(high for _, high in extremes)
    )
