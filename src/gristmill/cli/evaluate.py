"""`evaluate`: how well models predict texts, and what they score on tasks."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import UserError
from gristmill.base.printing import on_one_line
from gristmill.base.units import format_count
from gristmill.cli.evaluation_table import Evaluated, print_table
from gristmill.cli.models import Device, Which, open_loaded
from gristmill.cli.progress import ProgressLine

if TYPE_CHECKING:
    from gristmill.checkpoint.model import LoadedModel
    from gristmill.evaluate.data import EvaluationText
    from gristmill.evaluate.results import EvaluationResult
    from gristmill.evaluate.tasks.run import OpenTask


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
    from gristmill.evaluate.tasks.run import TaskOptions, open_tasks

    if ((items, shots) != (None, None) or trust_task_code) and not tasks:
        what = f"--items, --shots and {TRUST} are for tasks"
        raise UserError(what, where="evaluate", remedy="add --tasks")
    options = TaskOptions(items, shots, trust_task_code)
    opened = open_tasks(tasks, options) if tasks else []
    found, written = list[Evaluated](), list[Path]()
    for model in models:
        loaded = open_loaded(model, checkpoint=checkpoint, device=device)
        texts = _texts(loaded, data or (), text or (), default=not opened)
        for one in precision or [EvaluationPrecision.FP32]:
            _compute_in(loaded, one.value)
            results = _text_results(loaded, texts, limit=limit, batch=batch)
            for result in (*results, *_task_results(loaded, opened)):
                found.append(Evaluated(model, one.value, result))
                settings = {"batch": batch, "limit": limit}
                if result.kind == "task":
                    settings = {"items": items, "shots": shots}
                written += _keep(loaded, found[-1], output, settings)
        del loaded
    print_table(found)
    for file in written:
        typer.echo(f"written to {on_one_line(str(file))}")


# ------------------------------------------------------------------ measuring


def _texts(
    loaded: LoadedModel, data: Sequence[str], text: Sequence[str], *, default: bool
) -> list[EvaluationText]:
    from gristmill.evaluate.data import evaluation_ids

    chosen = [evaluation_ids(loaded, data=one) for one in data]
    chosen += [evaluation_ids(loaded, text=[one]) for one in text]
    return chosen or ([evaluation_ids(loaded)] if default else [])


def _compute_in(loaded: LoadedModel, precision: str) -> None:
    from gristmill.strategies.precision import DTYPES

    loaded.model.compute = DTYPES[precision]


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
