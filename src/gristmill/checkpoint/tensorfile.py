"""Safetensors files, written with their fingerprint, or while their tensors are still being made.

    8 bytes    length of the header, little endian
    header     JSON: dtype, shape and offsets of each tensor, padded with spaces to 8 bytes
    tensors    one after the other, without gaps

The bytes are the same as those of the safetensors package, which reads the files; only writing is
done here. The package's writer needs all tensors at once. It returns no fingerprint of what it was
given, and one taken of the file would not prove that the file is right. It also hides the error
numbers of the system in a text.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.layout import Fingerprint

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
        for one in hashed:
            one.result()
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
