"""Rows of a block as records that are compared, and the rows without those that are dropped.

    unit document     a record for each text of a column
    line, paragraph   a record for each of its lines or paragraphs that is long enough

Both passes over a corpus, the one that signs and the one that encodes, count the records of a block
in the same order, so a number is enough to tell which is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gristmill.text.dedup.groups import DropCode
from gristmill.text.dedup.signatures import SignatureSettings, sign_texts
from gristmill.text.dedup.sorting import Rows
from gristmill.text.dedup.units import unit_texts, units_of, without
from gristmill.text.sources.source import Reason, TextRows, Value

DUPLICATE = Reason("duplicate")
NEAR_DUPLICATE = Reason("near duplicate")
OLD_DUPLICATE = Reason("duplicate of an older set")
DUPLICATE_PARTS = Reason("nothing but duplicates")
"""All lines or paragraphs of a document were removed."""
REASONS = frozenset([DUPLICATE, NEAR_DUPLICATE, OLD_DUPLICATE, DUPLICATE_PARTS])
"""Why documents are dropped that nothing is wrong with."""
_BY_CODE: Mapping[int, Reason] = {
    DropCode.EQUAL: DUPLICATE,
    DropCode.NEAR: NEAR_DUPLICATE,
    DropCode.OLDER: OLD_DUPLICATE,
}
_SAMPLE = 80
"""Characters of a dropped document that the ledger shows."""


@dataclass(frozen=True)
class SignedColumn:
    """The records of one column of a block."""

    signatures: Rows
    places: npt.NDArray[np.uint64]
    """The line where the document of each record begins, counted from the beginning of the
    block."""


def sign_column(
    values: Sequence[Value], places: Sequence[int], settings: SignatureSettings
) -> SignedColumn:
    """The records of the texts of a column."""
    texts, lines = [], []
    for value, place in zip(values, places, strict=True):
        if isinstance(value, str):
            found = _records(value, settings)
            texts += found
            lines += [place] * len(found)
    return SignedColumn(sign_texts(texts, settings), np.array(lines, np.uint64))


def _records(text: str, settings: SignatureSettings) -> list[str]:
    if settings.unit == "document":
        return [text]
    return unit_texts(text, units_of(text, settings.unit, min_length=settings.min_length))


@dataclass(frozen=True)
class ColumnDrops:
    """Which records of a column of a block are dropped."""

    numbers: npt.NDArray[np.int64]
    """In ascending order, counted from 0."""
    codes: npt.NDArray[np.int64]
    """A `DropCode` for each."""


@dataclass(frozen=True)
class BlockDrops:
    """What is dropped of a block."""

    columns: Sequence[ColumnDrops]
    settings: SignatureSettings


@dataclass(frozen=True)
class RemovedUnits:
    """Lines or paragraphs that were removed from a document that stays."""

    place: int
    """The line where the document begins."""
    reason: Reason
    count: int


def drop_duplicates(rows: TextRows, drops: BlockDrops) -> tuple[TextRows, list[list[RemovedUnits]]]:
    """The rows of a block without duplicates, and for each column what was removed inside of
    documents."""
    columns, removed = [], []
    for values, column in zip(rows.columns, drops.columns, strict=True):
        inside: list[RemovedUnits] = []
        if len(column.numbers):
            if drops.settings.unit == "document":
                values = _without_documents(values, column)
            else:
                values = _without_units(values, rows.places, column, drops.settings, inside)
        columns.append(values)
        removed.append(inside)
    return replace(rows, columns=columns), removed


def _without_documents(values: Sequence[Value], drops: ColumnDrops) -> list[Value]:
    left = list(values)
    places = [place for place, value in enumerate(values) if isinstance(value, str)]
    for number, code in zip(drops.numbers.tolist(), drops.codes.tolist(), strict=True):
        place = places[number]
        left[place] = _with_sample(_BY_CODE[code], left[place])
    return left


def _without_units(
    values: Sequence[Value],
    places: Sequence[int],
    drops: ColumnDrops,
    settings: SignatureSettings,
    removed: list[RemovedUnits],
) -> list[Value]:
    left, first = list(values), 0
    for row, value in enumerate(values):
        if not isinstance(value, str):
            continue
        spans = units_of(value, settings.unit, min_length=settings.min_length)
        low, high = np.searchsorted(drops.numbers, [first, first + len(spans)])
        if low < high:
            gone = np.zeros(len(spans), np.bool_)
            gone[drops.numbers[low:high] - first] = True
            text = without(value, spans, gone)
            left[row] = text or _with_sample(DUPLICATE_PARTS, value)
            if text:
                for code, count in enumerate(np.bincount(drops.codes[low:high]).tolist()):
                    if count:
                        name = f"{_BY_CODE[code].value} {settings.unit}"
                        if code == DropCode.OLDER:
                            name = f"{settings.unit} of an older set"
                        removed.append(RemovedUnits(places[row], Reason(name), count))
        first += len(spans)
    return left


def _with_sample(reason: Reason, value: Value) -> Reason:
    return replace(reason, sample=value[:_SAMPLE]) if isinstance(value, str) else reason
