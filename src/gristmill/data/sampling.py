"""Sample orders: which tokens form sample i, a pure function of the seed and i.

So resuming needs no saved state. A range of a token set is read in samples of T + 1 tokens: T
inputs, and the same shifted by one as targets. Samples are numbered from 0 without end; an index
maps a number to the spans of tokens that form the sample, end to end. In these orders a sample is a
single span, a window:

    shuffled     sample i is window p(i mod m) of epoch i div m, where each epoch cuts the text into
                 m windows at a random offset and p is that epoch's random permutation
    random       sample i starts at hash(seed, i) modulo the number of possible starts
    sequential   sample i is window i mod m of the text in file order; neighbours share one token

The fourth order, Megatron's, is in `megatron_order.py`. Conversations are packed into samples to
keep padding small, and a sample consists of several spans:

    sample 0   | conversation 7                        | conversation 2  | pad |
    sample 1   | conversation 0         | conversation 5     | conversation 9  |

The longest conversations are placed first, each into the sample with the least room that suffices
(best-fit decreasing). One that is longer than a sample is truncated, and dropped if no answer is
left. Every other conversation is in exactly one sample. Each epoch visits the samples in a new
random order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

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
    """Maps sample numbers to spans of tokens."""

    @property
    def epoch(self) -> int:
        """Samples in one epoch."""
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


class _EpochOrder:
    """A random order for each epoch. The newest is cached: 8 bytes per sample."""

    def __init__(self, size: int, draw: Callable[[int], np.ndarray]) -> None:
        self._size, self._draw = size, draw
        self._newest = (-1, np.empty(0, np.int64))

    def at(self, samples: np.ndarray) -> np.ndarray:
        """The items at the positions of some samples, which are numbered without end."""
        epochs, places = np.divmod(samples, self._size)
        result = np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs).tolist():
            if epoch != self._newest[0]:
                self._newest = (epoch, self._draw(epoch))
            chosen = epochs == epoch
            result[chosen] = self._newest[1][places[chosen]]
        return result


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[seed, epoch]))


@dataclass(frozen=True)
class ShuffledWindows(Windows):
    """Every epoch visits the whole text once, in windows cut at a new offset."""

    @property
    def epoch(self) -> int:
        """Windows in one epoch: one fewer than fit, which leaves room for the offset."""
        return max(1, (len(self.tokens) - 1) // self.sequence - 1)

    def starts(self, samples: np.ndarray) -> np.ndarray:
        return self._order.at(samples)

    @cached_property
    def _order(self) -> _EpochOrder:
        return _EpochOrder(self.epoch, self._draw)

    def _draw(self, epoch: int) -> np.ndarray:
        """The starts of all windows of an epoch, in its order."""
        generator = _generator(self.seed, epoch)
        room = len(self.tokens) - 1 - self.epoch * self.sequence
        offset = self.tokens.start + int(generator.integers(0, room + 1))
        return generator.permutation(self.epoch) * self.sequence + offset


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
    """The text from beginning to end, repeatedly."""

    def starts(self, samples: np.ndarray) -> np.ndarray:
        return self.tokens.start + samples.astype(np.int64) % self.epoch * self.sequence


def spread_samples(count: int, *, most: int) -> np.ndarray:
    """Up to `most` sample numbers, spread evenly over `count` samples."""
    return np.linspace(0, count, min(most, count), endpoint=False).astype(np.int64)


# ------------------------------------------------------------------ packed conversations


@dataclass(frozen=True)
class Packing:
    """Which spans of a token set form each sample, padding included."""

    firsts: np.ndarray
    """The number of each sample's first span, followed by the number of spans."""
    begins: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.firsts) - 1

    def spans(self, samples: np.ndarray) -> TokenSpans:
        """The spans of some samples, those of the first one first."""
        firsts = self.firsts[samples]
        counts = self.firsts[samples + 1] - firsts
        numbers = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        numbers += np.arange(len(numbers))
        return TokenSpans(self.begins[numbers], self.counts[numbers])


class PackingCounts(NamedTuple):
    """Statistics on the conversations of a split."""

    conversations: int
    cut: int
    """Conversations that lose part of an answer."""
    dropped: int
    """Conversations that have no answer left after truncation."""
    tokens: int
    """Ids in samples, without padding."""
    loss_tokens: int
    """Ids that count in the loss."""


def pack(
    starts: np.ndarray, loss_mask: np.ndarray, *, length: int, padding: int, together: bool
) -> tuple[Packing, PackingCounts]:
    """Pack the conversations between `starts` into samples of `length` ids; without `together` each
    gets a sample of its own. `padding` is the position of `length` ids of padding. Ids after the
    last one in the loss mask are left out."""
    begins, ends = starts[:-1], starts[1:]
    limits = np.minimum(ends, begins + length)
    before = np.concatenate(([0], np.cumsum(loss_mask, dtype=np.int64)))
    places = np.flatnonzero(loss_mask)
    kept = before[limits] > before[begins]
    # The last id in the loss mask before each limit.
    last = places[before[limits][kept] - 1] if kept.any() else np.empty(0, np.int64)
    counts = np.zeros(len(begins), np.int64)
    counts[kept] = last + 1 - begins[kept]
    numbers = np.flatnonzero(kept)
    groups = _best_fit(counts[numbers], length) if together else [[n] for n in range(len(numbers))]
    firsts, span_begins, span_counts = [0], list[int](), list[int]()
    for group in groups:
        room = length
        for place in group:
            number = numbers[place]
            span_begins.append(int(begins[number]))
            span_counts.append(int(counts[number]))
            room -= int(counts[number])
        if room:
            span_begins.append(padding)
            span_counts.append(room)
        firsts.append(len(span_begins))
    packing = Packing(*(np.array(one, np.int64) for one in (firsts, span_begins, span_counts)))
    return packing, PackingCounts(
        conversations=len(begins),
        cut=int((kept & (before[ends] > before[limits])).sum()),
        dropped=int((~kept).sum()),
        tokens=int(counts.sum()),
        loss_tokens=int((before[limits] - before[begins]).sum()),
    )


def _best_fit(sizes: np.ndarray, length: int) -> list[list[int]]:
    """Groups of sizes that fit into `length`, the largest placed first."""
    groups = list[list[int]]()
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set if some group has room r
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[place])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            number = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, number = length, len(groups)
            groups.append([])
        groups[number].append(place)
        left = room - size
        if left:
            by_room.setdefault(left, []).append(number)
            rooms |= 1 << left
    return groups


@dataclass(frozen=True)
class PackedInOrder:
    """Packed samples in order, repeatedly."""

    packing: Packing

    @property
    def epoch(self) -> int:
        return len(self.packing)

    def spans(self, samples: np.ndarray) -> TokenSpans:
        return self.packing.spans(samples % self.epoch)


@dataclass(frozen=True)
class PackedShuffled:
    """Packed samples, each once per epoch, in a random order."""

    packing: Packing
    seed: int

    @property
    def epoch(self) -> int:
        return len(self.packing)

    def spans(self, samples: np.ndarray) -> TokenSpans:
        return self.packing.spans(self._order.at(samples))

    @cached_property
    def _order(self) -> _EpochOrder:
        size, seed = self.epoch, self.seed
        return _EpochOrder(size, lambda epoch: _generator(seed, epoch).permutation(size))
