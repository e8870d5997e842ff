"""`evaluate`, `generate` and `export`: what to do with a model."""

from __future__ import annotations

import enum
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import UserError
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.cli.progress import ProgressLine

if TYPE_CHECKING:
    from gristmill.checkpoint.model import LoadedModel
    from gristmill.generate import Sampling, TextGenerator

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run folder, a checkpoint, a Hugging Face folder or name."
    ),
]
Which = Annotated[
    str, typer.Option("--checkpoint", help="Of a run folder: latest, best or a step.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]


def _open(model: str, *, checkpoint: str, device: str) -> LoadedModel:
    from gristmill.checkpoint.model import open_model
    from gristmill.parallel.device import select_device

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"{device!r} is not auto, cpu, cuda or mps", where="--device")
    return open_model(model, device=select_device(device), checkpoint=checkpoint)


def evaluate(
    model: Model,
    data: Annotated[str | None, typer.Option(help="Token files: their prefix.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Text files to evaluate on.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many tokens.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Windows at once.", min=1)] = 8,
    checkpoint: Which = "latest",
    device: Device = "auto",
) -> None:
    """Loss, perplexity and bits per byte on text.

    Without --data or --text: on the validation text of the run.
    """
    import dataclasses

    from gristmill.evaluate.data import evaluation_ids
    from gristmill.evaluate.loss import evaluate_loss

    loaded = _open(model, checkpoint=checkpoint, device=device)
    chosen = evaluation_ids(loaded, data=data, text=text)
    with ProgressLine("evaluating") as line:
        result = evaluate_loss(
            loaded,
            chosen.ids,
            batch=batch,
            limit=limit,
            rules=chosen.rules,
            starts=chosen.starts,
            progress=lambda done, total: line.update(done, total, f"{format_count(done)} tokens"),
        )
    typer.echo(f"model          {loaded.origin}")
    typer.echo(f"text           {chosen.name}")
    typer.echo(f"loss           {result.loss:.4f}")
    typer.echo(f"perplexity     {result.perplexity:.2f}")
    typer.echo(f"bits per byte  {result.bits_per_byte:.4f}")
    typer.echo(f"tokens         {result.tokens:,} in {format_seconds(result.seconds)}")
    if loaded.run is not None and loaded.step is not None:
        from gristmill.base.files import write_json
        from gristmill.track.folder import RunFolder

        folder = RunFolder(loaded.run)
        folder.evals.mkdir(exist_ok=True)
        words = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(chosen.name).name).strip("-")
        file = folder.evals / f"step-{loaded.step:08d}-{words}.json"
        facts = {"model": loaded.origin.name, "text": chosen.name, **dataclasses.asdict(result)}
        write_json(file, facts)
        typer.echo(f"written to     {file}")


def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue; - reads stdin; none starts a conversation."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="At most this many.", min=1)] = 128,
    samples: Annotated[int, typer.Option(help="How many continuations.", min=1)] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the likeliest so many; 0: all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Draw from this much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.", min=0)] = 1337,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    cache: Annotated[bool, typer.Option(help="Keep keys and values of earlier tokens.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a sample.")
    ] = False,
    checkpoint: Which = "latest",
    device: Device = "auto",
) -> None:
    """Continue a text with a model."""
    from gristmill.generate import Sampling, TextGenerator

    sampling = Sampling(temperature, top_k, top_p, seed)
    loaded = _open(model, checkpoint=checkpoint, device=device)
    generator = TextGenerator(loaded.model, loaded.tokenizer, cached=cache)
    stops = [word for word in stop or () if word]
    if prompt is None and sys.stdin.isatty():
        _converse(generator, tokens=tokens, sampling=sampling, stop=stops)
        return
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    if as_json or samples > 1:
        texts = generator.texts(
            prompt, tokens=tokens, sampling=sampling, samples=samples, stop=stops
        )
        for number, text in enumerate(texts, start=1):
            if as_json:
                typer.echo(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False))
            else:
                typer.echo(f"--- {number} of {samples}\n{prompt}{text}")
        return
    _write(generator, prompt, tokens=tokens, sampling=sampling, stop=stops)


def _write(
    generator: TextGenerator, prompt: str, *, tokens: int, sampling: Sampling, stop: list[str]
) -> None:
    """Print a continuation as it appears."""
    sys.stdout.write(prompt)
    for _, piece in generator.stream(prompt, tokens=tokens, sampling=sampling, stop=stop):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _converse(
    generator: TextGenerator, *, tokens: int, sampling: Sampling, stop: list[str]
) -> None:
    typer.echo("Type the beginning of a text; an empty line or Ctrl-D ends.")
    while True:
        try:
            prompt = input(">> ")
        except EOFError:
            typer.echo("")
            return
        if not prompt:
            return
        _write(generator, prompt, tokens=tokens, sampling=sampling, stop=stop)


class ExportCheck(enum.StrEnum):
    """How an export is checked beside its files."""

    AUTO = "auto"
    TRANSFORMERS = "transformers"
    FILES = "files"


def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    checkpoint: Which = "latest",
    check: Annotated[
        ExportCheck,
        typer.Option(
            help="auto: by transformers too if the model fits into memory twice; transformers: in "
            "any case; files: only that all weights read back as they are in MODEL."
        ),
    ] = ExportCheck.AUTO,
) -> None:
    """Write a Hugging Face folder that `transformers` loads, and check it.

    The model need not fit into memory.
    """
    from gristmill.checkpoint.model import open_stored
    from gristmill.export import export as export_model

    with ProgressLine("opening") as line:
        line.update(0, None, model)
        stored = open_stored(model, checkpoint=checkpoint)
    with ProgressLine("exporting") as line:

        def show(doing: str, count: int, total: int) -> None:
            line.update(count, total, f"{doing}, {format_bytes(count)} of {format_bytes(total)}")

        done = export_model(stored, folder, check=check.value, progress=show)
    files = "1 file" if done.files == 1 else f"{done.files} files"
    typer.echo(f"{done.folder}: exported {stored.origin}, {format_bytes(done.bytes)} in {files}")
    compared = done.skipped
    if done.agreement is not None:
        compared = (
            "transformers' logits differ by at most "
            f"{done.agreement.largest_difference:.1e}, {done.agreement.greedy_tokens} greedy "
            "tokens are the same"
        )
    typer.echo(f"checked: all weights read back as they are in the source; {compared}")
