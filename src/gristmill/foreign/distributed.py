"""torch's distributed checkpoints (DCP), which Megatron writes as `torch_dist`.

    .metadata        pickled: for each tensor its type, its size and the places of its pieces in it;
                     for each piece the file, and where in it the piece begins
    __0_0.distcp …   the pieces, each a file of torch.save within the file

torch itself unpickles `.metadata`, which can run code. Here it is read as data (`pickled`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import DataError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.foreign.model import LazyTensor
from gristmill.foreign.pickled import LARGEST, PickledObject, read_pickle
from gristmill.foreign.torch_file import PickledTensor, dtype_named, read_torch_file

METADATA = ".metadata"


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
    dtype = dtype_named(state[0] if isinstance(state, tuple) else state["dtype"])
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
