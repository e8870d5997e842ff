"""Checkpoint folders: how they are committed, found, checked and thinned out.

    checkpoints/
    ├── step-00012000/          committed: complete, and never changed again
    │   ├── model.safetensors · optimizer.safetensors · state.json
    │   │   or, from many processes, their parts (see `pieces.py`) · pieces.json · state.json
    │   └── MANIFEST            one line per file: sha256, size, name; last: their sha256
    ├── .writing-step-00013000.5ac1e07f
    │                           not committed: whatever a crash leaves is removed at the next start
    ├── damaged-step-00012500   set aside: found damaged, never used, never deleted by us
    └── best.json               which step had the best validation loss

A checkpoint is written under its temporary name, every file is flushed, then the folder is renamed
and its parent flushed. The rename is the commit. There is no pointer to the newest: the newest is
the one with the highest step whose manifest holds.

Processes that share a run share this folder. They check files together, each its part, and come to
the same conclusion; what is renamed or removed, the first of them renames or removes.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import (
    read_json,
    sha256_file,
    storage_errors,
    sync_file,
    sync_folder,
    write_json,
)
from gristmill.base.units import Duration, Progress
from gristmill.parallel.control import ControlGroup

MANIFEST = "MANIFEST"
ALONE = ControlGroup()
_STEP = re.compile(r"step-(\d{8,})")
_LINE = re.compile(r"([0-9a-f]{64}) (\d{1,18}) ([^/]+)")


@dataclass(frozen=True)
class Fingerprint:
    """What a file's content is known by."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best validation loss."""

    step: int
    loss: float


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is as it was written, and those passed over."""

    path: Path | None
    damaged: list[tuple[Path, list[Problem]]]


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _STEP.fullmatch(path.name)
    assert match, f"{path} is not a checkpoint folder"
    return int(match[1])


Which = Callable[[str], bool]
"""Which files of a checkpoint, by their names."""


def everything(name: str) -> bool:
    """All files."""
    return True


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

    def clean(self, control: ControlGroup = ALONE) -> None:
        """Remove what interrupted writes and deletions left behind."""
        if control.is_rank0:
            for leftover in (*self.root.glob(".writing-*"), *self.root.glob(".deleting-*")):
                shutil.rmtree(leftover)
        control.barrier()

    def begin(self, step: int) -> Path:
        """An empty folder to write a checkpoint into."""
        # Nobody else knows this name: not even a process that outlived an earlier start of the run
        # and is still writing the same step.
        staging = self.root / f".writing-step-{step:08d}.{secrets.token_hex(4)}"
        with storage_errors(staging):
            staging.mkdir(parents=True)
        return staging

    def commit(self, staging: Path, *, known: Iterable[Fingerprint] = ()) -> Path:
        """Seal a written folder with its manifest and give it its name. Files whose fingerprint is
        `known` were flushed by those who wrote them; the others are flushed here."""
        final = self.root / staging.name.removeprefix(".writing-").partition(".")[0]
        by_name = {one.name: one for one in known}
        _all_visible(staging, by_name.values())
        with storage_errors(staging):
            for file in _write_manifest(staging, by_name):
                sync_file(file)
            sync_folder(staging)
            os.rename(staging, final)
            sync_folder(self.root)
        return final

    def newest_intact(self, control: ControlGroup = ALONE, *, read: Which = everything) -> Found:
        """The newest checkpoint whose files are intact, of those that are not `read` only the size;
        damaged newer ones are listed."""
        damaged: list[tuple[Path, list[Problem]]] = []
        for name in control.broadcast([path.name for path in reversed(self.committed())]):
            path = self.root / name
            problems = verify(path, control=control, read=read)
            if not problems:
                return Found(path, damaged)
            damaged.append((path, problems))
        return Found(None, damaged)

    def set_aside(self, path: Path, control: ControlGroup = ALONE) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved again and nothing is lost."""
        name: str = control.broadcast(self._set_aside(path).name if control.is_rank0 else None)
        return self.root / name

    def _set_aside(self, path: Path) -> Path:
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


def _write_manifest(folder: Path, known: dict[str, Fingerprint]) -> list[Path]:
    """Write the manifest; returns the files, itself among them, that were not known before."""
    own = [file for file in folder.iterdir() if file.name not in known]
    files = [*known.values(), *map(_fingerprint, own)]
    lines = [
        f"{one.sha256} {one.size} {one.name}\n" for one in sorted(files, key=lambda one: one.name)
    ]
    body = "".join(lines)
    seal = hashlib.sha256(body.encode()).hexdigest()
    manifest = folder / MANIFEST
    manifest.write_text(f"{body}{seal}\n")
    return [*own, manifest]


def _all_visible(folder: Path, files: Iterable[Fingerprint]) -> None:
    """Refuse to commit what other processes say they wrote and this one does not see."""
    faults = ((one.name, _fault(folder / one.name, one, content=False)) for one in files)
    problems = [Problem(fault, str(folder / name)) for name, fault in faults if fault]
    if problems:
        remedy = "set `folder` to a place on a file system that all processes share"
        last = Problem(problems[-1].what, problems[-1].where, remedy)
        raise UserError([*problems[:-1], last], exit=Exit.STORAGE)


def _fingerprint(file: Path) -> Fingerprint:
    return Fingerprint(file.name, sha256_file(file), file.stat().st_size)


def verify(
    folder: Path, *, control: ControlGroup = ALONE, read: Which = everything
) -> list[Problem]:
    """Everything that is not as it was written, found by all processes together. Files that are not
    to be `read` only have to be there, with the right size."""
    found = _verify_share(folder, rank=control.rank, ranks=control.size, read=read)
    told = control.all_gather([astuple(problem) for problem in found])
    problems = {Problem(*values) for those in told for values in those}
    return sorted(problems, key=lambda problem: problem.where or "")


def _verify_share(folder: Path, *, rank: int, ranks: int, read: Which) -> list[Problem]:
    """What one of several processes finds: file n is for process n mod their number."""
    where = str(folder / MANIFEST)
    try:
        text = (folder / MANIFEST).read_text()
    except OSError as error:
        return [Problem(f"cannot be read: {error.strerror}", where)]
    except UnicodeDecodeError:
        return [Problem("is damaged", where)]
    body, _, seal = text.removesuffix("\n").rpartition("\n")
    body += "\n"
    lines = [_LINE.fullmatch(line) for line in body.splitlines()]
    sealed = text == f"{body}{seal}\n" and hashlib.sha256(body.encode()).hexdigest() == seal
    files = [Fingerprint(line[3], line[1], int(line[2])) for line in lines if line]
    if not sealed or len(files) != len(lines):
        return [Problem("is damaged", where)]
    return [
        Problem(fault, str(folder / one.name))
        for one in files[rank::ranks]
        if (fault := _fault(folder / one.name, one, content=read(one.name)))
    ]


def _fault(file: Path, expected: Fingerprint, *, content: bool) -> str | None:
    """What is wrong with a file, if anything is."""
    try:
        if not file.is_file():
            return "is missing"
        size = file.stat().st_size
        if size != expected.size:
            return f"has {size} bytes, not {expected.size}"
        if content and sha256_file(file) != expected.sha256:
            return "has changed bytes"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None
