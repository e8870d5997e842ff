"""`launch`: submit a run to a cluster, and ask about it."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gristmill.base.errors import Exit, UserError
from gristmill.cli.launch_plan import time_warning, with_hours
from gristmill.cli.options import AsJson, Overrides
from gristmill.config.load import load_run
from gristmill.hub.downloads import settings_folder
from gristmill.launch.jobs.batch import (
    BatchState,
    JobRecord,
    Launcher,
    UncertainError,
    read_record,
    write_files,
)
from gristmill.launch.jobs.submit import (
    PlannedJob,
    launcher_of,
    plan_command,
    plan_sweep,
    plan_training,
    refuse_active,
    sweep_folder,
    sweep_words,
)
from gristmill.launch.jobs.submit import submit as submit_job
from gristmill.track.folder import RunFolder, move_aside, run_folder

_POLL = 0.5
_TAIL = 40
"""Lines of a log that are shown first."""

EXAMPLES = """
Examples:

gristmill launch run.toml --on slurm --dry-run        print the job

gristmill launch run.toml --on slurm launch.nodes=4 launch.account=abc

gristmill launch run.toml --on slurm launch.gpu=h100-80gb --hours 24

gristmill launch run.toml --then 'evaluate runs/NAME'    another job after this one

gristmill launch run.toml --sweep optim.lr=1e-3,6e-4 --sweep train.seed=1,2

gristmill launch status runs/NAME
"""


class _SubmitByDefault(TyperGroup):
    """`launch RUN.toml` is `launch submit RUN.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asks_for_help = bool(args) and args[0] in ("-h", "--help")
        if args and args[0] not in self.commands and not asks_for_help:
            args = ["submit", *args]
        return super().parse_args(ctx, args)


launch = typer.Typer(
    cls=_SubmitByDefault,
    help="Run on a cluster: Slurm, PBS, MPI, Kubernetes or Ray. `launch RUN.toml --on slurm` "
    "submits; see `launch submit --help`.",
    no_args_is_help=True,
)

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The run folder, or a run file of which it follows; of a sweep, the folder of one of "
        "its runs, or NAME-sweep for all.",
    ),
]


@launch.command("submit", epilog=EXAMPLES)
def submit(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="The run file, or a run folder to resume.")
    ],
    settings: Overrides = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE", help="slurm, pbs, mpi, kubernetes or ray; launch.on if not given."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the files of the job, and submit nothing: the one that would be submitted "
            "to the standard output, the others and their names to the standard error.",
        ),
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Write the files of the job into RUN/job; submit nothing."),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start over; an existing run is moved aside, not deleted."),
    ] = False,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Wait until this job has succeeded; may be repeated."),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMMAND",
            help="A command of gristmill for another job, of one process, that begins when this "
            "one has succeeded: 'evaluate runs/NAME'. Repeat it for a chain.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2…",
            help="Train one run for each value, as an array of jobs; several of these options "
            "give all combinations.",
        ),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs of a sweep at the same time.")
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help='Time there is, such as "24" hours or "3d": fills in launch.nodes and launch.time '
            "by plan, for the GPUs of launch.gpu.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a run to a cluster.

    The job is written into the run folder (RUN/job). `launch status`, `logs` and `cancel` find it
    there.
    """
    config = load_run(run, settings or (), find_model=settings_folder)
    if hours is not None:
        config, chosen = with_hours(config, hours)
        typer.echo(chosen, err=True)
    elif (warning := time_warning(config)) is not None:
        typer.echo(f"warning: {warning}", err=True)
    name, launcher = launcher_of(on or (config.launch.on if config.launch else None))
    for option, value in (("--after", after), ("--then", then), ("--sweep", sweep)):
        if value and option in launcher.lacks:
            what = f"{name} runs each job by itself"
            remedy = "leave it out, or use slurm or pbs"
            raise UserError(what, where=option, remedy=remedy, exit=Exit.USAGE)
    _check_ids(after or ())
    chain = [_command(text) for text in then or ()]
    if sweep:
        if fresh:
            what = "a sweep continues runs that exist, and --fresh would start them over"
            raise UserError(what, where="--sweep", remedy="leave out one", exit=Exit.USAGE)
        runs = [
            (words, load_run(run, [*(settings or ()), *words], find_model=settings_folder))
            for words in sweep_words(sweep, name=config.name)
        ]
        planned = plan_sweep(config, runs, launcher, name, at_once=at_once, after=after or ())
    else:
        if at_once is not None:
            what = "only the runs of a sweep can be limited"
            raise UserError(what, where="--at-once", remedy="add --sweep", exit=Exit.USAGE)
        planned = plan_training(config, launcher, name, after=after or ())
    if dry_run:
        _show(planned)
        return
    if write:
        typer.echo(f"wrote {_short(write_files(planned.job, planned.files))}; nothing is submitted")
        return
    folder, aside = run_folder(config), None
    if fresh:
        # Not what another job trains now.
        refuse_active(planned.job, launcher)
        aside = move_aside(folder)
    try:
        submitted = [submit_job(planned, launcher)]
    except UserError as error:
        if aside is not None and not isinstance(error, UncertainError):
            aside.rename(folder.path)
        raise
    previous = planned
    for words in chain:
        try:
            previous = plan_command(words, previous, launcher, after=[submitted[-1].id])
            submitted.append(submit_job(previous, launcher))
        except UserError:
            _report(planned, submitted, chain, as_json=as_json)
            raise
    _report(planned, submitted, chain, as_json=as_json)


def _check_ids(ids: list[str] | tuple[()]) -> None:

    for id in ids:
        if not re.fullmatch(r"[A-Za-z0-9][\w.\[\]-]*", id):
            raise UserError(f"{id!r} is no id of a job", where="--after", exit=Exit.USAGE)


def _command(text: str) -> list[str]:
    """The words of a command of gristmill."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{error}: {text!r}", where="--then", exit=Exit.USAGE) from error
    words = words[1:] if words[:1] == ["gristmill"] else words
    allowed = ("evaluate", "export", "generate", "report", "train", "prepare", "replay")
    if not words or words[0] not in allowed:
        raise UserError(
            f"{text!r} is no command that a job can run",
            where="--then",
            remedy=f"begin it with one of: {', '.join(allowed)}",
            exit=Exit.USAGE,
        )
    return words


def _show(planned: PlannedJob) -> None:
    """Print what would be submitted, and only that to the standard output: it can be piped into
    `sbatch`, `qsub` or `kubectl apply -f -`."""
    for number, (name, text) in enumerate(planned.files.items()):
        typer.echo(f"# ---- {planned.job.folder / name}", err=True)
        typer.echo(text, err=number > 0)


def _report(
    planned: PlannedJob, records: list[JobRecord], chain: list[list[str]], *, as_json: bool
) -> None:
    home = _short(planned.job.folder.parent)
    if as_json:
        ids = [record.id for record in records]
        typer.echo(json.dumps({"on": records[0].launcher, "ids": ids, "run": str(home)}))
        return
    first, *others = records
    count = len(planned.job.array or ())
    tasks = f", {count} {'task' if count == 1 else 'tasks'}" if count else ""
    typer.echo(f"submitted job {first.id} ({first.launcher}{tasks}) from {home}/job")
    # Of a chain that broke off, those that were submitted.
    for record, words in zip(others, chain, strict=False):
        typer.echo(f"then job {record.id}: gristmill {shlex.join(words)}")
    typer.echo(f"    gristmill launch status {home}")
    typer.echo(f"    gristmill launch logs -f {home}")


def _short(path: Path) -> Path:
    """Relative to the working folder, if it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _job_of(run: Path) -> tuple[Path, JobRecord, Launcher]:
    """The folder of a run or a sweep, its job and where that is."""
    folder = RunFolder(run) if run.is_dir() else run_folder(load_run(run))
    for place in (folder, sweep_folder(folder)):
        record = read_record(place.job)
        if record is not None:
            return place.path, record, launcher_of(record.launcher)[1]
    raise UserError(
        "this run was not submitted as a job",
        where=str(folder.path),
        remedy=f"submit it: gristmill launch {run} --on slurm",
        exit=Exit.USAGE,
    )


@launch.command("status")
def status(run: RunArgument, as_json: AsJson = False) -> None:
    """What the scheduler and the run itself say, or all runs of a sweep.

    Exit status 0 if the run is done, 75 if it is not.
    """
    path, record, launcher = _job_of(run)
    state = launcher.state(record)
    runs = [Path(task.run) for task in record.tasks] or [path]
    own = {place: RunFolder(place).read_status() for place in runs}
    if as_json:
        job = {"on": record.launcher, "id": record.id, "submitted": record.submitted}
        answer = {"phase": state.phase, "state": state.text, "exit": state.exit}
        report: dict[str, Any] = {"job": {**job, **answer}}
        if record.tasks:
            report["runs"] = {str(place): words for place, words in own.items()}
        else:
            report["run"] = own[path]
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        typer.echo(f"job {record.id} ({record.launcher}): {describe(state)}")
        for place, words in own.items():
            typer.echo(f"run {_short(place.absolute())}: {_own_words(words)}")
            if not state.active and words and words.get("state") != "done":
                typer.echo(
                    f"    to continue it: gristmill launch {_short(place)} --on {record.launcher}"
                )
    done = all(words.get("state") == "done" for words in own.values())
    done = done or (not any(own.values()) and state.exit == 0)
    raise typer.Exit(Exit.DONE if done else Exit.STOPPED)


def describe(state: BatchState) -> str:
    """A state with the meaning of its exit status."""
    if state.exit is None:
        return state.text
    meaning = f" ({Exit(state.exit).meaning})" if state.exit in set(Exit) else ""
    return f"{state.text}, exit status {state.exit}{meaning}"


def _own_words(own: dict[str, Any]) -> str:
    if not own:
        return "has not begun"
    words = f"{own.get('state', '?')} at step {own.get('step', 0)}"
    words += f", {own['updated']}" if "updated" in own else ""
    return words + (f": {own['error']}" if own.get("error") else "")


@launch.command("logs")
def logs(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, metavar="N", help="How many lines to begin with.")
    ] = _TAIL,
) -> None:
    """What the job has printed."""
    _, record, launcher = _job_of(run)
    command = launcher.output(record)
    if command is not None:
        follows = [*command, f"--tail={lines}", *(["--follow"] if follow else [])]
        raise typer.Exit(os.spawnvp(os.P_WAIT, follows[0], follows))
    shown: dict[str, int] = {}
    while True:
        ended = not follow or not launcher.state(record).active
        for file in sorted(file for pattern in record.logs for file in glob.glob(pattern)):
            _print_new(Path(file), shown, lines=lines)
        if ended:
            break
        time.sleep(_POLL)
    if not shown:
        typer.echo(f"nothing yet: {launcher.state(record).text}", err=True)


def _print_new(file: Path, shown: dict[str, int], *, lines: int) -> None:
    """Print what a file holds beyond what was printed; at first, its last lines."""
    with file.open("rb") as log:
        if str(file) not in shown:
            typer.echo(f"==> {_short(file.absolute())}", err=True)
            text = b"".join(log.readlines()[-lines:] if lines else [])
        else:
            log.seek(shown[str(file)])
            text = log.read()
        shown[str(file)] = log.tell()
    if text:
        typer.echo(text.decode(errors="replace"), nl=False)


@launch.command("cancel")
def cancel(run: RunArgument) -> None:
    """End the job; the run is saved first, if the scheduler gives it the time."""
    path, record, launcher = _job_of(run)
    state = launcher.state(record)
    if not state.active:
        typer.echo(f"job {record.id} has ended: {describe(state)}")
        return
    launcher.cancel(record)
    whose = "its runs save and stop" if record.tasks else "the run saves and stops"
    typer.echo(f"asked {record.launcher} to end job {record.id}; {whose}")
    for folder in [Path(task.run) for task in record.tasks] or [path]:
        typer.echo(f"    to continue it: gristmill launch {_short(folder)} --on {record.launcher}")
