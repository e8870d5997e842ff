"""The words of a text as an array of numbers, and what filters ask about each of them.

    "don't do it"  ->  pieces between blanks  ->  [do n't] [do] [it]  ->  [7 8 7 9]

Most pieces of a text were seen before, so a table remembers what each was divided into, and a text
costs one look-up for a piece. Facts about words are columns of arrays that the numbers index: then
a rule about all words of a text is a sum or a sort. The table is emptied when it has grown large.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.text.filters.english import English, code_points, english, tables

Numbers = npt.NDArray[np.int64]

_MOST_PIECES = 1 << 17
"""Pieces that are remembered from one text to the next."""
_JOINED = -1
"""Stands for a piece in which known words were put together: what is around it may matter."""
HASH_BASE = np.uint64(0x9E3779B97F4A7C15 | 1)


class WordTable(dict[str, tuple[int, ...]]):
    """The numbers of the words of each piece, and facts about words."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        """The words by their numbers."""
        self._numbers: dict[str, int] = {}
        self._capacity = 0
        self._grow()

    @functools.cached_property
    def language(self) -> English:
        """The rules that divide pieces; not every filter needs words."""
        return english()

    @functools.cached_property
    def _symbols(self) -> frozenset[str]:
        quality = tables()["quality"]
        return frozenset(map(chr, code_points(quality["ends"]) + code_points(quality["symbols"])))

    def _grow(self) -> None:
        """Make room for twice as many words."""
        old, self._capacity = self._capacity, max(1024, 2 * self._capacity)
        columns: dict[str, Any] = {
            "lengths": np.int64, "plain_lengths": np.int64, "has_letter": np.bool_,
            "hashes": np.uint64,
        }  # fmt: skip
        for name, dtype in columns.items():
            column = np.zeros(self._capacity, dtype)
            if old:
                column[:old] = getattr(self, name)
            setattr(self, name, column)

    lengths: Numbers
    """Characters of each word."""
    plain_lengths: Numbers
    """The same, and 0 for words that consist of symbols."""
    has_letter: npt.NDArray[np.bool_]
    hashes: npt.NDArray[np.uint64]
    """The sum of c(i) * HASH_BASE^i over the characters of each word, modulo 2^64."""

    def numbers_of(self, text: str) -> Numbers:
        """The words of a text, without blanks."""
        if len(self) > _MOST_PIECES:
            self.clear()
            self.words.clear()
            self._numbers.clear()
        found = map(self.__getitem__, text.split())
        numbers = np.fromiter(chain.from_iterable(found), np.int64)
        if numbers.size and numbers.min() == _JOINED:
            words = (word for word in self.language.words_of(text) if not word.isspace())
            return np.fromiter(map(self.number_of, words), np.int64)
        return numbers

    def __missing__(self, piece: str) -> tuple[int, ...]:
        words: Sequence[str] = self.language.divide(piece)
        joined = len(words) > 1 and self.language.joined(words, [True] * len(words))
        numbers = (_JOINED,) if joined else tuple(map(self.number_of, words))
        self[piece] = numbers
        return numbers

    def number_of(self, word: str) -> int:
        """The number of a word, which it gets when it is first seen."""
        number = self._numbers.get(word)
        if number is not None:
            return number
        number = self._numbers[word] = len(self.words)
        self.words.append(word)
        if number == self._capacity:
            self._grow()
        self.lengths[number] = len(word)
        plain = not self._symbols.issuperset(word)
        self.plain_lengths[number] = len(word) if plain else 0
        self.has_letter[number] = word.isalpha() or any(map(str.isalpha, word))
        value = 0
        for character in reversed(word):
            value = (value * int(HASH_BASE) + ord(character)) & 0xFFFFFFFFFFFFFFFF
        self.hashes[number] = value
        return number
