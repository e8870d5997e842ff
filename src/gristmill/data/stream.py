"""The samples of a run, from one token set or from a blend of several.

    sample i  --blend-->  set s, its sample n  --index-->  spans of set s  --gather-->  T + 1 ids

Windows are gathered in one call, as rows of a sliding view; spans of documents one by one or, if
they are very short, by the positions of all their tokens. With 16-bit ids this takes about 1 ns per
token for windows, 2 for spans of 500 tokens and 12 for those of 32.

Ids outside the model's vocabulary are refused here, before they reach a device: on a GPU they would
end the process with an assertion that names neither file nor position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gristmill.base.errors import DataError
from gristmill.data.blend import Blend, choose
from gristmill.data.intact import TokenFileWatch
from gristmill.data.megatron_order import RowTable
from gristmill.data.sampling import SampleIndex, TokenSpans
from gristmill.tokens.format import TokenReader

_SHORT = 128


@dataclass(frozen=True)
class Samples:
    """The ids of samples and, if requested, where documents begin in them."""

    ids_BS: np.ndarray
    doc_starts_BS: np.ndarray | None
    loss_mask_BS: np.ndarray | None = None
    """Which ids count in the loss as targets; None if all do."""
    sources_B: np.ndarray | None = None
    """The set of each sample; None if there is only one."""


@dataclass(frozen=True)
class OpenTokenSet:
    """One token set, open for sampling."""

    path: str
    reader: TokenReader
    ids: np.ndarray | None
    """All ids as one array, mapped or in memory; None for a set of several files."""
    watch: TokenFileWatch
    """Detects changes of the files; it has none if the ids are in memory."""
    rows: RowTable | None = None
    """The rows of the set, for Megatron's order."""
    loss_mask: np.ndarray | None = None
    """Whether each id counts in the loss; None if all do. For sets in memory only."""

    def read(
        self, spans: TokenSpans, *, length: int, doc_starts: bool, vocab: int | None = None
    ) -> Samples:
        """The ids of spans as samples of `length`, with the set's own document starts. All ids must
        be below `vocab` if it is given."""
        found = None
        if doc_starts:
            found = doc_starts_in_spans(spans, starts=self.reader.document_starts, length=length)
        ids_BS = self.gather(spans, length=length)
        if vocab is not None and (
            ids_BS.max() >= vocab or (ids_BS.dtype.kind == "i" and ids_BS.min() < 0)
        ):
            raise self._outside(ids_BS.reshape(-1), spans, vocab=vocab)
        loss_mask_BS = None
        if self.loss_mask is not None:
            loss_mask_BS = _gather(self.loss_mask, spans, length=length)
        return Samples(ids_BS, found, loss_mask_BS)

    def _outside(self, ids: np.ndarray, spans: TokenSpans, *, vocab: int) -> DataError:
        """The error for the first id outside the vocabulary, with its position."""
        first = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
        ends = np.cumsum(spans.counts)
        span = int(np.searchsorted(ends, first, side="right"))
        position = int(spans.begins[span] + first - (ends[span] - spans.counts[span]))
        file, token = self.reader.locate(position)
        inside = "" if token == position else f" (token {position} of the set)"
        return DataError(
            f"token {token}{inside} is the id {ids[first]}, outside the vocabulary of {vocab}",
            where=file,
            remedy="the file is damaged, or another tokenizer made it; to look at every id: "
            f"gristmill tokens verify {self.path}",
        )

    def gather(self, spans: TokenSpans, *, length: int) -> np.ndarray:
        """The ids of spans, as rows of `length`, in their stored type."""
        if self.ids is not None:
            return _gather(self.ids, spans, length=length)
        result = np.empty(int(spans.counts.sum()), self.reader.info.dtype)
        at = 0
        for begin, count in zip(spans.begins.tolist(), spans.counts.tolist(), strict=True):
            result[at : at + count] = self.reader.read(begin, count)
            at += count
        return result.reshape(-1, length)


def _gather(values: np.ndarray, spans: TokenSpans, *, length: int) -> np.ndarray:
    """The values of spans, as rows of `length`."""
    total = int(spans.counts.sum())
    if len(spans.begins) * length == total:
        return np.asarray(sliding_window_view(values, length)[spans.begins])
    if total < _SHORT * len(spans.begins):
        offsets = np.cumsum(spans.counts) - spans.counts
        positions = np.repeat(spans.begins - offsets, spans.counts)
        positions += np.arange(total)
        return values.take(positions).reshape(-1, length)
    result, at = np.empty(total, values.dtype), 0
    for begin, count in zip(spans.begins.tolist(), spans.counts.tolist(), strict=True):
        result[at : at + count] = values[begin : begin + count]
        at += count
    return result.reshape(-1, length)


def doc_starts_in_spans(spans: TokenSpans, *, starts: np.ndarray, length: int) -> np.ndarray:
    """Where documents begin in samples of `length` tokens: at each span but the first, and
    inside a span where the set says so."""
    offsets = np.cumsum(spans.counts) - spans.counts
    first = np.searchsorted(starts, spans.begins, side="right")
    counts = np.searchsorted(starts, spans.begins + spans.counts, side="left") - first
    numbers = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    inside = starts[numbers] + np.repeat(offsets - spans.begins, counts)
    doc_starts = np.zeros(int(spans.counts.sum()), bool)
    doc_starts[offsets] = True
    doc_starts[inside] = True
    rows = doc_starts.reshape(-1, length)
    rows[:, 0] = False
    return rows


@dataclass(frozen=True)
class SampleStream:
    """The endless sequence of a run's samples."""

    sets: tuple[OpenTokenSet, ...]
    indices: tuple[SampleIndex, ...]
    """The sample index of each set."""
    blend: Blend | None
    """None for a single set."""
    sequence: int

    def read(
        self, samples: np.ndarray, *, doc_starts: bool = False, vocab: int | None = None
    ) -> Samples:
        """The T + 1 ids of each sample, all below `vocab` if it is given."""
        length = self.sequence + 1
        if self.blend is None:
            spans = self.indices[0].spans(samples)
            return self.sets[0].read(spans, length=length, doc_starts=doc_starts, vocab=vocab)
        choice = choose(self.blend, samples)
        dtype = np.result_type(*(tokens.reader.info.dtype for tokens in self.sets))
        ids_BS = np.empty((len(samples), length), dtype)
        doc_starts_BS = np.empty(ids_BS.shape, bool) if doc_starts else None
        some = any(tokens.loss_mask is not None for tokens in self.sets)
        loss_mask_BS = np.ones(ids_BS.shape, bool) if some else None
        for number in np.unique(choice.sets).tolist():
            rows = np.flatnonzero(choice.sets == number)
            spans = self.indices[number].spans(choice.samples[rows])
            found = self.sets[number].read(spans, length=length, doc_starts=doc_starts, vocab=vocab)
            ids_BS[rows] = found.ids_BS
            if doc_starts_BS is not None:
                doc_starts_BS[rows] = found.doc_starts_BS
            if loss_mask_BS is not None and found.loss_mask_BS is not None:
                loss_mask_BS[rows] = found.loss_mask_BS
        return Samples(ids_BS, doc_starts_BS, loss_mask_BS, choice.sets)

    def taken(self, samples: int) -> list[int]:
        """How many of the first samples are from each set."""
        return [samples] if self.blend is None else self.blend.taken(samples).tolist()

    def check_files(self) -> None:
        """Refuse to continue if token files changed."""
        for tokens in self.sets:
            tokens.watch.check()
