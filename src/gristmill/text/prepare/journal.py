"""The journal that lets an interrupted preparation resume.

    .NAME.prepare.json   {"version": 1, "request": {…}, "cursor": {…}, "columns": […]}

Every few seconds the hidden files of the unfinished sets are flushed, then the journal records
their lengths and which line of which source comes next. The same command, given again, truncates
the files to that and continues. A different command is refused, since it would destroy hours of
work. The journal is removed once the sets are in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, write_json

_VERSION = 1


@dataclass(frozen=True)
class Cursor:
    """What comes next."""

    span: int = 0
    """The number of the span, in the order of the work."""
    position: int | None = None
    """Where in its source; None for the beginning of the span."""
    line: int = 0
    """The number of the next line."""


class Journal:
    """The journal of one preparation."""

    def __init__(self, name: Path, request: Mapping[str, Any]) -> None:
        self.path = name.with_name(f".{name.name}.prepare.json")
        self._name = name
        self._request = dict(request)

    def load(self) -> tuple[Cursor, Sequence[Mapping[str, Any]]] | None:
        """What an earlier process saved, if it had the same request."""
        if not self.path.exists():
            return None
        why = "its journal cannot be read"
        try:
            found = read_json(self.path)
            state = Cursor(**found["cursor"]), found["columns"]
            request = found["request"]
            if found["version"] == _VERSION:
                differing = [key for key in self._request if request.get(key) != self._request[key]]
                if not differing:
                    return state
                why = f"it differs in: {', '.join(differing)}"
        except (UserError, KeyError, TypeError):
            pass
        raise UserError(
            f"a different preparation of this set was interrupted: {why}",
            where=str(self._name),
            remedy="give the same command to resume it, use another name, or start over with "
            "--overwrite",
            exit=Exit.REFUSED,
        )

    def save(self, cursor: Cursor, columns: Sequence[Mapping[str, Any]]) -> None:
        value = {
            "version": _VERSION,
            "request": self._request,
            "cursor": asdict(cursor),
            "columns": list(columns),
        }
        write_json(self.path, value)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
