"""The format of Megatron-LM: ids in one file, sequences and documents in an index beside it.

    PREFIX.bin    ids, end to end
    PREFIX.idx    offset      bytes   what (little-endian, packed)
                  0           9       "MMIDIDX", two zeros
                  9           8       uint64, version 1
                  17          1       uint8, code of the type of an id
                  18          8       uint64, S sequences
                  26          8       uint64, D entries of the document index, one per document + 1
                  34          4 S     int32, length of each sequence in tokens
                  34 + 4 S    8 S     int64, byte in PREFIX.bin where each sequence begins
                  34 + 12 S   8 D     int64, number of each document's first sequence; last is S
                  …           S       int8, mode of each sequence: only of sets with images
    PREFIX.json   the manifest; Megatron neither writes nor reads it

A document is one sequence or several. Ids are uint16 if the vocabulary has fewer than 65,500,
otherwise int32, as Megatron chooses, so both files are the same byte for byte. Megatron checks very
little when it opens a set; this reader checks the whole index against the size of the ids.
Documents without tokens, which Megatron can store, are left out when read. Megatron-DeepSpeed's
`--dataset-impl cached` and `lazy` are one older format, whose ids are int32 whatever the vocabulary
(`megatron-cached` and `megatron-lazy` here, which write the same bytes):

    0  8  "TNTIDX", two zeros        56   8 (N + 1)   first dimension of each item: 0, 1, 2, …
    8  8  version 1                  …    8 (N + 1)   where each item begins, in ids
    16 8  code of the type           …    8 Z         size of each dimension: Z = N for rows of ids
    24 8  bytes of an id             …    8 D         document index, as above
    32 24 N items, Z sizes, D
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, UserError
from gristmill.tokens.format import (
    FileFacts,
    Manifest,
    NewSet,
    Starts,
    TokenFiles,
    TokenShard,
    file_of,
    file_size,
    map_array,
    stored,
)
from gristmill.tokens.writer import TokenWriter, raw_bytes

FORMAT = "megatron"
OLD_FORMATS = ("megatron-cached", "megatron-lazy")
FORMATS = (FORMAT, *OLD_FORMATS)
"""All that `read_files` reads; the index says which it is."""
MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
HEADER = struct.Struct("<9sQBQQ")
LONGEST = 2**31 - 1
_OLD_HEADER = struct.Struct("<8s6Q")
_FLOATS = (6, 7)
_PIECE = 1 << 20
_AGAIN = "copy both files of the set again from where they came"


@dataclass(frozen=True)
class MegatronIndex:
    """The content of an index file."""

    dtype: str
    lengths: npt.NDArray[Any]
    """Tokens of each sequence."""
    begins: npt.NDArray[Any]
    """Where each sequence begins, in units of `unit` bytes."""
    unit: int
    documents: npt.NDArray[Any]
    """The first sequence of each document, and at the end the number of sequences."""
    end: int | None = None
    """Where the last sequence ends, in the same units, if the index states it."""


def read_files(prefix: Path, manifest: Manifest | None = None) -> TokenFiles:
    """Read PREFIX.idx and check it against the size of PREFIX.bin; a manifest is not needed."""
    ids = file_of(prefix, ".bin")
    size = file_size(ids)
    index = read_index(file_of(prefix, ".idx"))
    _check_documents(file_of(prefix, ".idx"), index)
    _check_sequences(prefix, index, size=size)
    ends = np.zeros(len(index.lengths) + 1, dtype=np.int64)
    np.cumsum(index.lengths, out=ends[1:])
    bounds = ends[index.documents]
    starts = bounds[:-1][np.diff(bounds) > 0]
    shard = TokenShard(ids, offset=0, tokens=int(ends[-1]), dtype=index.dtype)
    return TokenFiles([shard], starts, sequence_lengths=index.lengths)


def read_index(path: Path) -> MegatronIndex:
    """Read an index of either kind; the arrays are checked by `read_files`."""
    size = file_size(path)
    with path.open("rb") as file:
        begin = file.read(max(HEADER.size, _OLD_HEADER.size))
    if begin.startswith(MAGIC):
        return _read_index(path, begin, size=size)
    if begin.startswith(OLD_MAGIC):
        return _read_old_index(path, begin, size=size)
    raise _damaged(path, f"this is not an index of Megatron: it begins with {begin[:9]!r}")


def _read_index(path: Path, begin: bytes, *, size: int) -> MegatronIndex:
    dtype, (sequences, entries) = _unpack(path, HEADER, begin)
    expected = HEADER.size + 12 * sequences + 8 * entries
    _check_size(path, size=size, expected=expected, modes=sequences)
    begins = HEADER.size + 4 * sequences
    index = MegatronIndex(
        dtype=dtype,
        lengths=map_array(path, "<i4", offset=HEADER.size, count=sequences),
        begins=map_array(path, "<i8", offset=begins, count=sequences),
        unit=1,
        documents=map_array(path, "<i8", offset=begins + 8 * sequences, count=entries),
    )
    if size > expected and map_array(path, "i1", offset=expected, count=sequences).any():
        raise DataError("some sequences of this set are not text but images", where=path)
    return index


def _read_old_index(path: Path, begin: bytes, *, size: int) -> MegatronIndex:
    dtype, (width, items, sizes, entries) = _unpack(path, _OLD_HEADER, begin)
    if width != stored(dtype).itemsize:
        raise _damaged(path, f"it says that {dtype} has {width} bytes")
    if sizes != items:
        raise _damaged(path, f"{items} items have {sizes} dimensions: they are no rows of ids")
    offset = _OLD_HEADER.size + 8 * (items + 1)
    _check_size(path, size=size, expected=offset + 8 * (2 * items + 1 + entries), modes=0)
    _check_dimensions(path, map_array(path, "<i8", offset=_OLD_HEADER.size, count=items + 1))
    begins = map_array(path, "<i8", offset=offset, count=items + 1)
    return MegatronIndex(
        dtype=dtype,
        lengths=map_array(path, "<i8", offset=offset + 8 * (items + 1), count=items),
        begins=begins[:-1],
        end=int(begins[-1]),
        unit=width,
        documents=map_array(path, "<i8", offset=offset + 8 * (2 * items + 1), count=entries),
    )


def _unpack(path: Path, header: struct.Struct, begin: bytes) -> tuple[str, list[int]]:
    """The type of the ids and the other numbers in a header."""
    if len(begin) < header.size:
        what = f"the index is cut short: {len(begin)} bytes, and its header is {header.size}"
        raise _damaged(path, what)
    _, version, code, *numbers = header.unpack_from(begin)
    if version != VERSION:
        raise _damaged(path, f"the index has version {version}; this program reads {VERSION}")
    if code in _FLOATS:
        raise DataError("the set holds fractions, not token ids", where=path)
    if code not in CODES:
        known = ", ".join(f"{number} {name}" for number, name in CODES.items())
        raise _damaged(path, f"the type code {code} is not known; known are {known}")
    return CODES[code], numbers


def _check_size(path: Path, *, size: int, expected: int, modes: int) -> None:
    if size not in (expected, expected + modes):
        how = "cut short" if size < expected else "too long"
        raise _damaged(
            path, f"the index is {how}: {size} bytes, and its header promises {expected}"
        )


def _check_dimensions(path: Path, firsts: npt.NDArray[Any]) -> None:
    """Check that every item has one dimension: the first of item n is number n."""
    for begin in range(0, len(firsts), _PIECE):
        piece = firsts[begin : begin + _PIECE]
        wrong = np.flatnonzero(piece != np.arange(begin, begin + len(piece)))
        if len(wrong):
            item, first = begin + int(wrong[0]), piece[wrong[0]]
            what = (
                f"the sizes of item {item} begin at {first} instead of {item}: it is no row of ids"
            )
            raise _damaged(path, what)


def _check_documents(path: Path, index: MegatronIndex) -> None:
    documents, sequences = index.documents, len(index.lengths)
    if not len(documents):
        raise _damaged(path, "the document index is empty")
    if documents[0] != 0 or documents[-1] != sequences:
        raise _damaged(
            path,
            f"the document index goes from {documents[0]} to {documents[-1]} instead of from 0 to "
            f"the number of sequences, {sequences}",
        )
    for begin in range(0, len(documents), _PIECE):
        steps = np.diff(documents[begin : begin + _PIECE + 1])
        if (steps < 0).any():
            number = begin + int(np.flatnonzero(steps < 0)[0])
            raise _damaged(path, f"document {number} ends before it begins")


def _check_sequences(prefix: Path, index: MegatronIndex, *, size: int) -> None:
    """Check that the sequences lie end to end and fill the file of ids."""
    path, width = file_of(prefix, ".idx"), stored(index.dtype).itemsize
    tokens = 0
    for begin in range(0, len(index.lengths), _PIECE):
        lengths = index.lengths[begin : begin + _PIECE].astype(np.int64)
        if (lengths < 0).any():
            number = int(np.flatnonzero(lengths < 0)[0])
            what = f"sequence {begin + number} has the length {lengths[number]}"
            raise _damaged(path, what)
        ends = tokens + np.cumsum(lengths)
        wanted = np.concatenate([[tokens], ends[:-1]]) * (width // index.unit)
        begins = index.begins[begin : begin + _PIECE]
        wrong = np.flatnonzero(begins != wanted)
        if len(wrong):
            number = int(wrong[0])
            start, end = (int(places[number]) * index.unit for places in (begins, wanted))
            other = f"the one before it ends at {end}"
            if not 0 <= start <= size:
                other = f"the ids have {size} bytes"
            what = f"sequence {begin + number} begins at byte {start}, and {other}"
            raise _damaged(path, what)
        tokens = int(ends[-1])
    if index.end not in (None, tokens * width // index.unit):
        what = f"the last sequence ends at {index.end}, and all lengths add up to {tokens}"
        raise _damaged(path, what)
    if tokens * width != size:
        how = "cut short" if size < tokens * width else "too long"
        raise DataError(
            f"the file is {how}: {size} bytes, and the lengths in the index add up to "
            f"{tokens * width}",
            where=file_of(prefix, ".bin"),
            remedy=_AGAIN,
        )


def _damaged(path: Path, what: str) -> DataError:
    return DataError(what, where=path, remedy=_AGAIN)


class MegatronWriter(TokenWriter):
    """Writes a set in Megatron's format.

    The place of each array of the index depends on the final lengths of the others. They are
    written to hidden files first, so that memory does not grow with the number of documents, and
    copied one after the other at the end.
    """

    # In the order in which the index holds them.
    _array_types: ClassVar[Mapping[str, np.dtype[Any]]] = {
        "lengths": np.dtype("<i4"),
        "begins": np.dtype("<i8"),
        "documents": np.dtype("<i8"),
    }
    _longest: ClassVar[int] = LONGEST
    """Tokens of a sequence that the index can count."""

    def __init__(self, new: NewSet) -> None:
        if new.vocab_size > 2**31:
            raise UserError(
                f"the format {new.format} holds ids below 2,147,483,648, and the vocabulary has "
                f"{new.vocab_size:,}",
                where=str(new.prefix),
                remedy="choose another format, such as --format flat",
            )
        super().__init__(new, dtype=self._type_of_ids(new.vocab_size))

    def _type_of_ids(self, vocab_size: int) -> str:
        """As Megatron's preprocessing chooses."""
        return "uint16" if vocab_size < 65500 else "int32"

    @property
    def _unit(self) -> int:
        """Bytes that the beginnings of sequences are counted in."""
        return 1

    def _open_files(self) -> None:
        saved = self._saved
        self._bin = self._hidden(".bin", saved=saved.get(".bin"))
        self._arrays = {
            name: self._hidden(f".idx.{name}", saved=saved.get(name)) for name in self._array_types
        }
        # Written at the end, from the arrays; one that a process left in its final place is stale.
        self._idx = self._hidden(".idx")
        # Without a manifest the set is read if the index is there, so the index comes last.
        self._files = [self._bin, self._idx]
        self._scratch = list(self._arrays.values())
        self._content = self._bin.hash
        self._current = int(saved.get("current", 0))
        """Tokens so far in the last sequence."""

    def _write(self, ids: npt.NDArray[Any], starts: Starts, sequences: Starts) -> None:
        before = self._count("begins")
        self._extend("documents", before + np.searchsorted(sequences, starts))
        self._extend("begins", (self.tokens + sequences) * (self._stored.itemsize // self._unit))
        # The first length completes the last sequence; at the very beginning there is none.
        bounds = np.concatenate([[-self._current], sequences, [len(ids)]])
        lengths = np.diff(bounds)[0 if before else 1 :]
        if (longest := int(lengths.max())) > self._longest:
            raise DataError(
                f"a document has {longest:,} tokens or more, and the index of the format "
                f"{self._new.format} counts to {self._longest:,}",
                where=self._new.prefix,
                remedy="give the id that ends a document (--end-of-text), or choose another format",
            )
        self._extend("lengths", lengths[:-1])
        self._current = int(lengths[-1])
        self._bin.write(raw_bytes(ids))

    def _count(self, name: str) -> int:
        return self._arrays[name].bytes // self._array_types[name].itemsize

    def _extend(self, name: str, values: npt.NDArray[np.int64]) -> None:
        self._arrays[name].write(values.astype(self._array_types[name]).tobytes())

    def _state(self) -> dict[str, Any]:
        arrays = {name: file.state() for name, file in self._arrays.items()}
        return {".bin": self._bin.state(), **arrays, "current": self._current}

    def _rewind(self, body: Mapping[str, Any]) -> None:
        self._bin.rewind(body[".bin"]["bytes"])
        for name, file in self._arrays.items():
            file.rewind(body[name]["bytes"])
        self._current = body["current"]
        self._content = self._bin.hash

    def _readable(self) -> TokenFiles:
        shard = TokenShard(self._bin.path, offset=0, tokens=self.tokens, dtype=self._dtype)
        begins, documents = (
            map_array(self._arrays[name].path, self._array_types[name], count=self._count(name))
            for name in ("begins", "documents")
        )
        return TokenFiles([shard], begins[documents] // (self._stored.itemsize // self._unit))

    def _close(self) -> dict[str, FileFacts]:
        sequences = self._count("begins")
        self._extend("lengths", np.array([self._current]))
        self._extend("documents", np.array([sequences]))
        code = next(code for code, name in CODES.items() if name == self._dtype)
        self._write_header(code, sequences, self._count("documents"))
        for file in self._arrays.values():
            for piece in file.content():
                self._idx.write(piece)
        return {".bin": self._bin.close(), ".idx": self._idx.close()}

    def _write_header(self, code: int, sequences: int, entries: int) -> None:
        """What comes before the arrays in the index."""
        self._idx.write(HEADER.pack(MAGIC, VERSION, code, sequences, entries))


class OldMegatronWriter(MegatronWriter):
    """Writes a set in the older format, which Megatron-DeepSpeed calls cached, or lazy."""

    _array_types: ClassVar[Mapping[str, np.dtype[Any]]] = {
        name: np.dtype("<i8") for name in ("begins", "lengths", "documents")
    }
    _longest: ClassVar[int] = 2**63 - 1

    def _type_of_ids(self, vocab_size: int) -> str:
        """Its builder is made without a type."""
        return "int32"

    @property
    def _unit(self) -> int:
        return self._stored.itemsize

    def _write_header(self, code: int, sequences: int, entries: int) -> None:
        # Where the last sequence ends.
        self._extend("begins", np.array([self.tokens]))
        width = self._stored.itemsize
        self._idx.write(
            _OLD_HEADER.pack(OLD_MAGIC, VERSION, code, width, sequences, sequences, entries)
        )
        for begin in range(0, sequences + 1, _PIECE):
            end = min(begin + _PIECE, sequences + 1)
            self._idx.write(np.arange(begin, end, dtype="<i8").tobytes())
