"""What keeps the documents of one sample apart: attention, positions and weights.

A mark stands where a document begins inside a sample:

    tokens      a b c . d e . f         . ends a text
    marks       0 0 0 0 1 0 0 1
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

    marks: Literal["none", "files", "ids"] = "none"
    """Where marks come from; none if nothing needs them."""
    attention: bool = False
    """Attention does not cross a boundary."""
    positions: bool = False
    """Positions restart at a boundary."""
    unweighted: bool = False
    """Targets predicted from an end-of-text id have no weight."""
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        assert self.end_of_text is not None or not (self.unweighted or self.marks == "ids")


JOINED = DocumentRules()


def marks_in_spans(spans: TokenSpans, *, starts: np.ndarray, length: int) -> np.ndarray:
    """Where documents begin in samples of `length` tokens: at each span but the first, and
    inside a span where the set says so."""
    offsets = np.cumsum(spans.counts) - spans.counts
    first = np.searchsorted(starts, spans.begins, side="right")
    counts = np.searchsorted(starts, spans.begins + spans.counts, side="left") - first
    numbers = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    inside = starts[numbers] + np.repeat(offsets - spans.begins, counts)
    marks = np.zeros(int(spans.counts.sum()), bool)
    marks[offsets] = True
    marks[inside] = True
    rows = marks.reshape(-1, length)
    rows[:, 0] = False
    return rows


def marks_after(tokens_BT: np.ndarray, *, end_of_text: int) -> np.ndarray:
    """Marks after each end-of-text id."""
    marks = np.zeros(tokens_BT.shape, bool)
    marks[:, 1:] = tokens_BT[:, :-1] == end_of_text
    return marks


def restarted_positions(marks_BT: np.ndarray) -> np.ndarray:
    """The position of each token in its document, or in the part of it inside the sample."""
    places = np.arange(marks_BT.shape[1], dtype=np.int32)
    begins_BT = marks_BT * places
    np.maximum.accumulate(begins_BT, axis=1, out=begins_BT)
    return np.subtract(places, begins_BT, out=begins_BT)
