"""Weights read into the parameters of a model, and refused before that if they do not fit.

    check_weights       names and shapes against a whole model, which needs no memory
    load_weights        the same, then read: the whole model, or this rank's shards of it
    load_parameters     any parameters; all numbers must be finite

Of each tensor only the slices that this rank holds are read (`Weights.parts`), so weights that were
written under one layout load into any other. Tables of the vocabulary may be stored with more rows
or fewer than the model has: rows beyond the vocabulary are padding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from gristmill.base.errors import DataError, Problem
from gristmill.checkpoint.tensorfile import TensorReader
from gristmill.models.spec import CausalLM
from gristmill.models.weights import Weights
from gristmill.strategies.sharding import ShardedParameter, whole_parameters


def load_parameters(
    parameters: Collection[ShardedParameter], weights: Weights, *, padded: frozenset[str]
) -> None:
    """Read this rank's shards of weights, and refuse them if they are not finite. Rows of `padded`
    parameters that are not stored are padding and become 0."""
    check_shapes(
        {parameter.name: parameter.shape for parameter in parameters}, weights, padded=padded
    )
    loaded = FiniteCheck()
    for parameter in parameters:
        target = parameter.local.detach()
        if parameter.name in padded:
            target.zero_()
        fill_shard(target, parameter, weights, parameter.name)
        loaded.add(parameter.name, target)
    loaded.require(weights.where)


def load_weights(
    model: CausalLM, weights: Weights, shards: Mapping[str, ShardedParameter] | None = None
) -> None:
    """Read weights into a new model: into this rank's `shards` of it, or into the whole model."""
    if shards is None:
        check_weights(model, weights)
        shards = whole_parameters(model)
    load_parameters(shards.values(), weights, padded=model.vocabulary_parameters())


def check_weights(model: CausalLM, weights: Weights) -> None:
    """Refuse weights that do not fit a whole model, which needs no memory; of a model with adapters
    theirs. Vocabulary tables may have more rows or fewer, as long as they have the vocabulary."""
    base, named = model.base_parameters(), model.named_parameters()
    shapes = {name: tuple(parameter.shape) for name, parameter in named if name not in base}
    tables, stored = model.vocabulary_parameters(), weights.shapes
    enough = frozenset(n for n in tables if stored.get(n) and stored[n][0] >= model.vocab)
    check_shapes(shapes, weights, padded=enough)


class FiniteCheck:
    """Finds tensors with NaN or infinity, and waits for the device only once."""

    def __init__(self) -> None:
        self._flags: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel():
            # Their extremes tell, without a copy of the tensor: 0 times anything finite is 0.
            low, high = tensor.aminmax()
            self._flags[name] = (low * 0 + high * 0).float()

    def require(self, where: str) -> None:
        """Refuse the tensors if any of them has such a number."""
        if not self._flags:
            return
        flags = torch.stack(list(self._flags.values())).tolist()
        names = [name for name, flag in zip(self._flags, flags, strict=True) if flag != 0]
        if names:
            others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
            raise DataError(f"NaN or infinite numbers in {names[0]}{others}", where=where)


def check_shapes(
    wanted: Mapping[str, tuple[int, ...]], stored: Weights, *, padded: frozenset[str]
) -> None:
    """Refuse tensors of other shapes; `padded` ones may differ in the number of rows."""
    problems = []
    for name, shape in wanted.items():
        present, first = stored.shapes.get(name), 1 if name in padded else 0
        if present is None:
            problems.append(f"there is no {name}")
        elif len(present) != len(shape) or present[first:] != shape[first:]:
            problems.append(f"{name} has shape {present}, not {shape}")
    if problems:
        raise DataError([Problem(what, stored.where) for what in problems])


def check_dtypes(wanted: Mapping[str, torch.dtype], stored: TensorReader) -> None:
    """Refuse tensors of another number format than the state that they are loaded into has."""
    problems = [
        f"{name} is stored as {stored.dtype(name)}, not {dtype}"
        for name, dtype in wanted.items()
        if name in stored.shapes and stored.dtype(name) != dtype
    ]
    if problems:
        raise DataError([Problem(what, stored.where) for what in problems])


def fill_shard(
    target: torch.Tensor, parameter: ShardedParameter, stored: Weights, name: str
) -> None:
    """Copy what is stored of this rank's slices of a tensor."""
    for shard in parameter.slices:
        for place, part in stored.parts(name, shard.whole):
            local = place.relative_to(shard.whole).shift(shard.local.begin)
            target[local.slices].copy_(part)
