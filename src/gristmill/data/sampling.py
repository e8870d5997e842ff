"""Which tokens form sample i: a pure function of the seed, so that resuming is only arithmetic.

A range of a token set is read in samples of T + 1 tokens: T inputs, and the same shifted by one as
targets. Samples are numbered from 0 without end; an index maps the number to the spans that form
the sample, end to end. In these orders a sample is one span, a window:

    shuffled     sample i is window p(i mod m) of epoch i div m, where each epoch cuts the text into
                 m windows at a random offset and p is that epoch's random permutation
    random       sample i starts at hash(seed, i) modulo the number of possible starts
    sequential   sample i is window i mod m of the text as it stands; neighbours share one token

The permutation of one epoch is held in memory, 8 bytes per window. The fourth order, Megatron's, is
in `megatron_order`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gristmill.base.hashing import mix


@dataclass(frozen=True)
class TokenSpans:
    """Spans of one token set that form samples of equal length when joined end to end."""

    begins: np.ndarray
    """Position of each span's first token."""
    counts: np.ndarray
    """Tokens of each span, at least one."""


class SampleIndex(Protocol):
    """Maps sample numbers to tokens."""

    @property
    def epoch(self) -> int:
        """Samples that visit the whole text once."""
        ...

    def spans(self, samples: np.ndarray) -> TokenSpans:
        """The spans of some samples, those of the first sample first."""
        ...


@dataclass(frozen=True)
class Windows(abc.ABC):
    """Base of the orders in which every sample is a single window."""

    tokens: range
    sequence: int
    seed: int

    @property
    def epoch(self) -> int:
        """Windows in one epoch."""
        return (len(self.tokens) - 1) // self.sequence

    @abc.abstractmethod
    def starts(self, samples: np.ndarray) -> np.ndarray:
        """Positions of the first token of each sample."""

    def spans(self, samples: np.ndarray) -> TokenSpans:
        starts = self.starts(samples)
        return TokenSpans(starts, np.full(len(starts), self.sequence + 1, np.int64))


@dataclass(frozen=True)
class ShuffledWindows(Windows):
    """Every epoch visits the whole text once, in windows cut at a new offset."""

    _cached: dict[int, np.ndarray] = field(default_factory=dict, init=False, compare=False)

    @property
    def epoch(self) -> int:
        """Windows in one epoch: one fewer than fit, which leaves room for the offset."""
        return max(1, (len(self.tokens) - 1) // self.sequence - 1)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(samples, self.epoch)
        result = np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._epoch_starts(int(epoch))[places[chosen]]
        return result

    def _epoch_starts(self, epoch: int) -> np.ndarray:
        if epoch not in self._cached:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            room = len(self.tokens) - 1 - self.epoch * self.sequence
            offset = self.tokens.start + int(generator.integers(0, room + 1))
            order = generator.permutation(self.epoch) * self.sequence + offset
            self._cached.clear()
            self._cached[epoch] = order
        return self._cached[epoch]


@dataclass(frozen=True)
class RandomWindows(Windows):
    """Every sample starts at an independent, uniformly random position."""

    def starts(self, samples: np.ndarray) -> np.ndarray:
        possible = np.uint64(len(self.tokens) - self.sequence)
        key = mix(np.array([self.seed], np.uint64))
        places = mix(samples.astype(np.uint64) + key) % possible
        return self.tokens.start + places.astype(np.int64)


@dataclass(frozen=True)
class SequentialWindows(Windows):
    """The text from beginning to end, over and over."""

    def starts(self, samples: np.ndarray) -> np.ndarray:
        return self.tokens.start + samples.astype(np.int64) % self.epoch * self.sequence


def spread_samples(count: int, *, most: int) -> np.ndarray:
    """The numbers of up to `most` of so many samples, spread evenly over them."""
    return np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64)
