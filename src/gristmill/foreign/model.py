"""A model in files of another program, under our names and in our layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from pydantic import ValidationError

from gristmill.base.errors import DataError, Problem
from gristmill.config.model import GPTConfig
from gristmill.foreign.torch_file import PickledTensor


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read, and put together, when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """A contiguous tensor of its own memory."""

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def reordered(self, rows: torch.Tensor) -> LazyTensor:
        """The same with its rows in another order."""
        assert len(rows) == self.shape[0], "every row has a place"
        return replace(self, read=lambda: self.read()[rows])


@dataclass(frozen=True)
class ImportedModel:
    """What an import has found."""

    program: str
    """The program that wrote it."""
    origin: Path
    """The file or folder that holds the weights."""
    config: GPTConfig
    tensors: Mapping[str, LazyTensor]
    """Under our names; all rows of the vocabulary that the file has, padding included."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


def stored_tensor(tensor: PickledTensor) -> LazyTensor:
    """A tensor as a file has it."""
    return LazyTensor(tensor.shape, tensor.dtype, tensor.read)


def joined(name: str, parts: Sequence[LazyTensor], dim: int, *, where: Path) -> LazyTensor:
    """Parts of a tensor, one after the other along a dimension."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].shape
    if any(len(part.shape) <= dim for part in parts) or any(
        part.shape[:dim] + part.shape[dim + 1 :] != first[:dim] + first[dim + 1 :] for part in parts
    ):
        shapes = ", ".join(str(part.shape) for part in parts)
        raise DataError(f"the parts of {name} do not fit together: {shapes}", where=where)
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    shape = (*first[:dim], sum(part.shape[dim] for part in parts), *first[dim + 1 :])

    def read() -> torch.Tensor:
        whole, begin = torch.empty(shape, dtype=dtype), 0
        for part in parts:
            count = part.shape[dim]
            whole.narrow(dim, begin, count).copy_(part.read())
            begin += count
        return whole

    return LazyTensor(shape, dtype, read)


def model_config(
    settings: Mapping[str, object], names: Mapping[str, str], *, where: Path
) -> GPTConfig:
    """Our settings, from theirs; `names` has what they call them, for messages."""
    try:
        config = GPTConfig.model_validate(dict(settings))
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            ours = ".".join(map(str, problem["loc"]))
            message = problem["msg"][0].lower() + problem["msg"][1:]
            shown = (
                repr(problem["input"]) if isinstance(problem["input"], int | float | str) else "it"
            )
            problems.append(Problem(f"{names.get(ours, ours)}: {shown}: {message}", str(where)))
        raise DataError(problems) from error
    uneven = (config.head_width is None and config.width % config.heads) or (
        config.heads % config.groups
    )
    if uneven or (config.positions == "rotary" and config.rotated % 2):
        what = (
            f"no model has these sizes: width {config.width}, {config.heads} heads, "
            f"{config.groups} key and value heads"
        )
        raise DataError(what, where=where)
    return config
