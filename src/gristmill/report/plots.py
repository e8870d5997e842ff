"""Curves for the report: the records of a run, thinned to what a screen can show.

A run has up to millions of steps and a chart about a thousand pixels. Consecutive records are put
into at most `LIMIT` buckets of nearly equal size; of each bucket a curve keeps

    mean   of the finite values, null if there is none: the line breaks there
    low    the smallest         } only if buckets hold more than one record,
    high   the largest          } so that a single spike is still visible

at the place (step, tokens, seconds) of the bucket's last record. Smoothing is left to the page,
where the reader can change it. Values keep six significant digits.

Records come some at a time, and nobody knows how many there will be. So buckets begin with one
record each, and whenever there are eight times as many as wanted, each two that are neighbours
become one: memory does not depend on the length of a run, and sizes differ by a quarter at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

LIMIT = 1000
FINER = 8
"""How many times more buckets there may be until the last record has come."""


def buckets(count: int, *, limit: int = LIMIT) -> list[range]:
    """Split `count` records into at most `limit` runs whose sizes differ by one at most."""
    parts = min(count, limit)
    edges = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [range(first, last) for first, last in pairwise(edges)]


@dataclass(frozen=True)
class _Buckets:
    """Consecutive buckets: B of them, C curves."""

    records_B: npt.NDArray[np.int64]
    """How many records each holds."""
    places_BP: npt.NDArray[np.float64]
    """Step, tokens and seconds of the last record of each."""
    counts_BC: npt.NDArray[np.int64]
    """How many finite values."""
    sums_BC: npt.NDArray[np.float64]
    lows_BC: npt.NDArray[np.float64]
    highs_BC: npt.NDArray[np.float64]

    def merged(self, edges: npt.NDArray[np.int64]) -> _Buckets:
        """Fewer buckets, that begin at these ones."""
        last = np.append(edges[1:], len(self.records_B)) - 1
        return _Buckets(
            np.add.reduceat(self.records_B, edges),
            self.places_BP[last],
            np.add.reduceat(self.counts_BC, edges),
            np.add.reduceat(self.sums_BC, edges),
            np.minimum.reduceat(self.lows_BC, edges),
            np.maximum.reduceat(self.highs_BC, edges),
        )

    def followed_by(self, other: _Buckets) -> _Buckets:
        return _Buckets(
            *(np.concatenate(both) for both in zip(*map(_arrays, (self, other)), strict=True))
        )


def _arrays(one: _Buckets) -> tuple[npt.NDArray[Any], ...]:
    return tuple(vars(one).values())


class Plot:
    """Curves that grow with the records that come."""

    def __init__(self, names: Sequence[str], *, limit: int = LIMIT) -> None:
        self.names, self.limit = tuple(names), limit
        self.count = 0
        """Records so far."""
        self._size = 1
        """Records of a bucket."""
        self._buckets: _Buckets | None = None

    def add(self, values_BC: npt.NDArray[np.float64], places_BP: npt.NDArray[np.float64]) -> None:
        """Add what some records have for each name, with their steps, tokens and seconds."""
        if not len(values_BC):
            return
        self.count += len(values_BC)
        finite_BC = np.isfinite(values_BC)
        found = _Buckets(
            np.ones(len(values_BC), np.int64),
            places_BP,
            finite_BC.astype(np.int64),
            np.where(finite_BC, values_BC, 0.0),
            np.where(finite_BC, values_BC, np.inf),
            np.where(finite_BC, values_BC, -np.inf),
        )
        if self._buckets is not None:
            # Full ones are left alone; the last may have room.
            found = self._merge_open(self._buckets, found)
        while len(found.records_B) > FINER * self.limit:
            self._size *= 2
            found = found.merged(_edges(found.records_B, self._size))
        self._buckets = found

    def _merge_open(self, before: _Buckets, block: _Buckets) -> _Buckets:
        both = before.followed_by(block)
        return both if self._size == 1 else both.merged(_edges(both.records_B, self._size))

    def thinned(self) -> dict[str, Any]:
        """The curves as the page reads them; a name without any finite value gives none."""
        found = self._buckets
        if found is None:
            return {"step": [], "tokens": [], "seconds": [], "curves": {}}
        groups = buckets(len(found.records_B), limit=self.limit)
        found = found.merged(np.array([group[0] for group in groups]))
        band = len(groups) < self.count
        curves = {}
        for number, name in enumerate(self.names):
            counts = found.counts_BC[:, number]
            if not counts.any():
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = found.sums_BC[:, number] / counts
            curves[name] = {
                "mean": _shown(mean),
                "low": _shown(found.lows_BC[:, number]) if band else None,
                "high": _shown(found.highs_BC[:, number]) if band else None,
            }
        steps, tokens, seconds = found.places_BP.T
        return {
            "step": [int(one) for one in steps],
            "tokens": [int(one) for one in tokens],
            "seconds": [_rounded(one) for one in seconds],
            "curves": curves,
        }


def _edges(records: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Where new buckets of `size` records begin, if each of these goes whole into one of them."""
    begins = np.cumsum(records) - records
    return np.flatnonzero(np.diff(begins // size, prepend=-1))


def _shown(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [_rounded(one) if math.isfinite(one) else None for one in values.tolist()]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
