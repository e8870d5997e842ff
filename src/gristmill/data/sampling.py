"""Which tokens form sample i: a pure function of the seed, so that resuming is only arithmetic.

A text of n tokens between two positions is read in windows of T + 1 tokens: T inputs, and the same
shifted by one as targets. Samples are numbered from 0 for ever; an index maps the number to the
window's first token.

    shuffled   sample i is window p(i mod m) of epoch i div m, where each epoch cuts the text into m
               windows at a random offset and p is that epoch's random permutation
    random     sample i starts at hash(seed, i) modulo the number of possible starts

The permutation of one epoch is held in memory: 8 bytes for each window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, UserError


@dataclass(frozen=True)
class Stretch:
    """Tokens `begin` to `end` (not included) of a token set."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


class SampleIndex(Protocol):
    """Where samples begin."""

    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Positions of the first token of each sample."""
        ...


def build_index(
    order: Literal["shuffled", "random"], stretch: Stretch, *, sequence: int, seed: int
) -> SampleIndex:
    """The index for an order; refuses a text shorter than one window."""
    if len(stretch) <= sequence:
        raise UserError(
            f"the training text has {len(stretch)} tokens, too few for one window of "
            f"{sequence} + 1",
            where="data.paths",
            remedy="prepare more text, or shorten data.sequence",
            exit=Exit.DATA,
        )
    if order == "random":
        return RandomWindows(stretch, sequence, seed)
    return ShuffledWindows(stretch, sequence, seed)


@dataclass
class ShuffledWindows:
    """Every epoch visits the whole text once, in windows cut at a new offset."""

    stretch: Stretch
    sequence: int
    seed: int
    _epoch: int = field(default=-1, init=False)
    _order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64), init=False)

    @property
    def windows(self) -> int:
        """Windows in one epoch: one fewer than fit, which leaves room for the offset."""
        return max(1, (len(self.stretch) - 1) // self.sequence - 1)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(samples, self.windows)
        result = np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._epoch_starts(int(epoch))[places[chosen]]
        return result

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            room = len(self.stretch) - 1 - self.windows * self.sequence
            offset = self.stretch.begin + int(generator.integers(0, room + 1))
            self._order = generator.permutation(self.windows) * self.sequence + offset
            self._epoch = epoch
        return self._order


@dataclass(frozen=True)
class RandomWindows:
    """Every sample starts at an independent, uniformly random place."""

    stretch: Stretch
    sequence: int
    seed: int

    def starts(self, samples: np.ndarray) -> np.ndarray:
        possible = np.uint64(len(self.stretch) - self.sequence)
        key = _mix(np.array([self.seed], np.uint64))
        places = _mix(samples.astype(np.uint64) + key) % possible
        return self.stretch.begin + places.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit numbers that leaves no visible pattern (the finaliser of
    splitmix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)


def spread_windows(stretch: Stretch, *, sequence: int, windows: int) -> np.ndarray:
    """Starts of up to `windows` windows that do not overlap, spread evenly over the text."""
    fitting = (len(stretch) - 1) // sequence
    chosen = np.linspace(0, fitting, min(windows, fitting), endpoint=False).astype(np.int64)
    return stretch.begin + chosen * sequence
