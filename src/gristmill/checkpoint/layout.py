"""Checkpoint folders: how they are committed, found, checked and thinned out.

    checkpoints/
    ├── step-00012000/          committed: complete, and never changed again
    │   ├── model.safetensors · optimizer.safetensors · state.json
    │   └── MANIFEST            one line per file: sha256, size, name; last: their sha256
    ├── .writing-step-00013000  not committed: whatever a crash leaves is removed at the next start
    ├── damaged-step-00012500   set aside: found damaged, never used, never deleted by us
    └── best.json               which step had the best validation loss

A checkpoint is written under its temporary name, every file is flushed, then the folder is renamed
and its parent flushed. The rename is the commit. There is no pointer to the newest: the newest is
the one with the highest step whose manifest holds.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.errors import Problem
from gristmill.base.files import (
    read_json,
    sha256_file,
    storage_errors,
    sync_file,
    sync_folder,
    write_json,
)
from gristmill.base.units import Duration, Progress

MANIFEST = "MANIFEST"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best validation loss."""

    step: int
    loss: float


@dataclass(frozen=True)
class Found:
    """The newest checkpoint whose every byte is as it was written, and those passed over."""

    path: Path | None
    damaged: list[tuple[Path, list[Problem]]]


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _STEP.fullmatch(path.name)
    assert match, f"{path} is not a checkpoint folder"
    return int(match[1])


class CheckpointFolder:
    """All checkpoints of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def committed(self) -> list[Path]:
        """Committed checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = [p for p in self.root.iterdir() if p.is_dir() and _STEP.fullmatch(p.name)]
        return sorted(found, key=step_of)

    def clean(self) -> None:
        """Remove what interrupted writes and deletions left behind."""
        for leftover in (*self.root.glob(".writing-*"), *self.root.glob(".deleting-*")):
            shutil.rmtree(leftover)

    def begin(self, step: int) -> Path:
        """An empty folder to write a checkpoint into."""
        staging = self.root / f".writing-step-{step:08d}"
        with storage_errors(staging):
            if staging.exists():
                shutil.rmtree(staging)
            staging.mkdir(parents=True)
        return staging

    def commit(self, staging: Path) -> Path:
        """Seal a written folder with its manifest and give it its name."""
        final = self.root / staging.name.removeprefix(".writing-")
        with storage_errors(staging):
            _write_manifest(staging)
            for file in staging.iterdir():
                sync_file(file)
            sync_folder(staging)
            os.rename(staging, final)
            sync_folder(self.root)
        return final

    def newest_intact(self) -> Found:
        """The newest checkpoint that passes all checks; damaged newer ones are listed."""
        damaged: list[tuple[Path, list[Problem]]] = []
        for path in reversed(self.committed()):
            problems = verify(path)
            if not problems:
                return Found(path, damaged)
            damaged.append((path, problems))
        return Found(None, damaged)

    def set_aside(self, path: Path) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved again and nothing is lost."""
        number = 0
        while True:
            suffix = f".{number}" if number else ""
            aside = self.root / f"damaged-{path.name}{suffix}"
            if not aside.exists():
                break
            number += 1
        os.rename(path, aside)
        sync_folder(self.root)
        return aside

    def best(self) -> Best | None:
        """The best checkpoint so far, if it is still there."""
        file = self.root / "best.json"
        if not file.is_file():
            return None
        values = read_json(file)
        return Best(int(values["step"]), float(values["loss"]))

    def mark_best(self, best: Best) -> None:
        write_json(self.root / "best.json", {"step": best.step, "loss": best.loss})

    def thin_out(
        self, *, keep: int, keep_every: Duration | None, progress_at: Callable[[int], Progress]
    ) -> list[Path]:
        """Delete old checkpoints, newest `keep`, the best and the permanent ones excepted.

        Only called after a newer one was committed and verified. A folder is renamed before it is
        emptied, so that a half-deleted one is never mistaken for a checkpoint.
        """
        best = self.best()
        removed = []
        for path in self.committed()[:-keep]:
            step = step_of(path)
            if (best and step == best.step) or _permanent(step, keep_every, progress_at):
                continue
            doomed = self.root / f".deleting-{path.name}"
            os.rename(path, doomed)
            shutil.rmtree(doomed)
            removed.append(path)
        return removed


def _permanent(
    step: int, keep_every: Duration | None, progress_at: Callable[[int], Progress]
) -> bool:
    if keep_every is None:
        return False
    return step == 0 or keep_every.due(progress_at(step - 1), progress_at(step))


# ------------------------------------------------------------------ manifests


def _write_manifest(folder: Path) -> None:
    lines = [
        f"{sha256_file(file)} {file.stat().st_size} {file.name}\n"
        for file in sorted(folder.iterdir())
    ]
    body = "".join(lines)
    seal = hashlib.sha256(body.encode()).hexdigest()
    (folder / MANIFEST).write_text(f"{body}{seal}\n")


def verify(folder: Path) -> list[Problem]:
    """Everything that is not as it was written."""
    where = str(folder / MANIFEST)
    try:
        text = (folder / MANIFEST).read_text()
    except OSError as error:
        return [Problem(f"cannot be read: {error.strerror}", where)]
    except UnicodeDecodeError:
        return [Problem("is damaged", where)]
    body, _, seal = text.removesuffix("\n").rpartition("\n")
    body += "\n"
    if text != f"{body}{seal}\n" or hashlib.sha256(body.encode()).hexdigest() != seal:
        return [Problem("is damaged", where)]
    return [problem for line in body.splitlines() for problem in _verify_file(folder, line)]


def _verify_file(folder: Path, line: str) -> list[Problem]:
    digest, size, name = line.split(" ", 2)
    file = folder / name
    if "/" in name or not file.is_file():
        return [Problem("is missing", str(file))]
    if file.stat().st_size != int(size):
        return [Problem(f"has {file.stat().st_size} bytes, not {size}", str(file))]
    try:
        return [] if sha256_file(file) == digest else [Problem("has changed bytes", str(file))]
    except OSError as error:
        return [Problem(f"cannot be read: {error.strerror}", str(file))]
