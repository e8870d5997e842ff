"""Weights by name, any region of which can be read, and the same weights under other names.

    ours                            theirs                           layout
    embedding.weight                transformer.wte.weight           padded rows added, dropped
    blocks.N.attention.qkv.weight   transformer.h.N.attn.c_attn...   transposed (Conv1D)
    blocks.N.attention.qkv.weight   model.layers.N.self_attn.q_proj  the first rows
    blocks.N.attention.qkv.weight   gpt_neox.layers.N...             rows in another order

A tensor of theirs is a list of row ranges of ours, one after the other, with its dimensions swapped
where it is transposed. So a region of one is made of regions of the other: weights are converted a
region at a time, in both directions, and no model has to fit into memory. `models/families.py` says
which tensors each family has.

Biases and gains that our model does not have are constant: zero and one, which compute the same.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from gristmill.base.errors import DataError, Problem
from gristmill.base.tensor_slices import TensorSlice

_BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.inv_freq$")
"""Tensors in published files that are no weights: masks and the angles of rotary positions."""
_MOST_NAMED = 5
"""How many surplus tensors a message names."""

TensorParts = Iterator[tuple[TensorSlice, torch.Tensor]]
"""Parts of a tensor, each with its place in the whole tensor."""


class Weights(ABC):
    """Tensors by name, in memory or on disk, any region of which can be read."""

    where: str
    """Where they are, for messages."""
    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        """The stored parts of a region, which must not be changed."""

    def read(
        self, name: str, region: TensorSlice | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """A copy of a tensor, or of a region of it, on the CPU."""
        region = region or TensorSlice.whole(self.shapes[name])
        value = torch.empty(region.shape, dtype=dtype)
        for place, part in self.parts(name, region):
            value[place.relative_to(region).slices].copy_(part)
        return value


class WeightsInMemory(Weights):
    """Tensors in memory, such as a model's own."""

    where = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        common = region.intersect(TensorSlice.whole(self.shapes[name]))
        if common is not None:
            yield common, self._tensors[name].detach()[common.slices]


# ------------------------------------------------------------------ under other names


@dataclass(frozen=True)
class SharedRows:
    """Rows of one of our tensors, and the rows of one of theirs that have the same numbers."""

    ours: range
    theirs: range


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of another program's model, and what it is made of."""

    name: str
    shape: tuple[int, ...]
    """Theirs, without padding."""
    ours: str | None
    """None if the model has no such parameter; then all numbers are the same."""
    rows: tuple[SharedRows, ...] = ()
    """Before it is transposed."""
    transposed: bool = False
    constant: float = 0.0

    def swapped(self, region: TensorSlice) -> TensorSlice:
        """A region before it is transposed, from one after, and the other way round."""
        return region.transposed if self.transposed else region

    def read(self, weights: Weights, region: TensorSlice) -> torch.Tensor:
        """A region of it, from weights under our names, in fp32 on the CPU."""
        if self.ours is None:
            return torch.full(region.shape, self.constant)
        region = self.swapped(region)
        value, places = torch.empty(region.shape), []
        for rows in self.rows:
            common = _narrowed(region, rows.theirs)
            if common is not None:
                source = _moved(common, rows.ours.start - rows.theirs.start)
                places.append((common.relative_to(region), source))
        first = min(source.begin[0] for _, source in places)
        last = max(source.end[0] for _, source in places)
        if last - first == region.shape[0]:
            # The same rows in another order, perhaps one by one: they are read at once.
            around = region.narrow(0, first, last)
            read = weights.read(self.ours, around)
            for place, source in places:
                value[place.slices] = read[source.relative_to(around).slices]
        else:
            for place, source in places:
                value[place.slices] = weights.read(self.ours, source)
        return value.T.contiguous() if self.transposed else value

    def parts(self, theirs: Weights, region: TensorSlice) -> TensorParts:
        """What it has of a region of our tensor."""
        for rows in self.rows:
            common = _narrowed(region, rows.ours)
            if common is None:
                continue
            offset = rows.theirs.start - rows.ours.start
            for place, part in theirs.parts(self.name, self.swapped(_moved(common, offset))):
                part = part.T if self.transposed else part
                yield _moved(self.swapped(place), -offset), part


def _narrowed(region: TensorSlice, rows: range) -> TensorSlice | None:
    begin, end = max(region.begin[0], rows.start), min(region.end[0], rows.stop)
    return region.narrow(0, begin, end) if begin < end else None


def _moved(region: TensorSlice, rows: int) -> TensorSlice:
    return region.narrow(0, region.begin[0] + rows, region.end[0] + rows)


class ForeignWeights(Weights):
    """Tensors of another program's model under our names and in our layout, without padding."""

    def __init__(
        self,
        theirs: Weights,
        tensors: Iterable[ForeignTensor],
        *,
        prefix: str = "",
        other_names: Mapping[str, str] | None = None,
        unused: Iterable[str] = (),
    ) -> None:
        """Refuses weights that are not these `tensors`. Their names may lack the `prefix`, or be
        one of `other_names`; `unused` ones may be there, but are not read."""
        self.where, self._theirs = theirs.where, theirs
        renamed = other_names or {}
        stored = {name.removeprefix(prefix): name for name in theirs.shapes}
        stored = {renamed.get(name, name): stored_as for name, stored_as in stored.items()}
        self._by_ours: dict[str, list[ForeignTensor]] = {}
        problems = []
        for one in tensors:
            name = stored.pop(one.name.removeprefix(prefix), None)
            if name is None:
                problems.append(f"the weights lack {one.name}")
            elif theirs.shapes[name] != one.shape:
                problems.append(f"{one.name} has shape {theirs.shapes[name]}, not {one.shape}")
            elif one.ours is not None:
                self._by_ours.setdefault(one.ours, []).append(replace(one, name=name))
        surplus = [n for n in stored if n not in unused and not _BUFFERS.search(n)]
        if surplus:
            more = len(surplus) - _MOST_NAMED
            named = ", ".join(stored[name] for name in surplus[:_MOST_NAMED])
            others = f" and {more} more" if more > 0 else ""
            problems.append(f"the weights have {named}{others}, and a model of this kind has not")
        if problems:
            raise DataError([Problem(what, self.where) for what in problems])
        self.shapes = {ours: _whole_shape(parts) for ours, parts in self._by_ours.items()}

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        for tensor in self._by_ours[name]:
            yield from tensor.parts(self._theirs, region)


def _whole_shape(tensors: list[ForeignTensor]) -> tuple[int, ...]:
    """The shape of our tensor that these are parts of."""
    rows = max(rows.ours.stop for tensor in tensors for rows in tensor.rows)
    shape = tensors[0].shape[::-1] if tensors[0].transposed else tensors[0].shape
    return (rows, *shape[1:])
