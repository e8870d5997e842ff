"""The token sets of one preparation, all advancing together.

    key 1 -> Ledger, and the sets train, val, test or the only one
    key 2 -> …

    OUTPUT                  one key, nothing held out
    OUTPUT_train            with documents held out; "{split}" in OUTPUT is put in place instead
    OUTPUT_title            several keys
    OUTPUT_text_document    Megatron's format, as its users expect it
    ….part-2-of-8           a part

Beside each set lies its tokenizer, PREFIX.tokenizer; beside all of a key, its ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit
from gristmill.base.files import storage_errors, write_json
from gristmill.text.prepare.grind import Column, Ground
from gristmill.text.prepare.holdout import Holdout
from gristmill.text.prepare.ledger import HopelessError, Ledger, ledger_from_json
from gristmill.text.prepare.parts import WHOLE, PartNumber
from gristmill.text.sources.source import Dropped
from gristmill.text.tokenizers.tokenizer import TOKENIZER_FILES, Tokenizer
from gristmill.tokens.format import TokenSetInfo, file_of
from gristmill.tokens.megatron import FORMAT as MEGATRON
from gristmill.tokens.store import create_tokens
from gristmill.tokens.writer import TokenWriter

SPLIT = "{split}"
_ALL = "all"


@dataclass(frozen=True)
class Layout:
    """What sets are made and how they are named."""

    output: Path
    format: str
    shard_size: int | None = None
    keys: tuple[str, ...] = ("text",)
    holdout: Holdout | None = None
    part: PartNumber = WHOLE

    def prefix(self, key: str, split: str | None) -> Path:
        """The name of one set; of `split` None, what all sets of a key have in common."""
        name = str(self.output)
        if self.holdout is not None:
            name = split_name(name, split)
        if self.format == MEGATRON:
            name += f"_{key}_document"
        elif len(self.keys) > 1:
            name += f"_{key}"
        return Path(name + (self.part.suffix if self.part != WHOLE else ""))

    @property
    def whole(self) -> Path:
        """A name for the preparation as such."""
        name = split_name(str(self.output), None)
        return Path(name + (self.part.suffix if self.part != WHOLE else ""))

    @property
    def splits(self) -> Sequence[str | None]:
        return (None,) if self.holdout is None else self.holdout.names


def split_name(output: str, split: str | None) -> str:
    """The name of one of the sets that documents are divided into; of None, of all together."""
    if split is not None:
        return output.replace(SPLIT, split) if SPLIT in output else f"{output}_{split}"
    path = Path(output)
    # What belongs to all sets lies above folders that are named for one.
    folders = [part for part in path.parent.parts if SPLIT not in part]
    return str(Path(*folders, path.name.replace(SPLIT, _ALL)))


@dataclass(frozen=True)
class PreparedSet:
    """A token set that was made."""

    prefix: Path
    info: TokenSetInfo


@dataclass(frozen=True)
class PreparedKey:
    """What one key gave."""

    key: str
    ledger: Ledger
    ledger_file: Path
    sets: tuple[PreparedSet, ...]


class Outputs:
    """The sets of a preparation, being written."""

    def __init__(
        self,
        layout: Layout,
        tokenizer: Tokenizer,
        *,
        overwrite: bool,
        strict: bool = False,
        lasting: bool = False,
        states: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin the sets, or go on with what `states` described.

        `lasting` sets outlive their process; `strict` stops at the first line without a document.
        """
        self.encoder = ""
        """The library that encoded what was taken last."""
        self._keys: list[_KeyOutput] = []
        self._strict = strict
        self._may_be_empty = layout.part != WHOLE
        with storage_errors(layout.whole.parent):
            layout.whole.parent.mkdir(parents=True, exist_ok=True)
        try:
            for number, key in enumerate(layout.keys):
                state = states[number] if states else None
                self._keys.append(_KeyOutput(layout, key, tokenizer, state))
                self._keys[-1].open(overwrite=overwrite, lasting=lasting)
        except BaseException:
            if states:
                self.release()
            else:
                self.abandon()
            raise

    @property
    def kept(self) -> int:
        return sum(output.ledger.kept for output in self._keys)

    @property
    def tokens(self) -> int:
        return sum(one.tokens for output in self._keys for one in output.sets)

    @property
    def text_bytes(self) -> int:
        return sum(one.text_bytes for output in self._keys for one in output.sets)

    def take(self, ground: Ground, *, source: int, line: int, origin: Callable[[int], str]) -> None:
        """Write what became of a block whose first line is number `line` of a source.

        `origin` names a place in the block.
        """
        self.encoder = ground.encoder
        for output, column in zip(self._keys, ground.columns, strict=True):
            output.ledger.lines += ground.rows
            for place, reason in column.dropped:
                self._drop(output.ledger, Dropped(reason, origin(place)))
            output.take(column, source=source, line=line)

    def _drop(self, ledger: Ledger, item: Dropped) -> None:
        if self._strict:
            raise HopelessError(
                f"this line gives no document: {item.reason.value}",
                where=item.origin,
                remedy="mend it, or prepare without strict to leave such lines out",
                exit=Exit.DATA,
            )
        ledger.drop(item)

    def save(self) -> list[dict[str, Any]]:
        """Flush everything; what is returned lets another process go on."""
        return [output.save() for output in self._keys]

    def finish(self) -> tuple[PreparedKey, ...]:
        """Put all sets in place."""
        for output in self._keys:
            output.ledger.check()
            if not self._may_be_empty:
                output.ledger.refuse_nothing()
                output.refuse_empty()
        return tuple(output.finish() for output in self._keys)

    def release(self) -> None:
        """Leave what was saved for another process."""
        for output in self._keys:
            for one in output.sets:
                one.writer.close()

    def abandon(self) -> None:
        """Remove everything that is not in place yet."""
        for output in self._keys:
            for one in output.sets:
                one.writer.abandon()


@dataclass
class _SetOutput:
    prefix: Path
    writer: TokenWriter
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


class _KeyOutput:
    """The ledger and the sets of one key."""

    def __init__(
        self, layout: Layout, key: str, tokenizer: Tokenizer, state: Mapping[str, Any] | None
    ) -> None:
        self.ledger = ledger_from_json(state["ledger"]) if state else Ledger()
        self.sets: list[_SetOutput] = []
        self._layout = layout
        self._key = key
        self._tokenizer = tokenizer
        self._state = state

    def open(self, *, overwrite: bool, lasting: bool) -> None:
        """Begin the sets, or go on with them."""
        for number, split in enumerate(self._layout.splits):
            saved = self._state["sets"][number] if self._state else None
            prefix = self._layout.prefix(self._key, split)
            writer = create_tokens(
                prefix,
                vocab_size=self._tokenizer.size,
                end_of_text=self._tokenizer.end_of_text,
                tokenizer=self._tokenizer.spec,
                format=self._layout.format,
                shard_size=self._layout.shard_size,
                overwrite=overwrite,
                state=(saved["writer"] if saved else {}) if lasting else None,
            )
            counts = saved["counts"] if saved else {}
            self.sets.append(_SetOutput(prefix, writer, **counts))

    def take(self, column: Column, *, source: int, line: int) -> None:
        self.ledger.kept += len(column.lengths)
        if not len(column.lengths):
            return
        holdout = self._layout.holdout
        if holdout is None:
            _append(self.sets[0], column.ids, column.lengths, column.text_bytes)
            return
        chosen = holdout.sets_of(column.places + line, source=source)
        for number, one in enumerate(self.sets):
            mine = chosen == number
            if mine.any():
                ids = column.ids[np.repeat(mine, column.lengths)]
                _append(one, ids, column.lengths[mine], column.text_bytes[mine])

    def save(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.as_json(),
            "sets": [
                {
                    "writer": one.writer.save(),
                    "counts": {
                        "documents": one.documents,
                        "tokens": one.tokens,
                        "text_bytes": one.text_bytes,
                    },
                }
                for one in self.sets
            ],
        }

    def refuse_empty(self) -> None:
        for one in self.sets:
            if not one.documents:
                raise HopelessError(
                    f"none of {self.ledger.kept} documents fell to this set",
                    where=str(one.prefix),
                    remedy="hold out a larger share (--split), or choose another --seed",
                    exit=Exit.DATA,
                )

    def finish(self) -> PreparedKey:
        ledger_file = file_of(self._layout.prefix(self._key, None), ".ledger.json")
        write_json(ledger_file, self.ledger.as_json())
        made = []
        for one in self.sets:
            save_tokenizer(self._tokenizer, file_of(one.prefix, ".tokenizer"))
            info = one.writer.finish(text_bytes=one.text_bytes, may_be_empty=not one.documents)
            made.append(PreparedSet(one.prefix, info))
        return PreparedKey(self._key, self.ledger, ledger_file, tuple(made))


def _append(
    one: _SetOutput,
    ids: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64],
    text_bytes: npt.NDArray[np.int64],
) -> None:
    one.writer.append(ids, starts=np.cumsum(lengths) - lengths)
    one.documents += len(lengths)
    one.tokens += len(ids)
    one.text_bytes += int(text_bytes.sum())


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a tokenizer beside a token set, in place of any other."""
    # A file of another tokenizer that stood here before would be opened in this one's place.
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    tokenizer.save(folder)
