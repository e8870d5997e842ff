"""Which parts of a tensor lie where, when many processes write a checkpoint.

Each process writes what it owns into files of its own, `model-00003-of-00008.safetensors` and the
same for the optimizer. A part that is the whole tensor has the tensor's name as its key, any other
its borders too:

    blocks.0.mlp.up.weight[512:1024,0:768]      rows 512 to 1023, columns 0 to 767

and `pieces.json` says of every tensor what it is and where its parts are:

    {"format": "gristmill-pieces", "version": 1,
     "model": {NAME: {"dtype": "F32", "shape": [1024, 768], "pieces": [
         {"file": FILE, "key": KEY, "begin": [512, 0], "end": [1024, 768]}, ...]}, ...},
     "optimizer": ...}

An index is complete if the parts of every tensor hold each of its elements exactly once. It is
checked before a checkpoint is committed and again when one is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import read_json, write_atomic
from gristmill.base.tensor_slices import TensorSlice

PIECES = "pieces.json"
FORMAT = "gristmill-pieces"
VERSION = 1
MODEL, OPTIMIZER, STRATEGY = KINDS = ("model", "optimizer", "strategy")
"""What a checkpoint holds tensors of; each kind has files of its own. Most strategies have none."""


@dataclass(frozen=True)
class TensorShare:
    """What one process says of a tensor: what the whole is, and the parts it writes, if any."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[TensorSlice, ...] = ()

    def plain(self) -> list[Any]:
        """As JSON holds it."""
        return [self.shape, self.dtype, [[box.begin, box.end] for box in self.boxes]]

    @classmethod
    def from_plain(cls, values: list[Any]) -> TensorShare:
        shape, dtype, boxes = values
        return cls(tuple(shape), dtype, tuple(TensorSlice(tuple(b), tuple(e)) for b, e in boxes))


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor, and where it is stored."""

    file: str
    key: str
    box: TensorSlice


@dataclass(frozen=True)
class StoredTensor:
    """What a tensor is, and where its parts are."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


Index = dict[str, StoredTensor]


def file_name(kind: str, *, rank: int = 0, ranks: int = 1) -> str:
    """The file that a process writes its tensors of a kind to."""
    part = "" if ranks == 1 else f"-{rank + 1:05d}-of-{ranks:05d}"
    return f"{kind}{part}.safetensors"


def piece_key(name: str, box: TensorSlice, shape: Sequence[int]) -> str:
    """The name of a part of a tensor within its file."""
    if box == TensorSlice.whole(shape):
        return name
    borders = ",".join(f"{b}:{e}" for b, e in zip(box.begin, box.end, strict=True))
    return f"{name}[{borders}]"


def join_shares(kind: str, shares: Sequence[Mapping[str, TensorShare]]) -> Index:
    """The index of what all processes, by rank, say of their tensors of a kind."""
    found: dict[str, list[StoredPiece]] = {}
    wholes: dict[str, TensorShare] = {}
    for rank, named in enumerate(shares):
        file = file_name(kind, rank=rank, ranks=len(shares))
        for name, share in named.items():
            whole = wholes.setdefault(name, share)
            same = (share.shape, share.dtype) == (whole.shape, whole.dtype)
            assert same, f"processes disagree on what {kind} {name} is: {share}, {whole}"
            found.setdefault(name, []).extend(
                StoredPiece(file, piece_key(name, box, share.shape), box) for box in share.boxes
            )
    return {
        name: StoredTensor(whole.shape, whole.dtype, tuple(found[name]))
        for name, whole in sorted(wholes.items())
    }


# ------------------------------------------------------------------ completeness


def faults_of(index: Index) -> list[str]:
    """Every tensor whose parts do not hold each of its elements exactly once, and why."""
    faults = ((name, _fault(tensor)) for name, tensor in index.items())
    return [f"{name}: {fault}" for name, fault in faults if fault is not None]


def _fault(tensor: StoredTensor) -> str | None:
    boxes, whole = [piece.box for piece in tensor.pieces], TensorSlice.whole(tensor.shape)
    outside = next((box for box in boxes if not _inside(box, whole)), None)
    if outside is not None:
        return f"a part, {outside}, lies outside of shape {tensor.shape}"
    common = _overlap(boxes)
    if common is not None:
        return f"{common} is in two parts"
    held = sum(box.size for box in boxes)
    if held != whole.size:
        return f"its parts hold {held} of {whole.size} elements"
    return None


def _inside(box: TensorSlice, whole: TensorSlice) -> bool:
    borders = zip(whole.begin, box.begin, box.end, whole.end, strict=True)
    return len(box.begin) == len(whole.begin) and all(a <= b <= c <= d for a, b, c, d in borders)


def _overlap(boxes: Iterable[TensorSlice]) -> TensorSlice | None:
    """Where two boxes meet, if any do. Only boxes that share a row are compared, since a large
    tensor may have thousands."""
    near: list[TensorSlice] = []
    for box in sorted(boxes, key=lambda one: one.begin):
        near = [one for one in near if one.end[:1] > box.begin[:1] or not box.begin]
        common = next((common for one in near if (common := one.meet(box))), None)
        if common is not None:
            return common
        near.append(box)
    return None


# ------------------------------------------------------------------ on the disk


def write_index(path: Path, indexes: Mapping[str, Index]) -> None:
    """Write the indexes of all kinds, one tensor a line."""
    head = [f'"format": "{FORMAT}"', f'"version": {VERSION}']
    tables = [f"{json.dumps(kind)}: {{{_table(index)}\n}}" for kind, index in indexes.items()]
    write_atomic(path, "{" + ",\n".join([*head, *tables]) + "}\n")


def _table(index: Index) -> str:
    rows = (f"\n  {json.dumps(name)}: {json.dumps(_plain(one))}" for name, one in index.items())
    return ",".join(rows)


def _plain(tensor: StoredTensor) -> dict[str, Any]:
    pieces = [
        {"file": piece.file, "key": piece.key, "begin": piece.box.begin, "end": piece.box.end}
        for piece in tensor.pieces
    ]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "pieces": pieces}


def read_index(folder: Path, kind: str) -> Index:
    """The checked index of a checkpoint's tensors of a kind."""
    path = folder / PIECES
    values = read_json(path)
    try:
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is not {FORMAT} version {VERSION}")
        tensors = values.get(kind, {}) if kind == STRATEGY else values[kind]
        index = {name: _stored(value) for name, value in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"not an index of pieces: {type(error).__name__}: {error}",
            where=str(path),
            exit=Exit.DATA,
        ) from error
    faults = faults_of(index)
    if faults:
        raise UserError([Problem(fault, str(path)) for fault in faults], exit=Exit.DATA)
    return index


def _stored(value: dict[str, Any]) -> StoredTensor:
    pieces = tuple(
        StoredPiece(plain_name(one["file"]), str(one["key"]), _box(one["begin"], one["end"]))
        for one in value["pieces"]
    )
    return StoredTensor(_numbers(value["shape"]), str(value["dtype"]), pieces)


def _box(begin: list[Any], end: list[Any]) -> TensorSlice:
    if len(begin) != len(end):
        raise ValueError(f"{begin} and {end} are not of the same length")
    return TensorSlice(_numbers(begin), _numbers(end))


def _numbers(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values} are not sizes")
    return tuple(values)


def plain_name(name: Any) -> str:
    """A file's name; one that leads out of the folder is refused."""
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    return name
