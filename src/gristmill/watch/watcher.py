"""Keeps the digests of all runs up to date, in a thread of its own.

Every interval the thread sees which files have changed and reads what is new: of the runs that were
written to last first, and of each a slice at a time in turn, so that a long file keeps nobody
waiting. Runs that nothing happens to are looked at less often, since on a shared disk every look is
a request to its server. Folders are searched again as often as their number allows.

Readers are told of changes by a version that grows. The rows that were new lately are kept, so that
many readers need no more memory than one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.watch.folders import find_runs
from gristmill.watch.run import WatchedRun, limits_for

_KEPT_CHANGES = 64
_SEARCH_SECONDS = 5.0
_SEARCH_SHARE = 20
"""A search may take one part in so many of the time."""
_QUIET_SECONDS = 120.0
_QUIET_LOOKS = 10
"""A run that was not written to for so long is looked at once in so many intervals."""
_ROUND_SECONDS = 0.25
"""After reading for so long, what is new is told."""
_SWITCH_SECONDS = 0.0005
"""How long a thread may hold Python's lock while another, which answers, waits for it."""


@dataclass(frozen=True, eq=False)
class RowChanges:
    """What became new with a version."""

    version: int
    rows: list[dict[str, Any]]
    """Of each run what has changed, and its id."""
    gone: list[str]


class Watcher:
    """All runs below some folders."""

    def __init__(
        self,
        roots: Sequence[Path],
        *,
        interval: float = 1.0,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.roots, self.interval, self._warn = list(roots), interval, warn
        self.runs: Mapping[str, WatchedRun] = {}
        """By id, in the order of their paths. Never changed: replaced."""
        self.version = 0
        self.changed: Callable[[], None] = lambda: None
        """Called in the thread when there is a new version."""
        self._told: dict[str, dict[str, Any]] = {}
        self._changes = deque[RowChanges](maxlen=_KEPT_CHANGES)
        self._changes_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="gristmill watcher", daemon=True)
        self._next_search = 0.0
        self._round = 0
        self._strange = set[str]()

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    # ------------------------------------------------------------------ what readers ask

    def rows(self) -> tuple[int, list[dict[str, Any]]]:
        """The version, and all rows."""
        with self._changes_lock:
            return self.version, list(self._told.values())

    def since(self, version: int) -> list[RowChanges] | None:
        """What became new after a version; None if that is no longer known."""
        with self._changes_lock:
            if version == self.version:
                return []
            first = self._changes[0].version if self._changes else self.version + 1
            if not first - 1 <= version < self.version:
                return None
            return [one for one in self._changes if one.version > version]

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                self.look()
            except Exception as error:  # such as no memory for a moment
                self._warn(f"watching failed, and goes on: {type(error).__name__}: {error}")
            self._stop.wait(max(0.01, self.interval - (time.monotonic() - begun)))

    def look(self) -> None:
        """See what has changed, read it, and tell."""
        if time.monotonic() >= self._next_search:
            self._search()
        due = [run for run in self.runs.values() if self._is_due(run)]
        self._round += 1
        unread = self._changed_runs(due)
        self._tell([run for run in due if run.row.keys() <= {"id"}])
        self._read(unread)
        self._tell(due)

    def _is_due(self, run: WatchedRun) -> bool:
        if run.unread or time.time() - run.follower.changed < _QUIET_SECONDS:
            return True
        return (self._round + int(run.id[:4], 16)) % _QUIET_LOOKS == 0

    def _changed_runs(self, runs: Sequence[WatchedRun]) -> list[WatchedRun]:
        """Those of which there is something to read, the last written first. Of long files that
        were never read a little is read at once, and told."""
        unread = [run for run in runs if self._guarded(run, run.look)]
        unread.sort(key=lambda run: -run.follower.changed)
        new, told = list[WatchedRun](), time.monotonic()
        for run in unread:
            self._guarded(run, run.sample)
            if run.row.keys() <= {"id"}:
                new.append(run)
            if time.monotonic() - told > _ROUND_SECONDS and not self._stop.is_set():
                self._tell(new)
                new, told = [], time.monotonic()
        return unread

    def _read(self, unread: list[WatchedRun]) -> None:
        """Read slices of these runs in turn until there are no more."""
        told = time.monotonic()
        while unread and not self._stop.is_set():
            unread = [run for run in unread if self._guarded(run, run.read)]
            if time.monotonic() - told > max(_ROUND_SECONDS, self.interval):
                # Others have changed meanwhile, have come, or are gone.
                if time.monotonic() >= self._next_search:
                    self._search()
                unread = [run for run in unread if self.runs.get(run.id) is run]
                others = [run for run in self.runs.values() if run not in unread]
                unread += self._changed_runs([run for run in others if self._is_due(run)])
                unread.sort(key=lambda run: -run.follower.changed)
                self._tell(list(self.runs.values()))
                told = time.monotonic()

    def _guarded(self, run: WatchedRun, act: Callable[[], bool]) -> bool:
        """Do something with a run. A folder that is strange in a way that nobody thought of keeps
        no other from being watched."""
        try:
            return act()
        except Exception as error:
            run.unread = False
            if run.id not in self._strange:
                self._strange.add(run.id)
                self._warn(f"{run.folder.path}: not shown: {type(error).__name__}: {error}")
            return False

    def _search(self) -> None:
        begun = time.monotonic()
        found = find_runs(self.roots)
        limits = limits_for(len(found))
        runs = {}
        for one in found:
            run = self.runs.get(one.id) or WatchedRun(one, limits=limits)
            run.name = one.name
            runs[one.id] = run
        self.runs = runs
        took = time.monotonic() - begun
        self._next_search = time.monotonic() + max(_SEARCH_SECONDS, _SEARCH_SHARE * took)

    def _tell(self, due: Sequence[WatchedRun]) -> None:
        """Make a version of what is new in some runs, and of those that are gone."""
        rows = list[dict[str, Any]]()
        told = dict(self._told)
        for run in due:
            if self._guarded(run, run.update_row) and run.id in self.runs:
                rows.append({"id": run.id, **_changed(told.get(run.id, {}), run.row)})
                told[run.id] = run.row
        gone = [id for id in told if id not in self.runs]
        if not rows and not gone:
            return
        ordered = {id: told[id] for id in self.runs if id in told}
        with self._changes_lock:
            self.version += 1
            self._told = ordered
            self._changes.append(RowChanges(self.version, rows, gone))
        self.changed()


def _changed(before: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a row whose values are new."""
    return {key: row[key] for key in row if key not in before or before[key] != row[key]}
