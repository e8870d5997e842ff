"""Which documents a sample consists of, and which samples contain a place of a token set.

    sample --blend, index--> spans of a token set --document_starts--> documents

The reverse direction scans the samples, since not every order has an inverse. A hundred million
samples take some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data.blend import choose
from gristmill.data.sampling import TokenSpans
from gristmill.data.stream import OpenTokenSet, SampleStream

_AT_ONCE = 1 << 16
"""Samples that are scanned at a time."""


@dataclass(frozen=True)
class DocumentPart:
    """The part of a document that is in a sample."""

    tokens: OpenTokenSet
    document: int
    begin: int
    """The position of its first token in the set."""
    count: int
    offset: int
    """Its offset in the document, in tokens."""


@dataclass(frozen=True)
class TokenPlace:
    """A range of a token set."""

    number: int
    """The number of the set in the run."""
    begin: int
    end: int


def spans_of(
    stream: SampleStream, samples: np.ndarray
) -> Iterator[tuple[int, np.ndarray, TokenSpans]]:
    """For each set: its number, which of the samples come from it, and their spans. The samples
    should be close together."""
    if stream.blend is None:
        yield 0, samples, stream.indices[0].spans(samples)
        return
    choice = choose(stream.blend, samples)
    for number in np.unique(choice.sets).tolist():
        mine = choice.sets == number
        yield number, samples[mine], stream.indices[number].spans(choice.samples[mine])


def documents_of(stream: SampleStream, sample: int) -> list[DocumentPart]:
    """The documents of a sample, in order."""
    ((number, _, spans),) = spans_of(stream, np.array([sample]))
    tokens, found = stream.sets[number], list[DocumentPart]()
    starts = tokens.reader.document_starts
    for span_begin, count in zip(spans.begins.tolist(), spans.counts.tolist(), strict=True):
        begin, end = span_begin, span_begin + count
        while begin < end:
            document = int(np.searchsorted(starts, begin, side="right")) - 1
            last = int(starts[document + 1]) if document + 1 < len(starts) else end
            stop = min(end, last)
            offset = begin - int(starts[document])
            found.append(DocumentPart(tokens, document, begin, stop - begin, offset))
            begin = stop
    return found


def samples_with(
    stream: SampleStream,
    places: Sequence[TokenPlace],
    *,
    samples: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[int, int]]:
    """Pairs of the number of a place and that of a sample which contains all of it, among the first
    samples of a run."""
    by_set: dict[int, list[int]] = {}
    for place, where in enumerate(places):
        by_set.setdefault(where.number, []).append(place)
    orders = {
        number: np.array(sorted(mine, key=lambda place: places[place].begin))
        for number, mine in by_set.items()
    }
    begins = {
        number: np.array([places[place].begin for place in order])
        for number, order in orders.items()
    }
    for first in range(0, samples, _AT_ONCE):
        some = np.arange(first, min(first + _AT_ONCE, samples))
        for number, which, spans in spans_of(stream, some):
            if number not in orders:
                continue
            ends = spans.begins + spans.counts
            low = np.searchsorted(begins[number], spans.begins, side="left")
            high = np.searchsorted(begins[number], ends, side="left")
            for span in np.flatnonzero(high > low).tolist():
                # Of several spans of one sample, find the sample.
                sample = int(which[_sample_of(span, spans, len(which), stream.sequence + 1)])
                for place in orders[number][low[span] : high[span]].tolist():
                    if places[place].end <= int(ends[span]):
                        yield place, sample
        progress(min(first + _AT_ONCE, samples), samples)


def _sample_of(span: int, spans: TokenSpans, samples: int, length: int) -> int:
    """The sample that a span belongs to; all samples have the same length."""
    if len(spans.counts) == samples:
        return span
    return int(spans.counts[:span].sum()) // length
