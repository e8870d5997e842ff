"""The journal of a preparation, which lets another process resume it.

    .NAME.prepare.json    the request, how far the work is, lengths and checksums of hidden files
    .NAME.spans.part      one line for each span that is done (`SpanRecord`)

Every few seconds the hidden files of the unfinished sets are flushed, then the journal records
their lengths and which line of which source comes next. The same command, given again, truncates
the files to that and continues. A different command is refused, since it would destroy hours of
work. The journal is removed once the sets are in place.

A span of a source is the unit of work that outlives a change of the sources. If sources were
changed, added or removed before the work resumes, the tokens of unchanged spans are copied from the
hidden files of the attempt before (a generation), and the others are encoded again. A span is the
same if its source has the same name, size and time, and the part takes the same range of it; with
documents held out it must also have the same number, since that decides about them.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import (
    read_json,
    sha256_text,
    storage_errors,
    write_json,
)
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.request import SourceSpan
from gristmill.text.sources.source import (
    ReadError,
    SkipReason,
    Source,
)
from gristmill.tokens.format import TokenReader
from gristmill.tokens.hashed_file import HashedFile


class DamagedSourceError(DataError):
    """A source that cannot be read any further."""

    @classmethod
    def of(cls, failure: ReadError, *, where: str) -> DamagedSourceError:
        return cls(
            failure.what,
            where=where,
            remedy=f"{failure.remedy}; then start the same command again, which keeps the work on "
            "all other files, or leave such files out with --on-damage skip",
        )


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
                "sets": [
                    (counts.tokens, counts.documents, counts.text_bytes) for counts in key.sets
                ],
            }
            for key in self.keys
        ]
        return {"fingerprint": self.id.fingerprint, "name": self.id.name, "keys": keys}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SpanRecord:
        keys = [
            KeyRecord(
                Ledger.from_json(key["ledger"]), [SetCounts(*counts) for counts in key["sets"]]
            )
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
            [KeptTokens(*facts) for facts in zip(sets, begin, key.sets, strict=True)]
            for sets, begin, key in zip(readers, begins, record.keys, strict=True)
        ]
        ledgers = [key.ledger for key in record.keys]
        kept[record.id] = KeptSpan(ledgers, tokens, cursor if last else None)
        begins = [
            [counts + more for counts, more in zip(begin, key.sets, strict=True)]
            for begin, key in zip(begins, record.keys, strict=True)
        ]
    return kept


_VERSION = 3


@dataclass(frozen=True)
class JournalGeneration:
    """One generation of hidden files."""

    number: int
    cursor: Cursor
    current: SpanId | None
    """The span in which the cursor is."""
    columns: Sequence[Mapping[str, Any]]
    """What `Outputs.save` returned."""
    log: Mapping[str, Any]
    """Length and checksum of the records."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JournalGeneration:
        current = value["current"]
        return cls(
            value["number"],
            Cursor(**value["cursor"]),
            SpanId(**current) if current else None,
            value["columns"],
            value["log"],
        )

    @property
    def unfinished(self) -> SpanRecord | None:
        """What the span at the cursor gave so far."""
        if self.current is None or self.cursor.position is None:
            return None
        keys = []
        for column in self.columns:
            sets = []
            for saved_set in column["sets"]:
                begin, writer = saved_set["begin"], saved_set["writer"]
                counts = SetCounts(writer["tokens"], writer["documents"], saved_set["text_bytes"])
                before = begin["writer"]["tokens"], begin["writer"]["documents"]
                sets.append(counts - SetCounts(*before, begin["text_bytes"]))
            keys.append(KeyRecord(Ledger.from_json(column["current"]), sets))
        return SpanRecord(self.current, keys)


def journal_file(name: Path) -> Path:
    """Where the journal of a preparation is."""
    return name.with_name(f".{name.name}.prepare.json")


class Journal:
    """The journal of one preparation."""

    def __init__(self, name: Path, request: Mapping[str, Any]) -> None:
        self.path = journal_file(name)
        self._name = name
        self._request = dict(request)
        self._generation = 0
        self._earlier: Sequence[JournalGeneration] = ()
        self._log: HashedFile | None = None

    def load(self) -> tuple[JournalGeneration, Sequence[JournalGeneration]] | None:
        """What an earlier process saved for the same request: its last generation, and those from
        which it was still copying."""
        if not self.path.exists():
            return None
        why = "its journal cannot be read"
        try:
            value = read_json(self.path)
            if value["version"] == _VERSION:
                request = value["request"]
                last, *earlier = (
                    JournalGeneration.from_json(generation) for generation in value["generations"]
                )
                differing = [key for key in self._request if request.get(key) != self._request[key]]
                if not differing:
                    return last, earlier
                why = f"it differs in: {', '.join(differing)}"
        except (UserError, KeyError, TypeError, ValueError):
            pass
        raise self.refused(why)

    def refused(self, why: str) -> UserError:
        """The error for a request that is not the one of the journal."""
        return UserError(
            f"a different preparation of this set was interrupted: {why}",
            where=str(self._name),
            remedy="give the same command to resume it, use another name, or start over with "
            "--overwrite",
            exit=Exit.REFUSED,
        )

    def _open_log(self, generation: int, saved: Mapping[str, Any] | None) -> HashedFile:
        final = self._name.with_name(f"{self._name.name}.spans")
        with storage_errors(final):
            return HashedFile(final, ending=f"part{generation or ''}", saved=saved)

    def records(self, generation: JournalGeneration) -> list[SpanRecord]:
        """The spans of a generation that are done."""
        log = self._open_log(generation.number, generation.log)
        lines = b"".join(log.content()).splitlines()
        log.release()
        return [SpanRecord.from_json(json.loads(line)) for line in lines]

    def begin(self, number: int = 0, earlier: Sequence[JournalGeneration] = ()) -> None:
        """Begin a generation, for which some spans are copied from earlier ones."""
        self._generation, self._earlier = number, earlier
        self._log = self._open_log(number, None)

    def resume(self, generation: JournalGeneration, earlier: Sequence[JournalGeneration]) -> None:
        """Continue a generation."""
        self._generation, self._earlier = generation.number, earlier
        self._log = self._open_log(generation.number, generation.log)

    def add(self, record: SpanRecord) -> None:
        """Record that a span is done; it counts once the journal is saved."""
        assert self._log is not None
        with storage_errors(self._log.path):
            self._log.write(json.dumps(record.as_json(), separators=(",", ":")).encode() + b"\n")

    def save(
        self, cursor: Cursor, current: SpanId | None, columns: Sequence[Mapping[str, Any]]
    ) -> None:
        assert self._log is not None
        with storage_errors(self._log.path):
            self._log.flush()
        now = JournalGeneration(self._generation, cursor, current, columns, self._log.state())
        value = {
            "version": _VERSION,
            "request": self._request,
            "generations": [asdict(generation) for generation in (now, *self._earlier)],
        }
        write_json(self.path, value)

    def release(self) -> None:
        """Leave everything for another process."""
        if self._log:
            self._log.release()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.release()
        for path in self.path.parent.glob(f".{glob.escape(self._name.name)}.spans.part*"):
            path.unlink(missing_ok=True)
