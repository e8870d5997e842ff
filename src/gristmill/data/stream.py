"""The samples of a run: those of one token set in its order, or of several mixed.

    sample i  --blend-->  set s, its sample n  --index-->  pieces of set s  --gather-->  T + 1 ids

Single windows are gathered in one call, as rows of a sliding view; pieces of documents one by one,
or where they are very short by the positions of all their tokens. With 16-bit ids this takes about
1 ns a token for windows, 2 for pieces of 500 tokens and 12 for those of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gristmill.data.blend import Blend, choose
from gristmill.data.documents import marks_in_pieces
from gristmill.data.sampling import Pieces, SampleIndex
from gristmill.data.watch import Watch
from gristmill.tokens.reader import TokenReader

_SHORT = 128


@dataclass(frozen=True)
class TokenText:
    """The ids of one token set."""

    reader: TokenReader
    ids: np.ndarray | None
    """All ids as one array, mapped or in memory; None of a set of several files."""
    watch: Watch | None
    """None if the ids are in memory."""

    def gather(self, pieces: Pieces, *, length: int) -> np.ndarray:
        """The ids of pieces, as rows of `length`, in their stored type."""
        total = int(pieces.counts.sum())
        if self.ids is not None and len(pieces) * length == total:
            return np.asarray(sliding_window_view(self.ids, length)[pieces.begins])
        if self.ids is not None and total < _SHORT * len(pieces):
            offsets = np.cumsum(pieces.counts) - pieces.counts
            positions = np.repeat(pieces.begins - offsets, pieces.counts)
            positions += np.arange(total)
            return self.ids.take(positions).reshape(-1, length)
        result = np.empty(total, self.reader.info.dtype)
        at, ids, read = 0, self.ids, self.reader.read
        for begin, count in zip(pieces.begins.tolist(), pieces.counts.tolist(), strict=True):
            piece = read(begin, count) if ids is None else ids[begin : begin + count]
            result[at : at + count] = piece
            at += count
        return result.reshape(-1, length)


@dataclass(frozen=True)
class Source:
    """A token set and the order in which it is read."""

    text: TokenText
    index: SampleIndex


@dataclass(frozen=True)
class Samples:
    """Ids of samples, and where documents begin in them if that was asked for."""

    ids_BS: np.ndarray
    marks_BS: np.ndarray | None


@dataclass(frozen=True)
class SampleStream:
    """The endless row of samples of a run."""

    sources: tuple[Source, ...]
    blend: Blend | None
    """None of a single set."""
    sequence: int

    def read(self, samples: np.ndarray, *, marks: bool = False) -> Samples:
        """The T + 1 ids of each sample."""
        length = self.sequence + 1
        if self.blend is None:
            (source,) = self.sources
            pieces = source.index.pieces(samples)
            return read_pieces(source.text, pieces, length=length, marks=marks)
        choice = choose(self.blend, samples)
        dtype = np.result_type(*(source.text.reader.info.dtype for source in self.sources))
        ids_BS = np.empty((len(samples), length), dtype)
        marks_BS = np.empty(ids_BS.shape, bool) if marks else None
        for number in np.unique(choice.sets).tolist():
            source, rows = self.sources[number], np.flatnonzero(choice.sets == number)
            pieces = source.index.pieces(choice.samples[rows])
            part = read_pieces(source.text, pieces, length=length, marks=marks)
            ids_BS[rows] = part.ids_BS
            if marks_BS is not None:
                marks_BS[rows] = part.marks_BS
        return Samples(ids_BS, marks_BS)

    def check_files(self) -> None:
        """Refuse to go on with token files that changed."""
        for source in self.sources:
            if source.text.watch is not None:
                source.text.watch.check()


def read_pieces(text: TokenText, pieces: Pieces, *, length: int, marks: bool) -> Samples:
    """The ids of pieces as rows, with marks from the set itself."""
    found = None
    if marks:
        found = marks_in_pieces(pieces, starts=text.reader.document_starts, length=length)
    return Samples(text.gather(pieces, length=length), found)
