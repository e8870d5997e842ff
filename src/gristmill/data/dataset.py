"""Windows of token files, and the parts that are held out of training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gristmill.base.errors import Exit, UserError
from gristmill.config.resolve import parse_split
from gristmill.config.schema import DataConfig
from gristmill.data.sampling import Stretch
from gristmill.text.tokenizers import Tokenizer
from gristmill.tokens.format import TokenReader
from gristmill.tokens.reader import id_range
from gristmill.tokens.store import open_tokens


@dataclass(frozen=True)
class Part:
    """One stretch of one token set."""

    reader: TokenReader
    stretch: Stretch

    def windows(self, starts: np.ndarray, *, sequence: int) -> np.ndarray:
        """The windows that begin at `starts`, T + 1 tokens each, as int64."""
        result = np.empty((len(starts), sequence + 1), np.int64)
        for row, start in enumerate(starts):
            result[row] = self.reader.read(int(start), sequence + 1)
        return result


@dataclass(frozen=True)
class Parts:
    """What is trained on and what is validated on."""

    train: Part
    validation: Part | None


def open_parts(config: DataConfig, *, sequence: int) -> Parts:
    """Open the token files of a run and divide them."""
    reader = open_tokens(config.paths)
    if config.validation is not None:
        held = open_tokens(config.validation)
        _same_tokenizer(reader, held, config)
        whole = Part(held, Stretch(0, len(held)))
        return Parts(Part(reader, Stretch(0, len(reader))), _long_enough(whole, sequence, config))
    fractions = parse_split(config.split or "99,1")
    assert fractions is not None, "the rules are checked when settings are loaded"
    cuts = _cuts(reader, fractions)
    train = Part(reader, Stretch(0, cuts[0]))
    if fractions[1] == 0:
        return Parts(train, None)
    validation = Part(reader, Stretch(cuts[0], cuts[1]))
    return Parts(train, _long_enough(validation, sequence, config))


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


def _long_enough(part: Part, sequence: int, config: DataConfig) -> Part:
    if len(part.stretch) > sequence:
        return part
    where = "data.validation" if config.validation else "data.split"
    raise UserError(
        f"the validation text has {len(part.stretch)} tokens, too few for one window of "
        f"{sequence} + 1",
        where=where,
        remedy='hold out more (data.split = "9,1"), or shorten data.sequence',
        exit=Exit.DATA,
    )


def _same_tokenizer(train: TokenReader, held: TokenReader, config: DataConfig) -> None:
    """Token files of other programs name no tokenizer; training proves those by their ids."""
    ours, theirs = train.info.tokenizer, held.info.tokenizer
    if ours is not None and theirs is not None and ours != theirs:
        raise UserError(
            f"{config.validation} was made with another tokenizer than {config.paths} "
            f"({theirs[:12]} and {ours[:12]})",
            where="data.validation",
            remedy="prepare both with the same tokenizer",
            exit=Exit.DATA,
        )


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
