"""What a preparation is asked for: sources, documents held out, its part, names of the token sets.

A document goes to the split into whose share hash(seed, source, line) falls. So the choice depends
on the seed and the document's place alone: not on workers, parts, or what is dropped around it.

    OUTPUT                  one key, nothing held out
    OUTPUT_train            with documents held out; "{split}" in OUTPUT is replaced instead
    OUTPUT_title            several keys
    OUTPUT_text_document    Megatron's format, as its users expect it
    ….part-2-of-8           a part

One preparation may be divided among several machines (`--part 2/8`). All sources, laid end to end
by their size on disk, are divided into equal stretches. A line belongs to the part in whose stretch
it begins. A source that cannot seek (compressed, or one document as a whole) belongs to the part in
which it begins. Parts follow one another, so merging them in order gives what one preparation would
have given.

    part 2/3:        [-- a.jsonl ----------][-- b.jsonl --------][- c.gz -]
                                   |>>>>>>>>>>>>>>>>|
"""

from __future__ import annotations

import functools
import glob
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, UserError
from gristmill.base.hashing import mix
from gristmill.base.units import parse_split
from gristmill.text.filters.build import FilterPlan
from gristmill.text.prepare.dedup_request import DedupRequest
from gristmill.text.sources.reading import format_of
from gristmill.text.sources.source import OnDamage, ReadOptions, Source
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.format import file_of, is_manifest, program_version
from gristmill.tokens.megatron import FORMATS as MEGATRON
from gristmill.tokens.shards import FLAT

SAVE_EVERY = 5.0
FIRST_SAVE = 1.0
"""A process that just began has little to save, and a user who interrupts it expects to resume."""
_SPLITS = ("train", "val", "test")
_SPLIT = "{split}"
_ALL = "all"
_SCHEDULERS = ("slurm", "pbs")


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
class PartNumber:
    """Which of how many parts, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def suffix(self) -> str:
        """Appended to the name of the whole set to name the part."""
        return "" if self == WHOLE else f".part-{self.number:0{len(str(self.of))}d}-of-{self.of}"


WHOLE = PartNumber(1, 1)


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
    filters: FilterPlan = field(default_factory=FilterPlan)
    append_end_of_text: bool = True
    strict: bool = False
    """Stop at the first line that would be dropped."""
    on_damage: OnDamage = OnDamage.STOP
    """Skipped files are left out as a whole, and the ledger names them."""
    format: str = FLAT
    shard_size: int | None = None
    holdout: Holdout | None = None
    dedup: DedupRequest | None = None
    """How duplicates are found; None keeps them."""
    part: PartNumber = WHOLE
    workers: int | None = None
    """Processes; one for each core if None."""
    overwrite: bool = False
    save_every: float = SAVE_EVERY
    """Seconds of work that a kill may cost."""

    @property
    def read_options(self) -> ReadOptions:
        """How sources are read, with what filters ask for."""
        return replace(self.options, fields=self.filters.fields)

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
            **self.filters.as_json(),
            "format": self.format,
            "shard_size": self.shard_size,
            "split": [*holdout.shares, holdout.seed, holdout.rows] if holdout else None,
            "dedup": self.dedup.as_json() if self.dedup else None,
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


# ------------------------------------------------------------------ parts


def parse_part(
    part: str | None, *, parts: int | None = None, environment: Mapping[str, str] = os.environ
) -> PartNumber:
    """The part that "2/8" names, or "2" of so many parts, or the scheduler for this task.

    Task 3 of a job array does part 3, whichever tasks run with it, so that it can run again alone.
    """
    if part is None and parts is None:
        return WHOLE
    where = f"--part {part}" if part else f"--parts {parts}"
    number, of = 0, parts
    if part is None or part in _SCHEDULERS:
        number, counted = _task(environment, scheduler=part, where=where)
        of = parts or counted
    elif given := re.fullmatch(r"(\d+)(?:/(\d+))?", part):
        number, of = int(given[1]), int(given[2]) if given[2] else parts
        if parts not in (None, of):
            raise UserError(f"this contradicts --parts {parts}", where=where)
    if number and of is None:
        raise UserError(
            "the number of parts is not known",
            where=where if part == str(number) else f"{where}, task {number}",
            remedy="add --parts, such as --parts 8",
        )
    if of is not None and 1 <= number <= of:
        return PartNumber(number, of)
    raise UserError(
        f"part {number} of {of} does not exist" if of else f"{part!r} is not a part of a whole",
        where=where,
        remedy="give its number and the number of parts, such as 2/8; the first is 1/8",
    )


def _task(
    environment: Mapping[str, str], *, scheduler: str | None, where: str
) -> tuple[int, int | None]:
    """The number of this task, and how many there are if all of them are certain to be here."""

    def value(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else None

    slurm, pbs = value("SLURM_ARRAY_TASK_ID"), value("PBS_ARRAY_INDEX")
    if scheduler != "pbs" and slurm is not None:
        first, last, count = (value(f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "COUNT"))
        if first == 0:
            raise UserError(
                "the tasks of this job array are counted from 0, and parts from 1",
                where=where,
                remedy="submit it with numbers from 1, such as --array=1-8",
            )
        # Some of the tasks alone are an array too.
        return slurm, count if first == 1 and last == count != 1 else None
    if scheduler != "slurm" and pbs is not None:
        return pbs, None
    # Only srun sets the second; in a batch script the first is always 0.
    rank, ranks = value("SLURM_PROCID"), value("SLURM_STEP_NUM_TASKS")
    if scheduler != "pbs" and rank is not None and ranks is not None and ranks > 1:
        return rank + 1, ranks
    sought = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX"}
    names = [sought[scheduler]] if scheduler else sought.values()
    raise UserError(
        f"this is not a task of a job array ({' or '.join(names)} is not set), nor one of "
        "several of srun",
        where=where,
        remedy="say which part it is, such as --part 2/8, or submit with sbatch --array=1-8",
    )


@dataclass(frozen=True)
class SourceSpan:
    """The range of a source that belongs to a part."""

    source: int
    """The number of the source."""
    begin: int = 0
    end: int | None = None
    """None: up to the end of the source."""
    disk: int = 0
    """Bytes on disk, for progress."""


def spans_of(sources: Sequence[Source], options: ReadOptions, part: PartNumber) -> list[SourceSpan]:
    """What a part takes of each source, in order."""
    if part == WHOLE:
        return [SourceSpan(n, disk=source.size or 0) for n, source in enumerate(sources)]
    sizes = []
    for source in sources:
        if source.size is None:
            raise no_parts_of(source.name)
        sizes.append(source.size)
    total = sum(sizes)
    low, high = total * (part.number - 1) // part.of, total * part.number // part.of
    spans, offset = [], 0
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        if source.can_seek and format_of(source, options).divisible:
            begin, end = max(low - offset, 0), min(high - offset, size)
            if begin < end:
                spans.append(SourceSpan(number, begin, end, disk=end - begin))
        elif low <= offset < high or (offset >= high == total):
            spans.append(SourceSpan(number, disk=size))
        offset += size
    return spans


def no_parts_of(source: str) -> UserError:
    """The error for a source without a size."""
    return UserError(
        "this source cannot be divided into parts, since its size is not known",
        where=source,
        remedy="give files, or prepare it as a whole, without --part and --parts",
    )


def find_sets(names: Sequence[Path]) -> list[Path]:
    """The prefixes of the token sets that names and globs stand for; no part may be missing."""
    prefixes = [prefix for name in names for prefix in _expand(name)]
    groups: dict[tuple[str, int], list[int]] = {}
    for prefix in prefixes:
        if match := re.fullmatch(r"(.*)\.part-(\d+)-of-(\d+)", str(prefix)):
            groups.setdefault((match[1], int(match[3])), []).append(int(match[2]))
    for (whole, of), numbers in groups.items():
        if numbers == list(range(1, of + 1)):
            continue
        missing = [number for number in range(1, of + 1) if number not in numbers]
        what = "the parts are out of order, or one is given twice"
        if missing:
            names_of_missing = ", ".join(PartNumber(number, of).suffix for number in missing[:5])
            what = f"{len(missing)} of {of} parts are not given: {names_of_missing}"
        raise DataError(
            what,
            where=whole,
            remedy=f'prepare what is missing, and give all parts: "{whole}.part-*-of-{of}"',
        )
    return prefixes


def _expand(name: Path) -> list[Path]:
    """The sets that match a glob, numbers sorted by value."""
    if not glob.has_magic(str(name)) or file_of(name, ".json").is_file():
        return [name]
    prefixes = [
        path[: -len(".json")] for path in glob.glob(f"{name}.json") if is_manifest(Path(path))
    ]
    if not prefixes:
        raise DataError("no token set matches", where=name)

    def by_number(text: str) -> list[tuple[int, str]]:
        pieces = re.split(r"(\d+)", text)
        return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]

    return [Path(prefix) for prefix in sorted(prefixes, key=by_number)]
