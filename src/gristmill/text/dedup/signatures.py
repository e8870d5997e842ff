"""What documents are compared by: rows of 64-bit numbers, one row for each document.

    exact      2 numbers, a BLAKE2b of 128 bits of the text
    minhash    the same 2, and a number for each bucket, of 14

Near duplicates share most of their shingles, which are all runs of 5 words. A permutation of all
possible shingles puts one shingle of a document first; the documents A and B have the same one with
a probability that is their similarity s: the number of shingles that both have, by the number that
either has. A bucket stands for 8 permutations, and two documents match if all 8 agree in any of 14
buckets: with probability 1 - (1 - s^8)^14, which is 0.57 at s = 0.7, 0.92 at 0.8 and 0.9996 at 0.9.

A permutation is the multiplication of a shingle's hash, 32 bits, by an odd number. A text of fewer
than 5 words is one shingle; one without words is compared by its exact hash.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gristmill.base.hashing import mix
from gristmill.text.dedup.words import Hashes, words_of

EXACT_COLUMNS = 2
_VERSION = 1
"""Changes with whatever changes signatures."""
_WINDOWS, _AT_ONCE = 1 << 14, 16
"""Shingles and permutations that are computed at once: 1 MiB fits into a core's cache."""
_PERMUTATION_SEED, _SHINGLE_SEED = 1 << 32, 2 << 32

Method = Literal["exact", "minhash"]
Unit = Literal["document", "paragraph", "line"]


@dataclass(frozen=True)
class SignatureSettings:
    """How documents are compared."""

    method: Method = "exact"
    unit: Unit = "document"
    """What is compared as a whole."""
    words: int = 5
    """Words of a shingle."""
    buckets: int = 14
    hashes: int = 8
    """Permutations of a bucket."""
    min_length: int = 0
    """Paragraphs and lines of fewer characters are not compared."""

    @property
    def columns(self) -> int:
        """Numbers of a row."""
        return EXACT_COLUMNS + (self.buckets if self.method == "minhash" else 0)

    def as_json(self) -> dict[str, Any]:
        """All that decides about signatures."""
        value = {"version": _VERSION, "method": self.method, "unit": self.unit}
        if self.method == "minhash":
            value |= {"words": self.words, "buckets": self.buckets, "hashes": self.hashes}
        if self.unit != "document":
            value |= {"min_length": self.min_length}
        return value


def sign_texts(texts: Sequence[str], settings: SignatureSettings) -> Hashes:
    """The rows of some texts."""
    rows = np.empty((len(texts), settings.columns), np.uint64)
    rows[:, :EXACT_COLUMNS] = exact_hashes(texts)
    if settings.method == "minhash":
        rows[:, EXACT_COLUMNS:] = _bucket_keys(texts, rows[:, 0], settings)
    return rows


def exact_hashes(texts: Sequence[str]) -> Hashes:
    """Two numbers for each text."""
    digests = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        for text in texts
    ]
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, EXACT_COLUMNS).astype(np.uint64)


def _bucket_keys(texts: Sequence[str], exact: Hashes, settings: SignatureSettings) -> Hashes:
    """For each text a number for each bucket."""
    words = words_of(texts)
    shingles, counts = _shingles(words.hashes, words.counts, length=settings.words)
    some = counts > 0
    keys: Hashes = np.add.outer(exact, np.arange(settings.buckets, dtype=np.uint64))
    if some.any():
        minima = _minima(shingles, counts[some], settings.buckets * settings.hashes)
        folded: Hashes = np.zeros((int(some.sum()), settings.buckets), np.uint64)
        for column in range(settings.hashes):
            folded = mix(folded ^ minima[column :: settings.hashes].T.astype(np.uint64))
        keys[some] = folded
    return mix(keys)


def _shingles(
    words: Hashes, counts: npt.NDArray[np.int64], *, length: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """The hashes of all shingles of all texts, and how many each text has."""
    factors = mix(np.arange(length, dtype=np.uint64) + np.uint64(_SHINGLE_SEED)) | np.uint64(1)
    windows = np.where(counts >= length, counts - length + 1, np.minimum(counts, 1))
    first = np.cumsum(counts) - counts
    sums = np.empty(int(windows.sum()), np.uint64)
    long = counts >= length
    in_long = np.repeat(long, windows)
    if long.any():
        count = len(words) - length + 1
        total = np.zeros(count, np.uint64)
        for place, factor in enumerate(factors):
            total += words[place : place + count] * factor
        # Where a text's last words stand, no window of it begins.
        begins = np.zeros(len(words) + 1, np.int64)
        np.add.at(begins, first[long], 1)
        np.add.at(begins, (first + windows)[long], -1)
        sums[in_long] = total[np.cumsum(begins[:count]) > 0]
    short = (counts > 0) & ~long
    if short.any():
        begin, size = first[short], counts[short]
        whole = size.astype(np.uint64)
        for place, factor in enumerate(factors[: int(size.max())]):
            mine = size > place
            whole[mine] += words[begin[mine] + place] * factor
        sums[~in_long] = whole
    return (mix(sums) >> np.uint64(32)).astype(np.uint32), windows


@functools.cache
def _multipliers(count: int) -> npt.NDArray[np.uint32]:
    numbers = mix(np.arange(count, dtype=np.uint64) + np.uint64(_PERMUTATION_SEED))
    return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _minima(
    shingles: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64], permutations: int
) -> npt.NDArray[np.uint32]:
    """For each permutation and text, the smallest number that it gives a shingle of the text."""
    factors = _multipliers(permutations)[:, None]
    first = np.cumsum(counts) - counts
    minima = np.full((permutations, len(counts)), np.iinfo(np.uint32).max, np.uint32)
    for begin in range(0, len(shingles), _WINDOWS):
        part = shingles[begin : begin + _WINDOWS]
        low = int(np.searchsorted(first, begin, side="right")) - 1
        high = int(np.searchsorted(first, begin + len(part)))
        bounds = np.maximum(first[low:high] - begin, 0)
        for row in range(0, permutations, _AT_ONCE):
            permuted = part * factors[row : row + _AT_ONCE]
            here = minima[row : row + _AT_ONCE, low:high]
            np.minimum(here, np.minimum.reduceat(permuted, bounds, axis=1), out=here)
    return minima
