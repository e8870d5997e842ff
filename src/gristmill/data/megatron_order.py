"""The sample order of Megatron-LM, index for index: the same files, seed and settings give the same
samples.

The rows of a set are Megatron's sequences, or the documents of the other formats. For n rows with T
tokens in all, N requested samples of L + 1 tokens, and one legacy RandomState(seed) for everything:

    epochs     E   the fewest with E T >= N L + 1
    documents  the n rows E times, shuffled as one          joined in this order, the rows are
    samples    row and offset of token j L of that text,    one text of E T tokens, cut into K
               for j = 0 ... K, K = (E T - 1) div L         samples that share their border tokens
    shuffle    0 ... K - 1, shuffled; sample k of the run is number shuffle[k] of the text

If less than 0.8 of the last epoch's samples are needed, that epoch is separate: its rows are
shuffled on their own and its samples come last. Rows are split into training, validation and test
by position: split i ends at row round(f n), where f is the running sum of the shares.

The permutations depend on the number of epochs and on whether the last is separate. A run that
requests enough additional samples to change either has a different order from its first sample on.
A run that reads beyond K samples starts the order again.

The last version of BigScience's Megatron-DeepSpeed keeps the last epoch separate up to 0.95, and
rounds the size of each split by itself. If the sizes then add up to too many, it subtracts the
excess from every boundary but the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data.sampling import TokenSpans
from gristmill.tokens.format import TokenReader

SEPARATE_BELOW = {"megatron": 0.80, "megatron-deepspeed": 0.95}
"""The last epoch is shuffled separately if a smaller share of it is needed."""

_BLOCK = 1 << 18


@dataclass(frozen=True)
class RowTable:
    """The rows of a token set."""

    begins: np.ndarray
    """Position of each row's first token."""
    lengths: np.ndarray
    """Tokens of each row; Megatron can store empty ones."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class EpochPlan:
    """How many epochs a number of samples takes."""

    number: int
    first_samples: int
    """Samples shuffled together: all, or those before a separate last epoch."""
    samples: int

    @property
    def last_separate(self) -> bool:
        return self.first_samples < self.samples

    def __str__(self) -> str:
        return f"{self.number}{', the last apart' if self.last_separate else ''}"


def row_table(reader: TokenReader) -> RowTable:
    """The rows of a set: its sequences if it has any, else its documents."""
    if reader.sequence_lengths is not None:
        lengths = np.array(reader.sequence_lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        return RowTable(begins=ends - lengths, lengths=lengths)
    starts = reader.document_starts
    lengths = np.diff(starts, append=len(reader))
    fits = int(lengths.max()) < 2**31
    return RowTable(begins=starts, lengths=lengths.astype(np.int32) if fits else lengths)


def split_rows(rows: int, *, shares: Sequence[float], order: str = "megatron") -> list[range]:
    """The rows of training, validation and test, for shares that need not add up to one."""
    weights = np.array([*shares, 0.0, 0.0][:3], np.float64)
    if order == "megatron-deepspeed":
        sizes = [round(share * float(rows)) for share in (weights / weights.sum()).tolist()]
        ends = list(itertools.accumulate(sizes))
        cuts = [0, *(end - (ends[-1] - rows) for end in ends)]
        return [range(begin, end) for begin, end in itertools.pairwise(cuts)]
    fractions = itertools.accumulate((weights / weights.sum()).tolist(), initial=0.0)
    cuts = [round(fraction * float(rows)) for fraction in fractions]
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def plan_epochs(
    tokens: int, *, sequence: int, samples: int | None, order: str = "megatron"
) -> EpochPlan:
    """Epochs over rows of `tokens` tokens for a number of samples; one epoch if none is given."""
    number = 1 if samples is None else max(1, -(-(samples * sequence + 1) // tokens))
    all_samples = (number * tokens - 1) // sequence
    if samples is None or number == 1:
        return EpochPlan(number, all_samples, all_samples)
    before = ((number - 1) * tokens - 1) // sequence
    needed, whole = samples - before, (tokens - 1) // sequence
    separate = needed < int(SEPARATE_BELOW[order] * whole)
    return EpochPlan(number, before if separate else all_samples, all_samples)


def build_indices(
    lengths: np.ndarray, epochs: EpochPlan, *, rows: range, sequence: int, seed: int
) -> dict[str, np.ndarray]:
    """Megatron's three indices over some rows of a set: documents, samples and shuffle."""
    random = np.random.RandomState(seed)
    documents = document_index(rows, epochs, random)
    return {
        "documents": documents,
        "samples": sample_index(lengths, documents, sequence=sequence, samples=epochs.samples),
        "shuffle": shuffle_index(epochs, random),
    }


def document_index(rows: range, epochs: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """The rows in the order in which their tokens are joined."""
    numbers = np.arange(rows.start, rows.stop, dtype=np.int64)
    groups = [np.tile(numbers, epochs.number - epochs.last_separate)]
    if epochs.last_separate:
        groups.append(numbers)
    for group in groups:
        # Draws do not depend on the dtype, and numpy shuffles 8-byte items fastest.
        random.shuffle(group)
    return np.concatenate([group.astype(np.int32) for group in groups])


def shuffle_index(epochs: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    """The order in which the samples of the text are visited."""
    order = np.arange(epochs.samples, dtype=np.int64)
    random.shuffle(order[: epochs.first_samples])
    if epochs.last_separate:
        random.shuffle(order[epochs.first_samples :])
    return order if epochs.samples >= 2**32 - 2 else order.astype(np.uint32)


def sample_index(
    lengths: np.ndarray, documents: np.ndarray, *, sequence: int, samples: int
) -> np.ndarray:
    """Position in the document index, and offset in that row, of every sequence-th token.

    A row holds the tokens j L between its two ends, and dividing both ends by L counts them. Blocks
    of rows keep the work in the CPU cache.
    """
    wide = max(len(documents), int(lengths.max())) > 2**31 - 1
    result = np.empty((samples + 1, 2), np.int64 if wide else np.int32)
    numbers = np.arange(_BLOCK, dtype=np.int32)
    bounds = np.zeros(_BLOCK + 1, np.int64)
    # A shift is faster than a division.
    shift = sequence.bit_length() - 1 if sequence & (sequence - 1) == 0 else None
    found, last = 0, -1
    for first in range(0, len(documents), _BLOCK):
        rows = documents[first : first + _BLOCK]
        ends = bounds[: len(rows) + 1]
        np.cumsum(lengths.take(rows, mode="clip"), dtype=np.int64, out=ends[1:])
        ends[0] = 0
        ends += last
        divided = ends // sequence if shift is None else ends >> shift
        places = np.repeat(numbers[: len(rows)], np.diff(divided))
        places = places[: samples + 1 - found]
        block = result[found : found + len(places)]
        tokens = np.arange(found, found + len(places), dtype=np.int64) * sequence
        block[:, 0] = places
        block[:, 0] += first
        block[:, 1] = tokens - 1 - ends.take(places)
        found, last = found + len(places), int(ends[-1])
    # Megatron begins at the first row even if that row is empty.
    result[0] = 0
    return result


@dataclass(frozen=True)
class MegatronOrder:
    """Samples in Megatron's order, each made of spans of several rows."""

    rows: RowTable
    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray

    @property
    def epoch(self) -> int:
        """All samples of the index, since Megatron shuffles its epochs together."""
        return len(self.shuffle)

    def spans(self, samples: np.ndarray) -> TokenSpans:
        chosen = self.shuffle[samples % self.epoch].astype(np.int64)
        first = self.samples[chosen].astype(np.int64)
        last = self.samples[chosen + 1].astype(np.int64)
        counts = last[:, 0] - first[:, 0] + 1
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(first[:, 0] - (ends - counts), counts)
        rows = self.documents[places]
        begins, lengths = self.rows.begins[rows], self.rows.lengths[rows].astype(np.int64)
        # The last span ends with the token that the next sample begins with.
        lengths[ends - 1] = last[:, 1] + 1
        begins[ends - counts] += first[:, 1]
        lengths[ends - counts] -= first[:, 1]
        filled = lengths > 0
        return TokenSpans(begins[filled], lengths[filled])
