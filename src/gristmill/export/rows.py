"""Tensors of an export: divided over files, and some rows at a time read from the source and
compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import write_json
from gristmill.base.tensor_slices import TensorSlice
from gristmill.checkpoint.model import StoredModel
from gristmill.checkpoint.state import FiniteCheck
from gristmill.checkpoint.tensorfile import HF_INDEX
from gristmill.models.weights import ForeignTensor

DTYPE = torch.float32
SHARD = 5 * 10**9
"""Bytes of tensors in one file, if no single tensor is larger."""
BYTES_AT_ONCE = 2**26
"""Bytes of a tensor that are in memory at once. For a transposed tensor they are columns of the
source: with fewer, each page of its file would be read more often."""

Advance = Callable[[str, int], None]
"""Called with what was done, and with how many bytes of weights."""


def tensor_bytes(tensor: ForeignTensor) -> int:
    """The size of a tensor in a file."""
    return math.prod(tensor.shape) * DTYPE.itemsize


def divide_files(sizes: Mapping[str, int], *, limit: int) -> dict[str, list[str]]:
    """The tensors of each file of a folder, by their bytes: one after the other, until the file is
    full."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def write_index(folder: Path, files: Mapping[str, Sequence[str]], *, size: int) -> None:
    """Say which file has which tensor, if there are several."""
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / HF_INDEX, index)


def row_regions(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    """A tensor in regions of as many rows as may be in memory at once."""
    count = max(1, BYTES_AT_ONCE // (math.prod(shape[1:]) * DTYPE.itemsize))
    for first in range(0, shape[0], count):
        yield TensorSlice.whole(shape).narrow(0, first, min(first + count, shape[0]))


def read_rows(
    stored: StoredModel, tensor: ForeignTensor, advance: Advance
) -> Iterator[torch.Tensor]:
    """A tensor from the source; refuses numbers that are not finite."""
    for rows in row_regions(tensor.shape):
        value, finite = tensor.read(stored.weights, rows), FiniteCheck()
        finite.add(tensor.ours or tensor.name, value)
        try:
            finite.require(str(stored.origin))
        except DataError as error:
            raise stored.unusable(error) from error
        yield value
        advance("writing", value.nbytes)


def require_same(name: str, value: torch.Tensor, wanted: torch.Tensor, stored: StoredModel) -> None:
    """Refuse what was read back if one bit is not that of the source."""
    # As integers: 0 and -0 are equal, but not the same bits.
    if not torch.equal(value.view(torch.int32), wanted.view(torch.int32)):
        raise UserError(
            f"{name} does not read back as it is in the source; nothing was exported",
            where=str(stored.origin),
            remedy="the disk or the memory of this machine is failing: check both",
            exit=Exit.STORAGE,
        )
