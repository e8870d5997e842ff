"""The account of what became of every line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.text.sources.source import Dropped, Reason

_PLACES = 100


class HopelessError(UserError):
    """An error that going on with the same work cannot mend."""


@dataclass
class Ledger:
    """What became of every line: lines = kept + all that was dropped, by reason."""

    lines: int = 0
    kept: int = 0
    dropped: dict[Reason, int] = field(default_factory=dict)
    places: list[Dropped] = field(default_factory=list)
    """The first 100 lines that were dropped."""

    def drop(self, item: Dropped) -> None:
        self.dropped[item.reason] = self.dropped.get(item.reason, 0) + 1
        if len(self.places) < _PLACES:
            self.places.append(item)

    def check(self) -> None:
        """Lines in = documents kept + lines dropped."""
        assert self.lines == self.kept + sum(self.dropped.values()), (
            f"lines unaccounted for: {self}"
        )

    def refuse_nothing(self) -> None:
        """An account without any document is an error."""
        if self.kept:
            return
        reasons = ", ".join(f"{count} {reason.value}" for reason, count in self.dropped.items())
        raise HopelessError(
            f"no document was found in {self.lines} lines" + (f" ({reasons})" if reasons else ""),
            where=self.places[0].origin if self.places else None,
            remedy="check the sources, and for JSON lines the name of the key that holds the text",
            exit=Exit.DATA,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "kept": self.kept,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
            "first_dropped": [
                {"origin": item.origin, "reason": item.reason.value} for item in self.places
            ],
        }


def ledger_from_json(value: Mapping[str, Any]) -> Ledger:
    """The ledger that `as_json` wrote."""
    return Ledger(
        lines=value["lines"],
        kept=value["kept"],
        dropped={Reason(reason): count for reason, count in value["dropped"].items()},
        places=[Dropped(Reason(p["reason"]), p["origin"]) for p in value["first_dropped"]],
    )


def merged_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The account of several parts, as if they had been one."""
    whole = Ledger()
    for part in ledgers:
        whole.lines += part.lines
        whole.kept += part.kept
        for reason, count in part.dropped.items():
            whole.dropped[reason] = whole.dropped.get(reason, 0) + count
        whole.places += part.places[: _PLACES - len(whole.places)]
    return whole
