"""Safetensors files, written with their fingerprint, or while their tensors are still being made.

    8 bytes    length of the header, little endian
    header     JSON: dtype, shape and offsets of each tensor, padded with spaces to 8 bytes
    tensors    one after the other, without gaps

The bytes are the same as those of the safetensors package, which reads the files; only writing is
done here. The package's writer needs all tensors at once. It returns no fingerprint of what it was
given, and one taken of the file would not prove that the file is right. It also hides the error
numbers of the system in a text.

Tensors of a checkpoint or a Hugging Face folder, read region by region from any layout.

A checkpoint of one rank has one file of whole tensors for each kind; `pieces.json` lists the pieces
of all others. A Hugging Face folder has whole tensors in one file or, with
`model.safetensors.index.json`, in several. A reader asks for a region of a tensor, and only that
region is read from each file.

Files are mapped into memory. Pages that were read count as memory of the process until the file is
closed, and a shared machine may enforce limits on that. So files are closed after some reading and
opened again when needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import read_json
from gristmill.base.tensor_slices import TensorSlice
from gristmill.checkpoint.layout import Fingerprint
from gristmill.checkpoint.pieces import (
    PIECES,
    STRATEGY,
    Index,
    StoredPiece,
    StoredTensor,
    check_file_name,
    file_name,
    read_index,
)
from gristmill.models.weights import TensorParts, Weights

HF_INDEX = "model.safetensors.index.json"
_READ_BEFORE_CLOSE = 2**28
"""Bytes that are read before files are closed."""


class TensorReader(Weights):
    """Tensors in the files of a folder, by name."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.where, self._index = folder, str(folder), index
        self.shapes = {name: tensor.shape for name, tensor in index.items()}
        self._files: dict[str, Any] = {}
        self._bytes_read = 0

    def below(self, prefix: str) -> TensorReader:
        """The tensors whose names begin with a prefix, under the rest of their names."""
        if not prefix:
            return self
        index = {n.removeprefix(prefix): t for n, t in self._index.items() if n.startswith(prefix)}
        return TensorReader(self.folder, index)

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._index[name].dtype
        if dtype not in DTYPES:
            raise self._error(f"{name} is of an unknown number format, {dtype!r}")
        return DTYPES[dtype]

    def read_exact(self, name: str) -> torch.Tensor:
        """A whole tensor in its own dtype."""
        return self.read(name, dtype=self.dtype(name))

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        for piece in self._index[name].pieces:
            common = region.intersect(piece.region)
            if common is not None:
                yield common, self._read_piece(name, piece, common.relative_to(piece.region))

    def _read_piece(self, name: str, piece: StoredPiece, inner: TensorSlice) -> torch.Tensor:
        if self._bytes_read >= _READ_BEFORE_CLOSE:
            self._files.clear()
            self._bytes_read = 0
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(self.folder / piece.file, framework="pt")
            file = self._files[piece.file]
            part = file.get_slice(piece.key)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            if (shape, dtype) == (piece.region.shape, self._index[name].dtype):
                whole = inner.shape == shape
                tensor: torch.Tensor = file.get_tensor(piece.key) if whole else part[inner.slices]
                # Reading some columns reads the pages of all.
                row_bytes = tensor.itemsize * sum(tensor.stride()[:1])
                self._bytes_read += row_bytes * sum(tensor.shape[:1])
                return tensor
        except (SafetensorError, OSError) as error:
            raise self._error(f"{piece.key} cannot be read: {error}", piece.file) from error
        raise self._error(f"{piece.key} has shape {shape} and format {dtype}", piece.file)

    def _error(self, what: str, file: str = PIECES) -> DataError:
        return DataError(what, where=self.folder / file)


def open_tensors(folder: Path, kind: str = "model") -> TensorReader:
    """A checkpoint's tensors of a kind."""
    if (folder / PIECES).is_file():
        return TensorReader(folder, read_index(folder, kind))
    file = file_name(kind)
    absent = kind == STRATEGY and not (folder / file).exists()
    return TensorReader(folder, {} if absent else _index_files(folder, [file]))


def open_hf_tensors(folder: Path) -> TensorReader:
    """The tensors of a Hugging Face folder; only safetensors, which run no code when read."""
    files = [file.name for file in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise DataError(
            "no .safetensors file here; pickled weights are not read, since they can run code",
            where=folder,
            remedy="put the model's .safetensors files here, or convert the weights that you have: "
            "save_pretrained(..., safe_serialization=True) of transformers",
        )
    path = folder / HF_INDEX
    if not path.is_file():
        return TensorReader(folder, _index_files(folder, files))
    try:
        weight_map = read_json(path)["weight_map"]
        files_by_name = {name: check_file_name(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not an index of tensors: {type(error).__name__}: {error}"
        raise DataError(what, where=path) from error
    index = _index_files(folder, sorted(set(files_by_name.values())))
    problems = [
        Problem(f"has no {name}", str(folder / file))
        for name, file in files_by_name.items()
        if name not in index
    ]
    if problems:
        raise DataError(problems)
    return TensorReader(folder, {name: index[name] for name in files_by_name})


def _index_files(folder: Path, files: Iterable[str]) -> Index:
    """The index of files of whole tensors."""
    index = {}
    for file in files:
        try:
            opened: Any = safe_open(folder / file, framework="pt")
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"cannot be read: {error}", where=folder / file) from error
        for name, part in slices.items():
            shape = tuple(part.get_shape())
            piece = StoredPiece(file, name, TensorSlice.whole(shape))
            index[name] = StoredTensor(part.get_dtype(), shape, [piece])
    return index


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtypes by their names in safetensors files."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 2**24
"""Bytes that are hashed and written at a time."""
Chunk = bytes | memoryview


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor that is written in parts, so that it never has to be in memory as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]
    """Its elements in order, as contiguous tensors in host memory."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Write and flush contiguous tensors in host memory, and read the file back to verify it."""
    streamed = {
        name: StreamedTensor(tensor.dtype, tuple(tensor.shape), partial(iter, (tensor,)))
        for name, tensor in tensors.items()
    }
    digest, size = hashlib.sha256(), 0
    # Hashing takes as long as writing, so another thread does it.
    with path.open("w+b", buffering=0) as file, ThreadPoolExecutor(1) as hashing:
        chunks = list(_chunks(streamed, None))
        hashed = [hashing.submit(digest.update, chunk) for chunk in chunks]
        for chunk in chunks:
            _write_all(file, chunk)
            size += len(chunk)
        os.fsync(file.fileno())
        same = _holds(file, chunks)
        for task in hashed:
            task.result()
    if not same:
        raise UserError(
            "does not read back as it was written",
            where=str(path),
            remedy="the disk or the memory of this machine is failing: check both",
            exit=Exit.STORAGE,
        )
    return Fingerprint(path.name, digest.hexdigest(), size)


def _write_all(file: io.FileIO, chunk: Chunk) -> None:
    """Write a chunk; the system may take it in several parts."""
    left = memoryview(chunk)
    while left:
        left = left[file.write(left) :]


def _holds(file: io.FileIO, chunks: Sequence[Chunk]) -> bool:
    """Whether a file that was just written, and is still in the system's cache, holds chunks. To
    compare them is much faster than to hash the file."""
    buffer = np.empty(max(map(len, chunks)), np.uint8)
    file.seek(0)
    for chunk in chunks:
        read = buffer[: len(chunk)]
        begin = 0
        while begin < len(chunk) and (count := file.readinto(read[begin:].data)):
            begin += count
        # Eight bytes at a time are compared eight times as fast.
        kind = np.uint8 if len(chunk) % 8 else np.uint64
        if begin < len(chunk) or not np.array_equal(read.view(kind), np.frombuffer(chunk, kind)):
            return False
    return True


def write_streamed(
    path: Path,
    tensors: Mapping[str, StreamedTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    digest: hashlib._Hash | None = None,
) -> int:
    """Write and flush tensors whose parts are made while they are written; returns the size of the
    file. Reading it back is left to the caller."""
    with path.open("wb") as file:
        for chunk in _chunks(tensors, metadata):
            if digest is not None:
                digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _chunks(
    tensors: Mapping[str, StreamedTensor], metadata: Mapping[str, str] | None
) -> Iterator[Chunk]:
    # Wide elements first keeps all of them aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in ordered:
        offsets = [begin, begin + tensor.bytes]
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        begin += tensor.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name, tensor in ordered:
        written = 0
        for part in tensor.parts():
            assert part.is_contiguous() and part.dtype == tensor.dtype, f"{name}: {part.dtype}"
            data = part.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _CHUNK):
                yield data[start : start + _CHUNK]
            written += len(data)
        assert written == tensor.bytes, f"{name} was {written} bytes, not {tensor.bytes}"
