"""Token files must stay as they were when a run opened them.

A file that is cut while it is memory-mapped ends the process with SIGBUS at the next read beyond
its end, and one that is written to changes the data without a word. So size and time of change are
noted when a set is opened and compared before each step's reads, which costs about a microsecond
for each file; of sets with many files only some are looked at in each step, in turn. What remains
is the moment between looking and reading. Sets that are held in memory need no watch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.base.errors import Exit, Problem, UserError

FILES_A_STEP = 16


@dataclass(frozen=True)
class FileState:
    """What shows whether a file was touched."""

    bytes: int
    changed_ns: int


@dataclass
class Watch:
    """Notices files that change."""

    states: dict[Path, FileState]
    _turn: int = field(default=0, init=False)

    def check(self) -> None:
        """Refuse to go on if one of the next few files is not what it was."""
        paths = list(self.states)
        few = [paths[(self._turn + i) % len(paths)] for i in range(min(FILES_A_STEP, len(paths)))]
        self._turn = (self._turn + len(few)) % max(1, len(paths))
        self._compare(few)

    def check_all(self) -> None:
        """Refuse to go on if any file is not what it was."""
        self._compare(self.states)

    def _compare(self, paths: Iterable[Path]) -> None:
        problems = [p for path in paths if (p := _problem(path, self.states[path]))]
        if problems:
            raise UserError(problems, exit=Exit.DATA)


def watch_files(paths: Iterable[Path]) -> Watch:
    """Note the state of files now."""
    states = {path: state for path in paths if (state := _state(path)) is not None}
    return Watch(states)


def _state(path: Path) -> FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return FileState(found.st_size, found.st_mtime_ns)


def _problem(path: Path, before: FileState) -> Problem | None:
    now = _state(path)
    if now == before:
        return None
    if now is None:
        what = "this file of the token set was removed while the run was reading it"
    elif now.bytes != before.bytes:
        what = (
            f"this file of the token set changed under the run: it had {before.bytes} bytes and "
            f"has {now.bytes}"
        )
    else:
        what = "this file of the token set was written to under the run"
    remedy = "put the set back as it was; the same command then goes on from the last checkpoint"
    return Problem(what, where=str(path), remedy=remedy)
