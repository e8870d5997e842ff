"""How a preparation survives its process: a journal beside the unfinished set.

    .NAME.prepare.json   {"version": 1, "request": {…}, "cursor": {…}, "columns": […]}

Every few seconds the hidden files of the set are flushed, and then the journal says how long each
of them was and which line of which source came next. The same command, given again, cuts the files
back to that and goes on. A command that asks for something else is refused, since it would destroy
work that may have taken hours. The journal is removed when the set is in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, sha256_text, write_json
from gristmill.text.sources.source import Source
from gristmill.tokens.format import program_version

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


@dataclass(frozen=True)
class State:
    """All that is needed to go on."""

    cursor: Cursor
    columns: Sequence[Mapping[str, Any]]
    """For each key its ledger, and for each of its sets the state of the writer."""


class Journal:
    """The journal of one output."""

    def __init__(self, output: Path, request: Mapping[str, Any]) -> None:
        self.path = output.with_name(f".{output.name}.prepare.json")
        self._output = output
        self._request = dict(request)

    def load(self, *, overwrite: bool) -> State | None:
        """What an earlier process left, if it was asked for the same."""
        if not self.path.exists():
            return None
        try:
            found = read_json(self.path)
            if found["version"] != _VERSION:
                raise KeyError("version")
            request = found["request"]
            state = State(Cursor(**found["cursor"]), found["columns"])
        except (UserError, KeyError, TypeError) as error:
            if overwrite:
                return None
            raise self._refusal("its journal cannot be read") from error
        differing = [name for name, value in self._request.items() if request.get(name) != value]
        if not differing:
            return state
        if overwrite:
            return None
        raise self._refusal(f"it differs in: {', '.join(differing)}")

    def _refusal(self, why: str) -> UserError:
        return UserError(
            f"another preparation of this set was interrupted, and this is not the same: {why}",
            where=str(self._output),
            remedy="give the same command to go on with it, another name, or --overwrite to begin "
            "anew",
            exit=Exit.REFUSED,
        )

    def save(self, state: State) -> None:
        value = {
            "version": _VERSION,
            "request": self._request,
            "cursor": asdict(state.cursor),
            "columns": list(state.columns),
        }
        write_json(self.path, value)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def request_of(sources: Sequence[Source], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for: equal requests give equal files."""
    identities = [source.identity for source in sources]
    return {
        "sources": sha256_text(repr(identities)),
        **settings,
        "version": program_version(),
    }
