"""The work on one block: read it, encode it, put the end of text after each document.

This is what workers do. It depends on its arguments only, which travel well between processes and
machines: a `Recipe` is data, and a `Grinder` can be made from it anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.text.sources.blocks import Block, Failure, Rows, Value
from gristmill.text.sources.reading import kind_of
from gristmill.text.sources.source import ReadOptions, Reason, Source
from gristmill.text.tokenizers.encoders import Encoder


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how blocks are ground."""

    options: ReadOptions
    encoder: Path
    """A folder, as `save_encoder` writes it."""
    end: int | None
    """The id that is put after each document."""
    dtype: str
    """The type of the ids."""


@dataclass(frozen=True)
class Column:
    """What the rows of a block gave for one key."""

    ids: npt.NDArray[Any]
    """All documents end to end, each with its end of text."""
    lengths: npt.NDArray[np.int64]
    """How many ids each document has."""
    text_bytes: npt.NDArray[np.int64]
    """How many bytes of text each document had."""
    places: npt.NDArray[np.int64]
    """The line where each document began, counted from the beginning of the block."""
    dropped: Sequence[tuple[int, Reason]]
    """The lines that gave no document."""


@dataclass(frozen=True)
class Ground:
    """What became of a block."""

    rows: int
    lines: int
    columns: Sequence[Column]
    failure: Failure | None
    encoder: str
    """The library that encoded it."""


class Grinder:
    """Grinds blocks by one recipe."""

    def __init__(self, recipe: Recipe, encoder: Encoder) -> None:
        self._options = recipe.options
        self._encoder = encoder
        self._end = recipe.end
        self._dtype = recipe.dtype

    def grind(self, source: Source, block: Block) -> Ground:
        """Read and encode a block."""
        return self.encode(kind_of(source, self._options).read(source, block, self._options))

    def encode(self, rows: Rows) -> Ground:
        """Encode rows that were read."""
        columns = [self._column(values, rows.places) for values in rows.columns]
        return Ground(len(rows.places), rows.lines, columns, rows.failure, self._encoder.name)

    def _column(self, values: Sequence[Value], places: Sequence[int]) -> Column:
        kept = np.asarray(places, np.int64)
        texts = [value for value in values if isinstance(value, str)]
        dropped: list[tuple[int, Reason]] = []
        if len(texts) < len(values):
            kept = kept[[isinstance(value, str) for value in values]]
            rows = zip(places, values, strict=True)
            dropped = [(place, value) for place, value in rows if isinstance(value, Reason)]
        encoded = self._encoder.encode(texts)
        lengths, sizes = encoded.lengths, encoded.text_bytes
        empty = lengths == 0
        if empty.any():
            # Some tokenizers see nothing in some texts.
            dropped += [(int(place), Reason.EMPTY_TEXT) for place in kept[empty]]
            dropped.sort(key=lambda one: one[0])
            kept, lengths, sizes = kept[~empty], lengths[~empty], sizes[~empty]
        ids = encoded.ids.astype(self._dtype, copy=False)
        if self._end is not None:
            ids, lengths = _ended(ids, lengths, self._end)
        return Column(ids, lengths, sizes, kept, dropped)


def _ended(
    ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64], end: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The documents with an id after each."""
    longer = lengths + 1
    ends = np.cumsum(longer) - 1
    result = np.empty(len(ids) + len(lengths), ids.dtype)
    inside = np.ones(len(result), np.bool_)
    inside[ends] = False
    result[inside] = ids
    result[ends] = end
    return result, longer
