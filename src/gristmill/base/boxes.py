"""Parts of tensors, as plain numbers: which part of a whole a process holds, and where.

    whole (6, 4), held by rank 1 of 2 as rows 1, 4:      Piece(whole 1:2, local 0:1)
    a stack of two matrices, each divided by rows        Piece(whole 4:5, local 1:2)

A `Box` is half open along every dimension. A tensor without dimensions is one box with none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
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

    def meet(self, other: Box) -> Box | None:
        """The common part of two boxes; None if there is none."""
        begin = tuple(map(max, self.begin, other.begin))
        end = tuple(map(min, self.end, other.end))
        return Box(begin, end) if all(b < e for b, e in zip(begin, end, strict=True)) else None

    def seen_from(self, outer: Box) -> Box:
        """The same part, counted from the corner of another box that holds it."""
        return self.moved([-offset for offset in outer.begin])

    def moved(self, offsets: Sequence[int]) -> Box:
        return Box(
            tuple(b + o for b, o in zip(self.begin, offsets, strict=True)),
            tuple(e + o for e, o in zip(self.end, offsets, strict=True)),
        )


@dataclass(frozen=True)
class Piece:
    """A part of a whole tensor, and the equally shaped part of a smaller one that holds it."""

    whole: Box
    local: Box

    def within(self, local: Box) -> Piece | None:
        """What of this piece lies inside a part of the smaller tensor, counted from its corner."""
        common = self.local.meet(local)
        if common is None:
            return None
        offsets = [w - p for w, p in zip(self.whole.begin, self.local.begin, strict=True)]
        return Piece(common.moved(offsets), common.seen_from(local))


def whole_piece(shape: Sequence[int]) -> tuple[Piece, ...]:
    """The one piece of a tensor that is held whole."""
    box = Box.whole(shape)
    return (Piece(box, box),)


def split_pieces(
    shape: Sequence[int], *, dim: int, parts: Sequence[int], rank: int, ranks: int
) -> tuple[Piece, ...]:
    """What one of several ranks holds of a whole that is divided along a dimension: an equal share
    of each of the `parts` that are stacked there, one after the other."""
    assert sum(parts) == shape[dim] and all(part % ranks == 0 for part in parts)
    pieces, start, kept = [], 0, 0
    for part in parts:
        share = part // ranks
        begin = [0] * len(shape)
        begin[dim] = kept
        end = list(shape)
        end[dim] = kept + share
        local = Box(tuple(begin), tuple(end))
        offset = [0] * len(shape)
        offset[dim] = start + rank * share - kept
        pieces.append(Piece(local.moved(offset), local))
        start, kept = start + part, kept + share
    return tuple(pieces)


def rows_of_rank(rows: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The rows that one of several ranks holds where the last ranks may hold fewer or none."""
    each = -(-rows // ranks)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


def row_pieces(
    pieces: Sequence[Piece], shape: Sequence[int], *, rank: int, ranks: int
) -> tuple[Piece, ...]:
    """The same pieces when the tensor of this shape that holds them is divided once more, by
    rows."""
    first, last = rows_of_rank(shape[0], rank=rank, ranks=ranks)
    rows = Box((first, *(0,) * (len(shape) - 1)), (last, *shape[1:]))
    found = [piece.within(rows) for piece in pieces]
    return tuple(piece for piece in found if piece is not None)
