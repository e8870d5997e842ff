"""What a preparation is asked for: sources, documents held out, names of the token sets.

A document goes to the split into whose share hash(seed, source, line) falls. So the choice depends
on the seed and the document's place alone: not on workers, parts, or what is dropped around it.

    OUTPUT                  one key, nothing held out
    OUTPUT_train            with documents held out; "{split}" in OUTPUT is replaced instead
    OUTPUT_title            several keys
    OUTPUT_text_document    Megatron's format, as its users expect it
    ….part-2-of-8           a part
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import UserError
from gristmill.base.hashing import mix
from gristmill.base.units import parse_split
from gristmill.text.prepare.parts import WHOLE, PartNumber
from gristmill.text.sources.source import OnDamage, ReadOptions
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.format import program_version
from gristmill.tokens.megatron import FORMATS as MEGATRON
from gristmill.tokens.shards import FLAT

SAVE_EVERY = 5.0
FIRST_SAVE = 1.0
"""A process that just began has little to save, and a user who interrupts it expects to resume."""
_SPLITS = ("train", "val", "test")
_SPLIT = "{split}"
_ALL = "all"


@dataclass(frozen=True)
class Holdout:
    """How many documents each split gets, and the seed that chooses them."""

    shares: tuple[float, ...]
    """Fractions for training, validation and optionally testing; their sum is one."""
    seed: int
    rows: int | None = None
    """If given, choose documents as the `datasets` library does from this many rows: those that
    come first in a random permutation. So the validation set of a corpus is the one that others
    have published results on."""

    @property
    def names(self) -> tuple[str, ...]:
        """The splits that get documents."""
        return tuple(name for name, share in zip(_SPLITS, self.shares, strict=False) if share)

    def sets_of(self, lines: npt.NDArray[np.int64], *, source: int) -> npt.NDArray[np.intp]:
        """For each line of a source, counted from 1, the number of its split in `names`."""
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
            f"{split!r} does not divide documents into two or three splits",
            where="--split",
            remedy="give proportions for train, val and optionally test, such as --split 999,1",
        )
    return Holdout(tuple(shares), seed)


@dataclass(frozen=True)
class PrepareRequest:
    """Everything that a preparation is asked for."""

    sources: Sequence[str]
    """Files, folders, globs, "-" for standard input, hf:NAME for a dataset."""
    output: Path
    """The name of the token sets, without what the key, split and part add to it."""
    tokenizer: Tokenizer | Callable[[], Tokenizer]
    """Or a function that opens it: then the worker processes start meanwhile."""
    options: ReadOptions = field(default_factory=ReadOptions)
    append_end_of_text: bool = True
    strict: bool = False
    """Stop at the first line that would be dropped."""
    on_damage: OnDamage = OnDamage.STOP
    """Skipped files are left out as a whole, and the ledger names them."""
    format: str = FLAT
    shard_size: int | None = None
    holdout: Holdout | None = None
    part: PartNumber = WHOLE
    workers: int | None = None
    """Processes; one for each core if None."""
    overwrite: bool = False
    save_every: float = SAVE_EVERY
    """Seconds of work that a kill may cost."""

    @property
    def splits(self) -> Sequence[str | None]:
        return (None,) if self.holdout is None else self.holdout.names

    def prefix(self, key: str, split: str | None) -> Path:
        """The name of one set; for `split` None, of what all sets of a key have in common."""
        name = str(self.output)
        if self.holdout is not None:
            name = split_name(name, split)
        if self.format in MEGATRON:
            name += f"_{key}_document"
        elif len(self.options.keys) > 1:
            name += f"_{key}"
        return Path(name + self.part.suffix)

    @property
    def name(self) -> Path:
        """The name of the preparation as a whole."""
        return Path(split_name(str(self.output), None) + self.part.suffix)

    def as_json(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """All that decides, for given sources, the content of the files."""
        options, holdout = self.options, self.holdout
        return {
            "tokenizer": tokenizer.fingerprint,
            "keys": list(options.keys),
            "documents": options.separator or options.split.value,
            **({"portion": list(options.portion)} if options.portion else {}),
            "append_eod": self.append_end_of_text,
            "format": self.format,
            "shard_size": self.shard_size,
            "split": [*holdout.shares, holdout.seed, holdout.rows] if holdout else None,
            "part": str(self.part),
            "version": program_version(),
        }


def split_name(output: str, split: str | None) -> str:
    """The name of the sets of one split; for None, of all splits together."""
    if split is not None:
        return output.replace(_SPLIT, split) if _SPLIT in output else f"{output}_{split}"
    path = Path(output)
    # Files for all splits are kept above folders that are named for one.
    folders = [part for part in path.parent.parts if _SPLIT not in part]
    return str(Path(*folders, path.name.replace(_SPLIT, _ALL)))
