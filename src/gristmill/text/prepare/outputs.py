"""The token sets of one preparation, written together.

key 1 -> its ledger, and the sets train, val, test or a single one
key 2 -> …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.base.files import make_folder, write_sealed_json
from gristmill.text.prepare.ledger import HopelessError, Ledger
from gristmill.text.prepare.parts import WHOLE
from gristmill.text.prepare.records import KeptSpan, KeptTokens, KeyRecord, SetCounts
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.prepare.workers import EncodedBlock, EncodedColumn
from gristmill.text.sources.source import Dropped, Skipped
from gristmill.text.tokenizers.tokenizer import TOKENIZER_FILES, Tokenizer
from gristmill.tokens.format import LEDGER_FILE, NewSet, TokenSetInfo, file_of
from gristmill.tokens.reader import PIECE, TokenReader
from gristmill.tokens.store import create_tokens
from gristmill.tokens.writer import TokenWriter


@dataclass(frozen=True)
class PreparedSet:
    """A finished token set."""

    prefix: Path
    info: TokenSetInfo


@dataclass(frozen=True)
class PreparedKey:
    """What one key gave."""

    key: str
    ledger: Ledger
    ledger_file: Path
    sets: tuple[PreparedSet, ...]


@dataclass
class _OpenSet:
    """A token set being written."""

    prefix: Path
    writer: TokenWriter
    text_bytes: int
    begin: Mapping[str, Any]
    """A mark at the beginning of the span that is being written."""

    def append(self, column: EncodedColumn) -> None:
        self.writer.append(column.ids, starts=np.cumsum(column.lengths) - column.lengths)
        self.text_bytes += int(column.text_bytes.sum())

    def copy(self, kept: KeptTokens) -> None:
        begin, end = kept.begin, kept.begin + kept.counts
        starts = kept.reader.document_starts[begin.documents : end.documents]
        for place in range(begin.tokens, end.tokens, PIECE):
            ids = kept.reader.read(place, min(PIECE, end.tokens - place))
            low, high = np.searchsorted(starts, [place, place + len(ids)])
            self.writer.append(ids, starts=starts[low:high] - place)
        self.text_bytes += kept.counts.text_bytes

    @property
    def counts(self) -> SetCounts:
        """Of the span that is being written."""
        begin = self.begin["writer"]
        return SetCounts(
            self.writer.tokens - begin["tokens"],
            self.writer.documents - begin["documents"],
            self.text_bytes - self.begin["text_bytes"],
        )

    def mark(self) -> None:
        self.begin = {"writer": self.writer.mark(), "text_bytes": self.text_bytes}

    def rewind(self) -> None:
        self.writer.rewind(self.begin["writer"])
        self.text_bytes = self.begin["text_bytes"]

    def save(self, *, rewound: bool) -> dict[str, Any]:
        now = {"writer": self.writer.save(), "text_bytes": self.text_bytes}
        return {**(self.begin if rewound else now), "begin": self.begin}


@dataclass
class _OpenKey:
    """The ledger and the sets of one key."""

    key: str
    ledger: Ledger
    """Of the spans that are done."""
    current: Ledger
    """Of the span that is being written."""
    sets: list[_OpenSet]


class Outputs:
    """The sets of a preparation, being written."""

    def __init__(
        self,
        request: PrepareRequest,
        tokenizer: Tokenizer,
        states: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation: int = 0,
    ) -> None:
        """Begin the sets; with states they outlive their process: () begins, others resume them."""
        self.encoder = ""
        """The library that encoded the last block."""
        self.copied = 0
        """Bytes of text whose tokens were taken over from an earlier generation."""
        self._request = request
        self._tokenizer = tokenizer
        self._resumable = states is not None
        self._generation = generation
        self._keys: list[_OpenKey] = []
        make_folder(request.name.parent)
        try:
            for number, key in enumerate(request.options.keys):
                self._open(key, states[number] if states else None)
        except BaseException:
            if states:
                self.release()
            else:
                self.abandon()
            raise

    def _open(self, key: str, state: Mapping[str, Any] | None) -> None:
        ledger, current = (
            Ledger.from_json(state[name]) if state else Ledger() for name in ("ledger", "current")
        )
        self._keys.append(_OpenKey(key, ledger, current, []))
        for number, split in enumerate(self._request.splits):
            saved: Mapping[str, Any] = {"writer": {}, "text_bytes": 0}
            saved = state["sets"][number] if state else saved
            prefix = self._request.prefix(key, split)
            writer = create_tokens(
                NewSet(
                    prefix,
                    vocab_size=self._tokenizer.size,
                    end_of_text=self._tokenizer.end_of_text,
                    tokenizer=self._tokenizer.spec,
                    format=self._request.format,
                    shard_size=self._request.shard_size,
                    overwrite=self._request.overwrite,
                    state=saved["writer"] if self._resumable else None,
                    generation=self._generation,
                )
            )
            one = _OpenSet(prefix, writer, saved["text_bytes"], saved.get("begin", {}))
            if not one.begin:
                one.mark()
            self._keys[-1].sets.append(one)

    @property
    def _sets(self) -> Iterator[_OpenSet]:
        return (one for key in self._keys for one in key.sets)

    @property
    def kept(self) -> int:
        return sum(key.ledger.kept + key.current.kept for key in self._keys)

    @property
    def tokens(self) -> int:
        return sum(one.writer.tokens for one in self._sets)

    @property
    def text_bytes(self) -> int:
        return sum(one.text_bytes for one in self._sets)

    def append(
        self, block: EncodedBlock, *, source: int, line: int, origin: Callable[[int], str]
    ) -> None:
        """Write a block whose first line is number `line` of a source; `origin` names a place."""
        self.encoder = block.encoder
        for key, column in zip(self._keys, block.columns, strict=True):
            key.current.lines += block.rows
            for place, reason in column.dropped:
                if self._request.strict:
                    raise HopelessError(
                        f"this line gives no document: {reason.value}",
                        where=origin(place),
                        remedy="fix it, or leave out --strict to drop such lines",
                    )
                key.current.drop(Dropped(reason, origin(place)))
            key.current.kept += len(column.lengths)
            if len(column.lengths):
                self._append(key.sets, column, source=source, line=line)

    def _append(
        self, sets: Sequence[_OpenSet], column: EncodedColumn, *, source: int, line: int
    ) -> None:
        holdout = self._request.holdout
        if holdout is None:
            sets[0].append(column)
            return
        chosen = holdout.sets_of(column.places + line, source=source)
        for number, one in enumerate(sets):
            mine = chosen == number
            if mine.any():
                one.append(column.only(mine))

    def copy(self, kept: KeptSpan) -> None:
        """Write what is kept of a span from an earlier generation."""
        for key, ledger, tokens in zip(self._keys, kept.ledgers, kept.tokens, strict=True):
            key.current.add(ledger)
            for one, source in zip(key.sets, tokens, strict=True):
                one.copy(source)
                self.copied += source.counts.text_bytes

    def rewind(self) -> None:
        """Forget everything since the last span was done."""
        for key in self._keys:
            key.current = Ledger()
            for one in key.sets:
                one.rewind()

    def skip(self, item: Skipped) -> None:
        """Note that a file is left out."""
        for key in self._keys:
            key.current.skip(item)

    def close_span(self) -> list[KeyRecord]:
        """End the span that is being written; what it gave."""
        made = []
        for key in self._keys:
            made.append(KeyRecord(key.current, [one.counts for one in key.sets]))
            key.ledger.add(key.current)
            key.current = Ledger()
            for one in key.sets:
                one.mark()
        return made

    def save(self, *, rewound: bool = False) -> list[dict[str, Any]]:
        """Flush everything; the result lets another process continue, if so requested from the
        beginning of the span that is being written."""
        return [
            {
                "ledger": key.ledger.as_json(),
                "current": (Ledger() if rewound else key.current).as_json(),
                "sets": [one.save(rewound=rewound) for one in key.sets],
            }
            for key in self._keys
        ]

    def readers(self) -> list[list[TokenReader]]:
        """The sets as they were saved, by key."""
        return [[one.writer.reader() for one in key.sets] for key in self._keys]

    def finish(self, skipped: Sequence[Skipped] = ()) -> tuple[PreparedKey, ...]:
        """Put all sets in place; the ledgers also name what was left out of folders."""
        may_be_empty = self._request.part != WHOLE
        # Every part finds the same, and the ledgers of all parts are added up.
        for item in skipped if self._request.part.number == 1 else ():
            self.skip(item)
        self.close_span()
        for key in self._keys:
            documents = {one.prefix: one.writer.documents for one in key.sets}
            check_complete(key.ledger, documents, may_be_empty=may_be_empty)
        prepared = []
        for key in self._keys:
            ledger_file = file_of(self._request.prefix(key.key, None), LEDGER_FILE)
            write_sealed_json(ledger_file, key.ledger.as_json())
            made = []
            for one in key.sets:
                save_tokenizer(self._tokenizer, file_of(one.prefix, ".tokenizer"))
                info = one.writer.finish(text_bytes=one.text_bytes, may_be_empty=may_be_empty)
                made.append(PreparedSet(one.prefix, info))
            prepared.append(PreparedKey(key.key, key.ledger, ledger_file, tuple(made)))
        return tuple(prepared)

    def release(self) -> None:
        """Leave what was saved for another process."""
        for one in self._sets:
            one.writer.close()

    def abandon(self) -> None:
        """Remove everything that is not in place yet."""
        for one in self._sets:
            one.writer.abandon()


def check_complete(
    ledger: Ledger, documents: Mapping[Path, int], *, may_be_empty: bool = False
) -> None:
    """Every line of a key is accounted for, and unless they may be empty, all its sets have
    documents."""
    ledger.check(may_be_empty=may_be_empty)
    for prefix, count in documents.items():
        if not count and not may_be_empty:
            raise HopelessError(
                f"none of {ledger.kept} documents fell into this set",
                where=prefix,
                remedy="hold out a larger share (--split), or choose another --seed",
            )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a tokenizer beside a token set, replacing any other."""
    # Files left from another tokenizer might be opened instead of this one's.
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    tokenizer.save(folder)
