"""What keeps the documents of one sample apart: attention, positions and weights.

A mark stands where a document begins inside a sample:

    tokens      a b c . d e . f         . ends a text
    doc_starts  0 0 0 0 1 0 0 1
    documents   0 0 0 0 1 1 1 2         attention stays between equal numbers
    positions   0 1 2 3 0 1 2 0         restart at each mark
    weights     1 1 1 0 1 1 0 1         if the token after an end of text is masked from the loss

Marks come from the token files, which know where documents begin, or as in Megatron from the ids:
after each end-of-text id. A sample that begins inside a document counts positions from its own
beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gristmill.data.sampling import TokenSpans


@dataclass(frozen=True)
class DocumentRules:
    """How document boundaries inside a sample are treated."""

    doc_starts: Literal["none", "files", "ids"] = "none"
    """What says where documents start; none if nothing needs it."""
    attention: bool = False
    """Attention does not cross a boundary."""
    positions: bool = False
    """Positions restart at a boundary."""
    unweighted: bool = False
    """Targets predicted from an end-of-text id have no weight."""
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        assert self.end_of_text is not None or not (self.unweighted or self.doc_starts == "ids")


JOINED = DocumentRules()


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


def doc_starts_after(tokens_BT: np.ndarray, *, end_of_text: int) -> np.ndarray:
    """Marks after each end-of-text id."""
    doc_starts = np.zeros(tokens_BT.shape, bool)
    doc_starts[:, 1:] = tokens_BT[:, :-1] == end_of_text
    return doc_starts


def restarted_positions(doc_starts_BT: np.ndarray) -> np.ndarray:
    """The position of each token in its document, or in the part of it inside the sample."""
    places = np.arange(doc_starts_BT.shape[1], dtype=np.int32)
    begins_BT = doc_starts_BT * places
    np.maximum.accumulate(begins_BT, axis=1, out=begins_BT)
    return np.subtract(places, begins_BT, out=begins_BT)
