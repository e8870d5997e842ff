"""Resuming from a run folder.

newest usable checkpoint -> state      damaged newer ones are moved aside with a warning; without
                                       any, that of the run in checkpoint.load, if given
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
from gristmill.tokens.format import common_tasks, program_version
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import cut_metrics, validation_loss
from gristmill.train.assemble import BuiltRun
from gristmill.train.environment import describe_environment


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run continues from, and messages for the user."""

    checkpoint: Path | None
    notes: list[str]
    continues: bool = False
    """Whether training continues from memory, after a change of workers."""


def resume(run: BuiltRun) -> Resumed:
    """Load the newest usable checkpoint, if there is one, and make the folder consistent with
    it."""
    folder, notes, saved = run.folder, list[str](), dict[str, Any]()
    checkpoints, control = CheckpointFolder(folder.checkpoints), run.control
    checkpoints.clean(control)

    def load(path: Path, *, other_run: bool = False) -> list[Problem]:
        """Load a checkpoint; returns why it cannot be used."""
        problems: list[Problem] = []

        def attempt() -> None:
            try:
                saved.clear()
                saved.update(_load(run, path, other_run=other_run))
            except DataError as error:
                problems.extend(error.problems)

        control.on_all_ranks(attempt)
        return merge_problems(problems, control)

    search = checkpoints.newest_intact(control, check=load)
    damaged = search.damaged
    if search.path is None:
        if damaged:
            raise _all_damaged(search, folder)
        notes += control.on_rank0(lambda: _check_lost(folder))
        if run.config.checkpoint.load is not None:
            search = _find_in_other_run(run, partial(load, other_run=True))
            notes += _notes_on_other_run(run, search, saved)
    best, told = control.on_rank0(lambda: _find_best(run, checkpoints))
    run.state.best = None if best is None else Best(*best)
    notes += told
    if search.path is not None:
        notes += resume_differences(saved, run)
    for path, problems in damaged:
        aside = checkpoints.set_aside(path, control)
        what = describe_problems(problems)
        notes.append(f"skipped damaged checkpoint {path.name} ({what}); it is now {aside.name}")
    notes += control.on_rank0(lambda: _fit_folder(run))
    return Resumed(search.path, notes)


def _find_in_other_run(run: BuiltRun, load: Callable[[Path], list[Problem]]) -> CheckpointSearch:
    """Load the newest usable checkpoint of the run in checkpoint.load, without changing that
    run."""
    source = Path(str(run.config.checkpoint.load))
    run.control.on_rank0(partial(_require_own_kind, source))
    search = CheckpointFolder(RunFolder(source).checkpoints).newest_intact(run.control, check=load)
    if search.path is None and search.damaged:
        problems = [
            Problem(describe_problems(problems), str(path)) for path, problems in search.damaged
        ]
        what, remedy = (
            "every checkpoint there is damaged",
            "leave checkpoint.load out, or repair it",
        )
        raise UserError([Problem(what, f"checkpoint.load {source}", remedy), *problems])
    return search


def _require_own_kind(source: Path) -> None:
    """Refuse a folder with checkpoints of another program."""
    if (source / "latest_checkpointed_iteration.txt").is_file():
        raise UserError(
            "this holds a checkpoint of Megatron, of which only the weights can be read",
            where=f"checkpoint.load {source}",
            remedy="`gristmill import` it, then start from the result with model.start, or "
            "--finetune in Megatron's command",
            exit=Exit.DATA,
        )


def _notes_on_other_run(
    run: BuiltRun, search: CheckpointSearch, saved: dict[str, Any]
) -> list[str]:
    """Messages for the user about a start from another run."""
    source = run.config.checkpoint.load
    if search.path is None:
        return [f"checkpoint.load {source} holds no checkpoint; starting at step 0"]
    notes = [
        f"passed over the damaged checkpoint {path} ({describe_problems(problems)})"
        for path, problems in search.damaged
    ]
    notes += [
        f"{change.where} {change.what}: the run goes on with other data"
        for change in identity_changes(
            saved["identity"], run.state, samples=saved["progress"]["samples"]
        )
    ]
    return notes


def _load(run: BuiltRun, path: Path, *, other_run: bool = False) -> dict[str, Any]:
    """Load a checkpoint into the state and the strategy; returns the content of its state.json."""
    saved = restore(run.state, path, other_run=other_run)
    try:
        run.strategy.load(run.state.strategy)
    except ValueError as error:
        raise DataError(f"strategy: {error}", where=path / STATE) from error
    return saved


def _fit_folder(run: BuiltRun) -> list[str]:
    """Make the rest of the folder consistent with the state; returns messages for the user. These
    files are records of the run: a damaged one is moved aside and never prevents a resume."""
    folder, best, notes = run.folder, run.state.best, list[str]()
    if best is not None and run.config.checkpoint.keep_best:
        # The run may have been killed between a save and its best.json.
        CheckpointFolder(folder.checkpoints).mark_best(best)
    # At step 0 the initial validation runs again.
    damaged = cut_metrics(folder.metrics, after=run.state.progress.steps or -1)
    if damaged:
        aside = folder.metrics.with_name(f"damaged-{folder.metrics.name}")
        with storage_errors(aside), aside.open("ab") as file:
            file.write(b"".join(damaged))
        lines = "1 damaged line" if len(damaged) == 1 else f"{len(damaged)} damaged lines"
        notes.append(f"moved {lines} of {folder.metrics.name} to {aside.name}")
    if folder.holds_run():
        try:
            changed = changed_settings(folder.settings, run.config)
            notes += [f"changed: {line}" for line in changed]
        except (ValueError, RecursionError) as error:
            notes.append(_set_aside(folder.settings, str(error)))
    written = f"# by {program_version()}; what each key means: gristmill config --schema\n"
    write_atomic(folder.settings, written + dump_run(run.config))
    earlier = folder.origin.read_bytes() if folder.origin.is_file() else b""
    typed = f"{timestamp()}  {shlex.join(sys.argv)}\n{folder.translation}"
    write_atomic(folder.origin, earlier + utf8(typed))
    environment = describe_environment(
        run.world,
        parameters=run.parameters,
        flops_per_token=run.token_cost.palm,
        planned=run.expected,
        checked_tasks=_checked_tasks(run),
    )
    write_json(folder.environment, environment)
    run.tokenizer.save(folder.tokenizer)
    if run.chat is not None:
        run.chat.template.save(folder.tokenizer)
    return notes


def _checked_tasks(run: BuiltRun) -> dict[str, Any] | None:
    """The tasks that all training sets were decontaminated against; None if a set does not record
    it, or if the weights come from elsewhere."""
    if run.config.model.initial_weights is not None:
        return None
    checked = [split.reader.checked for split in run.data.train.splits]
    known = [tasks for tasks in checked if tasks is not None]
    return common_tasks(known) if len(known) == len(checked) else None


def _set_aside(file: Path, why: str) -> str:
    """Rename a damaged file; returns a message."""
    return f"{file.name} is damaged ({why}); it is now {set_aside(file).name}, and written anew"


def _find_best(
    run: BuiltRun, checkpoints: CheckpointFolder
) -> tuple[tuple[int, float] | None, list[str]]:
    """The best loss up to this step, and messages for the user about it."""
    state, keep, notes = run.state, run.config.checkpoint.keep_best, list[str]()
    known, steps = [state.best], state.progress.steps
    try:
        # best.json may come from a validation after the last save.
        known.append(checkpoints.best())
    except DataError as error:
        notes.append(_set_aside(checkpoints.best_file, error.problems[0].what))
        loss = validation_loss(run.folder.metrics, step=steps)
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


def _all_damaged(search: CheckpointSearch, folder: RunFolder) -> UserError:
    return UserError(
        [
            Problem("every checkpoint of this run is damaged", str(folder.checkpoints)),
            *(Problem(describe_problems(problems)) for _, problems in search.damaged),
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
    """Refuse to restart a run from the beginning whose checkpoints are gone; returns messages for
    the user about a run that never had any."""
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


def resume_differences(saved: dict[str, Any], run: BuiltRun) -> list[str]:
    """Reasons why the rest of the run may not be bit-identical to an uninterrupted one."""
    mesh, before = run.world.layout, {"processes": 1, **saved}
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    workers, saved_workers = run.state.workers, saved.get("workers") or []
    if list(workers) != saved_workers:
        # More than the rounding changes.
        return [_from_average(saved_workers, workers)]
    if saved.get("layout"):
        before["layout"] = Mesh(**saved["layout"])
        now |= {"layout": mesh, "micro_batch": run.state.micro_batch}
    else:
        # Old checkpoints do not record the layout.
        now["processes"] = mesh.processes
    return [
        f"{name} was {before.get(name)} and is now {value}: losses agree only within rounding"
        for name, value in now.items()
        if before.get(name) != value
    ]


def _from_average(saved: Sequence[int], workers: Sequence[int]) -> str:
    """A note that the workers of a run changed."""
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
