"""What each span of a source gave: the unit of work that outlives a change of the sources.

The journal keeps a record of every span that is done. If sources were changed, added or removed
before the work resumes, the tokens of unchanged spans are copied from the hidden files of the
attempt before (a generation), and the others are encoded again. A span is the same if its source
has the same name, size and time, and the part takes the same range of it; with documents held out
it must also have the same number, since that decides about them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.base.files import sha256_text
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.parts import SourceSpan
from gristmill.text.sources.source import SkipReason, Source
from gristmill.tokens.reader import TokenReader


@dataclass(frozen=True)
class Cursor:
    """What comes next."""

    span: int = 0
    """The number of the span, in the order of the work."""
    position: int | None = None
    """Where in its source; None for the beginning of the span."""
    line: int = 0
    """The number of the next line."""


@dataclass(frozen=True)
class SetCounts:
    """How much of a token set."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0

    def __add__(self, other: SetCounts) -> SetCounts:
        return SetCounts(
            self.tokens + other.tokens,
            self.documents + other.documents,
            self.text_bytes + other.text_bytes,
        )

    def __sub__(self, other: SetCounts) -> SetCounts:
        return SetCounts(
            self.tokens - other.tokens,
            self.documents - other.documents,
            self.text_bytes - other.text_bytes,
        )


@dataclass(frozen=True)
class KeyRecord:
    """What a span gave for one key."""

    ledger: Ledger
    sets: Sequence[SetCounts]


@dataclass(frozen=True)
class SpanId:
    """Which span of which source."""

    fingerprint: str
    """Changes with the content of the source."""
    name: str

    @classmethod
    def of(cls, span: SourceSpan, source: Source, *, numbered: bool) -> SpanId:
        facts = source.identity, span.begin, span.end, span.source if numbered else None
        return cls(sha256_text(repr(facts))[:32], source.name)


@dataclass(frozen=True)
class SpanRecord:
    """What a span gave."""

    id: SpanId
    keys: Sequence[KeyRecord]

    @property
    def damaged(self) -> bool:
        return any(SkipReason.DAMAGED_FILE in key.ledger.skipped for key in self.keys)

    def as_json(self) -> dict[str, Any]:
        # There may be millions of them, and `dataclasses.asdict` is slow.
        keys = [
            {
                "ledger": key.ledger.as_json(),
                "sets": [(one.tokens, one.documents, one.text_bytes) for one in key.sets],
            }
            for key in self.keys
        ]
        return {"fingerprint": self.id.fingerprint, "name": self.id.name, "keys": keys}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SpanRecord:
        keys = [
            KeyRecord(Ledger.from_json(key["ledger"]), [SetCounts(*one) for one in key["sets"]])
            for key in value["keys"]
        ]
        return cls(SpanId(value["fingerprint"], value["name"]), keys)


@dataclass(frozen=True)
class KeptTokens:
    """Where the tokens of a span are in a set of an earlier generation."""

    reader: TokenReader
    begin: SetCounts
    counts: SetCounts


@dataclass(frozen=True)
class KeptSpan:
    """What is taken over from an earlier generation."""

    ledgers: Sequence[Ledger]
    """For each key."""
    tokens: Sequence[Sequence[KeptTokens]]
    """For each key and set."""
    cursor: Cursor | None
    """Where the work stopped; None if the span is done."""


def kept_spans(
    records: Sequence[SpanRecord],
    readers: Sequence[Sequence[TokenReader]],
    *,
    cursor: Cursor | None = None,
) -> dict[SpanId, KeptSpan]:
    """What a generation holds, from the records of all its spans; only the last may be unfinished,
    and then the cursor is in it."""
    kept = {}
    begins = [[SetCounts() for _ in sets] for sets in readers]
    for number, record in enumerate(records):
        last = number == len(records) - 1
        tokens = [
            [KeptTokens(*one) for one in zip(sets, begin, key.sets, strict=True)]
            for sets, begin, key in zip(readers, begins, record.keys, strict=True)
        ]
        ledgers = [key.ledger for key in record.keys]
        kept[record.id] = KeptSpan(ledgers, tokens, cursor if last else None)
        begins = [
            [one + more for one, more in zip(begin, key.sets, strict=True)]
            for begin, key in zip(begins, record.keys, strict=True)
        ]
    return kept
