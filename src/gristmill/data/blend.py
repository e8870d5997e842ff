"""Which of several token sets sample i comes from, and which of that set's samples it is.

Two ways of mixing, both free of chance and of state:

    rotation   sample i stands at place i p mod n on a circle of n places, p about n / 1.618 and
               without common factor; set s owns m(s) neighbouring places, n together. Every round
               visits every place once, and any stretch of samples holds each set very nearly in
               proportion. The samples of a set before i are counted in logarithmic time, so nothing
               is stored, however long the run.

    greedy     Megatron's: sample k (counted from 0) comes from the set with the largest deficit
               w(s) max(k, 1) - taken(s), the first of equals

With n = all windows of all sets a round of the rotation is one epoch: every sample exactly once.

The greedy rule has to be followed step by step. To let numpy do that for many samples at a time,
the samples are cut into lanes whose starts are guessed from the weights; lanes whose guess turns
out wrong are run again from where the lane before ended, until all agree. Its floating-point ties
fall as the compiler of Megatron's helper decided: on ARM product and difference are rounded once
(fused), on x86 twice, so the same weights give another order there. Both are offered.
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


@dataclass(frozen=True)
class Choice:
    """For some samples: the number of the set, and of the sample within that set."""

    sets: np.ndarray
    samples: np.ndarray


class Blend(Protocol):
    """How several sets are mixed."""

    def sets(self, begin: int, end: int) -> np.ndarray:
        """The sets that samples begin to end (not included) come from."""
        ...

    def taken(self, begin: int) -> np.ndarray:
        """How many samples of each set come before one."""
        ...


def choose(blend: Blend, samples: np.ndarray) -> Choice:
    """Where samples come from; they should lie close together, as those of one step do."""
    begin, end = int(samples.min()), int(samples.max()) + 1
    sets = blend.sets(begin, end)
    order = np.argsort(sets, kind="stable")
    counts = np.bincount(sets, minlength=int(sets.max()) + 1)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.empty(len(sets), np.int64)
    numbers[order] = np.arange(len(sets)) - before
    numbers += blend.taken(begin)[sets]
    chosen = samples - begin
    return Choice(sets[chosen], numbers[chosen])


# ------------------------------------------------------------------ the rotation


@dataclass(frozen=True)
class Rotation:
    """Sets in proportion to the places they own on a circle."""

    places: tuple[int, ...]

    @cached_property
    def round(self) -> int:
        return sum(self.places)

    @cached_property
    def step(self) -> int:
        """Near the golden section of the round, and without common factor."""
        step = max(1, round(self.round * (math.sqrt(5) - 1) / 2))
        while math.gcd(step, self.round) > 1:
            step -= 1
        return step

    def sets(self, begin: int, end: int) -> np.ndarray:
        first = begin * self.step % self.round
        borders = np.cumsum(self.places)
        # Multiples of the step overflow beyond 2^63, so long stretches are taken in pieces.
        longest = max(1, (1 << 62) // self.round)
        parts = []
        for at in range(0, end - begin, longest):
            count = min(longest, end - begin - at)
            offset = (first + at * self.step) % self.round
            turns = (np.arange(count, dtype=np.int64) * self.step + offset) % self.round
            parts.append(np.searchsorted(borders, turns, side="right"))
        return np.concatenate(parts)

    def taken(self, begin: int) -> np.ndarray:
        rounds, inside = divmod(begin, self.round)
        below = [self._below(inside, border) for border in np.cumsum(self.places).tolist()]
        return np.asarray(np.diff(below, prepend=0) + rounds * np.array(self.places))

    def _below(self, count: int, border: int) -> int:
        """How many of the first `count` samples stand at places below a border.

        Place x is below it if floor((x + n - border) / n) is 0, so the others are counted.
        """
        n, step = self.round, self.step
        high = _floor_sum(count, n, step, n - border) - _floor_sum(count, n, step, 0)
        return count - high


def proportional(weights: Sequence[float]) -> Rotation:
    """A blend by weights, exact to twelve digits."""
    total = math.fsum(weights)
    return Rotation(tuple(max(1, round(weight / total * _CIRCLE)) for weight in weights))


def _floor_sum(count: int, modulus: int, factor: int, offset: int) -> int:
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


@dataclass(frozen=True)
class Greedy:
    """The sets in Megatron's order; after the last sample it begins again."""

    choices: np.ndarray
    """The set of each sample."""
    counts: np.ndarray
    """Samples of each set before every 4096th sample."""
    total: np.ndarray
    """Samples of each set in all."""

    def sets(self, begin: int, end: int) -> np.ndarray:
        return self.choices.take(np.arange(begin, end), mode="wrap").astype(np.int64)

    def taken(self, begin: int) -> np.ndarray:
        rounds, inside = divmod(begin, len(self.choices))
        block = inside // _BLOCK
        part = self.choices[block * _BLOCK : inside]
        some = np.bincount(part, minlength=len(self.total))
        return np.asarray(self.counts[block] + some + rounds * self.total)


def build_greedy(choices: np.ndarray, *, sets: int) -> Greedy:
    """The blend for the sets of all samples."""
    blocks = [
        np.bincount(choices[begin : begin + _BLOCK], minlength=sets)
        for begin in range(0, len(choices), _BLOCK)
    ]
    counts = np.cumsum([np.zeros(sets, np.int64), *blocks], axis=0)
    return Greedy(choices, counts, total=counts[-1])


def fused_here() -> bool:
    """Whether Megatron's compiled helper rounds once on this kind of machine."""
    return platform.machine().lower() in ("aarch64", "arm64")


def greedy_by_weight(weights: Sequence[float], *, size: int, fused: bool) -> np.ndarray:
    """The sets of `size` samples, for weights that add up to one."""
    return _in_lanes(_Rule(np.array(weights, np.float64)[:, None], fused=fused), size=size)


def greedy_exhaustive(sizes: Sequence[int], *, fused: bool) -> np.ndarray:
    """The sets of all samples; a set that is spent is left out."""
    limits = np.array(sizes, np.int64)[:, None]
    rule = _Rule(limits / np.float64(limits.sum()), fused=fused, limits=limits)
    return _in_lanes(rule, size=int(limits.sum()))


@dataclass(frozen=True)
class _Rule:
    """Which set is next; arrays are columns, a row for each set."""

    weights: np.ndarray
    fused: bool
    limits: np.ndarray | None = None
    """Samples that a set has, if it is left out then."""


@dataclass(frozen=True)
class _Lanes:
    """Many stretches of the samples that are followed at the same time, a column for each."""

    choices: np.ndarray
    """The sets of their samples."""
    ends: np.ndarray
    """Samples taken of each set when a lane ends."""


def _in_lanes(rule: _Rule, *, size: int) -> np.ndarray:
    count = max(1, min(_LANES, size // _SHORTEST_LANE))
    length = -(-size // count)
    firsts = np.arange(count, dtype=np.int64) * length
    starts = _likely_counts(rule.weights, firsts)
    lanes = _follow(rule, firsts=firsts, starts=starts, length=length)
    while True:
        wrong = np.flatnonzero((starts[:, 1:] != lanes.ends[:, :-1]).any(axis=0)) + 1
        if not len(wrong):
            return lanes.choices.T.reshape(-1)[:size]
        starts[:, wrong] = lanes.ends[:, wrong - 1]
        again = _follow(rule, firsts=firsts[wrong], starts=starts[:, wrong], length=length)
        lanes.choices[:, wrong], lanes.ends[:, wrong] = again.choices, again.ends


def _likely_counts(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """How many samples of each set probably come before some: shares rounded down, and one more
    for those with the largest rest."""
    shares = weights * samples
    counts = np.floor(shares)
    missing = samples - counts.sum(axis=0)
    rank = np.argsort(np.argsort(counts - shares, axis=0, kind="stable"), axis=0, kind="stable")
    return np.asarray(counts + (rank < missing))


def _follow(rule: _Rule, *, firsts: np.ndarray, starts: np.ndarray, length: int) -> _Lanes:
    """Follow the rule from the samples `firsts`, before which `starts` were taken."""
    taken, lanes = starts.copy(), np.arange(len(firsts))
    choices = np.empty((length, len(firsts)), np.int16)
    halves = _halves(rule.weights)
    deficits, rounding = np.empty_like(taken), np.zeros_like(taken)
    for place in range(length):
        step = np.maximum(firsts + place, 1).astype(np.float64)
        np.multiply(rule.weights, step, out=deficits)
        if rule.fused:
            _lost(halves, _halves(step), deficits, out=rounding)
        deficits -= taken
        if rule.fused:
            deficits += rounding
        if rule.limits is not None:
            deficits[taken >= rule.limits] = -np.inf
        best = deficits.argmax(axis=0)
        choices[place] = best
        taken[best, lanes] += 1
    return _Lanes(choices, taken)


@dataclass(frozen=True)
class _Halves:
    """A number as the sum of two with half its digits, whose products are exact."""

    high: np.ndarray
    low: np.ndarray


def _halves(number: np.ndarray) -> _Halves:
    scaled = number * 134217729.0
    high = scaled - (scaled - number)
    return _Halves(high, number - high)


def _lost(left: _Halves, right: _Halves, product: np.ndarray, *, out: np.ndarray) -> None:
    """What rounding took from a product, exactly (after Dekker)."""
    np.multiply(left.high, right.high, out=out)
    out -= product
    out += left.low * right.high
    out += left.high * right.low
    out += left.low * right.low
