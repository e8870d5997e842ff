"""Conversations packed into samples, so that little of a sample is padding.

    sample 0   | conversation 7                        | conversation 2  | pad |
    sample 1   | conversation 0         | conversation 5     | conversation 9  |

A sample holds T + 1 ids. The longest conversations are placed first, each into the sample with the
least room that is enough for it (best fit, decreasing). One that is longer than a sample is cut at
its end; what has nothing left to learn then is left out. Every conversation is in exactly one
sample. Samples are visited in an order that each epoch draws anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gristmill.data.sampling import TokenSpans


@dataclass(frozen=True)
class Packing:
    """Which spans of a token set form each sample, padding included."""

    firsts: np.ndarray
    """The number of each sample's first span, and that of all spans at the end."""
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
    """What became of the conversations of a split."""

    conversations: int
    cut: int
    """Of these, such that lose part of an answer."""
    dropped: int
    """Of these, such that have no answer before their end is cut off."""
    tokens: int
    """Ids in samples, without padding."""
    loss_tokens: int
    """Those that count in the loss."""


def pack(
    starts: np.ndarray, loss_mask: np.ndarray, *, length: int, padding: int, together: bool
) -> tuple[Packing, PackingCounts]:
    """Pack the conversations between `starts` into samples of `length` ids, or with `together` off
    give each a sample of its own. `padding` is the position of `length` ids to fill samples with.
    Ids after the last one to learn are not needed and take no room."""
    begins, ends = starts[:-1], starts[1:]
    limits = np.minimum(ends, begins + length)
    before = np.concatenate(([0], np.cumsum(loss_mask, dtype=np.int64)))
    places = np.flatnonzero(loss_mask)
    kept = before[limits] > before[begins]
    # The last id to learn before each limit; meaningless where there is none.
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
    """Packed samples one after the other, over and over."""

    packing: Packing

    @property
    def epoch(self) -> int:
        return len(self.packing)

    def spans(self, samples: np.ndarray) -> TokenSpans:
        return self.packing.spans(samples % self.epoch)


@dataclass(frozen=True)
class PackedShuffled:
    """Packed samples, every one once in each epoch, in an order of its own."""

    packing: Packing
    seed: int
    _cached: dict[int, np.ndarray] = field(default_factory=dict, init=False, compare=False)

    @property
    def epoch(self) -> int:
        return len(self.packing)

    def spans(self, samples: np.ndarray) -> TokenSpans:
        epochs, places = np.divmod(samples, self.epoch)
        chosen = np.empty(len(samples), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = self._permutation(int(epoch))[places[here]]
        return self.packing.spans(chosen)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._cached:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._cached.clear()
            self._cached[epoch] = generator.permutation(self.epoch)
        return self._cached[epoch]
