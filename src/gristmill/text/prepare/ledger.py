"""The ledger: what became of every line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.base.errors import DataError
from gristmill.text.sources.source import Dropped, Reason, Skipped, SkipReason

_MAX_PLACES = 100


class HopelessError(DataError):
    """An error that resuming the same work would only repeat."""


@dataclass
class Ledger:
    """What became of every line: lines = kept + dropped, by reason."""

    lines: int = 0
    kept: int = 0
    dropped: dict[Reason, int] = field(default_factory=dict)
    places: list[Dropped] = field(default_factory=list)
    """The first 100 dropped lines."""
    skipped: dict[SkipReason, int] = field(default_factory=dict)
    """Files and folders that were left out; their lines are not counted."""
    skipped_places: list[Skipped] = field(default_factory=list)
    """The first 100 of them."""

    def skip(self, item: Skipped) -> None:
        self.skipped[item.reason] = self.skipped.get(item.reason, 0) + 1
        if len(self.skipped_places) < _MAX_PLACES:
            self.skipped_places.append(item)

    def drop(self, item: Dropped) -> None:
        self.dropped[item.reason] = self.dropped.get(item.reason, 0) + 1
        if len(self.places) < _MAX_PLACES:
            self.places.append(item)

    def add(self, other: Ledger) -> None:
        """Append the ledger of the part that follows."""
        self.lines += other.lines
        self.kept += other.kept
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.places += other.places[: _MAX_PLACES - len(self.places)]
        for skip, count in other.skipped.items():
            self.skipped[skip] = self.skipped.get(skip, 0) + count
        self.skipped_places += other.skipped_places[: _MAX_PLACES - len(self.skipped_places)]

    def check(self, *, may_be_empty: bool) -> None:
        """Lines read = documents kept + lines dropped, and there are documents."""
        dropped = sum(self.dropped.values())
        assert self.lines == self.kept + dropped, f"lines unaccounted for: {self}"
        if self.kept or may_be_empty:
            return
        counts = [*self.dropped.items(), *self.skipped.items()]
        reasons = ", ".join(f"{count} {reason.value}" for reason, count in counts)
        origins = [item.origin for item in self.places]
        origins += [item.origin for item in self.skipped_places]
        raise HopelessError(
            f"no document was found in {self.lines} lines" + (f" ({reasons})" if reasons else ""),
            where=origins[0] if origins else None,
            remedy="check the sources and, for JSON lines, the key of the text (--json-key)",
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "kept": self.kept,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
            "first_dropped": [
                {"origin": item.origin, "reason": item.reason.value} for item in self.places
            ],
            "skipped": {reason.value: count for reason, count in self.skipped.items()},
            "first_skipped": [
                {"origin": item.origin, "reason": item.reason.value, "what": item.what}
                for item in self.skipped_places
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Ledger:
        return cls(
            lines=value["lines"],
            kept=value["kept"],
            dropped={Reason(reason): count for reason, count in value["dropped"].items()},
            places=[Dropped(Reason(p["reason"]), p["origin"]) for p in value["first_dropped"]],
            skipped={SkipReason(why): count for why, count in value.get("skipped", {}).items()},
            skipped_places=[
                Skipped(SkipReason(p["reason"]), p["origin"], p["what"])
                for p in value.get("first_skipped", ())
            ],
        )
