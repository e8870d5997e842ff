"""Formats that are plain ids: `flat` in one file, `llmc` and `npy` in files of equal length.

    PREFIX.bin                                flat: ids, uint16 or uint32, little-endian, nothing
                                              else: nanoGPT reads it as it is
    PREFIX_000001.bin, PREFIX_000002.bin, …   llm.c and its descendants: a header of 256 int32
                                              (magic, version, number of tokens, zeros), then ids
    PREFIX_000001.npy, PREFIX_000002.npy, …   NumPy arrays of one dimension
    PREFIX.starts                             the position in the whole where each document begins,
                                              uint64, little-endian
    PREFIX.json                               the manifest, see `gristmill.tokens.format`

    llmc magic   version   ids
    20240520     1         uint16
    20240801     7         uint32

Lengths of documents are not stored: they follow from the starts and the number of tokens. Flat sets
have no shards, because a memory map does not mind the size. Of shards, all but the last hold the
same number of tokens, and a document may lie across a border. Other programs find the files by
their names and never see the two files beside them. The header of each shard is written for a full
one; the last one's is corrected, and its checksum taken again.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, UserError
from gristmill.tokens.format import (
    DTYPES,
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
    pieces,
    read_starts,
    stored,
)
from gristmill.tokens.writer import SHARD_ENDINGS, TokenWriter, raw_bytes

FLAT = "flat"
LLMC = "llmc"
NPY = "npy"

_LLMC_BYTES = 256 * 4
_LLMC_KINDS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
LLMC_MAGICS = frozenset(struct.pack("<i", magic) for magic, _ in _LLMC_KINDS)
"""The first four bytes of llm.c's files."""

_NPY_MAGIC = b"\x93NUMPY"
_SHARD_SIZE = 10**8
_AGAIN = "copy the file again from where it came"


def read_flat(prefix: Path, manifest: Manifest) -> TokenFiles:
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


# ------------------------------------------------------------------ shards


@dataclass(frozen=True)
class ShardFormat:
    """What distinguishes the files of one format."""

    header: Callable[[str, int], bytes]
    """The first bytes of a file, by type and number of tokens; their length does not vary."""
    parse: Callable[[Path], TokenShard]
    """Find the ids in a file, or say what is wrong with it."""
    largest: int
    """The most tokens in one file."""


def _llmc_header(dtype: str, tokens: int) -> bytes:
    magic, version = next(kind for kind, name in _LLMC_KINDS.items() if name == dtype)
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, tokens
    return header.tobytes()


def _parse_llmc(path: Path) -> TokenShard:
    size = file_size(path)
    with path.open("rb") as file:
        begin = file.read(_LLMC_BYTES)
    if len(begin) < _LLMC_BYTES:
        raise _damaged(path, f"the header is cut short: {len(begin)} of {_LLMC_BYTES} bytes")
    magic, version, tokens = (int(number) for number in np.frombuffer(begin, "<i4", count=3))
    if magic not in {known for known, _ in _LLMC_KINDS}:
        raise DataError(
            f"this is not a token file of llm.c: it begins with {magic} instead of 20240520",
            where=path,
            remedy="plain ids without a header are read with --from flat",
        )
    if (magic, version) not in _LLMC_KINDS:
        raise _damaged(path, f"version {version} of this format is not known")
    dtype = _LLMC_KINDS[magic, version]
    return _fitting(TokenShard(path, offset=_LLMC_BYTES, tokens=tokens, dtype=dtype), size=size)


def _npy_header(dtype: str, tokens: int) -> bytes:
    buffer = io.BytesIO()
    value = {"descr": stored(dtype).str, "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(buffer, value)
    return buffer.getvalue()


def _parse_npy(path: Path) -> TokenShard:
    size = file_size(path)
    with path.open("rb") as file:
        if file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
            raise _damaged(path, "this is not a NumPy array: its first bytes are others")
        file.seek(0)
        try:
            version = np.lib.format.read_magic(file)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(file)
        except (KeyError, ValueError) as error:
            raise _damaged(path, f"the header of the array is damaged: {error}") from error
        offset = file.tell()
    if len(shape) != 1 or dtype.name not in DTYPES or dtype.newbyteorder("<") != dtype:
        raise _damaged(
            path, f"an array {shape} of {dtype.str} is no row of ids: those are whole numbers"
        )
    return _fitting(TokenShard(path, offset=offset, tokens=shape[0], dtype=dtype.name), size=size)


def _fitting(shard: TokenShard, *, size: int) -> TokenShard:
    expected = shard.offset + shard.tokens * stored(shard.dtype).itemsize
    if shard.tokens < 0:
        raise _damaged(shard.path, f"the header promises {shard.tokens} tokens")
    if size != expected:
        how = "cut short" if size < expected else "too long"
        what = f"the file is {how}: {size} bytes, and its header promises {expected}"
        raise _damaged(shard.path, what)
    return shard


def _damaged(path: Path, what: str) -> UserError:
    return DataError(what, where=path, remedy=_AGAIN)


SHARD_FORMATS: Mapping[str, ShardFormat] = {
    LLMC: ShardFormat(header=_llmc_header, parse=_parse_llmc, largest=2**31 - 1),
    NPY: ShardFormat(header=_npy_header, parse=_parse_npy, largest=2**40),
}


def parse_shards(format: str, paths: Sequence[Path]) -> list[TokenShard]:
    """Find the ids in files that together are one set."""
    shards = [SHARD_FORMATS[format].parse(path) for path in paths]
    for shard in shards:
        if shard.dtype != shards[0].dtype:
            what = f"its ids are {shard.dtype}, and those of {shards[0].path} are {shards[0].dtype}"
            raise DataError(what, where=shard.path, remedy="keep the two sets apart")
    return shards


def read_shards(prefix: Path, manifest: Manifest) -> TokenFiles:
    """The ids and documents of a set of shards."""
    format = manifest.info.format
    ending = SHARD_ENDINGS[format]
    paths = [file_of(prefix, suffix) for suffix in manifest.files if suffix.endswith(ending)]
    if not paths:
        raise _damaged(file_of(prefix, ".json"), f"the manifest names no {ending} files")
    return TokenFiles(parse_shards(format, paths), read_starts(prefix))


class ShardWriter(TokenWriter):
    """Fills one file after the other."""

    def __init__(self, new: NewSet) -> None:
        most = SHARD_FORMATS[new.format].largest
        self._size = _SHARD_SIZE if new.shard_size is None else new.shard_size
        if not 0 < self._size <= most:
            raise UserError(
                f"a file of the format {new.format} holds 1 to {most:,} tokens, not {self._size:,}",
                where="--shard-size",
            )
        super().__init__(new, dtype=dtype_for(new.vocab_size))

    def _open_files(self) -> None:
        saved = self._saved
        self._starts = self._hidden(".starts", saved=saved.get(".starts"))
        # With .starts in place and no manifest, the shards are known to be unfinished.
        self._files = [self._starts]
        self._facts: dict[str, FileFacts] = {}
        self._marked = self._content.copy(), 0
        """The checksum of the ids at the last mark, and their number."""
        self._filled = self._size
        """Tokens in the last shard; a full one is followed by the next."""
        for facts in saved.get("shards", ()):
            self._next_shard(facts)
            self._filled = int(saved["filled"]) if facts is saved["shards"][-1] else self._size

    def _write(self, ids: npt.NDArray[Any], starts: Starts, sequences: Starts) -> None:
        self._starts.write(self._start_bytes(starts))
        self._content.update(raw_bytes(ids))
        rest = ids
        while len(rest):
            if self._filled == self._size:
                self._next_shard()
            part = rest[: self._size - self._filled]
            self._files[-1].write(raw_bytes(part))
            self._filled += len(part)
            rest = rest[len(part) :]

    def _suffix(self, number: int) -> str:
        return f"_{number:06d}{SHARD_ENDINGS[self._new.format]}"

    def _header(self, tokens: int) -> bytes:
        return SHARD_FORMATS[self._new.format].header(self._dtype, tokens)

    def _next_shard(self, saved: Mapping[str, Any] | None = None) -> None:
        self._close_shard()
        header = self._header(self._size)
        file = self._hidden(self._suffix(len(self._files)), saved=saved, header=header)
        self._files.append(file)
        self._filled = 0
        for piece in file.content(len(header)) if saved else ():
            self._content.update(piece)

    def _close_shard(self) -> None:
        number, last = len(self._files) - 1, self._files[-1]
        if number:
            full = self._filled == self._size
            facts = last.close() if full else last.close_with(self._header(self._filled))
            self._facts[self._suffix(number)] = facts

    def _state(self) -> dict[str, Any]:
        whole = [vars(facts) for facts in self._facts.values()]
        last = [self._files[-1].state()] if len(self._files) > 1 else []
        return {"shards": [*whole, *last], "filled": self._filled, ".starts": self._starts.state()}

    def mark(self) -> dict[str, Any]:
        self._marked = self._content.copy(), self.tokens
        return super().mark()

    def _rewind(self, body: Mapping[str, Any]) -> None:
        count = len(body["shards"])
        for file in self._files[count + 1 :]:
            file.discard()
        del self._files[count + 1 :]
        self._facts = dict(list(self._facts.items())[: max(count - 1, 0)])
        self._filled = body["filled"]
        if count:
            self._files[-1].rewind(body["shards"][-1]["bytes"])
        self._starts.rewind(body[".starts"]["bytes"])
        content, tokens = self._marked
        if tokens == self.tokens:
            self._content = content.copy()
            return
        self._content = hashlib.sha256()
        for _, ids in pieces(self.reader()):
            self._content.update(ids.tobytes())

    def _readable(self) -> TokenFiles:
        header, shards = len(self._header(self._size)), []
        for number, file in enumerate(self._files[1:], start=1):
            tokens = self._filled if number == len(self._files) - 1 else self._size
            shards.append(TokenShard(file.path, offset=header, tokens=tokens, dtype=self._dtype))
        starts = map_array(self._starts.path, "<i8", count=self.documents)
        return TokenFiles(shards, starts)

    def _close(self) -> dict[str, FileFacts]:
        self._close_shard()
        return self._facts | {".starts": self._starts.close()}
