"""Resuming from a run folder.

newest intact checkpoint -> state      damaged newer ones are set aside with a warning
metrics.jsonl                          cut back to the checkpoint's step
run.toml, origin.txt, environment.json, tokenizer/   rewritten at every start
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import storage_errors, write_atomic, write_json
from gristmill.checkpoint.layout import (
    Best,
    CheckpointFolder,
    CheckpointSearch,
    step_of,
    verify,
)
from gristmill.checkpoint.state import restore
from gristmill.config.load import changed_settings, dump_run
from gristmill.config.parallel import Mesh
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import cut_metrics
from gristmill.train.assemble import Assembly
from gristmill.train.environment import describe_environment

_STEP_NAME = re.compile(r"(?:step-)?(\d{1,18})")


@dataclass(frozen=True)
class Resumed:
    """What was found in the run folder."""

    checkpoint: Path | None
    notes: list[str]


def resume(parts: Assembly) -> Resumed:
    """Load the newest intact checkpoint, if there is one, and bring the folder in line with it."""
    folder, notes = parts.folder, []
    checkpoints, control = CheckpointFolder(folder.checkpoints), parts.control
    checkpoints.clean(control)
    found = checkpoints.newest_intact(control)
    if found.path is None and found.damaged:
        raise _all_damaged(found, folder)
    if found.path is not None:
        saved = restore(parts.state, found.path)
        parts.strategy.load(parts.state.strategy)
        parts.state.best = _best(parts, checkpoints)
        notes += resume_differences(saved, parts)
    for path, problems in found.damaged:
        aside = checkpoints.set_aside(path, control)
        what = "; ".join(str(problem) for problem in problems)
        notes.append(f"skipped damaged checkpoint {path.name} ({what}); it is now {aside.name}")
    notes += control.on_rank0(lambda: _fit_folder(parts))
    return Resumed(found.path, notes)


def find_step(folder: RunFolder, which: str) -> int:
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


def go_back(folder: RunFolder, step: int) -> Path:
    """Make a checkpoint the newest of a run: everything after it is set aside, with the metrics as
    they were. Returns the folder where it is."""
    target, number = folder.set_aside / f"after-step-{step:08d}", 0
    while target.exists():
        number += 1
        target = target.with_name(f"after-step-{step:08d}.{number}")
    CheckpointFolder(folder.checkpoints).set_aside_after(step, target)
    if folder.metrics.is_file():
        with storage_errors(target):
            shutil.copyfile(folder.metrics, target / folder.metrics.name)
    return target


def _fit_folder(parts: Assembly) -> list[str]:
    """Bring the rest of the folder in line with the state; returns the changed settings."""
    folder, best, changed = parts.folder, parts.state.best, []
    if best is not None and parts.config.checkpoint.keep_best:
        # The run may have been killed between a save and its best.json.
        CheckpointFolder(folder.checkpoints).mark_best(best)
    # At step 0 the initial validation runs again.
    cut_metrics(folder.metrics, after=parts.state.progress.steps or -1)
    if folder.holds_run():
        changed = [f"changed: {line}" for line in changed_settings(folder.settings, parts.config)]
    write_atomic(folder.settings, dump_run(parts.config))
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    earlier = folder.origin.read_text() if folder.origin.is_file() else ""
    write_atomic(folder.origin, f"{earlier}{when}  {shlex.join(sys.argv)}\n")
    environment = describe_environment(parts.world, parameters=parts.parameters)
    write_json(folder.environment, environment)
    parts.tokenizer.save(folder.tokenizer)
    return changed


def _best(parts: Assembly, checkpoints: CheckpointFolder) -> Best | None:
    """The best loss up to this step; best.json may come from a validation after the last save."""
    state, keep = parts.state, parts.config.checkpoint.keep_best
    known = [
        best
        for best in (state.best, checkpoints.best())
        if best is not None
        and best.step <= state.progress.steps
        # With keep_best, a best loss whose checkpoint is gone does not count.
        and (checkpoints.path(best.step).is_dir() or not keep)
    ]
    return min(known, key=lambda best: best.loss, default=None)


def _all_damaged(found: CheckpointSearch, folder: RunFolder) -> UserError:
    return UserError(
        [
            Problem("every checkpoint of this run is damaged", str(folder.checkpoints)),
            *(problem for _, problems in found.damaged for problem in problems),
            Problem(
                "nothing was changed",
                str(folder.path),
                "restore one from a backup, or start over with --fresh, which moves the old run "
                "aside",
            ),
        ],
        exit=Exit.STORAGE,
    )


def resume_differences(saved: dict[str, Any], parts: Assembly) -> list[str]:
    """Reasons why the rest of the run may not be bit-identical to an uninterrupted one."""
    mesh, before = parts.world.mesh, {"processes": 1, **saved}
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if saved.get("layout"):
        before["layout"] = Mesh(**saved["layout"])
        now |= {"layout": mesh, "micro_batch": parts.state.micro_batch}
    else:
        # Old checkpoints do not record the layout.
        now["processes"] = mesh.processes
    return [
        f"{name} was {before.get(name)} and is now {value}: losses agree only within rounding"
        for name, value in now.items()
        if before.get(name) != value
    ]
