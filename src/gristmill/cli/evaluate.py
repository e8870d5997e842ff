"""`evaluate`: how well models predict a text."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.units import format_count, format_seconds
from gristmill.cli.models import Device, Which, open_loaded
from gristmill.cli.progress import ProgressLine

if TYPE_CHECKING:
    from gristmill.checkpoint.model import LoadedModel
    from gristmill.evaluate.data import EvaluationText
    from gristmill.evaluate.loss import Evaluation


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
            help="Run folders, checkpoints, Hugging Face folders or names; several make a table.",
        ),
    ],
    data: Annotated[str | None, typer.Option(help="Token files, by their prefix.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text files to evaluate on.")] = None,
    limit: Annotated[int | None, typer.Option(help="Stop after this many tokens.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Windows per batch.", min=1)] = 8,
    precision: Annotated[
        list[EvaluationPrecision] | None,
        typer.Option(
            help="Number format of products and activations; fp32 if not given. Several make a "
            "table."
        ),
    ] = None,
    checkpoint: Which = "latest",
    device: Device = "auto",
) -> None:
    """Measure loss, perplexity and bits per byte on text.

    Uses the validation text of the run unless --data or --text is given.
    """
    formats = [one.value for one in precision or [EvaluationPrecision.FP32]]
    found: list[tuple[str, str, str, Evaluation]] = []
    written: list[Path] = []
    for model in models:
        loaded = open_loaded(model, checkpoint=checkpoint, device=device)
        chosen = _text(loaded, data=data, text=text)
        for one in formats:
            result = _measure(loaded, chosen, limit=limit, batch=batch, precision=one)
            if len(models) == len(formats) == 1:
                _print(loaded, chosen, result, one)
            else:
                found.append((model, one, chosen.name, result))
            written += _keep(loaded, chosen, result, one)
        del loaded
    if found:
        _print_table(found)
    for file in written:
        typer.echo(f"written to     {file}")


def _text(loaded: LoadedModel, *, data: str | None, text: list[str] | None) -> EvaluationText:
    from gristmill.evaluate.data import evaluation_ids

    return evaluation_ids(loaded, data=data, text=text)


def _measure(
    loaded: LoadedModel, chosen: EvaluationText, *, limit: int | None, batch: int, precision: str
) -> Evaluation:
    from gristmill.evaluate.loss import evaluate_loss
    from gristmill.parallel.precision import DTYPES

    loaded.model.compute = DTYPES[precision]
    with ProgressLine("evaluating") as line:
        return evaluate_loss(
            loaded,
            chosen.ids,
            batch=batch,
            limit=limit,
            rules=chosen.rules,
            starts=chosen.starts,
            progress=lambda done, total: line.update(done, total, f"{format_count(done)} tokens"),
        )


def _print(loaded: LoadedModel, chosen: EvaluationText, result: Evaluation, precision: str) -> None:
    rows = {
        "model": loaded.origin,
        "text": chosen.name,
        **({} if precision == "fp32" else {"precision": precision}),
        "loss": f"{result.loss:.4f}",
        "perplexity": f"{result.perplexity:.2f}",
        "bits per byte": f"{result.bits_per_byte:.4f}",
        "tokens": f"{result.tokens:,} in {format_seconds(result.seconds)}",
    }
    for title, value in rows.items():
        typer.echo(f"{title:<14} {value}")


def _print_table(found: list[tuple[str, str, str, Evaluation]]) -> None:
    wide = max(len("model"), *(len(model) for model, _, _, _ in found))
    texts = {text for _, _, text, _ in found}
    line = f"{{:<{wide}}}  {{:<9}} {{:>8}} {{:>10}} {{:>13}} {{:>12}} {{:>8}}".format
    title = line("model", "precision", "loss", "PPL", "bits per byte", "tokens", "time")
    if len(texts) == 1:
        typer.echo(f"text: {texts.pop()}")
        typer.echo(title)
    else:
        typer.echo(f"{title}  text")
    for model, precision, text, one in found:
        numbers = f"{one.loss:.4f}", f"{one.perplexity:.2f}", f"{one.bits_per_byte:.4f}"
        row = line(model, precision, *numbers, f"{one.tokens:,}", format_seconds(one.seconds))
        typer.echo(f"{row}  {text}" if texts else row)


def _keep(
    loaded: LoadedModel, chosen: EvaluationText, result: Evaluation, precision: str
) -> list[Path]:
    """Write the result into the run folder, if the model came from one."""
    if loaded.run is None or loaded.step is None:
        return []
    import dataclasses

    from gristmill.base.files import write_json
    from gristmill.track.folder import RunFolder

    folder = RunFolder(loaded.run)
    folder.evals.mkdir(exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(chosen.name).name).strip("-")
    suffix = "" if precision == "fp32" else f"-{precision}"
    file = folder.evals / f"step-{loaded.step:08d}-{name}{suffix}.json"
    facts = {"model": loaded.origin.name, "text": chosen.name, "precision": precision}
    write_json(file, {**facts, **dataclasses.asdict(result)})
    return [file]
