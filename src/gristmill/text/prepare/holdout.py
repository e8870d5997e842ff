"""Which documents are held out for validation and testing: by their place, not by chance.

A document goes to the set into whose share hash(seed, source, line) falls. So the choice depends on
nothing but the seed and where the document stands: not on the number of workers, not on how the
work is divided into parts, and not on what is dropped around it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import UserError
from gristmill.base.hashing import mix
from gristmill.base.units import parse_split

NAMES = ("train", "val", "test")


@dataclass(frozen=True)
class Holdout:
    """Shares of the documents, and the seed that chooses them."""

    shares: tuple[float, ...]
    """Fractions of one, for training, validation and perhaps testing."""
    seed: int
    rows: int | None = None
    """If given, the documents are chosen as the `datasets` library chooses them from so many rows:
    those that come first in a random permutation are held out. So the validation set of a corpus
    is the one that others have published results on."""

    @property
    def names(self) -> tuple[str, ...]:
        """The sets that get documents."""
        return tuple(name for name, share in zip(NAMES, self.shares, strict=False) if share)

    def sets_of(self, lines: npt.NDArray[np.int64], *, source: int) -> npt.NDArray[np.intp]:
        """For each line of a source, counted from 1, the number of its set in `names`."""
        if self.rows is not None:
            return np.isin(lines - 1, self._first).astype(np.intp)
        key = mix(mix(np.array([self.seed], np.uint64)) + np.uint64(source))
        chances = mix(lines.astype(np.uint64) + key).astype(np.float64) / 2.0**64
        bounds = np.cumsum([share for share in self.shares if share])
        return np.minimum(np.searchsorted(bounds, chances, side="right"), len(bounds) - 1)

    @functools.cached_property
    def _first(self) -> npt.NDArray[np.int64]:
        assert self.rows is not None and len(self.shares) == 2
        permutation = np.random.default_rng(self.seed).permutation(self.rows)
        return np.sort(permutation[: math.ceil(self.shares[1] * self.rows)])


def parse_holdout(split: str, *, seed: int) -> Holdout:
    """The holdout for proportions such as "999,1" or "0.9995,0.0005"."""
    shares = parse_split(split)
    if shares is None or shares[0] <= 0 or sum(share > 0 for share in shares) < 2:
        raise UserError(
            f"{split!r} does not divide documents into two or three sets",
            where="--split",
            remedy='give proportions for training, validation and perhaps testing, such as "999,1"',
        )
    return Holdout(tuple(shares), seed)
