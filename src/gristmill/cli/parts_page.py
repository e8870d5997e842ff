"""`prepare --page`: the page of a preparation in parts, once or kept up to date while they run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError
from gristmill.report.parts_page import write_parts_page
from gristmill.text.prepare.part_status import PartState, PartStatus, part_statuses
from gristmill.text.prepare.parts_run import PartsProgress

_EVERY = 10.0
"""Seconds between two writings: looking at a thousand parts takes a moment."""
_MAX_EVENTS = 100


def status_as_json(status: PartStatus) -> dict[str, Any]:
    """How far one part is, for programs."""
    return {
        "part": status.part.number,
        "state": status.state.value,
        **asdict(status.counts),
        "what": status.what,
        "log": str(status.log) if status.log else None,
    }


class PartsPage:
    """The page, if one is asked for."""

    def __init__(self, file: Path | None, output: Path) -> None:
        self._file = file
        self._output = output
        self._due = 0.0
        self._statuses: Sequence[PartStatus] = ()
        self._events: list[tuple[str, str]] = []
        self._progress: dict[str, Any] | None = None
        self._merging = False

    def note(self, message: str) -> None:
        """Something that happened, which the page lists."""
        at = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        self._events = [(at, message), *self._events][:_MAX_EVENTS]

    def follow(self, progress: PartsProgress) -> None:
        """Write the page if it has become old."""
        done, total = progress.bytes_done, progress.bytes_total
        if self._progress is None or self._progress["stage"] != progress.stage:
            self._progress = {"first": done}
        read = done - self._progress["first"]
        left = (total - done) * progress.seconds / read if read > 0 else None
        self._progress |= {**asdict(progress), "seconds_left": left}
        if self._file is not None and time.monotonic() >= self._due:
            self.write("Parts are running.", again=_EVERY, of=progress.parts)

    def write(self, doing: str, *, again: float | None = None, of: int | None = None) -> None:
        """Write the page as it is now."""
        if self._file is None:
            return
        self._statuses = part_statuses(self._output, of)
        self._save(doing, again=again, complete=False)
        self._due = time.monotonic() + _EVERY

    def merging(self) -> None:
        """All parts are done, and are read for the whole."""
        if not self._merging:
            self._merging = True
            self.write("All parts are done, and are being merged.", again=_EVERY)

    def finish(self) -> None:
        """Write the page for the last time: the parts are merged, and no longer there."""
        if self._file is None:
            return
        self._statuses = [
            replace(status, state=PartState.DONE, what=None, log=None) for status in self._statuses
        ]
        self._save("", again=None, complete=True)

    def _save(self, doing: str, *, again: float | None, complete: bool) -> None:
        assert self._file is not None
        content = {
            "name": str(self._output),
            "doing": doing,
            "complete": complete,
            "parts": [status_as_json(status) for status in self._statuses],
            "progress": self._progress,
            "events": self._events,
            "again": again,
        }
        write_parts_page(content, self._file)


def check_page(page: Path | None, *, for_parts: bool) -> None:
    """Refuse a page where there are no parts to show."""
    if page is not None and not for_parts:
        what = "the page shows all parts of a preparation, and this command does not look at them"
        remedy = "add --engine, or --status to look at parts that run already"
        raise UserError(what, where="--page", remedy=remedy)
