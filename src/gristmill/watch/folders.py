"""Finds the runs below some folders.

A folder that holds `run.toml` is a run, and nothing below it is looked at. A run's id is made of
its path, so it stays the same when the server is started again, and links to it keep working.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.errors import printable

DEEPEST = 4
"""Levels below a folder that was given."""
MOST_FOLDERS = 50_000
"""Folders that are looked at in one search."""
_RUN = "run.toml"
_PASSED = {"checkpoints", "set-aside", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class FoundRun:
    """A run folder."""

    id: str
    path: Path
    name: str
    """No other run has it."""


def find_runs(roots: Sequence[Path]) -> list[FoundRun]:
    """The runs in these folders, which may be runs themselves; ordered by path."""
    left = [MOST_FOLDERS]
    paths = {run.resolve() for root in roots for run in _below(root, DEEPEST, left)}
    ordered = sorted(paths)
    names = _unique_names(ordered)
    return [FoundRun(run_id(path), path, names[path]) for path in ordered]


def run_id(path: Path) -> str:
    """The id of a run, from its resolved path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def _below(folder: Path, levels: int, left: list[int]) -> Iterator[Path]:
    left[0] -= 1
    if left[0] < 0:
        return
    subfolders = list[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == _RUN and entry.is_file():
                    yield folder
                    return
                hidden = entry.name.startswith(".") or entry.name in _PASSED
                # A link to a folder is followed: the search is not deep, so it ends.
                if levels > 0 and not hidden and entry.is_dir():
                    subfolders.append(entry.name)
    except OSError:
        return  # not there, or nobody may read it
    for name in sorted(subfolders):
        yield from _below(folder / name, levels - 1, left)


def _unique_names(paths: Iterable[Path]) -> dict[Path, str]:
    """The end of each path that no other has: folder names where they differ."""
    names: dict[Path, str] = {}
    open_paths, length = list(paths), 1
    while open_paths:
        ends = {path: "/".join(path.parts[-length:]) for path in open_paths}
        counts = Counter(ends.values())
        names |= {path: end for path, end in ends.items() if counts[end] == 1}
        longest = {path for path in open_paths if length >= len(path.parts)}
        names |= {path: str(path) for path in longest if path not in names}
        open_paths = [path for path in open_paths if path not in names]
        length += 1
    return {path: printable(os.fsencode(name).decode(errors="replace"))
            for path, name in names.items()}  # fmt: skip
