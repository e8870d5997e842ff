"""Files that `torch.save` wrote, read without running code: tensors stay on disk until asked for.

    FILE            a zip archive, nothing compressed
      NAME/data.pkl       what was saved; tensors refer to storages by number   (`pickled`)
      NAME/data/0 …       the bytes of each storage
      NAME/byteorder      "little"

A tensor is a view of a storage: a type, an offset, sizes and strides. All of them are checked
against the size of the storage before anything is read, and the storage against its checksum. A
part of a larger file is read the same way, since torch's distributed checkpoints put such archives
one after the other into one file.
"""

from __future__ import annotations

import errno
import io
import math
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from gristmill.base.errors import DataError
from gristmill.foreign.pickled import LARGEST, PickledName, read_pickle

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


@dataclass(frozen=True)
class StorageRecord:
    """The bytes of a storage in a file."""

    path: Path
    begin: int
    bytes: int
    crc: int


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in a file, which is read when it is asked for."""

    storage: StorageRecord
    dtype: torch.dtype
    offset: int
    """In elements of the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Its numbers, in memory of their own."""
        record = self.storage
        value = torch.empty(record.bytes, dtype=torch.uint8)
        memory, crc, done = value.numpy().data, 0, 0
        with record.path.open("rb") as file:
            file.seek(record.begin)
            while done < record.bytes:
                part = memory[done : done + _CHUNK]
                count = file.readinto(part)
                if not count:
                    raise DataError("the file is cut short", where=record.path, remedy=_COPY_AGAIN)
                crc = zlib.crc32(part[:count], crc)
                done += count
        if crc != record.crc:
            what = "a tensor is not what was saved: its checksum differs"
            raise DataError(what, where=record.path, remedy=_COPY_AGAIN)
        view = value.view(self.dtype)
        return torch.as_strided(view, self.shape, self.stride, self.offset).contiguous()


@dataclass(frozen=True)
class _UntypedStorage:
    """A storage by its number, with the type that the file gives it."""

    record: StorageRecord
    dtype: torch.dtype


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

    def _storage(self, known: tuple[Any, ...]) -> _UntypedStorage:
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
        record = StorageRecord(self._path, self._data_begin(entry), entry.file_size, entry.CRC)
        return _UntypedStorage(record, dtype)

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
        if not isinstance(storage, _UntypedStorage):
            raise ValueError("a tensor has no storage")
        numbers = [offset, *shape, *stride]
        if len(shape) != len(stride) or len(shape) > _MOST_DIMS:
            raise ValueError("the sizes and strides of a tensor do not agree")
        if not all(map(_is_size, numbers)):
            raise ValueError("the sizes of a tensor are no sizes")
        elements = storage.record.bytes // storage.dtype.itemsize
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        # A stride of 0 would let a few bytes be a tensor of any size.
        if math.prod(shape) > elements or (math.prod(shape) and last >= elements):
            raise ValueError(
                f"a tensor of shape {tuple(shape)} reaches beyond its storage of {elements} numbers"
            )
        return PickledTensor(storage.record, storage.dtype, offset, tuple(shape), tuple(stride))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def dtype_named(value: Any) -> torch.dtype | None:
    """The type of numbers that a file names."""
    name = value.name if isinstance(value, PickledName) else ""
    return next((dtype for dtype in _STORAGES.values() if str(dtype) == name), None)


_MOST_VALUES = 250_000
_LONGEST_NAME = 1000


def tensors_below(value: Any, *, where: Path) -> dict[str, PickledTensor]:
    """All tensors in dictionaries within each other, their keys joined by dots."""
    tensors: dict[str, PickledTensor] = {}
    waiting = [("", value)]
    for name, inner in waiting:
        # Few bytes can say that a dictionary holds another one many times.
        if len(waiting) > _MOST_VALUES or len(name) > _LONGEST_NAME:
            raise DataError("the dictionaries of the model have no end", where=where)
        if isinstance(inner, PickledTensor):
            tensors[name] = inner
        elif isinstance(inner, dict):
            prefix = f"{name}." if name else ""
            waiting += [(f"{prefix}{key}", part) for key, part in inner.items() if type(key) is str]
    return tensors
