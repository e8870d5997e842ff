"""`prepare --filter` and `--decontaminate`: what is asked for, and what was dropped for it.

--decontaminate evaluations              the built-in tasks of `evaluate`
--decontaminate hellaswag,core=BUNDLE    tasks by the names that `evaluate --tasks` takes
--decontaminate FILE.jsonl               questions, or objects with a "text"
--decontaminate FILE.txt                 paragraphs between blank lines
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.errors import DataError, UserError, on_one_line
from gristmill.base.files import sha256_file
from gristmill.text.filters.build import FilterPlan
from gristmill.text.filters.contamination import (
    CONTAMINATION,
    SHORTEST,
    WORDS,
    ContaminationIndex,
    ContaminationSettings,
    TaskTexts,
)
from gristmill.text.filters.settings import GROUPS, SETTINGS, parse_filters
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import UNREADABLE, Document, DocumentSplit, ReadOptions

EVALUATIONS = "evaluations"
_BUILT_IN = ("lambada", "hellaswag")
_TEXT = (".txt", ".md")
_WHERE = "--decontaminate"
_MAX_PLACES = 5
_filter_option = functools.partial(typer.Option, rich_help_panel="Filters")

FilterNames = Annotated[
    list[str] | None,
    _filter_option(
        "--filter",
        metavar="NAMES",
        help=f"Drop documents by rules, in this order: {', '.join([*GROUPS, *SETTINGS])}; or "
        "FILE.toml with their settings. May be repeated.",
    ),
]
Decontaminate = Annotated[
    list[str] | None,
    _filter_option(
        _WHERE,
        metavar="TASKS",
        help="Drop documents that hold items of tasks: names as for evaluate --tasks, files of "
        "questions or text, or evaluations for lambada and hellaswag. May be repeated.",
    ),
]
DecontaminateWords = Annotated[
    int | None,
    _filter_option(
        min=SHORTEST,
        max=50,
        metavar="N",
        help=f"A document holds an item if they share a run of N words; {WORDS} if not given.",
    ),
]
DecontaminateShare = Annotated[
    float | None,
    _filter_option(
        min=0,
        max=1,
        metavar="SHARE",
        help="The least share of an item's runs that a document must hold; any one if not given.",
    ),
]


def open_plan(
    filters: Sequence[str] | None,
    tasks: Sequence[str] | None,
    words: int | None,
    share: float | None,
) -> FilterPlan:
    """What documents go through."""
    if not tasks:
        for option, value in (("words", words), ("share", share)):
            if value is not None:
                raise UserError(
                    "this says how items of tasks are looked for, and no task is given",
                    where=f"{_WHERE}-{option}",
                    remedy=f"add {_WHERE}, or leave it out",
                )
        return FilterPlan(parse_filters(filters or ()))
    settings = ContaminationSettings(words or WORDS, share or 0.0)
    texts = _task_texts(tasks)
    return FilterPlan(parse_filters(filters or ()), ContaminationIndex.of(texts, settings))


def _task_texts(given: Sequence[str]) -> list[TaskTexts]:
    """The items of tasks and files."""
    names = [name.strip() for entry in given for name in entry.split(",") if name.strip()]
    if not names:
        remedy = "for example hellaswag, or a file"
        raise UserError("no task is named", where=_WHERE, remedy=remedy)
    listed = [name for given in names for name in (_BUILT_IN if given == EVALUATIONS else (given,))]
    tasks = [task for name in dict.fromkeys(listed) for task in _texts_of(name)]
    seen: set[str] = set()
    for task in tasks:
        if task.name in seen:
            what = f"there are two tasks {task.name!r}"
            raise UserError(what, where=_WHERE, remedy="name each task once, and each file apart")
        seen.add(task.name)
    return tasks


def _texts_of(name: str) -> list[TaskTexts]:
    path = Path(name)
    if "=" not in name and path.suffix in _TEXT and path.is_file():
        return [_file_texts(path, ReadOptions(split=DocumentSplit.BLANK))]
    if "=" not in name and ".jsonl" in path.suffixes and path.is_file():
        texts = _file_texts(path, ReadOptions())
        if texts.texts:
            return [texts]
    # Importing what runs tasks takes seconds.
    from gristmill.evaluate.tasks import open_tasks

    return [texts for task in open_tasks([name], where=_WHERE) for texts in task.texts()]


def _file_texts(path: Path, options: ReadOptions) -> TaskTexts:
    """The paragraphs of a text file, or what JSON lines have under "text"."""
    items = SourceReader([str(path)], options)
    texts = [item.text for item in items if isinstance(item, Document)]
    if not texts and path.suffix in _TEXT:
        raise DataError("this file holds no text to look for", where=path)
    return TaskTexts(path.name.partition(".")[0], str(path), sha256_file(path), texts)


# ------------------------------------------------------------------ what was dropped


def print_dropped(ledger: Ledger, file: str) -> None:
    """What was dropped: a table of reasons, the commonest first, and the places of mistakes."""
    width = max((len(f"{count:,}") for count in ledger.dropped.values()), default=0)
    for reason, count in ledger.dropped.most_common():
        share = f"{count / ledger.lines:7.2%}"
        typer.echo(f"  dropped {count:>{width},} {share}  {on_one_line(reason.value)}")
    mistakes = [place for place in ledger.places if place.reason in UNREADABLE]
    for place in mistakes[:_MAX_PLACES]:
        typer.echo(f"    {place.origin}: {place.reason.value}")
    contaminated = [place for place in ledger.places if place.reason.found]
    for place in contaminated[:_MAX_PLACES]:
        task = place.reason.value.removeprefix(f"{CONTAMINATION}: ")
        typer.echo(f"    {place.origin}: {task}, {place.reason.found}")
    shown = min(len(mistakes), _MAX_PLACES) + min(len(contaminated), _MAX_PLACES)
    if ledger.dropped.total() > shown:
        typer.echo(f"    more places, with samples of the text: {file}")
