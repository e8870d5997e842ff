"""`train` and `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN.toml", help="The run file, or a run folder to go on with."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[A.B=C…]", help="Settings that replace those of the file."),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start anew; a run in the folder is moved aside, not deleted."
        ),
    ] = False,
) -> None:
    """Train a model, or go on with the run that the folder holds."""
    from gristmill.config.load import load_run

    config = load_run(run, settings or ())
    from gristmill.train.run import run_training

    outcome = run_training(config, fresh=fresh)
    raise typer.Exit(outcome.exit)


def demo(
    folder: Annotated[Path, typer.Option(help="Where text, tokens, run and report go.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int | None, typer.Option(help="Train for this many steps.")] = None,
) -> None:
    """The whole pipeline on this machine, without network: text, tokenizer, training, report."""
    from gristmill.cli.demo import run_demo

    run_demo(folder, steps=steps)
