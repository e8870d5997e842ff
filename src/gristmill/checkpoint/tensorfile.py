"""Safetensors files, written with their fingerprint, or while their tensors are still being made.

    8 bytes    length of the header, little endian
    header     JSON: dtype, shape and place of each tensor, filled up with spaces to 8 bytes
    tensors    one after the other, without gaps

The bytes are those that the safetensors package would write, which reads them too; only writing is
done here. Its own writer wants all tensors at once. It gives no fingerprint, so that one could only
be taken of the file, which proves nothing about what was to be written; and it hides the system's
error numbers in a text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import sha256_file
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
"""Number formats by their names in safetensors files."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_AT_ONCE = 2**24


@dataclass(frozen=True)
class Streamed:
    """A tensor that need never be in memory as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]
    """Its elements in their order, in contiguous tensors in host memory."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(tensor: torch.Tensor) -> str:
    """What safetensors files call a tensor's number format."""
    return _NAMES[tensor.dtype]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Fingerprint:
    """Write contiguous tensors in host memory, flush them, and read the file back to prove it."""
    digest, size = hashlib.sha256(), 0

    def observed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for part in _content({name: _at_hand(tensor) for name, tensor in tensors.items()}, {}):
            digest.update(part)
            size += len(part)
            yield part

    _write(path, observed())
    written = Fingerprint(path.name, digest.hexdigest(), size)
    if sha256_file(path) != written.sha256:
        raise UserError(
            "does not read back as it was written",
            where=str(path),
            remedy="the disk or the memory of this machine is failing: check both",
            exit=Exit.STORAGE,
        )
    return written


def write_streamed(
    path: Path, tensors: Mapping[str, Streamed], *, metadata: Mapping[str, str]
) -> None:
    """Write and flush tensors whose parts are made while they are written. Whether the file reads
    back as they are is for the caller to find out."""
    _write(path, _content(tensors, metadata))


def _write(path: Path, content: Iterable[bytes | memoryview]) -> None:
    with path.open("wb") as file:
        for part in content:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _at_hand(tensor: torch.Tensor) -> Streamed:
    return Streamed(tensor.dtype, tuple(tensor.shape), lambda: iter((tensor,)))


def _content(
    tensors: Mapping[str, Streamed], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    # Wide elements first keeps all of them aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in ordered:
        end = begin + tensor.bytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name, tensor in ordered:
        yield from _bytes(name, tensor)


def _bytes(name: str, tensor: Streamed) -> Iterator[memoryview]:
    written = 0
    for part in tensor.parts():
        assert part.is_contiguous() and part.dtype == tensor.dtype, f"{name}: {part.dtype}"
        data = part.reshape(-1).view(torch.uint8).numpy().data
        for at in range(0, len(data), _AT_ONCE):
            yield data[at : at + _AT_ONCE]
        written += len(data)
    assert written == tensor.bytes, f"{name} was {written} bytes, not {tensor.bytes}"
