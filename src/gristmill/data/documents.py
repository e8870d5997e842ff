"""What keeps the documents of one sample apart: attention, positions and weights.

A mark stands where a document begins inside a sample:

    tokens      a b c . d e . f         . ends a text
    marks       0 0 0 0 1 0 0 1
    documents   0 0 0 0 1 1 1 2         attention stays between equal numbers
    positions   0 1 2 3 0 1 2 0         begin again at each mark
    weights     1 1 1 0 1 1 0 1         if what follows the end of a text is not to be learned

Marks come from the token files, which know where documents begin, or as in Megatron from the ids:
behind each end-of-text id. A sample that begins inside a document counts positions from its own
beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gristmill.data.sampling import Pieces


@dataclass(frozen=True)
class DocumentRules:
    """What is done about the borders of documents."""

    marks: Literal["none", "files", "ids"] = "none"
    """What says where documents begin; none if nothing asks for it."""
    attention: bool = False
    """Attention does not cross a border."""
    positions: bool = False
    """Positions begin again at a border."""
    unweighted: bool = False
    """What is predicted from an end-of-text id does not count."""
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        assert self.end_of_text is not None or not (self.unweighted or self.marks == "ids")


JOINED = DocumentRules()


def marks_in_pieces(pieces: Pieces, *, starts: np.ndarray, length: int) -> np.ndarray:
    """Where documents begin in samples of `length` tokens: with each piece but the first, and
    inside a piece where the set says so."""
    offsets = np.cumsum(pieces.counts) - pieces.counts
    first = np.searchsorted(starts, pieces.begins, side="right")
    counts = np.searchsorted(starts, pieces.begins + pieces.counts, side="left") - first
    numbers = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    inside = starts[numbers] + np.repeat(offsets - pieces.begins, counts)
    marks = np.zeros(int(pieces.counts.sum()), bool)
    marks[offsets] = True
    marks[inside] = True
    rows = marks.reshape(-1, length)
    rows[:, 0] = False
    return rows


def marks_behind(tokens_BT: np.ndarray, *, end_of_text: int) -> np.ndarray:
    """Marks behind each end-of-text id."""
    marks = np.zeros(tokens_BT.shape, bool)
    marks[:, 1:] = tokens_BT[:, :-1] == end_of_text
    return marks


def document_numbers(marks_BT: np.ndarray) -> np.ndarray:
    """The number of each token's document in its sample."""
    return np.cumsum(marks_BT, axis=1, dtype=np.int32)


def restarted_positions(marks_BT: np.ndarray) -> np.ndarray:
    """The place of each token in its document, or in the part of it that the sample holds."""
    places = np.arange(marks_BT.shape[1], dtype=np.int32)
    begins_BT = marks_BT * places
    np.maximum.accumulate(begins_BT, axis=1, out=begins_BT)
    return np.subtract(places, begins_BT, out=begins_BT)
