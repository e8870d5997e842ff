"""`import`: weights of other programs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.units import format_bytes, format_count
from gristmill.cli.progress import ProgressLine


class Gelu(enum.StrEnum):
    """The two functions of that name."""

    EXACT = "gelu"
    TANH = "gelu_tanh"


def import_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="nanoGPT's ckpt.pt; or the folder of a Megatron-LM checkpoint, or of all of a "
            "run's, of which the newest is taken.",
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder for the model.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE|FOLDER",
            help="The tokenizer that the model was trained with, such as gpt2: generate, evaluate "
            "and export need it, a start of training does not.",
        ),
    ] = None,
    activation: Annotated[
        Gelu | None,
        typer.Option(
            help="Of nanoGPT, whose files do not say it: gelu, or gelu_tanh if it was trained with "
            "a version before the middle of 2023.",
            show_default="gelu",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is in FOLDER.")
    ] = False,
) -> None:
    """Make a model folder from a checkpoint of nanoGPT, Megatron-LM or Megatron-DeepSpeed.

    Runs nothing that is in the files. The folder can be model.start of a run.
    """
    from gristmill.foreign.folder import import_model, open_checkpoint
    from gristmill.text.tokenizers.tokenizer import open_tokenizer

    chosen = None if tokenizer is None else open_tokenizer(tokenizer)
    with ProgressLine("opening") as line:
        line.update(0, None, str(source))
        model = open_checkpoint(source, activation=None if activation is None else activation.value)
    with ProgressLine("importing") as line:

        def show(done: int, total: int) -> None:
            line.update(done, total, f"{format_bytes(done)} of {format_bytes(total)}")

        done = import_model(model, folder, tokenizer=chosen, overwrite=overwrite, progress=show)
    for note in model.notes:
        typer.echo(f"warning: {note}", err=True)
    size = f"{format_bytes(done.bytes)} in {done.files} file{'s' if done.files > 1 else ''}"
    typer.echo(
        f"{folder}: imported {model.origin} of {model.program}, "
        f"{format_count(done.parameters)} parameters, {size}"
    )
    typer.echo(f'start a run from it with model.start="{folder}"')
    if chosen is None:
        typer.echo(
            "note: without --tokenizer, generate, evaluate and export cannot use it", err=True
        )
