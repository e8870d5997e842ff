"""Resuming from a run folder.

newest usable checkpoint -> state      damaged newer ones are set aside with a warning; without any,
                                       that of another run, if checkpoint.load names one
metrics.jsonl                          cut back to the checkpoint's step
best.json                              checked, rebuilt if it is damaged
run.toml, origin.txt, environment.json, tokenizer/   rewritten at every start
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import set_aside, storage_errors, utf8, write_atomic, write_json
from gristmill.base.units import timestamp
from gristmill.checkpoint.layout import (
    Best,
    CheckpointFolder,
    CheckpointSearch,
    describe_problems,
    merge_problems,
)
from gristmill.checkpoint.state import identity_changes, restore
from gristmill.checkpoint.state_file import STATE
from gristmill.config.load import changed_settings, dump_run
from gristmill.config.parallel import Mesh
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import cut_metrics, validation_loss
from gristmill.train.assemble import Assembly
from gristmill.train.environment import describe_environment


@dataclass(frozen=True)
class Resumed:
    """What was found in the run folder."""

    checkpoint: Path | None
    notes: list[str]
    continues: bool = False
    """Whether training continues from memory, after a change of workers."""


def resume(parts: Assembly) -> Resumed:
    """Load the newest checkpoint that can be used, if there is one, and bring the folder in line
    with it."""
    folder, notes, saved = parts.folder, list[str](), dict[str, Any]()
    checkpoints, control = CheckpointFolder(folder.checkpoints), parts.control
    checkpoints.clean(control)

    def load(path: Path, *, other_run: bool = False) -> list[Problem]:
        """Load a checkpoint; returns why it cannot be used."""
        found: list[Problem] = []

        def attempt() -> None:
            try:
                saved.clear()
                saved.update(_load(parts, path, other_run=other_run))
            except DataError as error:
                found.extend(error.problems)

        control.on_all_ranks(attempt)
        return merge_problems(found, control)

    found = checkpoints.newest_intact(control, check=load)
    damaged = found.damaged
    if found.path is None:
        if damaged:
            raise _all_damaged(found, folder)
        notes += control.on_rank0(lambda: _check_lost(folder))
        if parts.config.checkpoint.load is not None:
            found = _find_in_other_run(parts, partial(load, other_run=True))
            notes += _notes_on_other_run(parts, found, saved)
    best, told = control.on_rank0(lambda: _find_best(parts, checkpoints))
    parts.state.best = None if best is None else Best(*best)
    notes += told
    if found.path is not None:
        notes += resume_differences(saved, parts)
    for path, problems in damaged:
        aside = checkpoints.set_aside(path, control)
        what = describe_problems(problems)
        notes.append(f"skipped damaged checkpoint {path.name} ({what}); it is now {aside.name}")
    notes += control.on_rank0(lambda: _fit_folder(parts))
    return Resumed(found.path, notes)


def _find_in_other_run(parts: Assembly, load: Callable[[Path], list[Problem]]) -> CheckpointSearch:
    """Load the newest checkpoint of the run in checkpoint.load that can be used. Nothing there is
    changed."""
    source = Path(str(parts.config.checkpoint.load))
    parts.control.on_rank0(partial(_require_own_kind, source))
    found = CheckpointFolder(RunFolder(source).checkpoints).newest_intact(parts.control, check=load)
    if found.path is None and found.damaged:
        problems = [Problem(describe_problems(one), str(path)) for path, one in found.damaged]
        what, remedy = (
            "every checkpoint there is damaged",
            "leave checkpoint.load out, or repair it",
        )
        raise UserError([Problem(what, f"checkpoint.load {source}", remedy), *problems])
    return found


def _require_own_kind(source: Path) -> None:
    """Refuse a folder that holds checkpoints, but of another program."""
    if (source / "latest_checkpointed_iteration.txt").is_file():
        raise UserError(
            "this holds a checkpoint of Megatron, of which only the weights can be read",
            where=f"checkpoint.load {source}",
            remedy="`gristmill import` it, then start from the result with model.start, or "
            "--finetune in Megatron's command",
            exit=Exit.DATA,
        )


def _notes_on_other_run(
    parts: Assembly, found: CheckpointSearch, saved: dict[str, Any]
) -> list[str]:
    """What the user should know about a start from another run."""
    source = parts.config.checkpoint.load
    if found.path is None:
        return [f"checkpoint.load {source} holds no checkpoint; starting at step 0"]
    notes = [
        f"passed over the damaged checkpoint {path} ({describe_problems(problems)})"
        for path, problems in found.damaged
    ]
    notes += [
        f"{one.where} {one.what}: the run goes on with other data"
        for one in identity_changes(saved["identity"], parts.state)
    ]
    return notes


def _load(parts: Assembly, path: Path, *, other_run: bool = False) -> dict[str, Any]:
    """Put a checkpoint into the state and the strategy; returns the content of its state.json."""
    saved = restore(parts.state, path, other_run=other_run)
    try:
        parts.strategy.load(parts.state.strategy)
    except ValueError as error:
        raise DataError(f"strategy: {error}", where=path / STATE) from error
    return saved


def _fit_folder(parts: Assembly) -> list[str]:
    """Bring the rest of the folder in line with the state; returns what the user should know. These
    files are records of the run: a damaged one is set aside and never keeps the run from
    resuming."""
    folder, best, notes = parts.folder, parts.state.best, list[str]()
    if best is not None and parts.config.checkpoint.keep_best:
        # The run may have been killed between a save and its best.json.
        CheckpointFolder(folder.checkpoints).mark_best(best)
    # At step 0 the initial validation runs again.
    damaged = cut_metrics(folder.metrics, after=parts.state.progress.steps or -1)
    if damaged:
        aside = folder.metrics.with_name(f"damaged-{folder.metrics.name}")
        with storage_errors(aside), aside.open("ab") as file:
            file.write(b"".join(damaged))
        lines = "1 damaged line" if len(damaged) == 1 else f"{len(damaged)} damaged lines"
        notes.append(f"moved {lines} of {folder.metrics.name} to {aside.name}")
    if folder.holds_run():
        try:
            changed = changed_settings(folder.settings, parts.config)
            notes += [f"changed: {line}" for line in changed]
        except (ValueError, RecursionError) as error:
            notes.append(_set_aside(folder.settings, str(error)))
    write_atomic(folder.settings, dump_run(parts.config))
    earlier = folder.origin.read_bytes() if folder.origin.is_file() else b""
    typed = f"{timestamp()}  {shlex.join(sys.argv)}\n{folder.translation}"
    write_atomic(folder.origin, earlier + utf8(typed))
    environment = describe_environment(parts.world, parameters=parts.parameters)
    write_json(folder.environment, environment)
    parts.tokenizer.save(folder.tokenizer)
    if parts.chat is not None:
        parts.chat.template.save(folder.tokenizer)
    return notes


def _set_aside(file: Path, why: str) -> str:
    """Rename a damaged file; returns a message."""
    return f"{file.name} is damaged ({why}); it is now {set_aside(file).name}, and written anew"


def _find_best(
    parts: Assembly, checkpoints: CheckpointFolder
) -> tuple[tuple[int, float] | None, list[str]]:
    """The best loss up to this step, and what the user should know about it."""
    state, keep, notes = parts.state, parts.config.checkpoint.keep_best, list[str]()
    known, steps = [state.best], state.progress.steps
    try:
        # best.json may come from a validation after the last save.
        known.append(checkpoints.best())
    except DataError as error:
        notes.append(_set_aside(checkpoints.best_file, error.problems[0].what))
        loss = validation_loss(parts.folder.metrics, step=steps)
        known.append(None if loss is None or not math.isfinite(loss) else Best(steps, loss))
    possible = [
        best
        for best in known
        if best is not None
        and best.step <= steps
        # With keep_best, a best loss whose checkpoint is gone does not count.
        and (checkpoints.path(best.step).is_dir() or not keep)
    ]
    best = min(possible, key=lambda best: best.loss, default=None)
    return None if best is None else astuple(best), notes


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


def _check_lost(folder: RunFolder) -> list[str]:
    """Refuse to train a run from the beginning again that has no checkpoint any more; returns what
    the user should know about one that never had any."""
    step = max(folder.last_step(), folder.read_status().get("step", 0))
    if not folder.has_saved():
        again = f"the run came to step {step}, but no checkpoint was saved; starting over at step 0"
        return [again] if step > 0 else []
    raise UserError(
        f"this run came to step {step}, but none of its checkpoints is here",
        where=folder.checkpoints,
        remedy="put one back to resume the run, or start over with --fresh, which moves the old "
        "run aside",
        exit=Exit.STORAGE,
    )


def resume_differences(saved: dict[str, Any], parts: Assembly) -> list[str]:
    """Reasons why the rest of the run may not be bit-identical to an uninterrupted one."""
    mesh, before = parts.world.layout, {"processes": 1, **saved}
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    workers, saved_workers = parts.state.workers, saved.get("workers") or []
    if list(workers) != saved_workers:
        # More than the rounding changes.
        return [_from_average(saved_workers, workers)]
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


def _from_average(saved: Sequence[int], workers: Sequence[int]) -> str:
    """That the workers of a run changed, in words."""
    if not saved:
        return (
            f"the checkpoint is of a run whose processes had the same weights; all {len(workers)} "
            "workers start from them"
        )
    average = f"the checkpoint holds {len(saved)} workers with weights of their own"
    if not workers:
        return (
            f"{average}; the run goes on from their average, with the optimizer state of worker "
            f"{saved[0]}"
        )
    return (
        f"{average}, and now there are {len(workers)}; all start from the average, each with the "
        "optimizer state of one of the old workers"
    )
