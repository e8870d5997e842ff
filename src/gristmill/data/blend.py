"""Blends of token sets: which set sample i of a run comes from, and which of its samples it is.

There are two ways to blend, both deterministic and stateless. A third, with weights that change
over the run, is in `mixture.py`:

    rotation   sample i falls on place i p mod n of a circle of n places, with p about n / 1.618
               and coprime to n; set s owns m(s) adjacent places, and the m(s) add up to n. Each
               round visits every place once, and any range of samples contains the sets very
               nearly in proportion. The samples of a set before i are counted in logarithmic time,
               so nothing is stored, however long the run.

    greedy     Megatron's: sample k (counted from 0) comes from the set with the largest deficit
               w(s) max(k, 1) - taken(s), the first of equals

With n = all windows of all sets, a round of the rotation is one epoch: every sample exactly once.

The greedy choice depends on all choices before it. To let numpy make many at a time, the samples
are cut into lanes whose starting counts are guessed from the weights; a lane with a wrong guess is
computed again from where the lane before it ended, until all agree. Floating-point ties depend on
the compiler of Megatron's helper: on ARM the product and difference are rounded once (fused), on
x86 twice, so the same weights give a different order there. Both are available.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

_CIRCLE = 1 << 40
_BLOCK = 1 << 12
_LANES = 1 << 15
_SHORTEST_LANE = 64


class Blend(Protocol):
    """Maps every sample to the set that it comes from."""

    def sets(self, begin: int, end: int) -> np.ndarray:
        """The sets that samples `begin` to `end` (exclusive) come from."""
        ...

    def taken(self, begin: int) -> np.ndarray:
        """How many samples of each set come before sample `begin`."""
        ...


@dataclass(frozen=True)
class BlendedSamples:
    """Where each of some samples comes from: the number of its set, and its number in that set."""

    sets: np.ndarray
    samples: np.ndarray


def choose(blend: Blend, samples: np.ndarray) -> BlendedSamples:
    """The sets of some samples, which should be close together, like those of one step."""
    begin, end = int(samples.min()), int(samples.max()) + 1
    sets = blend.sets(begin, end)
    order = np.argsort(sets, kind="stable")
    counts = np.bincount(sets, minlength=int(sets.max()) + 1)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.empty(len(sets), np.int64)
    numbers[order] = np.arange(len(sets)) - before
    numbers += blend.taken(begin)[sets]
    chosen = samples - begin
    return BlendedSamples(sets[chosen], numbers[chosen])


# ------------------------------------------------------------------ the rotation


@dataclass(frozen=True)
class Rotation:
    """Visits the sets in proportion to the places they own on a circle."""

    places: tuple[int, ...]

    @cached_property
    def round(self) -> int:
        return sum(self.places)

    @cached_property
    def step(self) -> int:
        """Near the golden section of the round, and coprime to it."""
        step = max(1, round(self.round * (math.sqrt(5) - 1) / 2))
        while math.gcd(step, self.round) > 1:
            step -= 1
        return step

    def sets(self, begin: int, end: int) -> np.ndarray:
        assert (end - begin) * self.round < 1 << 62, "the samples of a step do not overflow"
        offset = begin * self.step % self.round
        places = (np.arange(end - begin, dtype=np.int64) * self.step + offset) % self.round
        return np.searchsorted(np.cumsum(self.places), places, side="right")

    def taken(self, begin: int) -> np.ndarray:
        n, step = self.round, self.step
        rounds, inside = divmod(begin, n)
        # Place x lies below a border if floor((x + n - border) / n) is 0, so we count the others.
        low = floor_sum(inside, n, step, 0)
        below = [
            inside - (floor_sum(inside, n, step, n - border) - low)
            for border in np.cumsum(self.places).tolist()
        ]
        return np.asarray(np.diff(below, prepend=0) + rounds * np.array(self.places))


def proportional(weights: Sequence[float]) -> Rotation:
    """A blend by weights, exact to twelve digits."""
    total = math.fsum(weights)
    return Rotation(tuple(max(1, round(weight / total * _CIRCLE)) for weight in weights))


def floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
    """The sum of floor((factor i + offset) / modulus) over i from 0 to count - 1, by the steps of
    Euclid's algorithm."""
    total = 0
    while count > 0:
        total += (factor // modulus) * count * (count - 1) // 2 + (offset // modulus) * count
        factor, offset = factor % modulus, offset % modulus
        highest = factor * count + offset
        if highest < modulus:
            break
        count, offset = divmod(highest, modulus)
        modulus, factor = factor, modulus
    return total


# ------------------------------------------------------------------ Megatron's way


class Greedy:
    """The sets in Megatron's order, which repeats after the last sample."""

    def __init__(self, choices: np.ndarray, *, sets: int) -> None:
        self.choices = choices
        """The set of each sample."""
        blocks = [
            np.bincount(choices[begin : begin + _BLOCK], minlength=sets)
            for begin in range(0, len(choices), _BLOCK)
        ]
        self._counts = np.cumsum([np.zeros(sets, np.int64), *blocks], axis=0)
        """Samples of each set before every block of samples, and in all."""

    def sets(self, begin: int, end: int) -> np.ndarray:
        return self.choices.take(np.arange(begin, end), mode="wrap").astype(np.int64)

    def taken(self, begin: int) -> np.ndarray:
        rounds, inside = divmod(begin, len(self.choices))
        block = inside // _BLOCK
        total = self._counts[-1]
        partial = np.bincount(self.choices[block * _BLOCK : inside], minlength=len(total))
        return np.asarray(self._counts[block] + partial + rounds * total)


def fused_here() -> bool:
    """Whether Megatron's compiled helper rounds once on this kind of machine."""
    return platform.machine().lower() in ("aarch64", "arm64")


def greedy_exhaustive(sizes: Sequence[int], *, fused: bool) -> np.ndarray:
    """The sets of all samples; a set is left out once it is used up."""
    total = sum(sizes)
    weights = np.array(sizes, np.int64) / np.float64(total)
    return greedy_by_weight(weights, size=total, fused=fused, limits=sizes)


def greedy_by_weight(
    weights: Sequence[float] | np.ndarray,
    *,
    size: int,
    fused: bool,
    limits: Sequence[int] | None = None,
) -> np.ndarray:
    """The sets of `size` samples, for weights that add up to one. `limits`: the samples of each
    set, after which it is left out."""
    # Arrays have a row for each set, and a column for each lane.
    column = np.array(weights, np.float64)[:, None]
    limit = None if limits is None else np.array(limits, np.int64)[:, None]
    count = max(1, min(_LANES, size // _SHORTEST_LANE))
    length = -(-size // count)
    firsts = np.arange(count, dtype=np.int64) * length
    starts = _likely_counts(column, firsts)
    choices, ends = np.empty((length, count), np.int16), np.empty_like(starts)
    wrong = np.arange(count)
    while len(wrong):
        taken = starts[:, wrong]
        choices[:, wrong] = _follow_lanes(
            column, firsts[wrong], taken, length=length, fused=fused, limits=limit
        )
        ends[:, wrong] = taken
        wrong = np.flatnonzero((starts[:, 1:] != ends[:, :-1]).any(axis=0)) + 1
        starts[:, wrong] = ends[:, wrong - 1]
    return choices.T.reshape(-1)[:size]


def _likely_counts(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """A guess of how many samples of each set come before a sample: the weights' shares rounded
    down, plus one for those with the largest remainders."""
    shares = weights * samples
    counts = np.floor(shares)
    missing = samples - counts.sum(axis=0)
    rank = np.argsort(np.argsort(counts - shares, axis=0, kind="stable"), axis=0, kind="stable")
    return np.asarray(counts + (rank < missing))


def _follow_lanes(
    weights: np.ndarray,
    firsts: np.ndarray,
    taken: np.ndarray,
    *,
    length: int,
    fused: bool,
    limits: np.ndarray | None,
) -> np.ndarray:
    """The sets of `length` samples from each of `firsts` on; adds them to the counts `taken`."""
    lanes = np.arange(len(firsts))
    choices = np.empty((length, len(firsts)), np.int16)
    deficits, rounding = np.empty_like(taken), np.zeros_like(taken)
    for place in range(length):
        step = np.maximum(firsts + place, 1).astype(np.float64)
        np.multiply(weights, step, out=deficits)
        if fused:
            _rounding_error(weights, step, deficits, out=rounding)
        deficits -= taken
        if fused:
            deficits += rounding
        if limits is not None:
            deficits[taken >= limits] = -np.inf
        best = deficits.argmax(axis=0)
        choices[place] = best
        taken[best, lanes] += 1
    return choices


def _rounding_error(
    left: np.ndarray, right: np.ndarray, product: np.ndarray, *, out: np.ndarray
) -> None:
    """The exact rounding error of a product (Dekker): each factor is split into two numbers with
    half its digits, whose products are exact."""
    left_scaled, right_scaled = left * 134217729.0, right * 134217729.0
    left_high = left_scaled - (left_scaled - left)
    right_high = right_scaled - (right_scaled - right)
    left_low, right_low = left - left_high, right - right_high
    np.multiply(left_high, right_high, out=out)
    out -= product
    out += left_low * right_high
    out += left_high * right_low
    out += left_low * right_low
