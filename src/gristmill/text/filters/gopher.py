"""Gopher's rules of quality and repetition (Rae et al. 2021, appendix A), as datatrove has them.

    quality      words, their mean length, # and …, bullets and ellipses, letters, stop words
    repetition   lines and paragraphs that occur again; characters of the commonest 2- to 4-gram,
                 and of 5- to 10-grams that occur again

The decisions are datatrove's for English: n-grams that occur again are found from left to right
without overlap, and are compared as characters, so that "a b" and "ab" are the same.
Numbers decide nearly all of it. Two n-grams have equal hashes if they are equal, so the words that
repeated hashes cover are at least those that occur again, and only if these are too many are
n-grams compared one by one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.text.filters.document import TextDocument
from gristmill.text.filters.settings import GopherQualitySettings, GopherRepetitionSettings
from gristmill.text.filters.words import HASH_BASE, Numbers
from gristmill.text.sources.source import Reason

QUALITY = "gopher-quality"
REPETITION = "gopher-repetition"
_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
_BULLETS = ("•", "-")
_ELLIPSES = ("...", "…")


def over(value: float, limit: float | None) -> bool:
    """Whether a value is above a limit, if there is one; 0 is none, as in datatrove."""
    return bool(limit) and value > (limit or 0)


# ------------------------------------------------------------------ quality


class GopherQuality:
    """Drops documents that are unlike running text."""

    def __init__(self, settings: GopherQualitySettings) -> None:
        self._settings = settings
        self._stop_words = settings.stop_words

    def __call__(self, document: TextDocument) -> Reason | None:
        rule = self._broken_rule(document)
        return Reason(f"{QUALITY}: {rule}") if rule else None

    def _broken_rule(self, document: TextDocument) -> str | None:
        limits, text, words = self._settings, document.text, document.words
        plain_lengths = document.table.plain_lengths[words]
        plain = int(np.count_nonzero(plain_lengths))
        if limits.min_words and plain < limits.min_words:
            return "too few words"
        if over(plain, limits.max_words):
            return "too many words"
        if not plain:
            return "no words"
        mean = int(plain_lengths.sum()) / plain
        if limits.min_mean_word and mean < limits.min_mean_word:
            return "words too short"
        if over(mean, limits.max_mean_word):
            return "words too long"
        if over(text.count("#") / len(words), limits.max_symbols):
            return "too many #"
        if over((text.count("...") + text.count("…")) / len(words), limits.max_symbols):
            return "too many ellipses"
        lines = text.splitlines()
        bullets = sum(line.lstrip().startswith(_BULLETS) for line in lines)
        if over(bullets / len(lines), limits.max_bullet_lines):
            return "too many lines with bullets"
        ellipses = sum(line.rstrip().endswith(_ELLIPSES) for line in lines)
        if over(ellipses / len(lines), limits.max_ellipsis_lines):
            return "too many lines that end with an ellipsis"
        letters = int(np.count_nonzero(document.table.has_letter[words]))
        if limits.min_words_with_letters and letters / len(words) < limits.min_words_with_letters:
            return "too few words with letters"
        if limits.min_stop_words and self._count_stop_words(document) < limits.min_stop_words:
            return "too few stop words"
        return None

    def _count_stop_words(self, document: TextDocument) -> int:
        """How many different stop words there are."""
        known = [document.table.number_of(word) for word in dict.fromkeys(self._stop_words)]
        return sum(bool((document.words == number).any()) for number in known)


# ------------------------------------------------------------------ repetition


class GopherRepetition:
    """Drops documents that say the same again and again."""

    def __init__(self, settings: GopherRepetitionSettings) -> None:
        self._settings = settings

    def __call__(self, document: TextDocument) -> Reason | None:
        rule = self._broken_rule(document)
        return Reason(f"{REPETITION}: {rule}") if rule else None

    def _broken_rule(self, document: TextDocument) -> str | None:
        limits, text = self._settings, document.text
        paragraphs = _PARAGRAPHS.split(text.strip())
        again = repeated(paragraphs)
        if over(again.texts / len(paragraphs), limits.max_paragraphs):
            return "duplicate paragraphs"
        if over(again.characters / len(text), limits.max_paragraph_characters):
            return "characters of duplicate paragraphs"
        lines = _LINES.split(text)
        again = repeated(lines)
        if over(again.texts / len(lines), limits.max_lines):
            return "duplicate lines"
        if over(again.characters / len(text), limits.max_line_characters):
            return "characters of duplicate lines"
        grams = NGrams(document)
        for n, limit in limits.top.items():
            if len(document.words) >= n and grams.top_characters(n) / len(text) > limit:
                return f"top {n}-gram"
        for n, limit in limits.duplicate.items():
            if grams.may_exceed(n, limit * len(text)) and (
                grams.duplicate_characters(n) / len(text) > limit
            ):
                return f"duplicate {n}-grams"
        return None


class Repeated(NamedTuple):
    """Texts that occurred before in the same list."""

    texts: int
    characters: int


def repeated(texts: Sequence[str]) -> Repeated:
    """How many of some texts occurred before, and how many characters these have."""
    different = set(texts)
    if len(different) == len(texts):
        return Repeated(0, 0)
    characters = sum(map(len, texts)) - sum(map(len, different))
    return Repeated(len(texts) - len(different), characters)


class NGrams:
    """The n-grams of a document."""

    def __init__(self, document: TextDocument) -> None:
        self._words, self._table = document.words, document.table
        self._ends = np.cumsum(document.table.lengths[document.words])
        self._ranks = {1: document.words}
        """By n, a small number for each n-gram, equal for equal ones only."""

    def top_characters(self, n: int) -> int:
        """The characters of all occurrences of the commonest n-gram, with a space between words;
        of several that are equally common, the first."""
        keys = self._keys(n)
        ordered = np.sort(keys)
        bounds = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        counts = np.diff(bounds, append=len(ordered))
        most = int(counts.max())
        commonest = ordered[bounds[counts == most]]
        first = int(np.argmax(np.isin(keys, commonest))) if most > 1 else 0
        begin = int(self._ends[first - 1]) if first else 0
        return (int(self._ends[first + n - 1]) - begin + n - 1) * most

    def _keys(self, n: int) -> Numbers:
        """A number for each n-gram, equal for equal ones only."""
        if n == 1:
            return self._words
        shorter = self._ranks_of(n - 1)
        return shorter[:-1] * np.int64(len(self._table.words)) + self._words[n - 1 :]

    def _ranks_of(self, n: int) -> Numbers:
        if n not in self._ranks:
            self._ranks[n] = np.unique(self._keys(n), return_inverse=True)[1]
        return self._ranks[n]

    def may_exceed(self, n: int, characters: float) -> bool:
        """Whether n-grams that occurred before may have more than so many characters."""
        if len(self._words) < n:
            return False
        hashes = self._hashes(n)
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        equal = ordered[1:] == ordered[:-1]
        if not equal.any():
            return False
        again = np.zeros(len(self._words) + 1, np.int64)
        places = order[1:][equal]
        np.add.at(again, places, 1)
        np.add.at(again, places + n, -1)
        covered = np.cumsum(again[:-1]) > 0
        return bool(self._table.lengths[self._words[covered]].sum() > characters)

    def _hashes(self, n: int) -> npt.NDArray[np.uint64]:
        sums, inverse = self._hash_sums
        starts = np.concatenate(([0], self._ends[: len(self._words) - n]))
        return (sums[n:] - sums[: len(sums) - n]) * inverse[starts]

    @functools.cached_property
    def _hash_sums(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Sums of c(i) * B^i before each word, i counted through the whole text, and B^-i."""
        powers, inverse = _powers(int(self._ends[-1]) + 1)
        starts = np.concatenate(([0], self._ends[:-1]))
        terms = self._table.hashes[self._words] * powers[starts]
        return np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms))), inverse

    def duplicate_characters(self, n: int) -> int:
        """The characters of n-grams that occurred before, from left to right without overlap."""
        words = [self._table.words[number] for number in self._words.tolist()]
        seen, count, place = set[str](), 0, 0
        while place <= len(words) - n:
            gram = "".join(words[place : place + n])
            if gram in seen:
                count += len(gram)
                place += n
            else:
                seen.add(gram)
                place += 1
        return count


_powers_so_far = np.ones(1, np.uint64), np.ones(1, np.uint64)


def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Powers of the base of hashes, and their inverses, modulo 2^64."""
    global _powers_so_far
    if len(_powers_so_far[0]) < count:
        size = max(1 << 16, 1 << (count - 1).bit_length())
        inverse = np.uint64(pow(int(HASH_BASE), -1, 1 << 64))
        ones = np.ones(1, np.uint64)
        _powers_so_far = (
            np.concatenate((ones, np.cumprod(np.full(size - 1, HASH_BASE)))),
            np.concatenate((ones, np.cumprod(np.full(size - 1, inverse)))),
        )
    return _powers_so_far
