"""Tensors of a checkpoint, read part by part, whoever wrote them.

A checkpoint that one process wrote is one file of whole tensors for each kind; `pieces.json` says
where the parts of all others are. A reader asks for a part of a tensor and gets it from wherever
it lies: of each file only that part is read. Files are mapped into memory, so nothing is held that
was not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gristmill.base.boxes import Box
from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.pieces import PIECES, StoredPiece, StoredTensor, file_name, read_index
from gristmill.checkpoint.tensorfile import DTYPES


@dataclass(frozen=True)
class Part:
    """A part of a tensor as it lies in a file: to be copied, not to be changed."""

    box: Box
    tensor: torch.Tensor


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by name; each is read, whole, when it is asked for."""

    def __init__(self, folder: Path, kind: str = "model") -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        divided = (folder / PIECES).is_file()
        self._index = read_index(folder, kind) if divided else self._headers(file_name(kind))

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        for part in self.parts(name, Box.whole(whole.shape)):
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

    def parts(self, name: str, box: Box) -> Iterator[Part]:
        """What is stored of a part of a tensor, piece by piece."""
        for piece in self._index[name].pieces:
            common = box.meet(piece.box)
            if common is not None:
                yield Part(common, self._slice(name, piece, common.seen_from(piece.box)))

    def _slice(self, name: str, piece: StoredPiece, inner: Box) -> torch.Tensor:
        try:
            opened = self._open(piece.file)
            found = opened.get_slice(piece.key)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if (shape, dtype) == (piece.box.shape, self._index[name].dtype):
                whole = inner.shape == shape
                tensor: torch.Tensor = (
                    opened.get_tensor(piece.key) if whole else found[inner.slices]
                )
                return tensor
        except (SafetensorError, OSError) as error:
            raise self._error(f"{piece.key} cannot be read: {error}", piece.file) from error
        raise self._error(f"{piece.key} has shape {shape} and format {dtype}", piece.file)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]

    def _headers(self, file: str) -> dict[str, StoredTensor]:
        """The index of a file of whole tensors."""
        try:
            opened = self._open(file)
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise self._error(f"cannot be read: {error}", file) from error
        index = {}
        for name, one in slices.items():
            shape = tuple(one.get_shape())
            piece = StoredPiece(file, name, Box.whole(shape))
            index[name] = StoredTensor(shape, one.get_dtype(), (piece,))
        return index

    def _error(self, what: str, file: str = PIECES) -> UserError:
        return UserError(what, where=str(self.folder / file), exit=Exit.DATA)


def stored_tensors(folder: Path, kind: str = "model") -> StoredTensors:
    """A checkpoint's weights, or its optimizer's tensors, of which one at a time is in memory."""
    return StoredTensors(folder, kind)
