"""The journal of one preparation, which lets another process resume it.

    .NAME.prepare.json    the request, how far the work is, lengths and checksums of hidden files
    .NAME.spans.part      one line for each span that is done (`SpanRecord`)

Every few seconds the hidden files of the unfinished sets are flushed, then the journal records
their lengths and which line of which source comes next. The same command, given again, truncates
the files to that and continues. If sources have changed since, a new generation of hidden files is
begun, and the journal also describes the one before, from which the tokens of unchanged sources are
copied. A different command is refused, since it would destroy hours of work. The journal is removed
once the sets are in place.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, storage_errors, write_json
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.records import Cursor, KeyRecord, SetCounts, SpanId, SpanRecord
from gristmill.tokens.writer import HashedFile

_VERSION = 2


@dataclass(frozen=True)
class Generation:
    """One generation of hidden files."""

    number: int
    cursor: Cursor
    current: SpanId | None
    """The span in which the cursor is."""
    columns: Sequence[Mapping[str, Any]]
    """What `Outputs.save` returned."""
    log: Mapping[str, Any]
    """Length and checksum of the records."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Generation:
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
            for one in column["sets"]:
                begin, writer = one["begin"], one["writer"]
                counts = SetCounts(writer["tokens"], writer["documents"], one["text_bytes"])
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
        self._earlier: Sequence[Generation] = ()
        self._log: HashedFile | None = None

    def load(self) -> tuple[Generation, Sequence[Generation]] | None:
        """What an earlier process saved for the same request: its last generation, and those from
        which it was still copying."""
        if not self.path.exists():
            return None
        why = "its journal cannot be read"
        try:
            found = read_json(self.path)
            if found["version"] == _VERSION:
                request = found["request"]
                last, *earlier = (Generation.from_json(one) for one in found["generations"])
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

    def records(self, generation: Generation) -> list[SpanRecord]:
        """The spans of a generation that are done."""
        log = self._open_log(generation.number, generation.log)
        lines = b"".join(log.content()).splitlines()
        log.release()
        return [SpanRecord.from_json(json.loads(line)) for line in lines]

    def begin(self, number: int = 0, earlier: Sequence[Generation] = ()) -> None:
        """Begin a generation, for which some spans are copied from earlier ones."""
        self._generation, self._earlier = number, earlier
        self._log = self._open_log(number, None)

    def resume(self, generation: Generation, earlier: Sequence[Generation]) -> None:
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
        now = Generation(self._generation, cursor, current, columns, self._log.state())
        value = {
            "version": _VERSION,
            "request": self._request,
            "generations": [one.as_json() for one in (now, *self._earlier)],
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
