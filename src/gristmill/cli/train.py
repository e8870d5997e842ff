"""`train`: train a model, or resume the run in a folder."""

from __future__ import annotations

import enum
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.exits import follow_supervisor
from gristmill.base.limits import keep_freed_memory
from gristmill.base.locks import FolderLock
from gristmill.base.process import ProcessInfo
from gristmill.cli.dialects import DialectName, DialectTraining
from gristmill.cli.options import Overrides, command_options
from gristmill.cli.translate import TranslatedRun, translate_run
from gristmill.config.load import load_run
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig
from gristmill.hub.downloads import settings_folder
from gristmill.launch.processes import Job, supervise
from gristmill.launch.starting import require_gpus
from gristmill.track.folder import move_aside, run_folder
from gristmill.track.sinks import line


class LogFormat(enum.StrEnum):
    """Whose lines standard output has."""

    GRISTMILL = "gristmill"
    MEGATRON = "megatron"
    DECENTRALIZED = "decentralized"


@command_options(cls=DialectTraining)
def train(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN.toml", help="The run file, or a run folder to resume."),
    ] = None,
    settings: Overrides = None,
    dialect: DialectName = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start over; an existing run is moved aside, not deleted."),
    ] = False,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STEP",
            help="Go back to the checkpoint of this step, or to the best one (--from best), and "
            "train from there; what came after it is set aside, not deleted.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Train with N processes on this machine, one per device. Not needed under a "
            "launcher, which starts them itself.",
        ),
    ] = 1,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="After a crash, restart all processes from the last checkpoint, at most N times "
            "and only if a new checkpoint was reached. With parallel.elastic: restart the process "
            "that crashed, at most N times in all.",
        ),
    ] = 0,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="If the run does not fit into memory, take smaller micro-batches or recompute "
            "activations, and say so. The batch and seeds stay.",
        ),
    ] = False,
    validate_only: Annotated[
        bool,
        typer.Option(
            "--validate-only",
            help="Do not train: compute the run's own validation at its newest checkpoint (or "
            "--from STEP), or for the weights that it starts from. Changes nothing.",
        ),
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="Print the lines of another program, for scripts that parse them; the same as "
            "track.log_format.",
            show_default="gristmill",
        ),
    ] = None,
) -> None:
    """Train a model, or resume the run in the folder."""
    supervised = follow_supervisor()
    words = [*([] if run is None else [run]), *(settings or ())]
    if log_format is not None:
        ours = f"track.log_format={log_format.value}"
        # Settings of ours stand before the words of another program.
        words = [*words, ours] if dialect is None else [ours, *words]
    config, translated = _load(words, dialect)
    validate_only = validate_only or (translated is not None and translated.validates_only)
    if fresh and start_from is not None:
        what = "--fresh starts over, and --from goes back to a checkpoint"
        raise UserError(what, where="command line", remedy="leave out one of them", exit=Exit.USAGE)
    if fresh and validate_only:
        what = "--fresh starts a run over, and --validate-only changes nothing"
        raise UserError(what, where="command line", remedy="leave out one of them", exit=Exit.USAGE)
    if translated is not None and not supervised:
        _begin(translated)
    if (processes > 1 or restarts > 0) and not supervised:
        place = ProcessInfo.current()
        if place.world > 1:
            raise UserError(
                f"this is one of {place.world} processes of a launcher, and each would start "
                f"{processes} more",
                where="command line",
                remedy="leave out --processes and --restarts, or start one process without a "
                "launcher",
            )
        # Wrong settings are reported once, here, and not by every process.
        check_mesh(config, processes=config.runtime.devices_of(processes))
        if config.parallel.needs_own_gpus:
            require_gpus(config.runtime.device, processes=processes)
        folder = run_folder(config)
        if fresh:
            move_aside(folder)
        if start_from is not None and not validate_only:
            from gristmill.train.claim import choose_step, roll_back

            # Once, here: a restart continues from what was reached since.
            step = choose_step(folder, start_from)
            with FolderLock(folder.path):
                roll_back(folder, step)
        # As typed, since the run folder keeps it; a supervised process starts no others.
        options = (f"--processes={processes}", *([f"--restarts={restarts}"] if restarts else ()))
        options += ("--fit",) if fit else ()
        if validate_only:
            chosen = () if start_from is None else (f"--from={start_from}",)
            options = (*options, "--validate-only", *chosen)
        if dialect is not None:
            options = (f"--dialect={dialect}", *options)
        command = (sys.executable, "-m", "gristmill", "train", *options, "--", *words)
        job = Job(command, processes, folder, restarts, elastic=config.parallel.elastic)
        raise typer.Exit(supervise(job))
    if validate_only:
        _validate(config, start_from)
        return
    from gristmill.train.stop import StopRequest

    keep_freed_memory()
    place = ProcessInfo.current()
    if place.rank == 0:
        typer.echo(f"info: {config.name}: starting in {run_folder(config).path}")
    # The next import takes seconds, and a signal may arrive meanwhile.
    with StopRequest() as stop, _garbage_kept():
        from gristmill.train.run import Run

        opened = Run(config, translation="" if translated is None else translated.translation.text)
        outcome = opened.train(
            fresh=fresh, start_from=start_from, stop=stop, fit=fit, ends_process=True
        )
    raise typer.Exit(outcome.exit)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Collect no garbage while the run starts; the end of its first step collects again.

    Imports and compilation make half a million objects that stay, and hardly any garbage: visiting
    them again and again took 2 of 20 seconds until the first step, on two cores.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _load(words: list[str], dialect: str | None) -> tuple[RunConfig, TranslatedRun | None]:
    """The settings of a run file, or of another program's words."""
    if dialect is not None:
        translated = translate_run(dialect, words)
        return translated.config, translated
    return load_run(Path(words[0]), words[1:], find_model=settings_folder), None


def _begin(translated: TranslatedRun) -> None:
    """Say what became of the other program's options, and make the token files it would make."""
    place = ProcessInfo.current()
    if place.rank == 0:
        translated.tell()
    translated.prepare(alone=place.world == 1)


def _validate(config: RunConfig, step: str | None) -> None:
    """Print the validation of a run, beside what it recorded."""
    from gristmill.train.run import Run

    validation = Run(config).validate(checkpoint=step)
    if not validation.leads:
        return
    typer.echo(line(replace(validation.record, best=False)))
    if validation.recorded is not None:
        then, now = validation.recorded.loss, validation.record.loss
        same = "the same to the bit" if then == now else f"now {now:.9g}"
        typer.echo(f"recorded by the run: loss {then:.9g}, {same}")
