"""Tensors of a checkpoint or a Hugging Face folder, read region by region from any layout.

A checkpoint of one rank has one file of whole tensors for each kind; `pieces.json` lists the pieces
of all others. A Hugging Face folder has whole tensors in one file or, with
`model.safetensors.index.json`, in several. A reader asks for a region of a tensor, and only that
region is read from each file.

Files are mapped into memory. Pages that were read count as memory of the process until the file is
closed, and a shared machine may enforce limits on that. So files are closed after some reading and
opened again when needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gristmill.base.errors import DataError, Problem
from gristmill.base.files import read_json
from gristmill.base.tensor_slices import TensorSlice
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
from gristmill.checkpoint.tensorfile import DTYPES
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
            found = file.get_slice(piece.key)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if (shape, dtype) == (piece.region.shape, self._index[name].dtype):
                whole = inner.shape == shape
                tensor: torch.Tensor = file.get_tensor(piece.key) if whole else found[inner.slices]
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
        for name, one in slices.items():
            shape = tuple(one.get_shape())
            piece = StoredPiece(file, name, TensorSlice.whole(shape))
            index[name] = StoredTensor(one.get_dtype(), shape, [piece])
    return index
