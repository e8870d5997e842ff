"""Going back to a checkpoint: what came after it is set aside, and resuming does the rest."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import storage_errors
from gristmill.checkpoint.layout import CheckpointFolder, step_of, verify
from gristmill.track.folder import RunFolder

_STEP_NAME = re.compile(r"(?:step-)?(\d{1,18})")


def choose_step(folder: RunFolder, which: str) -> int:
    """The step of the checkpoint that a user names: a step, or "best". It must be intact."""
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
    """A remedy that names the checkpoints there are."""
    steps = ", ".join(str(step_of(path)) for path in checkpoints.committed())
    return f"there are checkpoints of steps {steps}" if steps else None


def roll_back(folder: RunFolder, step: int) -> Path:
    """Make a checkpoint the newest of a run: everything after it is set aside, with the metrics as
    they were. Returns the folder where it is."""
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
