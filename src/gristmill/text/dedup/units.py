"""The lines and paragraphs of a document, and the document without some of them.

    line        what stands between two newlines
    paragraph   lines that are not blank, between blank lines

Whitespace at both ends is not compared. A unit goes together with the newlines behind it; if the
last units of a document go, the last that stays keeps what ended the document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.text.dedup.signatures import Unit

_PARAGRAPH = re.compile(r"[^\n]*\S[^\n]*(?:\n[^\n]*\S[^\n]*)*")
_LINE = re.compile(r"[^\n]*\S[^\n]*")


class UnitSpan(NamedTuple):
    """Where a unit stands in its document."""

    begin: int
    end: int


def units_of(text: str, unit: Unit, *, min_length: int) -> list[UnitSpan]:
    """The units of a document that are compared; those that are blank or too short are not."""
    pattern = _LINE if unit == "line" else _PARAGRAPH
    spans = (UnitSpan(*match.span()) for match in pattern.finditer(text))
    return [span for span in spans if len(text[slice(*span)].strip()) >= min_length]


def unit_texts(text: str, spans: Sequence[UnitSpan]) -> list[str]:
    """What units are compared by."""
    return [text[slice(*span)].strip() for span in spans]


def without(text: str, spans: Sequence[UnitSpan], removed: npt.NDArray[np.bool_]) -> str:
    """A document without some of its units; nothing is left of one without any others."""
    pieces, place = [], 0
    tail = len(text.rstrip())
    for span, gone in zip(spans, removed.tolist(), strict=True):
        if not gone:
            continue
        pieces.append(text[place : span.begin])
        place = span.end
        while place < tail and text[place].isspace():
            place += 1
        # Blank lines behind it go, but not how the next unit is indented.
        place = max(span.end, text.rfind("\n", span.end, place) + 1)
    pieces.append(text[place:tail])
    left = "".join(pieces)
    return left.rstrip() + text[tail:] if left.strip() else ""
