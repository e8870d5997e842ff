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
from gristmill.base.units import format_count, format_seconds
from gristmill.cli.models import Device, Which, open_loaded
from gristmill.cli.progress import ProgressLine

if TYPE_CHECKING:
    from gristmill.checkpoint.model import LoadedModel
    from gristmill.evaluate.loss import EvaluationText
    from gristmill.evaluate.measures import Difference, Measure
    from gristmill.evaluate.results import EvaluationResult
    from gristmill.evaluate.tasks import OpenTask


class Evaluated(NamedTuple):
    """A result, and what it is a result of."""

    model: str
    precision: str
    result: EvaluationResult


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
    few = [
        entry.result
        for entry in results
        if any(0 < len(measure.items) < LEAST for measure in entry.result.measures.values())
    ]
    if few:
        what = "windows of the text" if few[0].kind == "text" else "items"
        note = f"{on_one_line(few[0].name)} has fewer than {LEAST} {what}, too few to tell how far "
        typer.echo(f"note: {note}its numbers are chance", err=True)


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
            metavar="MODEL…",
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
            metavar="DIR", help="Write the results there; those of runs go to their evals/ anyway."
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
    from gristmill.strategies.precision import DTYPES

    if ((items, shots) != (None, None) or trust_task_code) and not tasks:
        what = f"--items, --shots and {TRUST} are for tasks"
        raise UserError(what, where="evaluate", remedy="add --tasks")
    options = TaskOptions(items, shots, trust_task_code)
    opened = open_tasks(tasks, options) if tasks else []
    evaluated, written = list[Evaluated](), list[Path]()
    for model in models:
        loaded = open_loaded(model, checkpoint=checkpoint, device=device)
        texts = _texts(loaded, data or (), text or (), default=not opened)
        for chosen in precision or [EvaluationPrecision.FP32]:
            loaded.model.compute = DTYPES[chosen.value]
            results = _text_results(loaded, texts, limit=limit, batch=batch)
            for result in (*results, *_task_results(loaded, opened)):
                evaluated.append(Evaluated(model, chosen.value, result))
                settings = {"batch": batch, "limit": limit}
                if result.kind == "task":
                    settings = {"items": items, "shots": shots}
                written += _keep(loaded, evaluated[-1], output, settings)
        del loaded
    print_table(evaluated)
    for file in written:
        typer.echo(f"written to {on_one_line(str(file))}")


# ------------------------------------------------------------------ measuring


def _texts(
    loaded: LoadedModel, data: Sequence[str], text: Sequence[str], *, default: bool
) -> list[EvaluationText]:
    from gristmill.evaluate.loss import evaluation_ids

    chosen = [evaluation_ids(loaded, data=source) for source in data]
    chosen += [evaluation_ids(loaded, text=[source]) for source in text]
    return chosen or ([evaluation_ids(loaded)] if default else [])


def _text_results(
    loaded: LoadedModel, texts: Sequence[EvaluationText], *, limit: int | None, batch: int
) -> Iterator[EvaluationResult]:
    from gristmill.base.files import sha256_text
    from gristmill.evaluate.loss import evaluate_loss
    from gristmill.evaluate.results import EvaluationResult

    for chosen in texts:
        with ProgressLine("evaluating") as line:

            def show(done: int, total: int, *, line: ProgressLine = line) -> None:
                line.update(done, total, f"{format_count(done)} tokens")

            measured = evaluate_loss(
                loaded,
                chosen.ids,
                batch=batch,
                limit=limit,
                rules=chosen.rules,
                starts=chosen.starts,
                predicted=chosen.predicted,
                progress=show,
            )
        content = ",".join(map(str, chosen.ids[: None if limit is None else limit + 1].tolist()))
        context = loaded.model.config.context
        facts = {"data": chosen.name, "ids_sha256": sha256_text(content), "context": context}
        yield EvaluationResult(
            chosen.name, measured.measures, measured.tokens, measured.seconds, facts, kind="text"
        )


def _task_results(loaded: LoadedModel, opened: Sequence[OpenTask]) -> Iterator[EvaluationResult]:
    for one in opened:
        with ProgressLine("evaluating") as line:

            def show(task: str, done: int, total: int, *, line: ProgressLine = line) -> None:
                line.update(done, total, f"{task}, {done:,} of {total:,}")

            results = one.run(loaded, show)
        for result in results:
            for note in result.notes:
                typer.echo(f"warning: {on_one_line(note)}", err=True)
            yield result


def _keep(
    loaded: LoadedModel,
    evaluated: Evaluated,
    output: Path | None,
    settings: dict[str, int | None],
) -> list[Path]:
    """Write a result into the run folder, if the model came from one, and where the user says."""
    from gristmill.evaluate.results import result_name, write_result
    from gristmill.track.folder import RunFolder

    folders = [] if loaded.run is None else [RunFolder(loaded.run).evals]
    if output is not None:
        # Results of several models must not overwrite each other.
        name = loaded.run.name if loaded.run is not None else loaded.origin.name
        folders.append(output / name)
    precision = evaluated.precision
    files = [
        folder / result_name(evaluated.result, step=loaded.step, precision=precision)
        for folder in folders
    ]
    for file in files:
        write_result(file, evaluated.result, loaded, precision=precision, settings=settings)
    return files
