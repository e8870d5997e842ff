"""Slices of tensors, as plain numbers: which part of a whole tensor a rank holds, and where.

    whole (6, 4), of which rank 1 of 2 has rows 1 and 4:   ShardSlice(whole 1:2, local 0:1)
    a stack of two matrices, each split by rows            ShardSlice(whole 4:5, local 1:2)

A `TensorSlice` is half open along every dimension; a slice of a scalar has no dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular region of a tensor."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(e - b for b, e in zip(self.begin, self.end, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this region of a tensor."""
        return tuple(slice(b, e) for b, e in zip(self.begin, self.end, strict=True))

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """The common region of two slices; None if they have no element in common."""
        begin = tuple(map(max, self.begin, other.begin))
        end = tuple(map(min, self.end, other.end))
        if any(b >= e for b, e in zip(begin, end, strict=True)):
            return None
        return TensorSlice(begin, end)

    def narrow(self, dim: int, begin: int, end: int) -> TensorSlice:
        """The same slice with other bounds along one dimension."""
        after = dim + 1
        return TensorSlice(
            (*self.begin[:dim], begin, *self.begin[after:]),
            (*self.end[:dim], end, *self.end[after:]),
        )

    @property
    def transposed(self) -> TensorSlice:
        """The same region of the tensor with its dimensions in reverse order."""
        return TensorSlice(self.begin[::-1], self.end[::-1])

    def relative_to(self, outer: TensorSlice) -> TensorSlice:
        """The same region with offsets from the first element of an enclosing slice."""
        return self.shift([-offset for offset in outer.begin])

    def shift(self, offsets: Sequence[int]) -> TensorSlice:
        return TensorSlice(
            tuple(b + o for b, o in zip(self.begin, offsets, strict=True)),
            tuple(e + o for e, o in zip(self.end, offsets, strict=True)),
        )


@dataclass(frozen=True)
class ShardSlice:
    """A slice of a whole tensor, and the equally shaped slice of a rank's tensor that holds it."""

    whole: TensorSlice
    local: TensorSlice


def whole_slice(shape: Sequence[int]) -> tuple[ShardSlice, ...]:
    """The slices of a tensor that is not sharded."""
    whole = TensorSlice.whole(shape)
    return (ShardSlice(whole, whole),)


def split_slices(
    shape: Sequence[int], *, dim: int, parts: Sequence[int], rank: int, ranks: int
) -> tuple[ShardSlice, ...]:
    """What a rank holds of a tensor that is split along a dimension: an equal shard of each of the
    `parts` that are stacked there, one after the other."""
    assert sum(parts) == shape[dim] and all(part % ranks == 0 for part in parts)
    whole, slices, part_start, local_start = TensorSlice.whole(shape), [], 0, 0
    for part in parts:
        size = part // ranks
        start = part_start + rank * size
        local = whole.narrow(dim, local_start, local_start + size)
        slices.append(ShardSlice(whole.narrow(dim, start, start + size), local))
        part_start, local_start = part_start + part, local_start + size
    return tuple(slices)


def row_slices(
    slices: Sequence[ShardSlice], shape: Sequence[int], *, rank: int, ranks: int
) -> tuple[ShardSlice, ...]:
    """What a rank holds of these slices when the tensor of this shape that holds them is split
    again, by rows; the last ranks may hold fewer rows or none."""
    each = -(-shape[0] // ranks)
    first, last = (min(shape[0], number * each) for number in (rank, rank + 1))
    rows = TensorSlice.whole(shape).narrow(0, first, last)
    rows_here = []
    for shard in slices:
        local = shard.local.intersect(rows)
        if local is not None:
            whole = local.relative_to(shard.local).shift(shard.whole.begin)
            rows_here.append(ShardSlice(whole, local.relative_to(rows)))
    return tuple(rows_here)
