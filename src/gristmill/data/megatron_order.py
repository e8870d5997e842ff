"""The sample order of Megatron-LM, index for index: the same files, seed and settings give the same
samples.

The rows of a set are Megatron's sequences, or the documents of the other formats. With n rows of T
tokens together, N samples of L + 1 tokens asked for, and one legacy RandomState(seed) for all:

    epochs     E   the fewest with E T >= N L + 1
    documents  the n rows E times, shuffled as one          what all rows in this order hold, end to
    samples    row and offset of token j L of that text,    end, is one text of E T tokens, cut into
               for j = 0 ... K, K = (E T - 1) div L         K samples that share their border tokens
    shuffle    0 ... K - 1, shuffled; sample k of the run is number shuffle[k] of the text

If less than 0.8 of the last epoch's samples are needed, that epoch is kept apart: its rows are
shuffled for themselves and its samples come last. The division of rows into training, validation
and test is by their place in the set: part i ends at row round(f n), f the running sum of shares.

The permutations follow from the number of epochs and from whether the last is apart: a run that
asks for so many more samples that these change has another order from its first sample on. Where a
run reads beyond K samples it begins the order again. Megatron-DeepSpeed, which keeps the last epoch
apart up to 0.95, is not imitated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data.sampling import Pieces, Stretch
from gristmill.tokens.reader import TokenReader

APART = 0.80
"""A last epoch of which a smaller share is needed is kept apart."""

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Rows:
    """The rows of a token set."""

    begins: np.ndarray
    """Position of each row's first token."""
    lengths: np.ndarray
    """Tokens of each row; Megatron can store empty ones."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Indices:
    """Megatron's three indices of one set."""

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class Epochs:
    """How often the rows are visited for a number of samples."""

    number: int
    first_samples: int
    """Samples that are shuffled together: all, or those before a last epoch that is apart."""
    samples: int

    @property
    def apart(self) -> bool:
        return self.first_samples < self.samples

    def __str__(self) -> str:
        return f"{self.number}{', the last apart' if self.apart else ''}"


def rows_of(reader: TokenReader) -> Rows:
    """The rows of a set: its sequences where it has some, else its documents."""
    if reader.sequence_lengths is not None:
        lengths = np.array(reader.sequence_lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        return Rows(begins=ends - lengths, lengths=lengths)
    starts = reader.document_starts
    lengths = np.diff(starts, append=len(reader))
    fits = int(lengths.max()) < 2**31
    return Rows(begins=starts, lengths=lengths.astype(np.int32) if fits else lengths)


def split_rows(rows: int, *, shares: Sequence[float]) -> list[Stretch]:
    """Rows of each part, for shares that need not add up to one."""
    parts = np.array([*shares, 0.0, 0.0][:3], np.float64)
    fractions = itertools.accumulate((parts / parts.sum()).tolist(), initial=0.0)
    cuts = [round(fraction * float(rows)) for fraction in fractions]
    return [Stretch(begin, end) for begin, end in itertools.pairwise(cuts)]


def plan_epochs(tokens: int, *, sequence: int, samples: int | None) -> Epochs:
    """Epochs over rows of `tokens` tokens for a number of samples; one epoch if none is given."""
    number = 1 if samples is None else max(1, -(-(samples * sequence + 1) // tokens))
    all_samples = (number * tokens - 1) // sequence
    if samples is None or number == 1:
        return Epochs(number, all_samples, all_samples)
    before = ((number - 1) * tokens - 1) // sequence
    needed, whole = samples - before, (tokens - 1) // sequence
    return Epochs(number, before if needed < int(APART * whole) else all_samples, all_samples)


def build_indices(
    lengths: np.ndarray, *, rows: Stretch, sequence: int, seed: int, samples: int | None
) -> Indices:
    """The three indices over some rows of a set."""
    tokens = int(lengths[rows.begin : rows.end].sum(dtype=np.int64))
    epochs = plan_epochs(tokens, sequence=sequence, samples=samples)
    random = np.random.RandomState(seed)
    documents = document_index(rows, epochs, random)
    return Indices(
        documents=documents,
        samples=sample_index(lengths, documents, sequence=sequence, samples=epochs.samples),
        shuffle=shuffle_index(epochs, random),
    )


def document_index(rows: Stretch, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """The rows in the order in which their tokens are strung together."""
    numbers = np.arange(rows.begin, rows.end, dtype=np.int64)
    together = epochs.number - 1 if epochs.apart else epochs.number
    groups = [np.tile(numbers, together), *([numbers] if epochs.apart else [])]
    for group in groups:
        # The draws do not depend on the type, and numpy shuffles 8-byte items fastest.
        random.shuffle(group)
    return np.concatenate([group.astype(np.int32) for group in groups])


def shuffle_index(epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """The order in which the samples of the text are visited."""
    order = np.arange(epochs.samples, dtype=np.int64)
    random.shuffle(order[: epochs.first_samples])
    if epochs.apart:
        random.shuffle(order[epochs.first_samples :])
    return order if epochs.samples >= 2**32 - 2 else order.astype(np.uint32)


def sample_index(
    lengths: np.ndarray, documents: np.ndarray, *, sequence: int, samples: int
) -> np.ndarray:
    """Place in the document index and offset there of every sequence-th token.

    Token j L lies in the row whose tokens before it and up to its end enclose it. How many such
    tokens a row holds follows from dividing both by L; blocks of rows keep this in the cache.
    """
    wide = max(len(documents), int(lengths.max())) > 2**31 - 1
    result = np.empty((samples + 1, 2), np.int64 if wide else np.int32)
    numbers = np.arange(_BLOCK, dtype=np.int32)
    bounds = np.zeros(_BLOCK + 1, np.int64)
    found, last = 0, -1
    for first in range(0, len(documents), _BLOCK):
        rows = documents[first : first + _BLOCK]
        ends = bounds[: len(rows) + 1]
        np.cumsum(lengths.take(rows, mode="clip"), dtype=np.int64, out=ends[1:])
        ends[0] = 0
        ends += last
        places = np.repeat(numbers[: len(rows)], np.diff(_divided(ends, sequence)))
        places = places[: samples + 1 - found]
        block = result[found : found + len(places)]
        tokens = np.arange(found, found + len(places), dtype=np.int64) * sequence
        block[:, 0] = places
        block[:, 0] += first
        block[:, 1] = tokens - 1 - ends.take(places)
        found, last = found + len(places), int(ends[-1])
    # Megatron begins at the first row also where that row is empty.
    result[0] = 0
    return result


def _divided(numbers: np.ndarray, divisor: int) -> np.ndarray:
    if divisor & (divisor - 1) == 0:
        return numbers >> (divisor.bit_length() - 1)
    return numbers // divisor


@dataclass(frozen=True)
class MegatronOrder:
    """Samples in Megatron's order, each made of pieces of several rows."""

    rows: Rows
    indices: Indices

    @property
    def epoch(self) -> int:
        """All samples of the index: Megatron shuffles its epochs together."""
        return len(self.indices.shuffle)

    def pieces(self, samples: np.ndarray) -> Pieces:
        chosen = self.indices.shuffle[samples % self.epoch].astype(np.int64)
        first = self.indices.samples[chosen].astype(np.int64)
        last = self.indices.samples[chosen + 1].astype(np.int64)
        counts = last[:, 0] - first[:, 0] + 1
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(first[:, 0] - (ends - counts), counts)
        rows = self.indices.documents[places]
        begins, lengths = self.rows.begins[rows], self.rows.lengths[rows].astype(np.int64)
        # The last piece ends with the token that the next sample begins with.
        lengths[ends - 1] = last[:, 1] + 1
        begins[ends - counts] += first[:, 1]
        lengths[ends - counts] -= first[:, 1]
        filled = lengths > 0
        return Pieces(begins[filled], lengths[filled])
