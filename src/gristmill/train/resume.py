"""Resuming from a run folder.

newest usable checkpoint -> state      damaged newer ones are set aside with a warning
metrics.jsonl                          cut back to the checkpoint's step
run.toml, origin.txt, environment.json, tokenizer/   rewritten at every start
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import write_atomic, write_json
from gristmill.checkpoint.layout import (
    Best,
    CheckpointFolder,
    CheckpointSearch,
    describe_problems,
    merge_problems,
)
from gristmill.checkpoint.state import restore
from gristmill.checkpoint.state_file import STATE
from gristmill.config.load import changed_settings, dump_run
from gristmill.config.parallel import Mesh
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import cut_metrics
from gristmill.train.assemble import Assembly
from gristmill.train.environment import describe_environment


@dataclass(frozen=True)
class Resumed:
    """What was found in the run folder."""

    checkpoint: Path | None
    notes: list[str]


def resume(parts: Assembly) -> Resumed:
    """Load the newest checkpoint that can be used, if there is one, and bring the folder in line
    with it."""
    folder, notes, saved = parts.folder, list[str](), dict[str, Any]()
    checkpoints, control = CheckpointFolder(folder.checkpoints), parts.control
    checkpoints.clean(control)

    def load(path: Path) -> list[Problem]:
        """Load a checkpoint; returns why it cannot be used."""
        found: list[Problem] = []

        def attempt() -> None:
            try:
                saved.update(_load(parts, path))
            except DataError as error:
                found.extend(error.problems)

        control.on_all_ranks(attempt)
        return merge_problems(found, control)

    found = checkpoints.newest_intact(control, check=load)
    if found.path is None and found.damaged:
        raise _all_damaged(found, folder)
    if found.path is not None:
        parts.state.best = _best(parts, checkpoints)
        notes += _resume_differences(saved, parts)
    for path, problems in found.damaged:
        aside = checkpoints.set_aside(path, control)
        what = describe_problems(problems)
        notes.append(f"skipped damaged checkpoint {path.name} ({what}); it is now {aside.name}")
    notes += control.on_rank0(lambda: _fit_folder(parts))
    return Resumed(found.path, notes)


def _load(parts: Assembly, path: Path) -> dict[str, Any]:
    """Put a checkpoint into the state and the strategy; returns the content of its state.json."""
    saved = restore(parts.state, path)
    try:
        parts.strategy.load(parts.state.strategy)
    except ValueError as error:
        raise DataError(f"strategy: {error}", where=path / STATE) from error
    return saved


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
            *(Problem(describe_problems(problems)) for _, problems in found.damaged),
            Problem(
                "nothing was changed",
                str(folder.path),
                "restore one from a backup, or start over with --fresh, which moves the old run "
                "aside",
            ),
        ],
        exit=Exit.STORAGE,
    )


def _resume_differences(saved: dict[str, Any], parts: Assembly) -> list[str]:
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
