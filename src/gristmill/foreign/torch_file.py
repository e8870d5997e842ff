"""Files that torch wrote, read without running code: tensors stay on disk until asked for.

    FILE of torch.save      a zip archive, nothing compressed
      NAME/data.pkl           what was saved; tensors refer to storages by number   (`pickled`)
      NAME/data/0 …           the bytes of each storage
      NAME/byteorder          "little"

    FOLDER of torch's distributed checkpoints (DCP), which Megatron writes as `torch_dist`
      .metadata               pickled: for each tensor its type, its size and the places of its
                              pieces in it; for each piece the file, and where in it it begins
      __0_0.distcp …          the pieces, each a file of torch.save within the file

A tensor is a view of a storage: a type, an offset, sizes and strides. All of them are checked
against the size of the storage before anything is read, and the storage against its checksum.
torch itself unpickles `.metadata`, which can run code. Here it is read as data (`pickled`).
"""

from __future__ import annotations

import errno
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from gristmill.base.errors import DataError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.foreign.pickled import LARGEST, PickledName, PickledObject, read_pickle

METADATA = ".metadata"
"""The file by which a distributed checkpoint is known."""

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_MOST_DIMS = 8
_CHUNK = 2**24
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch before 1.6 go on after the two bytes of the protocol."""
_COPY_AGAIN = "copy the checkpoint again from where it came"
_MOST_VALUES = 250_000
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read, and put together, when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """A contiguous tensor of its own memory."""

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def reordered(self, rows: torch.Tensor) -> LazyTensor:
        """The same with its rows in another order."""
        assert len(rows) == self.shape[0], "every row has a place"
        return replace(self, read=lambda: self.read()[rows])


def concatenated(name: str, parts: Sequence[LazyTensor], dim: int, *, where: Path) -> LazyTensor:
    """Parts of a tensor, one after the other along a dimension."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].shape
    if any(len(part.shape) <= dim for part in parts) or any(
        part.shape[:dim] + part.shape[dim + 1 :] != first[:dim] + first[dim + 1 :] for part in parts
    ):
        shapes = ", ".join(str(part.shape) for part in parts)
        raise DataError(f"the parts of {name} do not fit together: {shapes}", where=where)
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    shape = (*first[:dim], sum(part.shape[dim] for part in parts), *first[dim + 1 :])

    def read() -> torch.Tensor:
        whole, begin = torch.empty(shape, dtype=dtype), 0
        for part in parts:
            count = part.shape[dim]
            whole.narrow(dim, begin, count).copy_(part.read())
            begin += count
        return whole

    return LazyTensor(shape, dtype, read)


@dataclass(frozen=True)
class _Storage:
    """A storage in a file."""

    path: Path
    begin: int
    bytes: int
    crc: int
    dtype: torch.dtype


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in a file, which is read when it is asked for."""

    storage: _Storage
    offset: int
    """In elements of the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    def read(self) -> torch.Tensor:
        """Its numbers, in memory of their own."""
        storage = self.storage
        value = torch.empty(storage.bytes, dtype=torch.uint8)
        memory, crc, done = value.numpy().data, 0, 0
        with storage.path.open("rb") as file:
            file.seek(storage.begin)
            while done < storage.bytes:
                part = memory[done : done + _CHUNK]
                count = file.readinto(part)
                if not count:
                    raise DataError("the file is cut short", where=storage.path, remedy=_COPY_AGAIN)
                crc = zlib.crc32(part[:count], crc)
                done += count
        if crc != storage.crc:
            what = "a tensor is not what was saved: its checksum differs"
            raise DataError(what, where=storage.path, remedy=_COPY_AGAIN)
        view = value.view(self.dtype)
        return torch.as_strided(view, self.shape, self.stride, self.offset).contiguous()


class _FilePart(io.FileIO):
    """A part of a file as a file, as far as zipfile needs it."""

    def __init__(self, path: Path, begin: int, length: int) -> None:
        super().__init__(path)
        self._begin, self._length = begin, length
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            # As of any file: zipfile looks for the end of an archive this way.
            raise OSError(errno.EINVAL, "a place before the beginning")
        return super().seek(self._begin + base + offset) - self._begin

    def tell(self) -> int:
        return super().tell() - self._begin

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._length - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def read_torch_file(path: Path, *, begin: int = 0, length: int | None = None) -> Any:
    """What `torch.save` wrote, with a `PickledTensor` for each tensor; of a part of a file if its
    beginning and length are given."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error
    length = size - begin if length is None else length
    if begin < 0 or length < 0 or begin + length > size:
        what = f"the file has {size} bytes, and a tensor is said to be at {begin} to "
        raise DataError(f"{what}{begin + length}", where=path, remedy=_COPY_AGAIN)
    with _FilePart(path, begin, length) as window:
        start = window.read(16)
        if start[:2] == b"\x80\x02" and start[2:15] == _OLD_MAGIC[:13]:
            raise DataError(
                "this file is in the format of torch before 1.6",
                where=path,
                remedy="load it with torch and save it again: torch.save writes a zip archive",
            )
        try:
            with zipfile.ZipFile(window) as archive:
                return _Archive(path, begin, length, window, archive).read()
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            what = f"this is no file of torch.save: {error}"
            raise DataError(what, where=path, remedy=_COPY_AGAIN) from error
        except (ValueError, struct.error, EOFError, OverflowError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            what = f"damaged: {' '.join(str(error).split())[:200]}"
            raise DataError(what, where=path, remedy=_COPY_AGAIN) from error


class _Archive:
    """A zip archive that torch.save wrote."""

    def __init__(
        self, path: Path, begin: int, length: int, window: _FilePart, archive: zipfile.ZipFile
    ) -> None:
        self._path, self._begin, self._length = path, begin, length
        self._window, self._archive = window, archive
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in archive.infolist():
            name = PurePosixPath(entry.filename)
            if name.is_absolute() or ".." in name.parts or entry.filename in self._entries:
                raise ValueError(f"an entry of the archive is named {entry.filename[:100]!r}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                raise ValueError(f"{entry.filename[:100]!r} is compressed or encrypted")
            if entry.file_size != entry.compress_size or entry.file_size > length:
                raise ValueError(f"{entry.filename[:100]!r} is larger than the file")
            self._entries[entry.filename] = entry

    def read(self) -> Any:
        pickles = [name for name in self._entries if PurePosixPath(name).name == "data.pkl"]
        if len(pickles) != 1 or len(PurePosixPath(pickles[0]).parts) != 2:
            raise ValueError("the archive has no NAME/data.pkl, or several")
        self._folder = pickles[0].rpartition("/")[0]
        order = self._entries.get(f"{self._folder}/byteorder")
        if order is not None and self._archive.read(order) != b"little":
            raise ValueError("its numbers are big-endian")
        if self._entries[pickles[0]].file_size > LARGEST:
            raise ValueError("data.pkl is larger than that of any checkpoint")
        data = self._archive.read(self._entries[pickles[0]])
        return read_pickle(data, where=str(self._path), storage=self._storage, tensor=self._tensor)

    def _storage(self, known: tuple[Any, ...]) -> _Storage:
        """From ("storage", type, number, device, elements)."""
        word, kind, key, _, count = known
        if word != "storage" or not isinstance(kind, PickledName) or not isinstance(key, str):
            raise ValueError("a reference to a storage is none")
        name = kind.name.rpartition(".")[2]
        dtype = torch.uint8 if name == "UntypedStorage" else _STORAGES.get(name)
        if dtype is None:
            raise ValueError(f"{kind.name} is a type of numbers that is not known")
        entry = self._entries.get(f"{self._folder}/data/{key}")
        if entry is None:
            raise ValueError(f"the archive has no storage {key[:20]!r}")
        if not _is_size(count) or count * dtype.itemsize != entry.file_size:
            raise ValueError(
                f"storage {key[:20]!r} has {entry.file_size} bytes, not {count} numbers"
            )
        begin = self._data_begin(entry)
        return _Storage(self._path, begin, entry.file_size, entry.CRC, dtype)

    def _data_begin(self, entry: zipfile.ZipInfo) -> int:
        """Where the bytes of an entry begin in the file: after the header that precedes them."""
        self._window.seek(entry.header_offset)
        magic, name, extra = struct.unpack("<4s22xHH", self._window.read(30))
        begin = entry.header_offset + 30 + name + extra
        if magic != b"PK\x03\x04" or begin + entry.file_size > self._length:
            raise ValueError(f"{entry.filename[:100]!r} is not where the archive says")
        return self._begin + int(begin)

    def _tensor(self, arguments: tuple[Any, ...]) -> PickledTensor:
        """From (storage, offset, sizes, strides, …)."""
        storage, offset, shape, stride = arguments[:4]
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor has no storage")
        numbers = [offset, *shape, *stride]
        if len(shape) != len(stride) or len(shape) > _MOST_DIMS:
            raise ValueError("the sizes and strides of a tensor do not agree")
        if not all(map(_is_size, numbers)):
            raise ValueError("the sizes of a tensor are no sizes")
        elements = storage.bytes // storage.dtype.itemsize
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        # A stride of 0 would let a few bytes be a tensor of any size.
        if math.prod(shape) > elements or (math.prod(shape) and last >= elements):
            raise ValueError(
                f"a tensor of shape {tuple(shape)} reaches beyond its storage of {elements} numbers"
            )
        return PickledTensor(storage, offset, tuple(shape), tuple(stride))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def tensors_below(value: Any, *, where: Path) -> dict[str, LazyTensor]:
    """All tensors in dictionaries within each other, their keys joined by dots."""
    tensors: dict[str, LazyTensor] = {}
    waiting = [("", value)]
    for name, inner in waiting:
        # Few bytes can say that a dictionary holds another one many times.
        if len(waiting) > _MOST_VALUES or len(name) > _LONGEST_NAME:
            raise DataError("the dictionaries of the model have no end", where=where)
        if isinstance(inner, PickledTensor):
            tensors[name] = LazyTensor(inner.shape, inner.dtype, inner.read)
        elif isinstance(inner, dict):
            prefix = f"{name}." if name else ""
            waiting += [(f"{prefix}{key}", part) for key, part in inner.items() if type(key) is str]
    return tensors


# ------------------------------------------------------------------ distributed checkpoints


@dataclass(frozen=True)
class _StoredChunk:
    """A piece of a tensor in a file."""

    region: TensorSlice
    path: Path
    begin: int
    length: int

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        value = read_torch_file(self.path, begin=self.begin, length=self.length)
        if not isinstance(value, PickledTensor) or value.shape != self.region.shape:
            raise DataError(f"no tensor of shape {self.region.shape} is here", where=self.path)
        if value.dtype != dtype:
            raise DataError(f"a tensor of {value.dtype} instead of {dtype}", where=self.path)
        return value.read()


@dataclass(frozen=True)
class DistributedTensor:
    """A tensor whose pieces are in several files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_StoredChunk, ...]

    def whole(self) -> LazyTensor:
        return LazyTensor(self.shape, self.dtype, lambda: self._read(TensorSlice.whole(self.shape)))

    def row(self, number: int) -> LazyTensor:
        """One of the tensors that are stacked in it."""
        region = TensorSlice.whole(self.shape).narrow(0, number, number + 1)
        return LazyTensor(self.shape[1:], self.dtype, lambda: self._read(region)[0])

    def _read(self, region: TensorSlice) -> torch.Tensor:
        # Pieces that overlap leave holes elsewhere, and no weight is NaN.
        value = torch.full(region.shape, math.nan, dtype=self.dtype)
        for chunk in self.chunks:
            common = region.intersect(chunk.region)
            if common is not None:
                part = chunk.read(self.dtype)[common.relative_to(chunk.region).slices]
                value[common.relative_to(region).slices] = part
        return value


def read_distributed(folder: Path, wanted: Callable[[str], bool]) -> dict[str, DistributedTensor]:
    """The tensors of a distributed checkpoint that are wanted, by name."""
    path = folder / METADATA
    if path.stat().st_size > LARGEST:
        raise DataError("larger than that of any checkpoint", where=path)
    content = read_pickle(path.read_bytes(), where=str(path))
    try:
        return _tensors(folder, content, wanted)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"not the metadata of a checkpoint: {type(error).__name__}: {str(error)[:100]}"
        raise DataError(what, where=path) from error


def _tensors(
    folder: Path, content: Any, wanted: Callable[[str], bool]
) -> dict[str, DistributedTensor]:
    fields = _fields(content, "Metadata")
    places = {}
    for index, info in fields["storage_data"].items():
        known = _fields(index, "MetadataIndex")
        if isinstance(known["fqn"], str) and wanted(known["fqn"]):
            # Sizes are checked before they are hashed: tuples within tuples may take for ever.
            offset = known.get("offset")
            places[known["fqn"], None if offset is None else _sizes(offset)] = info
    tensors = {}
    for name, described in fields["state_dict_metadata"].items():
        if not isinstance(name, str) or not wanted(name):
            continue
        if not described.name.endswith(".TensorStorageMetadata"):
            continue
        tensors[name] = _tensor(folder, name, described.fields, places)
    if not tensors:
        raise DataError("there is no GPT model in this checkpoint", where=folder / METADATA)
    return tensors


def _tensor(
    folder: Path, name: str, described: Mapping[Any, Any], places: Mapping[Any, Any]
) -> DistributedTensor:
    shape = _sizes(described["size"])
    # The state of these properties is a tuple, of which the type comes first.
    state = described["properties"].state
    dtype = _dtype_named(state[0] if isinstance(state, tuple) else state["dtype"])
    if dtype is None:
        raise ValueError(f"{name} is of an unknown type of numbers")
    chunks = []
    for chunk in described["chunks"]:
        facts = _fields(chunk, "ChunkStorageMetadata")
        begin, sizes = _sizes(facts["offsets"]), _sizes(facts["sizes"])
        region = TensorSlice(begin, tuple(b + n for b, n in zip(begin, sizes, strict=True)))
        inside = len(begin) == len(shape) and region.intersect(TensorSlice.whole(shape)) == region
        if not inside:
            raise ValueError(f"a piece of {name} is outside of it")
        info = _fields(places[name, begin], "_StorageInfo")
        if info.get("transform_descriptors"):
            raise DataError(f"the pieces of {name} are compressed", where=folder / METADATA)
        place, length = _place(info)
        if region.size * dtype.itemsize > length:
            raise ValueError(f"a piece of {name} is larger than its place in the file")
        path = _file(folder, info["relative_path"])
        chunks.append(_StoredChunk(region, path, place, length))
    covered = sum(chunk.region.size for chunk in chunks)
    if covered != TensorSlice.whole(shape).size:
        raise ValueError(f"the pieces of {name} do not make it up")
    return DistributedTensor(shape, dtype, tuple(chunks))


def _fields(value: Any, name: str) -> dict[Any, Any]:
    if not isinstance(value, PickledObject) or value.name.rpartition(".")[2] != name:
        raise ValueError(f"there is no {name}")
    return value.fields


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if len(sizes) > 8 or not all(type(size) is int and 0 <= size < 2**40 for size in sizes):
        raise ValueError("sizes that are none")
    return sizes


def _place(info: Mapping[Any, Any]) -> tuple[int, int]:
    begin, length = info["offset"], info["length"]
    if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
        raise ValueError("a place that is none")
    return begin, length


def _file(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"a file named {str(name)[:60]!r}")
    return folder / name


def _dtype_named(value: Any) -> torch.dtype | None:
    """The type of numbers that a file names."""
    name = value.name if isinstance(value, PickledName) else ""
    return next((dtype for dtype in _STORAGES.values() if str(dtype) == name), None)
