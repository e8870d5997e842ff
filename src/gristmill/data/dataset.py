"""The token sets of a run, and how each is split into training and validation.

    data.paths   one set | several | several with weights      each is split by itself:
    set          |------ training ------|- validation -|- test, never read -|

Splits are cut by tokens and moved to the beginning of a document if one is near; for Megatron's
order they are cut by rows, as Megatron does. With data.validation nothing is held out. If there are
several sets, one whose validation split is shorter than one window is left out of validation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.units import split_shares
from gristmill.config.schema import DataConfig, RunConfig
from gristmill.config.settings import TokenPaths
from gristmill.data.intact import TokenFileWatch
from gristmill.data.megatron_order import row_table, split_rows
from gristmill.data.sampling import PackedInOrder, Packing, SampleIndex, SequentialWindows
from gristmill.data.stream import OpenTokenSet
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.format import TokenReader, id_range
from gristmill.tokens.store import open_tokens

DEFAULT_SPLIT = "99,1"


@dataclass(frozen=True)
class DatasetSplit:
    """A range of one token set: its training or validation split."""

    source: OpenTokenSet
    tokens: range
    rows: range | None = None
    """The same range in rows, for Megatron's order."""
    packing: Packing | None = None
    """The samples of a set of conversations; None if samples are cut from the text."""

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def reader(self) -> TokenReader:
        return self.source.reader

    @property
    def documents(self) -> list[int]:
        """The first of its documents, and the first one after it."""
        ends = [self.tokens.start, self.tokens.stop]
        return [int(place) for place in np.searchsorted(self.reader.document_starts, ends)]

    def in_order(self, sequence: int) -> SampleIndex:
        """Its samples from beginning to end, which do not overlap."""
        if self.packing is not None:
            return PackedInOrder(self.packing)
        return SequentialWindows(self.tokens, sequence, seed=0)


@dataclass(frozen=True)
class Mixture:
    """Splits of one or several token sets, with their weights if given."""

    splits: tuple[DatasetSplit, ...]
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ValidationSet:
    """A further validation set, whose loss is reported under its name."""

    name: str
    text: Mixture
    windows: int


@dataclass(frozen=True)
class RunData:
    """The training and validation data of a run."""

    train: Mixture
    validation: Mixture | None
    notes: tuple[str, ...] = ()
    """Facts about the data for the log."""
    warnings: tuple[str, ...] = ()
    """Data that was left out, for the log."""
    sets: tuple[ValidationSet, ...] = ()
    """Further validation sets."""

    @property
    def mixtures(self) -> list[Mixture]:
        """Everything that the run reads."""
        main = [self.train] if self.validation is None else [self.train, self.validation]
        return [*main, *(one.text for one in self.sets)]


def path_list(paths: TokenPaths) -> tuple[str, ...]:
    """The paths of token sets, without their weights."""
    return (paths,) if isinstance(paths, str) else tuple(paths)


def open_data(config: DataConfig, *, sequence: int) -> RunData:
    """Open the token files of a run and split them."""
    if config.kind == "chat":
        raise UserError(
            "the run's data are conversations, not token files",
            where="data.paths",
            remedy="name token files with --data, or text with --text",
            exit=Exit.DATA,
        )
    sets = [
        open_set(path, in_memory=config.in_memory, rows=config.by_rows)
        for path in path_list(config.paths)
    ]
    weights = held_weights = path_weights(config.paths)
    if config.validation is None:
        splits = [_split(one, config.split or DEFAULT_SPLIT, config.order) for one in sets]
        train = [both[0] for both in splits]
        held = [split for both in splits for split in both[1:]]
        _require_same_tokenizer(train, ())
    else:
        paths = path_list(config.validation)
        train = [_whole(one) for one in sets]
        held = [_whole(open_set(path, in_memory=config.in_memory)) for path in paths]
        held_weights = path_weights(config.validation)
        _require_same_tokenizer(train, held)
    _require_training_windows(train, sequence)
    validation = _validation(held, held_weights, sequence, config) if held else None
    return RunData(Mixture(tuple(train), weights), validation)


def open_validation_sets(
    config: RunConfig, train: Mixture, *, sequence: int
) -> tuple[ValidationSet, ...]:
    """Open the further sets of validation text in token files."""
    found = list[ValidationSet]()
    for number, one in enumerate(config.validation.sets or ()):
        where = f"validate.set.{number}.data"
        held = [
            _whole(open_set(path, in_memory=config.data.in_memory)) for path in path_list(one.data)
        ]
        _require_same_tokenizer(train.splits, held, where=where)
        text = _with_windows(held, path_weights(one.data), sequence)
        if text is None:
            longest = max(len(split.tokens) for split in held)
            raise UserError(
                f"the validation set {one.name!r} has {longest} tokens, too few for one window of "
                f"{sequence} + 1",
                where=where,
                remedy="prepare more text, or shorten data.sequence",
                exit=Exit.DATA,
            )
        found.append(ValidationSet(one.name, text, one.windows or config.validation.windows))
    return tuple(found)


def open_set(path: str, *, in_memory: bool = False, rows: bool = False) -> OpenTokenSet:
    """One token set, mapped or in memory."""
    reader = open_tokens(path)
    ids = reader.read(0, len(reader)) if in_memory or len(reader.files) == 1 else None
    return OpenTokenSet(
        path,
        reader,
        np.array(ids) if in_memory else ids,
        TokenFileWatch(() if in_memory else reader.files),
        rows=row_table(reader) if rows else None,
    )


def path_weights(paths: TokenPaths) -> tuple[float, ...] | None:
    """The weights of token sets, if any are given."""
    return tuple(paths.values()) if isinstance(paths, dict) else None


def _whole(source: OpenTokenSet) -> DatasetSplit:
    rows = None if source.rows is None else range(len(source.rows))
    return DatasetSplit(source, range(len(source.reader)), rows)


def _split(source: OpenTokenSet, split: str, order: str) -> list[DatasetSplit]:
    """The training split of a set, and the validation split if its share is above 0."""
    shares, reader, rows = split_shares(split), source.reader, source.rows
    assert shares is not None, "the rules are checked when settings are loaded"
    if rows is None:
        ends = [round(end) for end in np.cumsum([s / sum(shares) for s in shares]) * len(reader)]
        cuts = [_document_cut(reader, end, begin=begin) for begin, end in pairwise([0, *ends])]
        found = [DatasetSplit(source, range(*both)) for both in pairwise([0, *cuts])]
    else:
        found = []
        for chosen in split_rows(len(rows), shares=shares, order=order):
            begin, end = (
                int(rows.begins[row]) if row < len(rows) else len(reader)
                for row in (chosen.start, chosen.stop)
            )
            found.append(DatasetSplit(source, range(begin, end), chosen))
    return found[:2] if shares[1] else found[:1]


def _document_cut(reader: TokenReader, end: int, *, begin: int) -> int:
    """The document start nearest to a cut, or the cut itself if none is near.

    A start is near if moving the cut to it changes neither split by more than half.
    """
    if end == len(reader):
        return end
    starts = reader.document_starts
    nearest = int(starts[np.abs(starts - end).argmin()])
    room = min(end - begin, len(reader) - end) / 2
    return nearest if abs(nearest - end) <= room else end


# ------------------------------------------------------------------ checks


def _require_training_windows(train: Sequence[DatasetSplit], sequence: int) -> None:
    problems = []
    for split in train:
        if len(split.tokens) > sequence:
            continue
        which = "the training text" if len(train) == 1 else f"the training text of {split.path}"
        if split.source.rows is not None and split.rows is not None:
            total = len(split.source.rows)
            which += f", rows {split.rows.start} to {split.rows.stop} of {total},"
        what = f"{which} has {len(split.tokens)} tokens, too few for one window of {sequence} + 1"
        remedy = _smallest_holdout(split, sequence) or "prepare more text, or shorten data.sequence"
        problems.append(Problem(what, where="data.paths", remedy=remedy))
    if problems:
        raise UserError(problems, exit=Exit.DATA)


def _validation(
    held: Sequence[DatasetSplit],
    weights: tuple[float, ...] | None,
    sequence: int,
    config: DataConfig,
) -> Mixture:
    """The splits that hold at least one window; refuses validation text in which none does."""
    found = _with_windows(held, weights, sequence)
    if found is not None:
        return found
    longest = max(held, key=lambda split: len(split.tokens))
    rows = "" if longest.rows is None else f" in {len(longest.rows)} rows"
    raise UserError(
        f"the validation text has {len(longest.tokens)} tokens{rows}, too few for one window of "
        f"{sequence} + 1",
        where="data.validation" if config.validation else "data.split",
        remedy=_smallest_holdout(longest, sequence)
        or 'hold out more (data.split = "9,1"), or shorten data.sequence',
        exit=Exit.DATA,
    )


def _with_windows(
    held: Sequence[DatasetSplit], weights: tuple[float, ...] | None, sequence: int
) -> Mixture | None:
    """The splits that hold at least one window; None if none does."""
    kept = [number for number, split in enumerate(held) if len(split.tokens) > sequence]
    if not kept:
        return None
    return Mixture(
        tuple(held[number] for number in kept),
        weights and tuple(weights[number] for number in kept),
    )


def _smallest_holdout(split: DatasetSplit, sequence: int) -> str | None:
    """For splits by rows: advice on the smallest split that suffices, or why there is none."""
    if split.source.rows is None:
        return None
    lengths = split.source.rows.lengths
    rows, total = len(lengths), len(split.reader)
    tail = np.cumsum(lengths[::-1], dtype=np.int64)
    held = int(np.searchsorted(tail, sequence, side="right")) + 1
    if held >= rows or total - int(tail[held - 1]) <= sequence:
        return (
            f"the set has {total} tokens in {rows} rows, which cannot be split: prepare more "
            'text, shorten data.sequence, or hold nothing out with data.split = "1,0"'
        )
    return f'hold out at least {held} of the {rows} rows: data.split = "{rows - held},{held}"'


def _require_same_tokenizer(
    train: Sequence[DatasetSplit],
    held: Sequence[DatasetSplit],
    *,
    where: str = "data.validation",
) -> None:
    """Refuse token sets of different tokenizers. Files of other programs do not name theirs and are
    checked by their ids."""
    known = [
        (split.path, made_with, place)
        for splits, place in ((train, "data.paths"), (held, where))
        for split in splits
        if (made_with := split.reader.info.tokenizer) is not None
    ]
    remedy = f"prepare {'both' if len(known) == 2 else 'all'} with the same tokenizer"
    problems = [
        Problem(
            f"{path} was made with a different tokenizer than {known[0][0]} "
            f"({theirs[:12]} and {known[0][1][:12]})",
            where=place,
            remedy=remedy,
        )
        for path, theirs, place in known[1:]
        if theirs != known[0][1]
    ]
    if problems:
        raise UserError(problems, exit=Exit.DATA)


def prove_tokenizer(tokenizer: Tokenizer, reader: TokenReader, *, where: str, remedy: str) -> None:
    """Refuse a tokenizer that did not produce the ids: one with another fingerprint or, where none
    is recorded, one whose vocabulary does not contain all ids."""
    made_with, size = reader.info.tokenizer, reader.info.vocab_size
    if made_with == tokenizer.fingerprint:
        return
    if made_with is not None:
        what = (
            f"the token files were made with tokenizer {made_with[:12]}, and this one is "
            f"{tokenizer.fingerprint[:12]}"
        )
        raise UserError(what, where=where, remedy=remedy, exit=Exit.DATA)
    if size is not None and size <= tokenizer.size:
        return
    found = id_range(reader)
    if found.smallest < 0 or found.largest >= tokenizer.size:
        outside = found.smallest if found.smallest < 0 else found.largest
        what = f"the token files hold the id {outside}, and the tokenizer has {tokenizer.size} ids"
        raise UserError(what, where=where, remedy=remedy, exit=Exit.DATA)
