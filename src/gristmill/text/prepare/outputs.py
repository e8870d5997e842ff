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
from gristmill.text.prepare.journal import KeptSpan, KeptTokens, KeyRecord, SetCounts
from gristmill.text.prepare.ledger import HopelessError, Ledger
from gristmill.text.prepare.request import WHOLE, PrepareRequest
from gristmill.text.prepare.workers import EncodedBlock, EncodedColumn
from gristmill.text.sources.source import UNREADABLE, Dropped, Skipped
from gristmill.text.tokenizers.tokenizer import TOKENIZER_FILES, Tokenizer
from gristmill.tokens.format import LEDGER_FILE, PIECE, NewSet, TokenReader, TokenSetInfo, file_of
from gristmill.tokens.origins import packed, with_source
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

    def append(self, column: EncodedColumn, *, span: int, line: int) -> None:
        """Write documents of a block whose first line is number `line` of the source of a span."""
        origins = packed(span, column.places + line) if self.writer.has_origins else None
        starts = np.cumsum(column.lengths) - column.lengths
        self.writer.append(column.ids, starts=starts, origins=origins)
        self.text_bytes += int(column.text_bytes.sum())

    def copy(self, kept: KeptTokens, *, span: int) -> None:
        """Write what an earlier attempt had of a span, which had another number there."""
        begin, end = kept.begin, kept.begin + kept.counts
        starts = kept.reader.document_starts[begin.documents : end.documents]
        for place in range(begin.tokens, end.tokens, PIECE):
            ids = kept.reader.read(place, min(PIECE, end.tokens - place))
            low, high = begin.documents + np.searchsorted(starts, [place, place + len(ids)])
            plain = kept.reader.plain_origins
            origins = None if plain is None else with_source(plain[low:high], span)
            inside = kept.reader.document_starts[low:high] - place
            self.writer.append(ids, starts=inside, origins=origins)
        self.text_bytes += kept.counts.text_bytes

    @property
    def counts(self) -> SetCounts:
        """How much the span that is being written has so far."""
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
    """The lines of the spans that are done."""
    current: Ledger
    """The lines of the span that is being written."""
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
        sources: Sequence[str] | None = None,
    ) -> None:
        """Begin the sets; with states they outlive their process: () begins, others resume them.
        `sources`: the name of the source of each span, if it is recorded where documents come
        from."""
        self.encoder = ""
        """The library that encoded the last block."""
        self.copied = 0
        """Bytes of text whose tokens were taken over from an earlier generation."""
        self._request = request
        self._tokenizer = tokenizer
        self._resumable = states is not None
        self._generation = generation
        self._sources = sources
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
                    origins=self._sources is not None,
                    checked=self._request.filters.checked,
                )
            )
            open_set = _OpenSet(prefix, writer, saved["text_bytes"], saved.get("begin", {}))
            if not open_set.begin:
                open_set.mark()
            self._keys[-1].sets.append(open_set)

    @property
    def _sets(self) -> Iterator[_OpenSet]:
        return (open_set for key in self._keys for open_set in key.sets)

    @property
    def kept(self) -> int:
        return sum(key.ledger.kept + key.current.kept for key in self._keys)

    @property
    def tokens(self) -> int:
        return sum(open_set.writer.tokens for open_set in self._sets)

    @property
    def text_bytes(self) -> int:
        return sum(open_set.text_bytes for open_set in self._sets)

    def append(
        self,
        block: EncodedBlock,
        *,
        source: int,
        line: int,
        origin: Callable[[int], str],
        span: int = 0,
    ) -> None:
        """Write a block whose first line is number `line` of a source; `origin` names a place, and
        `span` is the number of the source's span in the work."""
        self.encoder = block.encoder
        for key, column in zip(self._keys, block.columns, strict=True):
            key.current.lines += block.rows
            for place, reason in column.dropped:
                if self._request.strict and reason in UNREADABLE:
                    raise HopelessError(
                        f"this line gives no document: {reason.value}",
                        where=origin(place),
                        remedy="fix it, or leave out --strict to drop such lines",
                    )
                key.current.drop(Dropped(reason, origin(place)))
            for units in column.removed:
                key.current.remove(units, origin(units.place))
            key.current.kept += len(column.lengths)
            if len(column.lengths):
                self._append(key.sets, column, source=source, span=span, line=line)

    def _append(
        self,
        sets: Sequence[_OpenSet],
        column: EncodedColumn,
        *,
        source: int,
        span: int,
        line: int,
    ) -> None:
        holdout = self._request.holdout
        if holdout is None:
            sets[0].append(column, span=span, line=line)
            return
        chosen = holdout.sets_of(column.places + line, source=source)
        for number, open_set in enumerate(sets):
            mine = chosen == number
            if mine.any():
                open_set.append(column.only(mine), span=span, line=line)

    def copy(self, kept: KeptSpan, *, span: int) -> None:
        """Write what is kept of a span from an earlier generation."""
        for key, ledger, tokens in zip(self._keys, kept.ledgers, kept.tokens, strict=True):
            key.current.add(ledger)
            for open_set, its_tokens in zip(key.sets, tokens, strict=True):
                open_set.copy(its_tokens, span=span)
                self.copied += its_tokens.counts.text_bytes

    def rewind(self) -> None:
        """Forget everything since the last span was done."""
        for key in self._keys:
            key.current = Ledger()
            for open_set in key.sets:
                open_set.rewind()

    def skip(self, item: Skipped) -> None:
        """Note that a file is left out."""
        for key in self._keys:
            key.current.skip(item)

    def close_span(self) -> list[KeyRecord]:
        """End the span that is being written; what it gave."""
        records = []
        for key in self._keys:
            records.append(KeyRecord(key.current, [open_set.counts for open_set in key.sets]))
            key.ledger.add(key.current)
            key.current = Ledger()
            for open_set in key.sets:
                open_set.mark()
        return records

    def save(self, *, rewound: bool = False) -> list[dict[str, Any]]:
        """Flush everything; the result lets another process continue, if so requested from the
        beginning of the span that is being written."""
        return [
            {
                "ledger": key.ledger.as_json(),
                "current": (Ledger() if rewound else key.current).as_json(),
                "sets": [open_set.save(rewound=rewound) for open_set in key.sets],
            }
            for key in self._keys
        ]

    def readers(self) -> list[list[TokenReader]]:
        """The sets as they were saved, by key."""
        return [[open_set.writer.reader() for open_set in key.sets] for key in self._keys]

    def finish(self, skipped: Sequence[Skipped] = ()) -> tuple[PreparedKey, ...]:
        """Put all sets in place; the ledgers also name what was left out of folders."""
        may_be_empty = self._request.part != WHOLE
        # Every part finds the same, and the ledgers of all parts are added up.
        for item in skipped if self._request.part.number == 1 else ():
            self.skip(item)
        self.close_span()
        for key in self._keys:
            documents = {open_set.prefix: open_set.writer.documents for open_set in key.sets}
            check_complete(key.ledger, documents, may_be_empty=may_be_empty)
        prepared = []
        for key in self._keys:
            ledger_file = file_of(self._request.prefix(key.key, None), LEDGER_FILE)
            write_sealed_json(ledger_file, key.ledger.as_json())
            sets = []
            for open_set in key.sets:
                save_tokenizer(self._tokenizer, file_of(open_set.prefix, ".tokenizer"))
                info = open_set.writer.finish(
                    text_bytes=open_set.text_bytes,
                    may_be_empty=may_be_empty,
                    sources=self._sources or (),
                )
                sets.append(PreparedSet(open_set.prefix, info))
            prepared.append(PreparedKey(key.key, key.ledger, ledger_file, tuple(sets)))
        return tuple(prepared)

    def release(self) -> None:
        """Leave what was saved for another process."""
        for open_set in self._sets:
            open_set.writer.close()

    def abandon(self) -> None:
        """Remove everything that is not in place yet."""
        for open_set in self._sets:
            open_set.writer.abandon()


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
