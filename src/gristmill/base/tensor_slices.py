"""Slices of tensors, as plain numbers: which part of a whole a process holds, and where.

    whole (6, 4), of which rank 1 of 2 has rows 1 and 4:   ShardSlice(whole 1:2, local 0:1)
    a stack of two matrices, each divided by rows          ShardSlice(whole 4:5, local 1:2)

A `TensorSlice` is half open along every dimension; of a tensor without dimensions it has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular part of a tensor."""

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
        """Elements inside."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What a tensor is indexed with to get this part of it."""
        return tuple(slice(b, e) for b, e in zip(self.begin, self.end, strict=True))

    def meet(self, other: TensorSlice) -> TensorSlice | None:
        """The common part of two slices; None if there is none."""
        begin = tuple(map(max, self.begin, other.begin))
        end = tuple(map(min, self.end, other.end))
        some = all(b < e for b, e in zip(begin, end, strict=True))
        return TensorSlice(begin, end) if some else None

    def seen_from(self, outer: TensorSlice) -> TensorSlice:
        """The same part, counted from the corner of another slice that holds it."""
        return self.moved([-offset for offset in outer.begin])

    def moved(self, offsets: Sequence[int]) -> TensorSlice:
        return TensorSlice(
            tuple(b + o for b, o in zip(self.begin, offsets, strict=True)),
            tuple(e + o for e, o in zip(self.end, offsets, strict=True)),
        )


@dataclass(frozen=True)
class ShardSlice:
    """A part of a whole tensor, and the equally shaped part of a smaller one that holds it."""

    whole: TensorSlice
    local: TensorSlice

    def within(self, local: TensorSlice) -> ShardSlice | None:
        """What of this piece lies inside a part of the smaller tensor, counted from its corner."""
        common = self.local.meet(local)
        if common is None:
            return None
        offsets = [w - p for w, p in zip(self.whole.begin, self.local.begin, strict=True)]
        return ShardSlice(common.moved(offsets), common.seen_from(local))


def whole_slice(shape: Sequence[int]) -> tuple[ShardSlice, ...]:
    """The one piece of a tensor that is held whole."""
    box = TensorSlice.whole(shape)
    return (ShardSlice(box, box),)


def split_slices(
    shape: Sequence[int], *, dim: int, parts: Sequence[int], rank: int, ranks: int
) -> tuple[ShardSlice, ...]:
    """What one of several ranks holds of a whole that is divided along a dimension: an equal share
    of each of the `parts` that are stacked there, one after the other."""
    assert sum(parts) == shape[dim] and all(part % ranks == 0 for part in parts)
    pieces, start, kept = [], 0, 0
    for part in parts:
        share = part // ranks
        begin, end, offset = [0] * len(shape), list(shape), [0] * len(shape)
        begin[dim], end[dim] = kept, kept + share
        offset[dim] = start + rank * share - kept
        local = TensorSlice(tuple(begin), tuple(end))
        pieces.append(ShardSlice(local.moved(offset), local))
        start, kept = start + part, kept + share
    return tuple(pieces)


def rows_of_rank(rows: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The rows that one of several ranks holds where the last ranks may hold fewer or none."""
    each = -(-rows // ranks)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


def row_slices(
    pieces: Sequence[ShardSlice], shape: Sequence[int], *, rank: int, ranks: int
) -> tuple[ShardSlice, ...]:
    """The same pieces when the tensor of this shape that holds them is also divided by rows."""
    first, last = rows_of_rank(shape[0], rank=rank, ranks=ranks)
    rows = TensorSlice((first, *(0,) * (len(shape) - 1)), (last, *shape[1:]))
    found = [piece.within(rows) for piece in pieces]
    return tuple(piece for piece in found if piece is not None)
