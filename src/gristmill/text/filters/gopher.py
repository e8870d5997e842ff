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
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.text.filters.document import TextDocument
from gristmill.text.filters.settings import GopherQualitySettings, GopherRepetitionSettings
from gristmill.text.filters.words import powers_of_base
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
        plain_lengths = document.table.facts.plain_lengths[words]
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
        letters = int(np.count_nonzero(document.table.facts.has_letter[words]))
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
        several = "\n\n" in text
        paragraphs = _PARAGRAPHS.split(text.strip()) if several else [text.strip()]
        again = repeated(paragraphs)
        if over(again.texts / len(paragraphs), limits.max_paragraphs):
            return "duplicate paragraphs"
        if over(again.characters / len(text), limits.max_paragraph_characters):
            return "characters of duplicate paragraphs"
        lines = _LINES.split(text) if several else text.split("\n")
        again = repeated(lines)
        if over(again.texts / len(lines), limits.max_lines):
            return "duplicate lines"
        if over(again.characters / len(text), limits.max_line_characters):
            return "characters of duplicate lines"
        if not len(document.words):
            return None
        grams = NGrams(document)
        for n, limit in limits.top.items():
            if grams.top_exceeds(n, limit, len(text)):
                return f"top {n}-gram"
        for n, hashes in grams.may_repeat(list(limits.duplicate)).items():
            if grams.repeats_exceed(n, hashes, limits.duplicate[n], len(text)):
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
        self._numbers, self._table = document.words, document.table
        self._words = document.words.tolist()
        self._lengths = document.table.facts.lengths[document.words]
        self._ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._lengths)))
        """Where each word ends among the characters of all, after where the first begins."""
        self._most = {0: len(self._words)}
        """How often the commonest n-gram occurs, by n."""

    def top_exceeds(self, n: int, limit: float, size: int) -> bool:
        """Whether all occurrences of the commonest n-gram have more than a share of so many
        characters, with a space between words; of several that are equally common, the first."""
        if len(self._words) < n:
            return False
        # It occurs no more often than the commonest shorter one.
        most = min(count for words, count in self._most.items() if words < n)
        longest = int((self._ends[n:] - self._ends[:-n]).max()) + n - 1
        if most * longest / size <= limit:
            return False
        counts = Counter(zip(*(self._words[place:] for place in range(n)), strict=False))
        most = self._most[n] = max(counts.values())
        first = next(gram for gram, count in counts.items() if count == most)
        length = sum(len(self._table.words[number]) for number in first) + n - 1
        return most * length / size > limit

    def may_repeat(self, lengths: Sequence[int]) -> dict[int, npt.NDArray[np.uint64]]:
        """By n, the hashes of n-grams that may have occurred before, sorted; only where there are
        some."""
        lengths = [n for n in lengths if n < len(self._words)]
        # Where an n-gram would go beyond the end stands a number that is nowhere else.
        hashes = np.tile(np.arange(len(self._words), dtype=np.uint64), (len(lengths), 1))
        for row, n in zip(hashes, lengths, strict=True):
            row[: len(row) - n + 1] = self._hashes(n)
        hashes.sort(axis=1)
        equal = hashes[:, 1:] == hashes[:, :-1]
        return {n: hashes[row, 1:][equal[row]] for row, n in enumerate(lengths) if equal[row].any()}

    def repeats_exceed(
        self, n: int, again: npt.NDArray[np.uint64], limit: float, size: int
    ) -> bool:
        """Whether n-grams that occurred before have more than a share of so many characters."""
        hashes = self._hashes(n)
        nearest = np.minimum(np.searchsorted(again, hashes), len(again) - 1)
        places = np.flatnonzero(again[nearest] == hashes)
        places = places[np.argsort(hashes[places], kind="stable")]
        later = places[1:][hashes[places[1:]] == hashes[places[:-1]]]
        # All words of n-grams that may have occurred before are more than those that did.
        changes = np.zeros(len(self._ends), np.int64)
        np.add.at(changes, later, 1)
        np.add.at(changes, later + n, -1)
        if self._lengths[np.cumsum(changes[:-1]) > 0].sum() / size <= limit:
            return False
        return self._count_repeated(n) / size > limit

    def _count_repeated(self, n: int) -> int:
        """The characters of n-grams that occurred before, from left to right without overlap."""
        words = [self._table.words[number] for number in self._words]
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

    def _hashes(self, n: int) -> npt.NDArray[np.uint64]:
        """A number for each n-gram, equal for those with equal characters."""
        sums, inverse = self._hash_sums
        return (sums[n:] - sums[:-n]) * inverse[: len(sums) - n]

    @functools.cached_property
    def _hash_sums(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Sums of c(i) * B^i before each word, i counted through the whole text, and B^-i."""
        powers, inverse = powers_of_base(int(self._ends[-1]) + 1)
        terms = self._table.facts.hashes[self._numbers] * powers[self._ends[:-1]]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms)))
        return sums, inverse[self._ends]
