"""The ledger of a preparation: what became of every line.

    lines = kept + dropped, by reason

It is written beside the token set and names the first dropped lines of each reason. The ledgers of
parts add up to the ledger of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError
from gristmill.base.files import (
    read_json,
    write_sealed_json,
)
from gristmill.text.dedup.drops import RemovedUnits
from gristmill.text.sources.source import (
    UNREADABLE,
    Dropped,
    Reason,
    Skipped,
    SkipReason,
)
from gristmill.tokens.format import LEDGER_FILE, file_of

_MAX_PLACES = 100
"""Dropped lines that are named for each reason, and files that are."""
_MAX_SAMPLES = 20
"""The same for reasons that keep samples of the text."""
_MAX_FOUND = 2000
"""The same for what is to be listed for every text."""


class HopelessError(DataError):
    """An error that resuming the same work would only repeat."""


@dataclass
class Ledger:
    """What became of every line: lines = kept + dropped, by reason."""

    lines: int = 0
    kept: int = 0
    dropped: Counter[Reason] = field(default_factory=Counter)
    places: list[Dropped] = field(default_factory=list)
    """The first dropped lines of each reason."""
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    """Files and folders that were left out; their lines are not counted."""
    skipped_places: list[Skipped] = field(default_factory=list)
    """The first 100 of them."""
    removed: Counter[Reason] = field(default_factory=Counter)
    """Lines and paragraphs that were removed inside of documents that stay."""
    removed_places: list[Dropped] = field(default_factory=list)
    """The first 100 such documents of each reason."""

    def __post_init__(self) -> None:
        self._removed_documents = Counter(item.reason for item in self.removed_places)

    def skip(self, item: Skipped) -> None:
        self.skipped[item.reason] += 1
        if len(self.skipped_places) < _MAX_PLACES:
            self.skipped_places.append(item)

    def drop(self, item: Dropped) -> None:
        if self.dropped[item.reason] < _most_places(item.reason):
            self.places.append(item)
        self.dropped[item.reason] += 1

    def remove(self, units: RemovedUnits, origin: str) -> None:
        """Note what was removed inside of a document."""
        self._remove_at(Dropped(units.reason, origin))
        self.removed[units.reason] += units.count

    def _remove_at(self, item: Dropped) -> None:
        if self._removed_documents[item.reason] < _MAX_PLACES:
            self.removed_places.append(item)
            self._removed_documents[item.reason] += 1

    def add(self, other: Ledger) -> None:
        """Append the ledger of the part that follows."""
        self.lines += other.lines
        self.kept += other.kept
        before = Counter(self.dropped)
        for item in other.places:
            if before[item.reason] < _most_places(item.reason):
                self.places.append(item)
                before[item.reason] += 1
        self.dropped.update(other.dropped)
        self.skipped.update(other.skipped)
        self.skipped_places += other.skipped_places[: _MAX_PLACES - len(self.skipped_places)]
        self.removed.update(other.removed)
        for item in other.removed_places:
            self._remove_at(item)

    def check(self, *, may_be_empty: bool) -> None:
        """Lines read = documents kept + lines dropped, and there are documents."""
        assert self.lines == self.kept + self.dropped.total(), f"lines unaccounted for: {self}"
        if self.kept or may_be_empty:
            return
        counts = [(reason.value, count) for reason, count in self.dropped.items()]
        counts += [(reason.value, count) for reason, count in self.skipped.items()]
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
        origins = [item.origin for item in self.places]
        origins += [item.origin for item in self.skipped_places]
        remedy = "check the sources and, for JSON lines, the key of the text (--json-key)"
        if self.dropped.keys() - UNREADABLE:
            remedy = "look at what is dropped, and leave out filters or change their settings"
        raise HopelessError(
            f"no document was found in {self.lines} lines" + (f" ({reasons})" if reasons else ""),
            where=origins[0] if origins else None,
            remedy=remedy,
        )

    def as_json(self) -> dict[str, Any]:
        removed: dict[str, Any] = {}
        if self.removed:
            removed["removed"] = {reason.value: count for reason, count in self.removed.items()}
            removed["first_removed"] = [_dropped_as_json(item) for item in self.removed_places]
        return {
            "lines": self.lines,
            "kept": self.kept,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
            "first_dropped": [_dropped_as_json(item) for item in self.places],
            "skipped": {reason.value: count for reason, count in self.skipped.items()},
            "first_skipped": [
                {"origin": item.origin, "reason": item.reason.value, "what": item.what}
                for item in self.skipped_places
            ],
            **removed,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Ledger:
        return cls(
            lines=value["lines"],
            kept=value["kept"],
            dropped=Counter({Reason(why): count for why, count in value["dropped"].items()}),
            places=[
                Dropped(Reason(p["reason"], p.get("text", ""), p.get("found", "")), p["origin"])
                for p in value["first_dropped"]
            ],
            skipped=Counter(
                {SkipReason(why): count for why, count in value.get("skipped", {}).items()}
            ),
            skipped_places=[
                Skipped(SkipReason(p["reason"]), p["origin"], p["what"])
                for p in value.get("first_skipped", ())
            ],
            removed=Counter({Reason(why): n for why, n in value.get("removed", {}).items()}),
            removed_places=[
                Dropped(Reason(p["reason"]), p["origin"]) for p in value.get("first_removed", ())
            ],
        )


def _dropped_as_json(item: Dropped) -> dict[str, str]:
    reason, facts = item.reason, {"origin": item.origin, "reason": item.reason.value}
    facts |= {"found": reason.found} if reason.found else {}
    return facts | ({"text": reason.sample} if reason.sample else {})


def _most_places(reason: Reason) -> int:
    """How many dropped lines are named for a reason."""
    if reason.found:
        return _MAX_FOUND
    return _MAX_SAMPLES if reason.sample else _MAX_PLACES


def merge_ledgers(prefixes: Sequence[Path], output: Path) -> None:
    """Write the ledger of all sets beside the merged one, if each has one."""
    files = [file_of(prefix, LEDGER_FILE) for prefix in prefixes]
    if all(file.is_file() for file in files):
        whole = Ledger()
        for file in files:
            whole.add(Ledger.from_json(read_json(file)))
        write_sealed_json(file_of(output, LEDGER_FILE), whole.as_json())
