"""Finds tasks by their names, and runs them.

    lambada, hellaswag          built in; their data from the Hub or its cache
    lambada=FILE                the same with local data
    core, core=BUNDLE           CORE, from nanochat's bundle
    FILE.jsonl                  questions in a file
    FILE.yaml                   a task file of lm-evaluation-harness that is data
    harness:hellaswag           a task of lm-evaluation-harness by its name; so is any other name

Opening a task reads its data, so that a missing file is told before a model is loaded or trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gristmill.base.errors import UserError
from gristmill.checkpoint.model import LoadedModel
from gristmill.evaluate import core
from gristmill.evaluate.harness import HarnessTask, open_harness_task
from gristmill.evaluate.questions import BUILT_IN, Task, open_file
from gristmill.evaluate.results import EvaluationResult
from gristmill.evaluate.scoring import Truncation, score
from gristmill.text.filters.contamination import TaskTexts

HARNESS = "harness:"
_ROWS = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")

Progress = Callable[[str, int, int], None]
"""Called with a task, the questions done and their number."""


class TaskOptions(NamedTuple):
    """How tasks are run."""

    items: int | None = None
    """Only this many items of each task."""
    shots: int | None = None
    """Solved examples before each question, for tasks of lm-evaluation-harness."""
    trust_code: bool = False
    """Whether task files of the harness may run code; only the command line can say so."""


@dataclass(frozen=True)
class OpenTask:
    """A task whose data is there."""

    name: str
    run: Callable[[LoadedModel, Progress], list[EvaluationResult]]
    """What a model scores; a group of tasks has several results."""
    texts: Callable[[], list[TaskTexts]]
    """The items, for finding them in a training text; a group has several tasks."""


def open_tasks(
    given: Sequence[str], options: TaskOptions | None = None, *, where: str = "--tasks"
) -> list[OpenTask]:
    """The tasks in a list whose entries may name several, separated by commas."""
    names = [name.strip() for entry in given for name in entry.split(",")]
    unique = list(dict.fromkeys(name for name in names if name))
    if not unique:
        raise UserError("no task is named", where=where, remedy="for example lambada")
    return [_open(name, options or TaskOptions(), where=where) for name in unique]


def _open(name: str, options: TaskOptions, *, where: str) -> OpenTask:
    chosen, _, place = name.partition("=")
    path, is_file = Path(place) if place else None, name.endswith(_ROWS) and "=" not in name
    if not (chosen in BUILT_IN or chosen == core.NAME or is_file):
        if place:
            known = ", ".join([*BUILT_IN, core.NAME])
            raise UserError(f"{chosen!r} takes no file: only {known} do", where=where)
        harness = name.removeprefix(HARNESS)
        opened = open_harness_task(harness, where=where, trust=options.trust_code)
        return OpenTask(opened.name, partial(_run_in_harness, opened, options), opened.texts)
    if options.shots is not None:
        what = f"{name} is asked as it is defined, without further examples"
        remedy = f"use the harness's own: --tasks {HARNESS}NAME --shots {options.shots}"
        raise UserError(what, where="--shots", remedy=remedy)
    if chosen == core.NAME:
        tasks = core.open_core(path, where=where)
        return OpenTask(
            core.NAME,
            partial(_run_core, tasks, options),
            lambda: [_texts(f"{core.NAME}/{task.name}", task) for task in tasks],
        )
    task = open_file(Path(name)) if is_file else BUILT_IN[chosen](path)
    run = partial(_run_single, task, options)
    return OpenTask(task.name, run, lambda: [_texts(task.name, task)])


def _texts(name: str, task: Task) -> TaskTexts:
    return TaskTexts(name, str(task.facts["data"]), task.facts["data_sha256"], task.texts)


# ------------------------------------------------------------------ running


def _run_single(
    task: Task, options: TaskOptions, loaded: LoadedModel, progress: Progress
) -> list[EvaluationResult]:
    return [_run(task, options, loaded, progress)]


def _run_core(
    tasks: Sequence[Task], options: TaskOptions, loaded: LoadedModel, progress: Progress
) -> list[EvaluationResult]:
    return [core.combined([_run(task, options, loaded, progress) for task in tasks])]


def _run_in_harness(
    task: HarnessTask, options: TaskOptions, loaded: LoadedModel, progress: Progress
) -> list[EvaluationResult]:
    return task.run(
        loaded,
        items=options.items,
        shots=options.shots,
        progress=lambda done, total: progress(task.name, done, total),
    )


def _run(
    task: Task, options: TaskOptions, loaded: LoadedModel, progress: Progress
) -> EvaluationResult:
    started, truncation = time.monotonic(), Truncation()
    if options.items is not None:
        task = task.first(options.items)
    scores = score(
        loaded.model,
        task.questions(loaded.tokenizer),
        progress=lambda done, total: progress(task.name, done, total),
        truncation=truncation,
    )
    notes = tuple[str, ...]()
    if truncation.count:
        context = loaded.model.config.context
        what = f"{truncation.count:,} texts were longer than the context of {context}"
        notes = (f"{task.name}: {what} and lost their beginning",)
    return EvaluationResult(
        task.name,
        task.measures(scores),
        count=len(scores),
        seconds=time.monotonic() - started,
        facts=task.facts,
        notes=notes,
    )
