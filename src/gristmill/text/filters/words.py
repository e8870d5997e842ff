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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.text.filters.english import English, code_points, english, tables

Numbers = npt.NDArray[np.int64]

_MOST_PIECES = 1 << 18
"""Pieces that are remembered from one text to the next."""
_JOINED = -1
"""Stands for a piece in which known words were put together: what is around it may matter."""
HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
_BASE, _MODULUS = int(HASH_BASE), (1 << 64) - 1


class WordTable(dict[str, tuple[int, ...]]):
    """The numbers of the words of each piece, and facts about words."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        """The words by their numbers."""
        self._numbers: dict[str, int] = {}
        self._joined: dict[str, tuple[int, ...]] = {}
        """The words of such pieces, if nothing around them matters."""
        self.facts = WordFacts.of_size(1024)

    @functools.cached_property
    def language(self) -> English:
        """The rules that divide pieces; not every filter needs words."""
        return english()

    def numbers_of(self, text: str) -> Numbers:
        """The words of a text, without blanks."""
        if len(self) > _MOST_PIECES:
            self.clear()
            self.words.clear()
            self._numbers.clear()
            self._joined.clear()
        pieces = text.split()
        numbers = np.fromiter(chain.from_iterable(map(self.__getitem__, pieces)), np.int64)
        if numbers.size and numbers.min() == _JOINED:
            return self._with_joined(text, pieces)
        return numbers

    def _with_joined(self, text: str, pieces: Sequence[str]) -> Numbers:
        """The words of a text in which known words were put together."""
        numbers, language = list[int](), self.language
        for before, piece, after in zip((None, *pieces), pieces, (*pieces[1:], None), strict=False):
            piece_numbers = self[piece]
            if piece_numbers == (_JOINED,):
                if language.may_touch(before, after):
                    words = (word for word in language.words_of(text) if not word.isspace())
                    return np.fromiter(map(self.number_of, words), np.int64)
                piece_numbers = self._joined[piece]
            numbers += piece_numbers
        return np.asarray(numbers, np.int64)

    def __missing__(self, piece: str) -> tuple[int, ...]:
        words: Sequence[str] = self.language.divide(piece)
        joined = self.language.joined(words, [True] * len(words)) if len(words) > 1 else None
        numbers = tuple(map(self.number_of, joined or words))
        if joined:
            self._joined[piece] = numbers
            numbers = (_JOINED,)
        self[piece] = numbers
        return numbers

    def number_of(self, word: str) -> int:
        """The number of a word, which it gets when it is first seen."""
        number = self._numbers.get(word)
        if number is None:
            number = self._numbers[word] = len(self.words)
            self.words.append(word)
            if number == len(self.facts.lengths):
                self.facts = self.facts.doubled()
            self.facts.note(number, word)
        return number


class WordFacts(NamedTuple):
    """Facts about words, by their numbers."""

    lengths: Numbers
    """Characters of each word."""
    plain_lengths: Numbers
    """The same, and 0 for words that consist of symbols."""
    has_letter: npt.NDArray[np.bool_]
    hashes: npt.NDArray[np.uint64]
    """The sum of c(i) * HASH_BASE^i over the characters of each word, modulo 2^64."""

    @classmethod
    def of_size(cls, count: int) -> WordFacts:
        """Room for so many words."""
        return cls(
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(count, np.bool_),
            np.zeros(count, np.uint64),
        )

    def doubled(self) -> WordFacts:
        """The same with room for twice as many words."""
        double = WordFacts.of_size(2 * len(self.lengths))
        for new, old in zip(double, self, strict=True):
            new[: len(old)] = old
        return double

    def note(self, number: int, word: str) -> None:
        """Write down what is known of a word."""
        self.lengths[number] = len(word)
        self.plain_lengths[number] = 0 if _symbols().issuperset(word) else len(word)
        self.has_letter[number] = word.isalpha() or any(map(str.isalpha, word))
        value = 0
        for point in map(ord, reversed(word)):
            value = (value * _BASE + point) & _MODULUS
        self.hashes[number] = value


@functools.cache
def _symbols() -> frozenset[str]:
    """Characters that make no word."""
    quality = tables()["quality"]
    return frozenset(map(chr, code_points(quality["ends"]) + code_points(quality["symbols"])))


_powers = np.ones(1, np.uint64), np.ones(1, np.uint64)


def powers_of_base(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """So many powers of the base of hashes or more, and their inverses, modulo 2^64."""
    global _powers
    if len(_powers[0]) < count:
        size, one = max(1 << 16, 1 << (count - 1).bit_length()), np.ones(1, np.uint64)
        inverse = np.uint64(pow(int(HASH_BASE), -1, 1 << 64))
        _powers = (
            np.concatenate((one, np.cumprod(np.full(size - 1, HASH_BASE)))),
            np.concatenate((one, np.cumprod(np.full(size - 1, inverse)))),
        )
    return _powers
