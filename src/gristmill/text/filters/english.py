"""English words as spaCy's blank English tokenizer divides text, which datatrove's filters count.

    (don't,  ->  ( do n't ,          U.S.A. -> U.S.A.         well-known -> well - known

What stands between two blanks is divided by itself, and `divide` is a function of it alone:

    marks are split off at both ends until none is left or the rest is a known word
    the rest is a known word, a URL, or is split around marks that stand between letters

Known words are those that stay whole (`Mr.`) or are divided in their own way (`do|n't`). At last,
neighbouring pieces that form a known word together are put together again: "and", "/" and "or".
Only there may what follows a blank matter: see `EnglishText`. The tables are in english.toml.
"""

from __future__ import annotations

import functools
import re
import string
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, pairwise
from typing import Any, NamedTuple

_MOST_PIECES = 1 << 16
"""Pieces whose words are remembered."""
_LONGEST_ENDING = 16
"""More characters than what may be split off an end, dots apart, with what is looked at before."""
_APOSTROPHES = str.maketrans("'", "\u2019")
_STRETCH = 64
"""Words after which a text may be cut."""
_MARKS = ",;:!?)"
_PLAIN = frozenset(string.ascii_letters + string.digits)
_DIGIT = re.compile("[0-9]")
_BLANKS_OR_NOT = re.compile(r"\s+|\S+")


def code_points(ranges: str) -> list[int]:
    """The code points of ranges such as "61-7A 100-136/2 3F"."""
    points: list[int] = []
    for word in ranges.split():
        limits, _, step = word.partition("/")
        first, _, last = limits.partition("-")
        points += range(int(first, 16), int(last or first, 16) + 1, int(step or 1))
    return points


def _class(characters: Iterable[int]) -> str:
    """The inside of a class of a regular expression."""
    points, pieces = sorted(set(characters)), list[str]()
    begin = 0
    for place in range(1, len(points) + 1):
        if place == len(points) or points[place] != points[place - 1] + 1:
            first, last = points[begin], points[place - 1]
            pieces.append(f"\\U{first:08x}" + (f"-\\U{last:08x}" if last > first else ""))
            begin = place
    return "".join(pieces)


class _Span(NamedTuple):
    """Words that form a known word together."""

    begin: int
    end: int


@dataclass(frozen=True)
class _Patterns:
    """What is split off, and where."""

    before: re.Pattern[str]
    after: re.Pattern[str]
    between: re.Pattern[str]
    url: re.Pattern[str]


class English:
    """Divides text into words."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._patterns = _patterns(tables)
        self.known = dict(_known(tables))
        self.divide = functools.lru_cache(_MOST_PIECES)(self._divide_piece)
        """The words of what stands between two blanks, before known words are put together."""
        self._longest = max(map(len, self.known))
        self._sequences: dict[str, list[tuple[str, ...]]] = {}
        for word in self.known:
            # Of the others no piece is ever split off.
            if self._has_marks(word):
                pieces = tuple(self._divide(word, {}))
                self._sequences.setdefault(pieces[0], []).append(pieces)
        sequences = chain.from_iterable(self._sequences.values())
        self._beginnings = frozenset(
            (first, second)
            for first, second, *rest in _of_two_words(self._sequences.values())
            if self.known["".join((first, second, *rest))] != (first, second, *rest)
        )
        """How those begin that are not what they are divided into."""
        self._in_sequences = frozenset(chain.from_iterable(sequences))
        ends = code_points(tables["sentences"]["ends"])
        self.sentence_ends = frozenset(map(chr, ends))
        self._ends = re.compile(f"[{_class(ends)}]")

    def _has_marks(self, word: str) -> bool:
        patterns = self._patterns
        inside = patterns.after.search(word) or patterns.between.search(word)
        return bool(patterns.before.match(word) or inside)

    def _divide_piece(self, piece: str) -> tuple[str, ...]:
        if piece.isascii() and piece not in self.known:
            # The commonest cases, for which patterns need not be searched.
            if piece.isalpha():
                return (piece,)
            stem, mark = piece[:-1], piece[-1]
            if stem.isalpha() and (mark in _MARKS or (mark == "." and stem[-1].islower())):
                return (*self.known.get(stem, (stem,)), mark)
        return tuple(self._divide(piece, self.known))

    def _divide(self, piece: str, known: Mapping[str, Sequence[str]]) -> list[str]:
        begin, end = 0, len(piece)
        before, after = list[str](), list[str]()
        # Letters and digits are split off in currencies and after digits only.
        money, digits = "$" in piece, _DIGIT.search(piece) is not None
        while begin < end:
            if self._is_known(piece, begin, end, known):
                break
            first, last = begin, end
            searched = money or piece[begin] not in _PLAIN
            if searched and (match := self._patterns.before.match(piece, begin, end)):
                first = match.end()
                if self._is_known(piece, first, end, known):
                    before.append(piece[begin:first])
                    begin = first
                    break
            searched = digits or piece[end - 1] not in _PLAIN or piece[end - 1] in "sS"
            if searched and (size := self._ending(piece, first, end)):
                last = end - size
                if self._is_known(piece, begin, last, known):
                    after.append(piece[last:end])
                    end = last
                    break
            if (first, last) == (begin, end):
                break
            if first > begin:
                before.append(piece[begin:first])
            if last < end:
                after.append(piece[last:end])
            begin, end = first, last
        middle = piece[begin:end]
        return [*before, *self._middle(middle, known), *reversed(after)]

    def _is_known(
        self, piece: str, begin: int, end: int, known: Mapping[str, Sequence[str]]
    ) -> bool:
        return begin < end <= begin + self._longest and piece[begin:end] in known

    def _ending(self, piece: str, begin: int, end: int) -> int:
        """How many characters are split off the end."""
        if end - begin > 1 and piece.endswith("..", begin, end):
            return end - max(begin, len(piece[:end].rstrip(".")))
        match = self._patterns.after.search(piece[max(begin, end - _LONGEST_ENDING) : end])
        return match.end() - match.start() if match else 0

    def _middle(self, text: str, known: Mapping[str, Sequence[str]]) -> Sequence[str]:
        if not text:
            return ()
        if text in known:
            return known[text]
        if "." in text and self._patterns.url.match(text):
            return (text,)
        words, start = list[str](), 0
        for match in self._patterns.between.finditer(text):
            if match.start() == 0:
                continue
            if match.start() > start:
                words.append(text[start : match.start()])
            words.append(match[0])
            start = match.end()
        return [*words, text[start:]] if start < len(text) else words

    # ------------------------------------------------------------------ known words in pieces

    def joined(self, words: Sequence[str], glued: Sequence[bool]) -> list[str] | None:
        """The words with those put together that form a known word; None if there are none.

        `glued[i]`: no blank stands between word i and the next one. Longer ones come first, and
        none that touches another, even if that one changes nothing.
        """
        if self._beginnings.isdisjoint(pairwise(words)):
            return None
        spans = sorted(self._spans(words), key=lambda span: (span.begin - span.end, span.begin))
        seen, replaced = set[int](), dict[int, tuple[int, Sequence[str]]]()
        for begin, end in spans:
            if begin not in seen and end - 1 not in seen and all(glued[begin : end - 1]):
                new = self.known["".join(words[begin:end])]
                if list(new) != list(words[begin:end]):
                    replaced[begin] = (end, new)
            seen.update(range(begin, end))
        if not replaced:
            return None
        result, place = list[str](), 0
        while place < len(words):
            end, put = replaced.get(place, (place + 1, words[place : place + 1]))
            result += put
            place = end
        return result

    def _spans(self, words: Sequence[str]) -> Iterator[_Span]:
        for begin, word in enumerate(words):
            for sequence in self._sequences.get(word, ()):
                end = begin + len(sequence)
                if tuple(words[begin:end]) == sequence:
                    yield _Span(begin, end)

    def may_touch(self, before: str | None, after: str | None) -> bool:
        """Whether what is put together in a piece may depend on the pieces before and after it."""
        # Whatever reaches across a blank holds the word right before or after it.
        return (before is not None and self.divide(before)[-1] in self._in_sequences) or (
            after is not None and self.divide(after)[0] in self._in_sequences
        )

    def words_of(self, text: str) -> list[str]:
        """All words of a text, those of blanks included; a single space between two is none."""
        return list(chain.from_iterable(self._stretches(text)))

    def _stretches(self, text: str) -> Iterator[list[str]]:
        """The words of a text, cut after words that are never put together with others."""
        words, glued, begun = list[str](), list[bool](), False
        for match in _BLANKS_OR_NOT.finditer(text):
            piece = match[0]
            if not piece[0].isspace():
                new = self.divide(piece)
                words += new
                glued += [True] * len(new)
                begun = True
                if len(words) >= _STRETCH and new[-1] not in self._in_sequences:
                    yield self.joined(words, glued) or words
                    words, glued = [], []
                continue
            if glued:
                glued[-1] = piece[0] != " "
            if piece := piece[piece[0] == " " and begun :]:
                words.append(piece)
                glued.append(True)
                begun = True
        yield self.joined(words, glued) or words

    def most_sentences(self, text: str) -> int:
        """No text has more sentences than this."""
        if text.isascii():
            return 1 + text.count(".") + text.count("!") + text.count("?")
        return 1 + len(self._ends.findall(text))

    def sentences(self, text: str, *, enough: int | None = None) -> int:
        """How many sentences a text has, counted until there are enough."""
        count, ended = 1, False
        for words in self._stretches(text):
            for word in words:
                if word in self.sentence_ends:
                    ended = True
                elif ended and not is_punctuation(word):
                    count, ended = count + 1, False
                    if count == enough:
                        return count
        return count


def _of_two_words(
    sequences: Iterable[Sequence[tuple[str, ...]]],
) -> Iterator[tuple[str, ...]]:
    return (words for words in chain.from_iterable(sequences) if len(words) > 1)


def is_punctuation(word: str) -> bool:
    """Whether a word consists of punctuation."""
    return all(unicodedata.category(character)[0] == "P" for character in word)


# ------------------------------------------------------------------ tables


def _known(tables: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Known words, and what they are divided into."""
    whole = tables["whole"]
    rules = [(word,) for word in (*whole["words"].split(), *whole["others"].split())]
    for table in tables["divided"]:
        stems = table["stems"].split()
        if table.get("title"):
            stems += [stem.title() for stem in stems]
        endings = [ending.split("|") for ending in table["endings"].split()]
        rules += [(stem, *ending) for stem in stems for ending in endings]
    for words in rules:
        yield "".join(words), words
        other = tuple(word.translate(_APOSTROPHES) for word in words)
        yield "".join(other), other


def _patterns(tables: Mapping[str, Any]) -> _Patterns:
    letters, marks = tables["letters"], tables["marks"]
    lower, upper, title, uncased = (
        code_points(letters[name]) for name in ("lower", "upper", "title", "uncased")
    )
    quotes = list(map(ord, marks["quotes"].split()))
    punctuation = list(map(ord, marks["punctuation"].split()))
    symbols = code_points(marks["symbols"])
    both_ends = [*punctuation, *quotes, *symbols, *map(ord, marks["dashes"].split())]

    def either(words: str) -> str:
        return "|".join(map(re.escape, words.split()))

    small, large = _class((*lower, *uncased)), _class((*upper, *uncased))
    any_letter = _class((*lower, *upper, *title, *uncased))
    stop_after = _class(
        (*lower, *uncased, *punctuation, *quotes, *map(ord, marks["before_stop"].split()))
    )
    quote, symbol, end = _class(quotes), _class(symbols), _class(both_ends)
    before = rf"[{end}]|\.\.+|\+(?![0-9])|{either(marks['before'])}|{either(marks['currencies'])}"
    after = (
        rf"(?:……|[{end}]|\.\.+|['\u2019][sS]|(?<=[0-9])(?:\+|{either(marks['currencies'])}|"
        rf"{either(marks['units'])})|(?<=°[FfCcKk])\.|(?<=[{stop_after}])\.|"
        rf"(?<=[{large}][{large}])\.)\Z"
    )
    between = (
        rf"\.\.+|…|[{symbol}]|(?<=[0-9])[+*^-](?=[0-9-])"
        rf"|(?<=[{small}{quote}])\.(?=[{large}{quote}])|(?<=[{any_letter}]),(?=[{any_letter}])"
        rf"|(?<=[{any_letter}0-9])(?:{either(marks['hyphens'])}|[:<>=/])(?=[{any_letter}])"
    )
    return _Patterns(
        re.compile(before), re.compile(after), re.compile(between), re.compile(_url(small))
    )


def _url(small: str) -> str:
    """What counts as a URL: scheme and user may be missing, a host and the rest must fit."""
    name = r"[A-Za-z0-9\u00a1-\uffff]"
    label = rf"(?:{name}(?:[A-Za-z0-9\u00a1-\uffff_-]{{0,62}}{name})?\.)"
    private = (
        r"(?!(?:10|127)(?:\.\d{1,3}){3}|(?:169\.254|192\.168)(?:\.\d{1,3}){2}"
        r"|172\.(?:1[6-9]|2\d|3[01])(?:\.\d{1,3}){2})"
    )
    first, middle, last = (
        r"(?:[1-9]\d?|1\d\d|2[01]\d|22[0-3])",
        r"\.(?:1?\d{1,2}|2[0-4]\d|25[0-5])",
        r"\.(?:[1-9]\d?|1\d\d|2[0-4]\d|25[0-4])",
    )
    host = rf"(?:{private}{first}(?:{middle}){{2}}{last}|{label}+[{small}]{{2,63}})"
    return rf"(?:[\w+.-]{{2,}}://)?(?:\S+@)?{host}(?::\d{{2,5}})?(?:[/?#]\S*)?\Z"


@functools.cache
def tables() -> Mapping[str, Any]:
    """The content of english.toml."""
    return tomllib.loads(resources.files(__package__).joinpath("english.toml").read_text("utf-8"))


@functools.cache
def english() -> English:
    """The rules, which take a quarter of a second to build."""
    return English(tables())
