"""The words of texts as hashes of 64 bits: what near duplicates are compared by.

    text       Prices rose by 1,250.75 % - Čapek's  →  prices | rose | by | 0 | capek | s

    letters    lower case, without marks: é is e; other numerals are letters too
    a number   0, with the points and commas between its digits
    a word     the letters and digits between two other characters; only its first 64 count
    no spaces  Chinese, Japanese, Thai, Lao, Khmer, Burmese: each letter is a word

The texts of a block are one array of code points, for which a table holds the class and the value
of each character. With P^i for the powers of an odd number modulo 2^64, H(i) is the sum of all
value(j) * P^j with j < i, and the hash of the word from i to j is (H(j) - H(i)) / P^i. So the hash
does not depend on where the word stands, and no loop runs over words.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.base.hashing import mix

Hashes = npt.NDArray[np.uint64]

_SEPARATOR, _LETTER, _ALONE, _DIGIT, _POINT, _IGNORED = range(6)
_WORD_LETTERS = 64
_PIECE = 1 << 15
"""Characters whose sums are formed at once: their 8 bytes each fit into a core's cache."""
_FACTOR = 0x9DDFEA08EB382D69
_SMALL = 0x3100
"""Characters up to here, and those in `_MORE`, are looked up; others of the same kind are alike."""
_MORE = ((0xA000, 0xAC00), (0xD7B0, 0xD800), (0xF900, 0x1F000), (0x2F800, 0x2FA20))
_NO_SPACES = (
    (0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800), (0x3005, 0x3008), (0x3040, 0x3100),
    (0x31F0, 0x3200), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0xFF66, 0xFFA0),
    (0x20000, 0x323B0),
)  # fmt: skip
"""Scripts that put no spaces between words."""
_IDEOGRAPHS = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0x20000, 0x2F800), (0x30000, 0x323B0))
_HANGUL = (0xAC00, 0xD7A4)
_END = 0x323B1
"""What follows, as the last entry of the table, separates words."""
_POINTS = ".,\u060c\u066b"
"""The last two are Arabic."""


class Words(NamedTuple):
    """The words of several texts, end to end."""

    hashes: Hashes
    counts: npt.NDArray[np.int64]
    """How many words each text has."""


class _Characters(NamedTuple):
    classes: npt.NDArray[np.uint8]
    values: Hashes
    """0 for what separates words."""


@functools.cache
def _characters() -> _Characters:
    """What each code point means."""
    classes = np.full(_END, _SEPARATOR, np.uint8)
    # What stands for each letter.
    plain = np.arange(_END, dtype=np.uint64)
    classes[slice(*_HANGUL)] = _LETTER
    for begin, end in _IDEOGRAPHS:
        classes[begin:end] = _LETTER
    for code in itertools.chain(range(_SMALL), *(range(*bounds) for bounds in _MORE)):
        character = chr(code)
        category = unicodedata.category(character)
        if category == "Nd":
            classes[code], plain[code] = _DIGIT, ord("0")
        elif category in ("Mn", "Cf"):
            classes[code] = _IGNORED
        elif category[0] in "LNM":
            classes[code], plain[code] = _LETTER, _folded(character)
        elif character in _POINTS:
            classes[code] = _POINT
    for begin, end in _NO_SPACES:
        part = classes[begin:end]
        part[part == _LETTER] = _ALONE
    values = mix(plain)
    values[(classes == _SEPARATOR) | (classes == _POINT)] = 0
    return _Characters(classes, values)


def _folded(character: str) -> int:
    """What stands for a letter: its lower case without marks, which may be several letters."""
    signs = unicodedata.normalize("NFD", character.lower())
    if len(signs) > 1:
        signs = "".join(sign for sign in signs if unicodedata.category(sign) != "Mn")
    number = 0
    for sign in signs or character:
        number = number << 21 | ord(sign)
    return number


@functools.cache
def _powers() -> tuple[Hashes, Hashes]:
    """P^i and 1 / P^i, modulo 2^64."""
    count = _PIECE + _WORD_LETTERS + 1
    tables = []
    for factor in (_FACTOR, pow(_FACTOR, -1, 1 << 64)):
        powers = np.full(count, np.uint64(factor))
        powers[0] = 1
        tables.append(np.multiply.accumulate(powers))
    return tables[0], tables[1]


def words_of(texts: Sequence[str]) -> Words:
    """The words of some texts."""
    if not texts:
        return Words(np.empty(0, np.uint64), np.empty(0, np.int64))
    classes, values = _characters()
    content = "\n".join([*texts, ""]).encode("utf-32-le", "surrogatepass")
    codes = np.minimum(np.frombuffer(content, "<u4"), _END - 1)
    kinds = classes[codes]
    lengths = np.array([len(text) + 1 for text in texts], np.int64)
    for chosen in (_not_ignored, _outside_numbers):
        kept = chosen(kinds)
        if not kept.all():
            first = np.cumsum(lengths) - lengths
            lengths = np.add.reduceat(kept, first, dtype=np.int64)
            codes, kinds = codes[kept], kinds[kept]
    starts = np.flatnonzero(_begins(kinds))
    ends = np.append(starts[1:], len(codes))
    ends = np.minimum(ends, starts + _WORD_LETTERS)
    counts = np.diff(np.searchsorted(starts, np.cumsum(lengths)), prepend=0)
    return Words(_hashes(values, codes, starts, ends), counts)


def _not_ignored(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    kept: npt.NDArray[np.bool_] = kinds != _IGNORED
    return kept


def _outside_numbers(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """All characters but those of a number behind its first digit."""
    digits = kinds == _DIGIT
    inside = kinds == _POINT
    inside[1:-1] &= digits[:-2] & digits[2:]
    inside[[0, -1]] = False
    kept: npt.NDArray[np.bool_] = ~inside
    inside |= digits
    kept[1:] &= ~(digits[1:] & inside[:-1])
    return kept


def _begins(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where words begin."""
    letters = (kinds >= _LETTER) & (kinds <= _DIGIT)
    alone = kinds == _ALONE
    begins: npt.NDArray[np.bool_] = letters.copy()
    begins[1:] &= ~letters[:-1] | alone[1:] | alone[:-1]
    return begins


def _hashes(
    values: Hashes,
    codes: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.intp],
    ends: npt.NDArray[np.int64],
) -> Hashes:
    powers, inverses = _powers()
    hashes = np.empty(len(starts), np.uint64)
    sums = np.zeros(len(powers), np.uint64)
    for begin in range(0, len(codes), _PIECE):
        low, high = np.searchsorted(starts, [begin, begin + _PIECE])
        terms = values[codes[begin : begin + _PIECE + _WORD_LETTERS]]
        terms *= powers[: len(terms)]
        np.cumsum(terms, out=sums[1 : len(terms) + 1])
        inside, until = starts[low:high] - begin, ends[low:high] - begin
        hashes[low:high] = (sums[until] - sums[inside]) * inverses[inside]
    return mix(hashes)
