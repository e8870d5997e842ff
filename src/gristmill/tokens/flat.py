"""The flat format: all ids in one file, end to end.

    PREFIX.bin      ids, uint16 or uint32, little-endian, nothing else: nanoGPT reads it as it is
    PREFIX.starts   the position where each document begins, uint64, little-endian
    PREFIX.json     the manifest, see `gristmill.tokens.format`

Lengths are not stored: they follow from the starts and the number of tokens. There is one file per
kind rather than shards, because a memory map does not mind the size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.tokens.format import Manifest, NewSet, TokenReader, dtype_for, file_of, stored
from gristmill.tokens.reader import MappedReader, Shard, check_manifest, file_size, read_starts
from gristmill.tokens.writer import HashedFile, SetWriter, StartsFile, Stretch, Written

FORMAT = "flat"


def open_set(prefix: Path, manifest: Manifest) -> TokenReader:
    """Open a flat set, memory-mapped."""
    shard = plain_shard(file_of(prefix, ".bin"), dtype=manifest.info.dtype)
    starts = read_starts(prefix)
    check_manifest(prefix, manifest.info, shards=[shard], documents=len(starts))
    return MappedReader(manifest.info, shards=[shard], starts=starts)


def plain_shard(path: Path, *, dtype: str) -> Shard:
    """A file that is nothing but ids."""
    size, width = file_size(path), stored(dtype).itemsize
    if size % width:
        raise UserError(
            f"{size} bytes are no whole number of {dtype} ids",
            where=str(path),
            remedy="name the type its ids are stored in, or copy the file again",
            exit=Exit.DATA,
        )
    return Shard(path, offset=0, tokens=size // width, dtype=dtype)


def create_set(new: NewSet) -> SetWriter:
    """Begin a flat set."""
    return SetWriter(
        new,
        format=FORMAT,
        dtype=dtype_for(new.vocab_size),
        open_body=lambda: _FlatBody(new),
    )


class _FlatBody:
    def __init__(self, new: NewSet) -> None:
        lasting = new.state is not None
        saved = new.state["body"] if new.state else {}
        bin = file_of(new.prefix, ".bin")
        self._bin = HashedFile(bin, lasting=lasting, saved=saved.get(".bin"))
        self._starts = StartsFile(new.prefix, lasting=lasting, saved=saved.get(".starts"))

    def write(self, stretch: Stretch) -> None:
        self._starts.note(stretch)
        self._bin.write(stretch.ids.tobytes())

    def save(self) -> dict[str, Any]:
        return {".bin": self._bin.save(), ".starts": self._starts.save()}

    def release(self) -> None:
        self._bin.release()
        self._starts.release()

    def close(self) -> Written:
        files = {".bin": self._bin.close(), ".starts": self._starts.close()}
        return Written(files, content=files[".bin"].sha256)

    def publish(self) -> None:
        self._starts.publish()
        self._bin.publish()

    def discard(self) -> None:
        self._bin.discard()
        self._starts.discard()
