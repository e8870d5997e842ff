"""Curves of what was recorded at the same moments, thinned while they grow.

Buckets hold equal numbers of consecutive records, a power of two: 1, 2, 4 and so on. When there are
as many buckets as may be, each two neighbours become one. So memory does not depend on the length
of a run, and what a bucket holds never changes once it is full: whoever has drawn the first buckets
of a size need not draw them again. Of each bucket a curve keeps

    mean   of the finite values, NaN if there is none
    low    the smallest     } so that a single spike is still visible
    high   the largest      }

at the step, tokens and seconds of the bucket's last record. Coarser buckets are made of those that
are kept, two by two, which gives the same numbers whenever it is done. Twenty bytes are kept for
each bucket of a curve: the sum in double precision, the count, and both extremes in single.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
PLACES = ("step", "tokens", "seconds")
"""The columns of a bucket's place."""
_FIRST_CAPACITY = 32
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Buckets:
    """Consecutive buckets: B of them, of C curves."""

    places_BP: Doubles
    sums_CB: Doubles
    counts_CB: npt.NDArray[Any]
    lows_CB: npt.NDArray[np.float32]
    highs_CB: npt.NDArray[np.float32]

    @property
    def means_CB(self) -> Doubles:
        """NaN where there is no finite value."""
        with np.errstate(divide="ignore", invalid="ignore"):
            means: Doubles = self.sums_CB / np.where(self.counts_CB, self.counts_CB, np.nan)
        return means

    def in_pairs(self) -> Buckets:
        """Each two neighbours as one; the last may be alone."""
        odd = len(self.places_BP) % 2
        last = np.arange(1, len(self.places_BP) + odd, 2)
        return Buckets(
            self.places_BP[np.minimum(last, len(self.places_BP) - 1)],
            _paired(np.add, self.sums_CB, odd, 0.0),
            _paired(np.add, self.counts_CB, odd, 0),
            _paired(np.minimum, self.lows_CB, odd, np.inf),
            _paired(np.maximum, self.highs_CB, odd, -np.inf),
        )

    def merged(self, edges: npt.NDArray[np.int64]) -> Buckets:
        """Fewer buckets, that begin at these ones."""
        last = np.append(edges[1:], len(self.places_BP)) - 1
        return Buckets(
            self.places_BP[last],
            np.add.reduceat(self.sums_CB, edges, axis=1),
            np.add.reduceat(self.counts_CB, edges, axis=1),
            np.minimum.reduceat(self.lows_CB, edges, axis=1),
            np.maximum.reduceat(self.highs_CB, edges, axis=1),
        )


def _paired(merge: np.ufunc, values_CB: npt.NDArray[Any], odd: int, nothing: float) -> Any:
    if odd:
        values_CB = np.pad(values_CB, ((0, 0), (0, 1)), constant_values=nothing)
    return merge(values_CB[:, ::2], values_CB[:, 1::2])


class Curves:
    """Curves that grow with the records that come."""

    def __init__(self, most: int) -> None:
        """`most` buckets are kept."""
        self.most = most + most % 2
        self.count = 0
        """Records so far."""
        self.size = 1
        """Records of a bucket; the last may hold fewer."""
        self._rows: dict[str, int] = {}
        self._capacity = min(_FIRST_CAPACITY, self.most)
        self._places_BP = np.zeros((self._capacity, len(PLACES)))
        self._sums_CB = np.zeros((0, self._capacity))
        self._counts_CB = np.zeros((0, self._capacity), np.int32)
        self._lows_CB = np.zeros((0, self._capacity), np.float32)
        self._highs_CB = np.zeros((0, self._capacity), np.float32)

    @property
    def names(self) -> list[str]:
        """The curves that have any finite value."""
        held = np.count_nonzero(self._counts_CB[:, : self.used], axis=1)
        return [name for name, row in self._rows.items() if held[row] > 0]

    @property
    def used(self) -> int:
        """Buckets that hold anything."""
        return -(-self.count // self.size)

    @property
    def nbytes(self) -> int:
        """The memory that the buckets take."""
        arrays = (self._places_BP, self._sums_CB, self._counts_CB, self._lows_CB, self._highs_CB)
        return sum(array.nbytes for array in arrays)

    def add(self, names: Sequence[str], values_BC: Doubles, places_BP: Doubles) -> None:
        """Add what some records have for each name, with their steps, tokens and seconds."""
        rows = self._rows_of(names)
        begin = 0
        while begin < len(values_BC):
            room = self.most * self.size - self.count
            if room == 0:
                self._double()
                continue
            end = min(len(values_BC), begin + room)
            self._append(rows, values_BC[begin:end], places_BP[begin:end])
            begin = end

    def _rows_of(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        new = [name for name in names if name not in self._rows]
        if new:
            for name in new:
                self._rows[name] = len(self._rows)
            self._reallocate(self._capacity)
        return np.array([self._rows[name] for name in names], dtype=np.int64)

    def _reallocate(self, capacity: int) -> None:
        """Make room for so many buckets of all names; what is new holds nothing."""
        shape = (len(self._rows), capacity)
        rows, old = len(self._sums_CB), min(self._capacity, capacity)
        places_BP = np.zeros((capacity, len(PLACES)))
        places_BP[:old] = self._places_BP[:old]
        self._places_BP, self._capacity = places_BP, capacity
        for name, nothing in (("sums", 0), ("counts", 0), ("lows", np.inf), ("highs", -np.inf)):
            before = getattr(self, f"_{name}_CB")
            array = np.full(shape, nothing, before.dtype)
            array[:rows, :old] = before[:, :old]
            setattr(self, f"_{name}_CB", array)

    def _append(self, rows: npt.NDArray[np.int64], values_BC: Doubles, places_BP: Doubles) -> None:
        """Add records for which there is room."""
        numbers = (self.count + np.arange(len(values_BC))) // self.size
        edges = np.flatnonzero(np.diff(numbers, prepend=-1))
        first, last = int(numbers[0]), int(numbers[-1]) + 1
        if last > self._capacity:
            self._reallocate(min(self.most, max(last, 2 * self._capacity)))
        finite = np.isfinite(values_BC)
        kept = np.where(finite, values_BC, 0.0)
        shown = np.clip(kept, -_LARGEST, _LARGEST).astype(np.float32)
        lows = np.minimum.reduceat(np.where(finite, shown, np.float32(np.inf)), edges)
        highs = np.maximum.reduceat(np.where(finite, shown, np.float32(-np.inf)), edges)
        where = (rows, slice(first, last))
        self._sums_CB[where] += np.add.reduceat(kept, edges).T
        self._counts_CB[where] += np.add.reduceat(finite.astype(np.int32), edges).T
        self._lows_CB[where] = np.minimum(self._lows_CB[where], lows.T)
        self._highs_CB[where] = np.maximum(self._highs_CB[where], highs.T)
        self._places_BP[first:last] = places_BP[np.append(edges[1:], len(values_BC)) - 1]
        self.count += len(values_BC)

    def _double(self) -> None:
        """All buckets are full: each two become one."""
        half = self.used // 2
        pairs = self.stored().in_pairs()
        self.size *= 2
        for name, nothing in (("sums", 0), ("counts", 0), ("lows", np.inf), ("highs", -np.inf)):
            array = getattr(self, f"_{name}_CB")
            array[:, :half] = getattr(pairs, f"{name}_CB")
            array[:, half:] = nothing
        self._places_BP[:half] = pairs.places_BP

    # ------------------------------------------------------------------ reading

    def stored(self, names: Sequence[str] | None = None, *, first: int = 0) -> Buckets:
        """The buckets that are kept, from one on; of all names, or of some that are known."""
        part = slice(first, self.used)
        every = names is None
        rows = slice(None) if every else np.array([self._rows[name] for name in names or ()], int)
        return Buckets(
            self._places_BP[part],
            self._sums_CB[rows, part],
            self._counts_CB[rows, part],
            self._lows_CB[rows, part],
            self._highs_CB[rows, part],
        )

    def knows(self, name: str) -> bool:
        """Whether there is a curve of this name, with values or without."""
        return name in self._rows

    def size_for(self, points: int) -> int:
        """The smallest size of buckets of which there are no more than that."""
        size = self.size
        while -(-self.count // size) > points:
            size *= 2
        return size

    def thinned(self, names: Sequence[str], *, size: int, first: int = 0) -> Buckets:
        """Buckets of a size that is at least the one kept, from one on."""
        factor = size // self.size
        thin = self.stored(names, first=first * factor)
        while factor > 1:
            thin = thin.in_pairs()
            factor //= 2
        return thin
