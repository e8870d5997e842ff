"""Token files must stay as they were when a run opened them.

If a file is cut while it is memory-mapped, the next read beyond its end kills the process with
SIGBUS; if it is written to, the data changes silently. So we note the size and modification time
of every file when a set is opened and compare them before each step reads, at about a microsecond
per file. Sets with many files are checked a few files per step, in turn. A change between the check
and the read can still go unnoticed. Sets held in memory need no check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from gristmill.base.errors import Exit, Problem, UserError

FILES_PER_STEP = 16


class TokenFileWatch:
    """Detects changes to the files of a token set."""

    def __init__(self, paths: Iterable[Path]) -> None:
        states = ((path, _size_and_time(path)) for path in paths)
        self.states = {path: state for path, state in states if state is not None}
        self._turns = itertools.cycle(self.states)

    def check(self) -> None:
        """Refuse to continue if one of the next few files changed."""
        count = min(FILES_PER_STEP, len(self.states))
        self._compare(itertools.islice(self._turns, count))

    def check_all(self) -> None:
        """Refuse to continue if any file changed."""
        self._compare(self.states)

    def _compare(self, paths: Iterable[Path]) -> None:
        problems = []
        for path in paths:
            before, now = self.states[path], _size_and_time(path)
            if now == before:
                continue
            if now is None:
                what = "this file of the token set was removed while the run was reading it"
            elif now[0] != before[0]:
                what = f"this file of the token set changed during the run, from {before[0]} bytes "
                what += f"to {now[0]}"
            else:
                what = "this file of the token set was written to during the run"
            remedy = "restore the set; the same command then resumes from the last checkpoint"
            problems.append(Problem(what, where=str(path), remedy=remedy))
        if problems:
            raise UserError(problems, exit=Exit.DATA)


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
