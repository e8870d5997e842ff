"""Tensors of a checkpoint or a Hugging Face folder, read part by part, whoever wrote them.

A checkpoint that one process wrote is one file of whole tensors for each kind; `pieces.json` says
where the parts of all others are. A Hugging Face folder has whole tensors in one file or, by
`model.safetensors.index.json`, in several. A reader asks for a part of a tensor and gets it from
wherever it lies: of each file only that part is read.

Files are mapped into memory, so nothing is held that was not asked for. Pages that were read stay
with the process until the file is let go, and those who watch over a shared machine count them. So
files are let go now and then, and opened again by the next who asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import read_json
from gristmill.base.tensor_slices import TensorSlice
from gristmill.checkpoint.pieces import (
    PIECES,
    STRATEGY,
    Index,
    StoredPiece,
    StoredTensor,
    file_name,
    plain_name,
    read_index,
)
from gristmill.checkpoint.tensorfile import DTYPES
from gristmill.models.weights import TensorPart

HF_INDEX = "model.safetensors.index.json"
_LET_GO = 2**28
"""Bytes that are read before files are let go."""


class TensorReader(Mapping[str, torch.Tensor]):
    """Tensors in the files of a folder by name; each is read, whole, when it is asked for."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self._index = folder, index
        self._files: dict[str, Any] = {}
        self._read = 0

    @property
    def where(self) -> str:
        return str(self.folder)

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        for part in self.parts(name, TensorSlice.whole(whole.shape)):
            whole[part.box.slices] = part.tensor
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def shape(self, name: str) -> tuple[int, ...]:
        return self._index[name].shape

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._index[name].dtype
        if dtype not in DTYPES:
            raise self._error(f"{name} is of an unknown number format, {dtype!r}")
        return DTYPES[dtype]

    def parts(self, name: str, box: TensorSlice) -> Iterator[TensorPart]:
        """What is stored of a part of a tensor, piece by piece."""
        for piece in self._index[name].pieces:
            common = box.meet(piece.box)
            if common is not None:
                yield TensorPart(common, self._slice(name, piece, common.seen_from(piece.box)))

    def _slice(self, name: str, piece: StoredPiece, inner: TensorSlice) -> torch.Tensor:
        try:
            opened = self._open(piece.file)
            found = opened.get_slice(piece.key)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if (shape, dtype) == (piece.box.shape, self._index[name].dtype):
                whole = inner.shape == shape
                tensor: torch.Tensor = (
                    opened.get_tensor(piece.key) if whole else found[inner.slices]
                )
                # Of some columns, the pages of all are read.
                self._read += tensor.itemsize * sum(tensor.stride()[:1]) * sum(tensor.shape[:1])
                return tensor
        except (SafetensorError, OSError) as error:
            raise self._error(f"{piece.key} cannot be read: {error}", piece.file) from error
        raise self._error(f"{piece.key} has shape {shape} and format {dtype}", piece.file)

    def _open(self, file: str) -> Any:
        if self._read >= _LET_GO:
            self._files.clear()
            self._read = 0
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]

    def _error(self, what: str, file: str = PIECES) -> UserError:
        return UserError(what, where=str(self.folder / file), exit=Exit.DATA)


def open_tensors(folder: Path, kind: str = "model") -> TensorReader:
    """A checkpoint's tensors of a kind, of which one at a time is in memory."""
    if (folder / PIECES).is_file():
        return TensorReader(folder, read_index(folder, kind))
    file = file_name(kind)
    absent = kind == STRATEGY and not (folder / file).exists()
    return TensorReader(folder, {} if absent else _headers(folder, [file]))


def open_hf_tensors(folder: Path) -> TensorReader:
    """The tensors of a Hugging Face folder; only safetensors, which run no code when read."""
    files = [file.name for file in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise UserError(
            "no .safetensors file here; pickled weights are not read, since they can run code",
            where=str(folder),
            exit=Exit.DATA,
        )
    if not (folder / HF_INDEX).is_file():
        return TensorReader(folder, _headers(folder, files))
    places = _places(folder / HF_INDEX)
    index = _headers(folder, sorted(set(places.values())))
    absent = [name for name in places if name not in index]
    if absent:
        raise UserError(
            [Problem(f"has no {name}", str(folder / places[name])) for name in absent],
            exit=Exit.DATA,
        )
    return TensorReader(folder, {name: index[name] for name in places})


def _places(file: Path) -> dict[str, str]:
    """Which file each tensor of a Hugging Face folder is in."""
    try:
        return {name: plain_name(one) for name, one in read_json(file)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"not an index of tensors: {type(error).__name__}: {error}",
            where=str(file),
            exit=Exit.DATA,
        ) from error


def _headers(folder: Path, files: Iterable[str]) -> Index:
    """The index of files of whole tensors."""
    index = {}
    for file in files:
        try:
            opened: Any = safe_open(folder / file, framework="pt")
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            where = str(folder / file)
            raise UserError(f"cannot be read: {error}", where=where, exit=Exit.DATA) from error
        for name, one in slices.items():
            shape = tuple(one.get_shape())
            piece = StoredPiece(file, name, TensorSlice.whole(shape))
            index[name] = StoredTensor(shape, one.get_dtype(), (piece,))
    return index
