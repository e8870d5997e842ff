"""The flat format: all ids in one file, end to end.

    PREFIX.bin      ids, uint16 or uint32, little-endian, nothing else: nanoGPT reads it as it is
    PREFIX.starts   the position where each document begins, uint64, little-endian
    PREFIX.json     the manifest, see `gristmill.tokens.format`

Lengths are not stored: they follow from the starts and the number of tokens. There is one file per
kind rather than shards, because a memory map does not mind the size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gristmill.base.errors import DataError
from gristmill.tokens.format import (
    FileFacts,
    Manifest,
    NewSet,
    Starts,
    TokenFiles,
    TokenShard,
    dtype_for,
    file_of,
    file_size,
    map_array,
    read_starts,
    stored,
)
from gristmill.tokens.writer import TokenWriter, raw_bytes

FORMAT = "flat"


def read_files(prefix: Path, manifest: Manifest) -> TokenFiles:
    """The ids and documents of a flat set."""
    shard = plain_shard(file_of(prefix, ".bin"), dtype=manifest.info.dtype)
    return TokenFiles([shard], read_starts(prefix))


def plain_shard(path: Path, *, dtype: str) -> TokenShard:
    """A file that is nothing but ids."""
    size, width = file_size(path), stored(dtype).itemsize
    if size % width:
        raise DataError(
            f"{size} bytes are no whole number of {dtype} ids",
            where=path,
            remedy="name the type its ids are stored in (--dtype), or copy the file again",
        )
    return TokenShard(path, offset=0, tokens=size // width, dtype=dtype)


class FlatWriter(TokenWriter):
    """Writes a flat set."""

    def __init__(self, new: NewSet) -> None:
        super().__init__(new, dtype=dtype_for(new.vocab_size))

    def _open_files(self) -> None:
        self._bin = self._hidden(".bin", saved=self._saved.get(".bin"))
        self._starts = self._hidden(".starts", saved=self._saved.get(".starts"))
        self._files = [self._starts, self._bin]
        self._content = self._bin.hash

    def _write(self, ids: npt.NDArray[Any], starts: Starts, sequences: Starts) -> None:
        self._starts.write(self._start_bytes(starts))
        self._bin.write(raw_bytes(ids))

    def _state(self) -> dict[str, Any]:
        return {".bin": self._bin.state(), ".starts": self._starts.state()}

    def _rewind(self, body: Mapping[str, Any]) -> None:
        self._bin.rewind(body[".bin"]["bytes"])
        self._starts.rewind(body[".starts"]["bytes"])
        self._content = self._bin.hash

    def _readable(self) -> TokenFiles:
        shard = TokenShard(self._bin.path, offset=0, tokens=self.tokens, dtype=self._dtype)
        starts = map_array(self._starts.path, "<i8", count=self.documents)
        return TokenFiles([shard], starts)

    def _close(self) -> dict[str, FileFacts]:
        return {".bin": self._bin.close(), ".starts": self._starts.close()}
