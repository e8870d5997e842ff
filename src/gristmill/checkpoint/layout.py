"""Checkpoint folders: how they are committed, found, verified and thinned out.

    checkpoints/
    ├── step-00012000/          committed: complete, and never changed again
    │   ├── model.safetensors · optimizer.safetensors · state.json
    │   │   or, from several ranks, their files (see `pieces.py`) · pieces.json · state.json
    │   └── MANIFEST            one line per file: sha256, size, name; last: their sha256
    ├── .writing-step-00013000.5ac1e07f
    │                           not committed: left by a crash, removed at the next start
    ├── damaged-step-00012500   set aside: found damaged, never used, never deleted by us
    └── best.json               which step had the best validation loss; with a checksum

A checkpoint is written under its temporary name, every file is flushed, then the folder is renamed
and its parent flushed. The rename is the commit. No file points to the newest checkpoint: that is
the one with the highest step whose manifest holds.

The ranks of a run share this folder. They verify files together, each some of them, and reach the
same conclusion; only rank 0 renames and removes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import (
    SEAL,
    read_json,
    seal_of,
    set_aside,
    sha256_file,
    sha256_text,
    storage_errors,
    sync_file,
    sync_folder,
    write_sealed_json,
)
from gristmill.base.units import Duration, Progress
from gristmill.distributed.control import ControlGroup

MANIFEST = "MANIFEST"
ALONE = ControlGroup()
_HASHING_THREADS = 8
"""How many files are read and hashed at a time."""
_STEP = re.compile(r"step-(\d{8,})")
_LINE = re.compile(r"([0-9a-f]{64}) (\d{1,18}) ([^/]+)")


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a file's content."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best validation loss."""

    step: int
    loss: float

    @classmethod
    def of(cls, value: Any) -> Best:
        """From a value of a JSON file; a `ValueError` if this is something else."""
        if isinstance(value, dict) and set(value) == {"step", "loss"}:
            best = cls(**value)
            numbers = type(best.step) is int and type(best.loss) in (int, float)
            if numbers and best.step >= 0 and math.isfinite(best.loss):
                return best
        raise ValueError("not a step and its loss")


@dataclass(frozen=True)
class CheckpointSearch:
    """The newest intact checkpoint, if any, and the damaged ones that are newer."""

    path: Path | None
    damaged: list[tuple[Path, list[Problem]]]


NameFilter = Callable[[str], bool]
CheckpointCheck = Callable[[Path], list[Problem]]


def find_step(path: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if it was given another name."""
    match = _STEP.fullmatch(path.absolute().name)
    return None if match is None else int(match[1])


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
        folders = [p for p in self.root.iterdir() if p.is_dir() and _STEP.fullmatch(p.name)]
        return sorted(folders, key=step_of)

    def clean(self, control: ControlGroup = ALONE) -> None:
        """Remove what interrupted writes and deletions left behind."""

        def remove() -> None:
            for kind in (".writing", ".deleting"):
                for leftover in self.root.glob(f"{kind}-step-*"):
                    _remove(leftover)

        control.on_rank0(remove)

    def begin(self, step: int) -> Path:
        """An empty folder to write a checkpoint into."""
        # No other process knows this name: not even one that outlived an earlier start of the run
        # and is still writing the same step.
        staging = self.root / f".writing-step-{step:08d}.{secrets.token_hex(4)}"
        with storage_errors(staging):
            # A run folder that has vanished is not made again.
            self.root.mkdir(exist_ok=True)
            staging.mkdir()
        return staging

    def commit(self, staging: Path, *, known: Iterable[Fingerprint] = ()) -> Path:
        """Write the manifest of a folder and give the folder its name. Files with a `known`
        fingerprint were flushed by the ranks that wrote them; the others are flushed here."""
        final = self.root / staging.name.removeprefix(".writing-").partition(".")[0]
        by_name = {fingerprint.name: fingerprint for fingerprint in known}
        faults = (_problem(staging, fingerprint, read=False) for fingerprint in by_name.values())
        problems = [problem for problem in faults if problem is not None]
        if problems:
            remedy = "set `folder` to a place on a file system that all processes share"
            raise UserError(
                [*problems[:-1], replace(problems[-1], remedy=remedy)], exit=Exit.STORAGE
            )
        with storage_errors(staging):
            for file in _write_manifest(staging, by_name):
                sync_file(file)
            sync_folder(staging)
            os.rename(staging, final)
            sync_folder(self.root)
        return final

    def newest_intact(
        self,
        control: ControlGroup = ALONE,
        *,
        read: NameFilter | None = None,
        check: CheckpointCheck = lambda path: [],
    ) -> CheckpointSearch:
        """The newest checkpoint that `verify` finds intact, and the damaged ones that are newer.
        `check` finds what is wrong with the content of one that has every byte it was written
        with; on all ranks it must find the same. A single process calls it while the bytes are
        still being verified, and takes its word only if they are good."""
        damaged: list[tuple[Path, list[Problem]]] = []
        for name in control.broadcast([path.name for path in reversed(self.committed())]):
            path = self.root / name
            if control.size == 1:
                problems = _verify_and_check(path, read, check)
            else:
                problems = verify(path, control=control, read=read) or check(path)
            if not problems:
                return CheckpointSearch(path, damaged)
            damaged.append((path, problems))
        return CheckpointSearch(None, damaged)

    def set_aside(self, path: Path, control: ControlGroup = ALONE) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved again and nothing is lost."""

        name: str = control.on_rank0(lambda: set_aside(path).name)
        return self.root / name

    @property
    def best_file(self) -> Path:
        return self.root / "best.json"

    def best(self) -> Best | None:
        """The best checkpoint so far, if one is marked; refuses a damaged file."""
        if not self.best_file.is_file():
            return None
        value = read_json(self.best_file)
        seal = value.pop(SEAL, None) if isinstance(value, dict) else None
        try:
            best = Best.of(value)
        except ValueError as error:
            raise DataError(str(error), where=self.best_file) from error
        if seal is not None:
            good = seal == seal_of(asdict(best))
        else:
            # Older versions wrote no seal, but mostly the same into the checkpoint itself.
            good = self._saved_loss(best) == best.loss
        if not good:
            raise DataError("has changed bytes", where=self.best_file)
        return best

    def _saved_loss(self, best: Best) -> float:
        """The loss that the best checkpoint itself has for its step; the one given if it has
        none."""
        with contextlib.suppress(DataError, ValueError, KeyError, TypeError):
            saved = Best.of(read_json(self.path(best.step) / "state.json")["best"])
            return saved.loss if saved.step == best.step else best.loss
        return best.loss

    def mark_best(self, best: Best) -> None:
        write_sealed_json(self.best_file, asdict(best))

    def newest_before(self, step: int) -> int | None:
        """The step of the newest checkpoint from before a step."""
        return max((n for n in map(step_of, self.committed()) if n < step), default=None)

    def set_aside_after(self, step: int, target: Path) -> None:
        """Move the checkpoints of later steps into another folder."""
        later = [path for path in self.committed() if step_of(path) > step]
        with storage_errors(target):
            # The newest first: if this is interrupted, the run is never left without those between.
            for path in reversed(later):
                os.rename(path, target / path.name)
            sync_folder(target)
            sync_folder(self.root)

    def thin_out(
        self,
        *,
        keep: int,
        keep_every: Duration | None,
        progress_at: Callable[[int], Progress],
        good_before: int | None = None,
    ) -> None:
        """Delete old checkpoints, except the newest `keep`, the best and the permanent ones. While
        a spike lasts, which began at step `good_before`, those from before it do not count, and
        none of them is deleted.

        Only called after a newer one was committed and verified. A folder is renamed before it is
        emptied, so that a half-deleted one is never mistaken for a checkpoint.
        """
        try:
            best = self.best()
        except DataError:
            return  # one of these may be the best, and the next resume finds out which
        first = 0 if good_before is None else good_before
        for path in [path for path in self.committed() if step_of(path) >= first][:-keep]:
            step = step_of(path)
            permanent = keep_every is not None and (
                step == 0 or keep_every.due(progress_at(step - 1), progress_at(step))
            )
            if permanent or (best is not None and step == best.step):
                continue
            doomed = self.root / f".deleting-{path.name}"
            os.rename(path, doomed)
            _remove(doomed)


def _remove(path: Path) -> None:
    """Delete a folder. Of a link only itself: what it leads to was put there by somebody else, and
    so were plain files."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


# ------------------------------------------------------------------ manifests


def _write_manifest(folder: Path, known: dict[str, Fingerprint]) -> list[Path]:
    """Write the manifest; returns it and the files that were not known before."""
    unknown = [file for file in folder.iterdir() if file.name not in known]
    fingerprints = [
        *known.values(),
        *(Fingerprint(file.name, sha256_file(file), file.stat().st_size) for file in unknown),
    ]
    fingerprints.sort(key=lambda entry: entry.name)
    body = "".join(f"{entry.sha256} {entry.size} {entry.name}\n" for entry in fingerprints)
    manifest = folder / MANIFEST
    manifest.write_text(f"{body}{sha256_text(body)}\n")
    return [*unknown, manifest]


def verify(
    folder: Path, *, control: ControlGroup = ALONE, read: NameFilter | None = None
) -> list[Problem]:
    """Everything in a checkpoint that is not as it was written. All ranks verify it together, file
    n on rank n modulo their number. Of files that `read` refuses only the size is compared."""
    try:
        files = _read_manifest(folder)[control.rank :: control.size]
    except (OSError, ValueError) as error:
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is damaged"
        problems: list[Problem | None] = [Problem(what, str(folder / MANIFEST))]
    else:
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            problems = list(
                pool.map(
                    lambda file: _problem(folder, file, read=read is None or read(file.name)), files
                )
            )
    return merge_problems([problem for problem in problems if problem is not None], control)


def _verify_and_check(path: Path, read: NameFilter | None, check: CheckpointCheck) -> list[Problem]:
    """What is wrong with a checkpoint. Hashing takes as long as loading, so both are done at a
    time; nothing that comes of damaged bytes is believed."""
    with ThreadPoolExecutor(1) as side:
        verifying, failure = side.submit(verify, path, read=read), None
        try:
            faults = check(path)
        except Exception as error:
            faults, failure = [], error
        problems = verifying.result()
    if not problems and failure is not None:
        raise failure
    return problems or faults


def merge_problems(own: Sequence[Problem], control: ControlGroup) -> list[Problem]:
    """What any of the ranks has found, on all of them."""
    reports = control.all_gather([astuple(problem) for problem in own])
    problems = {Problem(*values): None for report in reports for values in report}
    return sorted(problems, key=lambda problem: problem.where or "")


_MOST_PROBLEMS = 3


def describe_problems(problems: Sequence[Problem]) -> str:
    """The first problems of a checkpoint in one line: every file and tensor may have one."""
    more = len(problems) - _MOST_PROBLEMS
    shown = [str(problem) for problem in problems[:_MOST_PROBLEMS]]
    return "; ".join([*shown, f"and {more} more"] if more > 0 else shown)


def _read_manifest(folder: Path) -> list[Fingerprint]:
    text = (folder / MANIFEST).read_text()
    body, _, seal = text.removesuffix("\n").rpartition("\n")
    body += "\n"
    lines = [_LINE.fullmatch(line) for line in body.splitlines()]
    files = [Fingerprint(line[3], line[1], int(line[2])) for line in lines if line]
    sealed = text == f"{body}{seal}\n" and sha256_text(body) == seal
    if not sealed or len(files) != len(lines):
        raise ValueError("the manifest is not as it was written")
    return files


def _problem(folder: Path, expected: Fingerprint, *, read: bool) -> Problem | None:
    """What is wrong with a file, if anything."""
    file, fault = folder / expected.name, None
    try:
        if not file.is_file():
            fault = "is missing"
        elif (size := file.stat().st_size) != expected.size:
            fault = f"has {size} bytes, not {expected.size}"
        elif read and sha256_file(file) != expected.sha256:
            fault = "has changed bytes"
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    return None if fault is None else Problem(fault, str(file))
