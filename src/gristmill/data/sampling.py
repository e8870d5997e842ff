"""Which tokens form sample i: a pure function of the seed, so that resuming is only arithmetic.

A text of n tokens between two positions is read in samples of T + 1 tokens: T inputs, and the same
shifted by one as targets. Samples are numbered from 0 for ever; an index maps the number to the
pieces of text that form the sample, end to end. In these orders a sample is one piece, a window:

    shuffled     sample i is window p(i mod m) of epoch i div m, where each epoch cuts the text into
                 m windows at a random offset and p is that epoch's random permutation
    random       sample i starts at hash(seed, i) modulo the number of possible starts
    sequential   sample i is window i mod m of the text as it stands; neighbours share one token

The permutation of one epoch is held in memory: 8 bytes for each window. The fourth order, that of
Megatron, has a module of its own.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gristmill.base.hashing import mix


@dataclass(frozen=True)
class Stretch:
    """Tokens `begin` to `end` (not included) of a token set."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Pieces:
    """Pieces of one token set which, end to end, form samples of equal length."""

    begins: np.ndarray
    """Position of each piece's first token."""
    counts: np.ndarray
    """Tokens of each piece, at least one."""

    def __len__(self) -> int:
        return len(self.begins)


class SampleIndex(Protocol):
    """What samples are made of."""

    @property
    def epoch(self) -> int:
        """Samples that visit the whole text once."""
        ...

    def pieces(self, samples: np.ndarray) -> Pieces:
        """The pieces of some samples, those of the first sample first."""
        ...


@dataclass(frozen=True)
class Windows(abc.ABC):
    """What the orders of single windows have in common."""

    stretch: Stretch
    sequence: int
    seed: int

    @property
    def epoch(self) -> int:
        """Windows in one epoch."""
        return (len(self.stretch) - 1) // self.sequence

    @abc.abstractmethod
    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Positions of the first token of each sample."""

    def pieces(self, samples: np.ndarray) -> Pieces:
        starts = self.starts(samples)
        return Pieces(starts, np.full(len(starts), self.sequence + 1, np.int64))


@dataclass(frozen=True)
class ShuffledWindows(Windows):
    """Every epoch visits the whole text once, in windows cut at a new offset."""

    _kept: dict[int, np.ndarray] = field(default_factory=dict, init=False, compare=False)

    @property
    def epoch(self) -> int:
        """Windows in one epoch: one fewer than fit, which leaves room for the offset."""
        return max(1, (len(self.stretch) - 1) // self.sequence - 1)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(samples, self.epoch)
        result = np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._epoch_starts(int(epoch))[places[chosen]]
        return result

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        if epoch not in self._kept:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            room = len(self.stretch) - 1 - self.epoch * self.sequence
            offset = self.stretch.begin + int(generator.integers(0, room + 1))
            order = generator.permutation(self.epoch) * self.sequence + offset
            self._kept.clear()
            self._kept[epoch] = order
        return self._kept[epoch]


@dataclass(frozen=True)
class RandomWindows(Windows):
    """Every sample starts at an independent, uniformly random place."""

    def starts(self, samples: np.ndarray) -> np.ndarray:
        possible = np.uint64(len(self.stretch) - self.sequence)
        key = mix(np.array([self.seed], np.uint64))
        places = mix(samples.astype(np.uint64) + key) % possible
        return self.stretch.begin + places.astype(np.int64)


@dataclass(frozen=True)
class SequentialWindows(Windows):
    """The text from its beginning to its end, again and again."""

    def starts(self, samples: np.ndarray) -> np.ndarray:
        return self.stretch.begin + samples.astype(np.int64) % self.epoch * self.sequence


def spread_windows(stretch: Stretch, *, sequence: int, windows: int) -> np.ndarray:
    """Starts of up to `windows` windows that do not overlap, spread evenly over the text."""
    fitting = (len(stretch) - 1) // sequence
    chosen = np.linspace(0, fitting, min(windows, fitting), endpoint=False).astype(np.int64)
    return stretch.begin + chosen * sequence
