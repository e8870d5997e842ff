"""From what a person names to sources.

    a file, a folder, a glob      files; those of a folder and of a glob in sorted order
    -                             standard input
    hf:NAME, hf:./folder          a dataset of Hugging Face

What is missing is an error at once, before any work is done. A folder is searched all the way down;
hidden files in it are left alone.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.text.sources.datasets import DatasetSource, is_dataset
from gristmill.text.sources.source import ReadOptions, Source

STDIN = "-"


def find_sources(names: Sequence[str], options: ReadOptions) -> list[Source]:
    """The sources that some names stand for, in order."""
    return [source for name in names for source in _find(name, options)]


def _find(name: str, options: ReadOptions) -> Sequence[Source]:
    if name == STDIN:
        return [Source(None)]
    if is_dataset(name):
        return [DatasetSource(name, options)]
    place = Path(name)
    if place.is_dir():
        found = sorted(file for file in place.rglob("*") if _is_visible(file, below=place))
        missing = "this folder holds no files"
    elif place.exists():
        return [Source(place)]
    else:
        matches = map(Path, glob.glob(name, recursive=True))
        found = sorted(file for file in matches if file.is_file())
        missing = "no file matches" if glob.has_magic(name) else "no such file or folder"
    if not found:
        raise UserError(missing, where=name, exit=Exit.DATA)
    return [Source(file) for file in found]


def _is_visible(file: Path, *, below: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(below).parts)
    return not hidden and file.is_file()
