"""The token sets of a run, and the parts of them that are trained on and held out.

    data.paths   one set | several | several with weights      each is divided in its own order:
    set          |------ training ------|- validation -|- test, never read -|

The cuts are made by tokens and moved to the beginning of a document where one is near; for the
order megatron they are made by rows, as Megatron makes them. With data.validation nothing is held
out. A set of several whose held-out part is shorter than one window is not validated on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.units import parse_split, split_shares
from gristmill.config.schema import DataConfig
from gristmill.config.values import TokenPaths
from gristmill.data.megatron_order import Rows, rows_of, split_rows
from gristmill.data.sampling import Stretch
from gristmill.data.stream import TokenText
from gristmill.data.watch import watch_files
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.reader import TokenReader, id_range
from gristmill.tokens.store import open_tokens

DEFAULT_SPLIT = "99,1"


@dataclass(frozen=True)
class RowPart:
    """Some neighbouring rows of a token set."""

    table: Rows
    numbers: Stretch
    """The rows `begin` to `end` (not included)."""


@dataclass(frozen=True)
class Part:
    """One stretch of one token set."""

    path: str
    text: TokenText
    stretch: Stretch
    rows: RowPart | None = None
    """The same stretch in rows, for the order megatron."""

    @property
    def reader(self) -> TokenReader:
        return self.text.reader


@dataclass(frozen=True)
class Mixture:
    """Parts of one or several token sets, with their weights if some were given."""

    parts: tuple[Part, ...]
    weights: tuple[float, ...] | None = None

    def check_files(self) -> None:
        """Refuse to go on with token files that changed."""
        for part in self.parts:
            if part.text.watch is not None:
                part.text.watch.check_all()


@dataclass(frozen=True)
class Parts:
    """What is trained on and what is validated on."""

    train: Mixture
    validation: Mixture | None


@dataclass(frozen=True)
class _Divided:
    train: Part
    held: Part | None


def path_list(paths: TokenPaths) -> tuple[str, ...]:
    """The paths of token sets, without their weights."""
    return (paths,) if isinstance(paths, str) else tuple(paths)


def open_parts(config: DataConfig, *, sequence: int) -> Parts:
    """Open the token files of a run and divide them."""
    texts = {path: open_text(path, in_memory=config.in_memory) for path in path_list(config.paths)}
    weights = _weights(config.paths)
    if config.validation is not None:
        held = _whole(config.validation, in_memory=config.in_memory)
        train = Mixture(tuple(_whole_part(config, *item) for item in texts.items()), weights)
        _same_tokenizer(config, train=train.parts, held=held.parts)
        _train_long_enough(train.parts, sequence)
        return Parts(train, _long_enough(held, sequence, config))
    divided = [_divide(config, path, text) for path, text in texts.items()]
    train = Mixture(tuple(both.train for both in divided), weights)
    _same_tokenizer(config, train=train.parts, held=())
    _train_long_enough(train.parts, sequence)
    if divided[0].held is None:
        return Parts(train, None)
    validation = Mixture(tuple(both.held for both in divided if both.held is not None), weights)
    return Parts(train, _long_enough(validation, sequence, config))


def open_text(path: str, *, in_memory: bool = False) -> TokenText:
    """One token set, mapped or in memory."""
    reader = open_tokens(path)
    if in_memory:
        return TokenText(reader, np.array(reader.read(0, len(reader))), watch=None)
    one_file = len(reader.files) == 1
    ids = reader.read(0, len(reader)) if one_file else None
    return TokenText(reader, ids, watch=watch_files(reader.files))


def _weights(paths: TokenPaths) -> tuple[float, ...] | None:
    return tuple(paths.values()) if isinstance(paths, dict) else None


def _whole(paths: TokenPaths, *, in_memory: bool) -> Mixture:
    parts = []
    for path in path_list(paths):
        text = open_text(path, in_memory=in_memory)
        parts.append(Part(path, text, Stretch(0, len(text.reader))))
    return Mixture(tuple(parts), _weights(paths))


def _whole_part(config: DataConfig, path: str, text: TokenText) -> Part:
    stretch = Stretch(0, len(text.reader))
    if config.order != "megatron":
        return Part(path, text, stretch)
    table = rows_of(text.reader)
    return Part(path, text, stretch, RowPart(table, Stretch(0, len(table))))


# ------------------------------------------------------------------ dividing a set


def _divide(config: DataConfig, path: str, text: TokenText) -> _Divided:
    split = config.split or DEFAULT_SPLIT
    if config.order == "megatron":
        return _divide_rows(path, text, split)
    fractions = parse_split(split)
    assert fractions is not None, "the rules are checked when settings are loaded"
    cuts = _cuts(text.reader, fractions)
    train = Part(path, text, Stretch(0, cuts[0]))
    held = Part(path, text, Stretch(cuts[0], cuts[1])) if fractions[1] else None
    return _Divided(train, held)


def _divide_rows(path: str, text: TokenText, split: str) -> _Divided:
    shares = split_shares(split)
    assert shares is not None, "the rules are checked when settings are loaded"
    table = rows_of(text.reader)
    train, held, _ = split_rows(len(table), shares=shares)
    return _Divided(
        _row_part(path, text, table, train),
        _row_part(path, text, table, held) if shares[1] else None,
    )


def _row_part(path: str, text: TokenText, table: Rows, numbers: Stretch) -> Part:
    bounds = [
        int(table.begins[row]) if row < len(table) else len(text.reader)
        for row in (numbers.begin, numbers.end)
    ]
    return Part(path, text, Stretch(*bounds), RowPart(table, numbers))


def _cuts(reader: TokenReader, fractions: list[float]) -> list[int]:
    """Ends of the parts in tokens, moved to the beginning of a document where one is near."""
    ends = [round(end) for end in np.cumsum(fractions) * len(reader)]
    return [_document_cut(reader, end, begin=begin) for begin, end in pairwise([0, *ends])]


def _document_cut(reader: TokenReader, end: int, *, begin: int) -> int:
    """The document start nearest to a cut, or the cut itself where none is near.

    A start is near if moving to it changes neither neighbour by more than half.
    """
    if end == len(reader):
        return end
    starts = reader.document_starts
    nearest = int(starts[np.abs(starts - end).argmin()])
    room = min(end - begin, len(reader) - end) / 2
    return nearest if abs(nearest - end) <= room else end


# ------------------------------------------------------------------ what is refused


def _train_long_enough(parts: Sequence[Part], sequence: int) -> None:
    problems = []
    for part in parts:
        if len(part.stretch) > sequence:
            continue
        which = "the training text" if len(parts) == 1 else f"the training text of {part.path}"
        if part.rows is not None:
            numbers = part.rows.numbers
            which += f", rows {numbers.begin} to {numbers.end} of {len(part.rows.table)},"
        problems.append(
            Problem(
                f"{which} has {len(part.stretch)} tokens, too few for one window of {sequence} + 1",
                where="data.paths",
                remedy=_shorter_split(part, sequence)
                or "prepare more text, or shorten data.sequence",
            )
        )
    if problems:
        raise UserError(problems, exit=Exit.DATA)


def _long_enough(held: Mixture, sequence: int, config: DataConfig) -> Mixture:
    """The parts that hold a window; refuses a validation text of which none does."""
    kept = [number for number, part in enumerate(held.parts) if len(part.stretch) > sequence]
    if kept:
        weights = held.weights
        return Mixture(
            tuple(held.parts[number] for number in kept),
            weights and tuple(weights[number] for number in kept),
        )
    longest = max(held.parts, key=lambda part: len(part.stretch))
    rows = "" if longest.rows is None else f" in {len(longest.rows.numbers)} rows"
    raise UserError(
        f"the validation text has {len(longest.stretch)} tokens{rows}, too few for one window of "
        f"{sequence} + 1",
        where="data.validation" if config.validation else "data.split",
        remedy=_shorter_split(longest, sequence)
        or 'hold out more (data.split = "9,1"), or shorten data.sequence',
        exit=Exit.DATA,
    )


def _shorter_split(part: Part, sequence: int) -> str | None:
    """The split by rows that holds out just enough, where there is one."""
    if part.rows is None:
        return None
    lengths = part.rows.table.lengths
    rows, total = len(lengths), len(part.reader)
    tail = np.cumsum(lengths[::-1], dtype=np.int64)
    held = int(np.searchsorted(tail, sequence, side="right")) + 1
    if held >= rows or total - int(tail[held - 1]) <= sequence:
        return (
            f"the set has {total} tokens in {rows} rows, which cannot be divided: prepare more "
            'text, shorten data.sequence, or hold nothing out with data.split = "1,0"'
        )
    return f'hold out at least {held} of the {rows} rows: data.split = "{rows - held},{held}"'


def _same_tokenizer(config: DataConfig, *, train: Sequence[Part], held: Sequence[Part]) -> None:
    """Token files of other programs name no tokenizer; training proves those by their ids."""
    known = [part for part in (*train, *held) if part.reader.info.tokenizer is not None]
    problems = []
    for part in known[1:]:
        ours, theirs = known[0].reader.info.tokenizer, part.reader.info.tokenizer
        assert ours is not None and theirs is not None
        if ours != theirs:
            problems.append(
                Problem(
                    f"{part.path} was made with another tokenizer than {known[0].path} "
                    f"({theirs[:12]} and {ours[:12]})",
                    where="data.validation" if any(part is one for one in held) else "data.paths",
                    remedy=f"prepare {'both' if len(known) == 2 else 'all'} with the same "
                    "tokenizer",
                )
            )
    if problems:
        raise UserError(problems, exit=Exit.DATA)


def prove_tokenizer(tokenizer: Tokenizer, reader: TokenReader, *, where: str, remedy: str) -> None:
    """Refuse a tokenizer that did not make the ids: by its fingerprint, or where nobody wrote that
    down, because ids lie outside its vocabulary.
    """
    made_with, size = reader.info.tokenizer, reader.info.vocab_size
    if made_with is not None:
        if tokenizer.fingerprint != made_with:
            what = (
                f"the token files were made with tokenizer {made_with[:12]}, and this one is "
                f"{tokenizer.fingerprint[:12]}"
            )
            raise UserError(what, where=where, remedy=remedy, exit=Exit.DATA)
        return
    if size is not None and size <= tokenizer.size:
        return
    found = id_range(reader)
    if found.smallest < 0 or found.largest >= tokenizer.size:
        outside = found.smallest if found.smallest < 0 else found.largest
        what = f"the token files hold the id {outside}, and the tokenizer has {tokenizer.size} ids"
        raise UserError(what, where=where, remedy=remedy, exit=Exit.DATA)
