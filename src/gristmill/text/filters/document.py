"""A text that filters look at; what several of them need is computed once.

Every filter is a function of a `TextDocument`. It returns None to keep it, a `Reason` to drop it,
or another text to go on with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

from gristmill.text.filters.words import Numbers, WordTable
from gristmill.text.sources.source import Reason


class TextDocument:
    """One text, and what else its row holds."""

    def __init__(self, text: str, fields: Mapping[str, str], table: WordTable) -> None:
        self.text = text
        self.fields = fields
        """Other values of the row, by their keys."""
        self.table = table

    @functools.cached_property
    def lowered(self) -> str:
        return self.text.lower()

    @functools.cached_property
    def words(self) -> Numbers:
        """The words, as numbers in the table."""
        return self.table.numbers_of(self.text)

    def changed(self, text: str) -> TextDocument:
        """The same row with another text."""
        return TextDocument(text, self.fields, self.table)


Verdict: TypeAlias = Reason | str | None
"""Why a text is dropped, or the text to go on with, or None if it stays as it is."""
Filter: TypeAlias = Callable[[TextDocument], Verdict]
