"""Locking a run folder for the process that trains, and going back to one of its checkpoints.

To go back, everything after that checkpoint is moved aside; resuming then does the rest.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Self

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import storage_errors
from gristmill.base.locks import FolderLock
from gristmill.checkpoint.layout import CheckpointFolder, step_of, verify
from gristmill.track.folder import RunFolder, move_aside

_STEP_NAME = re.compile(r"(?:step-)?(\d{1,18})")


class FolderClaim:
    """Locks a run folder for this process until the context ends. If a user error then keeps a new
    run from starting, its folder is removed again."""

    def __init__(self, folder: RunFolder, *, fresh: bool, start_from: str | None) -> None:
        self.folder, self.fresh, self.start_from = folder, fresh, start_from
        self._lock, self._new = FolderLock(folder.path), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UserError) and self._new:
            self.folder.remove_unused()
        self._lock.release()

    def take(self) -> None:
        """Create or lock the folder, and go back to an earlier checkpoint if requested."""
        if self.fresh:
            move_aside(self.folder)
        step = None if self.start_from is None else choose_step(self.folder, self.start_from)
        new = self.folder.create()
        self._lock.acquire()
        # Only now: another process may have locked the folder in the meantime.
        self.folder.held, self._new = self._lock, new
        if step is not None:
            roll_back(self.folder, step)

    def take_over(self) -> None:
        """Lock the folder of a run that another worker led before."""
        self._new = False
        if not self._lock.held:
            self.folder.create()
            # A worker that is frozen, or cut off from the network, keeps its lock for ever.
            with contextlib.suppress(UserError):
                self._lock.acquire()
                self.folder.held = self._lock

    def give_up(self) -> None:
        """Release the lock, so that another worker can lead the run."""
        self._new = False
        self._lock.release()
        self.folder.held = None


def choose_step(folder: RunFolder, which: str) -> int:
    """The step of the checkpoint that a user named, by step or as "best". It must be intact."""
    checkpoints = CheckpointFolder(folder.checkpoints)
    steps = [step_of(path) for path in checkpoints.committed()]
    known = known_steps(checkpoints)
    if which == "best":
        best = checkpoints.best()
        if best is None:
            what = "no checkpoint is marked as the best"
            raise UserError(what, where=folder.checkpoints, remedy=known)
        step = best.step
    else:
        number = _STEP_NAME.fullmatch(which)
        step = -1 if number is None else int(number[1])
    if step not in steps:
        what = f"there is no checkpoint of step {which}" if known else "there are no checkpoints"
        raise UserError(what, where=str(folder.checkpoints), remedy=known)
    problems = verify(checkpoints.path(step))
    if problems:
        raise UserError([*problems[:-1], replace(problems[-1], remedy=known)], exit=Exit.STORAGE)
    return step


def known_steps(checkpoints: CheckpointFolder) -> str | None:
    """A remedy that lists the existing checkpoints."""
    steps = ", ".join(str(step_of(path)) for path in checkpoints.committed())
    return f"there are checkpoints of steps {steps}" if steps else None


def roll_back(folder: RunFolder, step: int) -> Path:
    """Make a checkpoint the newest of a run: everything after it is moved aside, with a copy of the
    metrics. Returns the folder where it is."""
    target, number = folder.set_aside / f"after-step-{step:08d}", 0
    while target.exists():
        number += 1
        target = target.with_name(f"after-step-{step:08d}.{number}")
    with storage_errors(target):
        target.mkdir(parents=True)
        # First, since the next resume cuts them.
        if folder.metrics.is_file():
            shutil.copyfile(folder.metrics, target / folder.metrics.name)
    CheckpointFolder(folder.checkpoints).set_aside_after(step, target)
    return target
