"""Which pieces of each tensor are in which file of a checkpoint that several ranks wrote.

Each rank writes what it owns into files of its own, `model-00003-of-00008.safetensors` and the same
for the optimizer. A piece that is the whole tensor has the tensor's name as its key; any other key
also has the bounds of the piece:

    blocks.0.mlp.up.weight[512:1024,0:768]      rows 512 to 1023, columns 0 to 767

`pieces.json` lists all tensors and their pieces:

    {"format": "gristmill-pieces", "version": 1,
     "model": {NAME: {"dtype": "F32", "shape": [1024, 768], "pieces": [
         {"file": FILE, "key": KEY, "begin": [512, 0], "end": [1024, 768]}, ...]}, ...},
     "optimizer": ...}

An index is complete if the pieces of every tensor hold each of its elements exactly once. That is
checked before a checkpoint is committed, and again when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Problem
from gristmill.base.files import read_json, write_atomic
from gristmill.base.tensor_slices import TensorSlice

PIECES = "pieces.json"
FORMAT = "gristmill-pieces"
VERSION = 1
MODEL, OPTIMIZER, STRATEGY = "model", "optimizer", "strategy"
"""The kinds of tensors in a checkpoint, each with files of its own. Most strategies have none."""


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor, and where it is stored."""

    file: str
    key: str
    region: TensorSlice


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's dtype and shape, and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[StoredPiece]


Index = dict[str, StoredTensor]


def file_name(kind: str, *, rank: int = 0, ranks: int = 1) -> str:
    """The file that a rank writes its tensors of a kind to."""
    part = "" if ranks == 1 else f"-{rank + 1:05d}-of-{ranks:05d}"
    return f"{kind}{part}.safetensors"


def piece_key(name: str, region: TensorSlice, shape: Sequence[int]) -> str:
    """The name of a piece of a tensor within its file."""
    if region == TensorSlice.whole(shape):
        return name
    bounds = ",".join(f"{b}:{e}" for b, e in zip(region.begin, region.end, strict=True))
    return f"{name}[{bounds}]"


TensorReport = tuple[str, Sequence[int], Sequence[tuple[Sequence[int], Sequence[int]]]]
"""What a rank reports of a tensor, as JSON: its dtype, its whole shape, and the begin and end of
each piece that this rank writes, if any."""


def merge_reports(kind: str, reports: Sequence[Mapping[str, TensorReport]]) -> Index:
    """The index of the tensors of a kind from the reports of all ranks, in order."""
    index: Index = {}
    for rank, report in enumerate(reports):
        file = file_name(kind, rank=rank, ranks=len(reports))
        for name, (dtype, shape, bounds) in report.items():
            tensor = index.setdefault(name, StoredTensor(dtype, tuple(shape), []))
            known = (tensor.dtype, tensor.shape)
            assert (dtype, tuple(shape)) == known, (
                f"ranks disagree on {kind} {name}: {dtype} {tuple(shape)}, {known}"
            )
            for begin, end in bounds:
                region = TensorSlice(tuple(begin), tuple(end))
                key = piece_key(name, region, tensor.shape)
                tensor.pieces.append(StoredPiece(file, key, region))
    return dict(sorted(index.items()))


# ------------------------------------------------------------------ completeness


def find_faults(index: Index) -> list[str]:
    """Every tensor whose pieces do not hold each of its elements exactly once, and why."""
    faults = ((name, _fault(tensor)) for name, tensor in index.items())
    return [f"{name}: {fault}" for name, fault in faults if fault is not None]


def _fault(tensor: StoredTensor) -> str | None:
    regions, shape = [piece.region for piece in tensor.pieces], tensor.shape
    for region in regions:
        bounds = zip(region.begin, region.end, shape, strict=True)
        if len(region.begin) != len(shape) or not all(0 <= b <= e <= n for b, e, n in bounds):
            return f"a piece, {region}, lies outside of shape {shape}"
    # Only regions with a row in common are compared, since a large tensor may have thousands.
    near: list[TensorSlice] = []
    for region in sorted(regions, key=lambda other: other.begin):
        near = [other for other in near if other.end[:1] > region.begin[:1] or not shape]
        common = next((common for other in near if (common := other.intersect(region))), None)
        if common is not None:
            return f"{common} is in two pieces"
        near.append(region)
    elements, size = sum(region.size for region in regions), TensorSlice.whole(shape).size
    return None if elements == size else f"its pieces hold {elements} of {size} elements"


# ------------------------------------------------------------------ on disk


def write_index(path: Path, indexes: Mapping[str, Index]) -> None:
    """Write the indexes of all kinds, one tensor per line."""
    tables = [f'"format": "{FORMAT}"', f'"version": {VERSION}']
    for kind, index in indexes.items():
        rows = []
        for name, tensor in index.items():
            pieces = [
                {"file": piece.file, "key": piece.key, **vars(piece.region)}
                for piece in tensor.pieces
            ]
            value = {"dtype": tensor.dtype, "shape": tensor.shape, "pieces": pieces}
            rows.append(f"\n  {json.dumps(name)}: {json.dumps(value)}")
        tables.append(f"{json.dumps(kind)}: {{{','.join(rows)}\n}}")
    write_atomic(path, "{" + ",\n".join(tables) + "}\n")


def read_index(folder: Path, kind: str) -> Index:
    """The checked index of a checkpoint's tensors of a kind."""
    path = folder / PIECES
    values = read_json(path)
    try:
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is not {FORMAT} version {VERSION}")
        tensors = values.get(kind, {}) if kind == STRATEGY else values[kind]
        index = {
            name: StoredTensor(
                str(value["dtype"]), _sizes(value["shape"]), [_piece(p) for p in value["pieces"]]
            )
            for name, value in tensors.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not an index of pieces: {type(error).__name__}: {error}"
        raise DataError(what, where=path) from error
    faults = find_faults(index)
    if faults:
        raise DataError([Problem(fault, str(path)) for fault in faults])
    return index


def _piece(value: dict[str, Any]) -> StoredPiece:
    begin, end = _sizes(value["begin"]), _sizes(value["end"])
    if len(begin) != len(end):
        raise ValueError(f"{begin} and {end} are not of the same length")
    return StoredPiece(check_file_name(value["file"]), str(value["key"]), TensorSlice(begin, end))


def _sizes(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values} are not sizes")
    return tuple(values)


def check_file_name(name: Any) -> str:
    """Refuse a file name that leads out of the folder."""
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    return name
