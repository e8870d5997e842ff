"""`evaluate`: how well models predict texts, and what they score on tasks.

The table of `evaluate`: a row for each measure of each model.

    on    measure        model    value  std. error
    corn  bits per byte  runs/a  1.0213      0.0051                    593,862 tokens in 12.1s
                         runs/b  0.9987      0.0049  -0.0226 ± 0.0010, p < 0.001: more than chance

Differences are to the first model, on the same items.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gristmill.base.errors import UserError, on_one_line
from gristmill.base.units import format_seconds
from gristmill.cli.models import Device, Which, open_model
from gristmill.cli.progress import ProgressLine

if TYPE_CHECKING:
    from gristmill.evaluate.measures import Difference, Measure
    from gristmill.evaluate.results import EvaluationResult


class Evaluated(NamedTuple):
    """A result, and what it is a result of."""

    model: str
    result: EvaluationResult

    @property
    def precision(self) -> str:
        """The number format in which the model computed."""
        return self.result.precision


def print_table(results: Sequence[Evaluated]) -> None:
    """A table with a row for each measure of each model; what all rows share stands above it."""
    from gristmill.evaluate.measures import LEAST

    rows = list(_rows(results))
    titles = _TableRow("on", "measure", "model", "precision", "value", "std. error", "", "")
    columns = [
        [getattr(titles, name), *(getattr(row, name) for row in rows)] for name in _TableRow._fields
    ]
    same_everywhere = len(results) == len({entry.result.name for entry in results})
    shared = {
        name
        for name in ("model", "precision")
        if same_everywhere or len({getattr(entry, name) for entry in results}) == 1
    }
    for name in ("model", "precision"):
        if name in shared and (name == "model" or results[0].precision != "fp32"):
            typer.echo(f"{name:<9}  {on_one_line(getattr(results[0], name))}")
    kept = [
        (name, column)
        for name, column in zip(_TableRow._fields, columns, strict=True)
        if name not in shared and any(column[1:])
    ]
    for number in range(len(rows) + 1):
        cells = [
            column[number].rjust(_width(column))
            if name in ("value", "stderr")
            else column[number].ljust(_width(column))
            for name, column in kept
        ]
        typer.echo("  ".join(cells).rstrip())
    _print_checks(results)
    few = [
        entry.result
        for entry in results
        if any(0 < len(measure.items) < LEAST for measure in entry.result.measures.values())
    ]
    if few:
        what = "windows of the text" if few[0].kind == "text" else "items"
        note = f"{on_one_line(few[0].name)} has fewer than {LEAST} {what}, too few to tell how far "
        typer.echo(f"note: {note}its numbers are chance", err=True)


_CHECKS = {
    "yes": "was checked: documents with its items were dropped",
    "no": "was not checked against its items",
    "unknown": "is not known to have been checked against its items",
}


def _print_checks(results: Sequence[Evaluated]) -> None:
    """Whether the training text of each model may hold items of the tasks."""
    models: dict[tuple[str, str], list[str]] = {}
    for entry in results:
        if entry.result.checked is not None:
            key = on_one_line(entry.result.name), entry.result.checked
            models.setdefault(key, []).append(on_one_line(entry.model))
    for (task, checked), names in models.items():
        of = ", ".join(dict.fromkeys(names))
        typer.echo(f"{task}: the training text of {of} {_CHECKS[checked]}")


class _TableRow(NamedTuple):
    """One line of the table."""

    on: str
    measure: str
    model: str
    precision: str
    value: str
    stderr: str
    difference: str
    size: str


def _rows(results: Sequence[Evaluated]) -> Iterator[_TableRow]:
    """Grouped by text or task, then by measure; what is as above is left empty."""
    by_name: dict[str, list[Evaluated]] = {}
    for entry in results:
        by_name.setdefault(entry.result.name, []).append(entry)
    for name, group in by_name.items():
        on = name
        parts = [key for entry in group for key in entry.result.parts]
        for part in dict.fromkeys(["", *parts]):
            wanted = [
                entry.result.parts.get(part, {}) if part else entry.result.measures
                for entry in group
            ]
            for measure in dict.fromkeys(key for entry in wanted for key in entry):
                title = f"{part} {measure.replace('bits_per_byte', 'bits per byte')}".strip()
                first = wanted[0].get(measure)
                for entry, measures in zip(group, wanted, strict=True):
                    if measure not in measures:
                        continue
                    value, result = measures[measure], entry.result
                    # Other ids or another context are other windows, even if there are as many.
                    same = result.facts == group[0].result.facts
                    size = f"{result.count:,} {result.unit} in {format_seconds(result.seconds)}"
                    yield _TableRow(
                        on_one_line(on),
                        on_one_line(title),
                        on_one_line(entry.model),
                        entry.precision,
                        _shown(value.value, measure),
                        "" if value.stderr is None else _shown(value.stderr, measure),
                        "" if entry is group[0] else _difference(first, value, measure, same=same),
                        size if measure == next(iter(result.measures)) and not part else "",
                    )
                    on = title = ""


def _difference(first: Measure | None, second: Measure, measure: str, *, same: bool) -> str:
    """How a model differs from the first one, and whether that is more than chance; `same`: both
    were asked the same."""
    from gristmill.evaluate.measures import compare

    if first is None:
        return ""
    difference = compare(first, second, same_items=same)
    if difference is None:
        return f"{second.value - first.value:+.4f}"
    sign = "+" if difference.value >= 0 else "-"
    amount = (
        f"{sign}{_shown(abs(difference.value), measure)} ± {_shown(difference.stderr, measure)}"
    )
    return f"{amount}, {_verdict(difference)}"


def _verdict(difference: Difference) -> str:
    p = "p < 0.001" if difference.p < 0.001 else f"p = {difference.p:.3f}"
    means = "more than chance" if difference.significant else "may be chance"
    return f"{p}: {means}{'' if difference.paired else ' (unpaired)'}"


def _shown(value: float, measure: str) -> str:
    return f"{value:.2f}" if measure == "perplexity" else f"{value:.4f}"


def _width(column: Sequence[str]) -> int:
    return max(map(len, column))


TRUST = "--trust-task-code"


class EvaluationPrecision(enum.StrEnum):
    """The number format in which a model computes."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Run folders, checkpoints, Hugging Face folders or names; several are compared "
            "with the first.",
        ),
    ],
    data: Annotated[
        list[str] | None, typer.Option(help="Token files, by their prefix; may be repeated.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text: a file, a folder, a glob or hf:DATASET; may be repeated."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks, separated by commas: lambada, hellaswag, core, FILE.jsonl, FILE.yaml or "
            "a name of lm-evaluation-harness. lambada=FILE takes local data. May be repeated."
        ),
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="Only this many items of each task.", min=1)
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(help="Examples before each question of a task of the harness.", min=0),
    ] = None,
    trust_task_code: Annotated[
        bool,
        typer.Option(
            TRUST,
            help="Let FILE.yaml of --tasks run the Python code that it names. Without this, a task "
            "file that could run code is refused.",
        ),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(help="Stop after this many tokens of each text.", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows computed at once.", min=1)] = 8,
    precision: Annotated[
        list[EvaluationPrecision] | None,
        typer.Option(
            help="Number format of products and activations; fp32 if not given; may be repeated."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the results there; those of runs go to their evals/ anyway.",
        ),
    ] = None,
    checkpoint: Which = "latest",
    device: Device = "auto",
) -> None:
    """Measure loss, perplexity and bits per byte on text, and scores on tasks.

    Uses the validation text of the run unless --data, --text or --tasks is given. With several
    models, says whether they differ by more than chance.
    """
    from gristmill.evaluate.tasks import TaskOptions, open_tasks

    if ((items, shots) != (None, None) or trust_task_code) and not tasks:
        what = f"--items, --shots and {TRUST} are for tasks"
        raise UserError(what, where="evaluate", remedy="add --tasks")
    options = TaskOptions(items, shots, trust_task_code)
    # Before any model is loaded, which takes longer.
    opened = open_tasks(tasks, options) if tasks else []
    evaluated = list[Evaluated]()
    for name in models:
        model = open_model(name, checkpoint=checkpoint, device=device)
        with ProgressLine("evaluating") as line:
            results = model.evaluate(
                data=data or (),
                text=text or (),
                tasks=opened,
                items=items,
                shots=shots,
                limit=limit,
                batch=batch,
                precision=[one.value for one in precision or [EvaluationPrecision.FP32]],
                output=output,
                progress=line.show_count,
            )
        for result in results:
            for note in result.notes:
                typer.echo(f"warning: {on_one_line(note)}", err=True)
        evaluated += [Evaluated(name, result) for result in results]
        del model
    print_table(evaluated)
    for file in (file for one in evaluated for file in one.result.files):
        typer.echo(f"written to {on_one_line(str(file))}")
