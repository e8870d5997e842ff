"""`train` and `demo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import UserError
from gristmill.cli.options import Overrides

if TYPE_CHECKING:
    from gristmill.config.schema import RunConfig


def train(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN.toml", help="The run file, or a run folder to go on with."),
    ],
    settings: Overrides = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start anew; a run in the folder is moved aside, not deleted."
        ),
    ] = False,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train with so many processes on this machine, one for each device. Not needed "
            "where a launcher starts them.",
        ),
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="After a crash, start all again from the last checkpoint, at most so often and "
            "only while checkpoints are reached.",
        ),
    ] = 0,
) -> None:
    """Train a model, or go on with the run that the folder holds."""
    from gristmill.launch.lifeline import follow_supervisor

    supervised = follow_supervisor()
    from gristmill.base.downloads import model_folder
    from gristmill.config.load import load_run

    config = load_run(run, settings or (), find_model=model_folder)
    if (processes > 1 or restarts > 0) and not supervised:
        # As typed, for the run folder keeps it; a process that is supervised starts no others.
        options = (f"--processes={processes}", *([f"--restarts={restarts}"] if restarts else ()))
        command = (sys.executable, "-m", "gristmill", "train", *options, "--", str(run))
        command = (*command, *(settings or ()))
        raise typer.Exit(
            _supervise(config, command, fresh=fresh, processes=processes, restarts=restarts)
        )
    from gristmill.base.memory import keep_freed_memory
    from gristmill.train.stop import StopRequest

    keep_freed_memory()
    # What follows takes seconds to import, and a signal may come meanwhile.
    with StopRequest() as stop:
        from gristmill.train.run import run_training

        outcome = run_training(config, fresh=fresh, stop=stop)
    raise typer.Exit(outcome.exit)


def _supervise(
    config: RunConfig, command: Sequence[str], *, fresh: bool, processes: int, restarts: int
) -> int:
    """Train in processes of their own; what is wrong with the settings is said once and here."""
    from gristmill.base.process import Place
    from gristmill.config.rules import check_mesh
    from gristmill.launch.processes import Job, supervise
    from gristmill.track.folder import move_aside, run_folder

    place = Place.current()
    if place.world > 1:
        raise UserError(
            f"this is one of {place.world} processes of a launcher, and each would start "
            f"{processes} more",
            where="command line",
            remedy="leave out --processes and --restarts, or start one process without a launcher",
        )
    check_mesh(config, processes=processes)
    folder = run_folder(config)
    if fresh:
        move_aside(folder)
    return supervise(Job(command, processes, folder, restarts))


def demo(
    folder: Annotated[Path, typer.Option(help="Where text, tokens, run and report go.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int | None, typer.Option(help="Train for this many steps.")] = None,
) -> None:
    """The whole pipeline on this machine, without network: text, tokenizer, training, report."""
    from gristmill.cli.demo import run_demo

    run_demo(folder, steps=steps)
