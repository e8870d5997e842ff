"""From a run to a job: choose a launcher, check the `[launch]` table, write and submit the files.

The settings are written into the job as they are now, so that a job that waits for days trains what
was submitted, whatever happens to the run file meanwhile.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import require_utf8, storage_errors
from gristmill.base.units import format_seconds, parse_seconds
from gristmill.config.launch import LaunchConfig, LauncherName
from gristmill.config.load import dump_run
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig
from gristmill.launch.jobs.batch import (
    ArrayTask,
    BatchJob,
    JobRecord,
    Launcher,
    files_of_submission,
    has_no_effect,
    read_record,
    write_record,
)
from gristmill.launch.jobs.kubernetes import Kubernetes
from gristmill.launch.jobs.mpi import Mpi
from gristmill.launch.jobs.pbs import Pbs
from gristmill.launch.jobs.ray import Ray
from gristmill.launch.jobs.slurm import Slurm
from gristmill.track.folder import RunFolder, run_folder

SETTINGS = "run.toml"
LAUNCHERS: Mapping[LauncherName, Callable[[], Launcher]] = {
    "slurm": Slurm,
    "pbs": Pbs,
    "mpi": Mpi,
    "kubernetes": Kubernetes,
    "ray": Ray,
}


def launcher_of(name: str | None) -> tuple[LauncherName, Launcher]:
    """The launcher with this name."""
    for known, make in LAUNCHERS.items():
        if known == name:
            return known, make()
    what = "nothing says where to submit the run" if name is None else f"there is no {name!r}"
    raise UserError(
        what,
        where="--on",
        remedy=f"give --on or set launch.on to one of: {', '.join(LAUNCHERS)}",
        exit=Exit.USAGE,
    )


@dataclass(frozen=True)
class PlannedJob:
    """A job that could be submitted."""

    job: BatchJob
    files: dict[str, str]
    """Its files by name; the first is the one that is submitted."""


def plan_training(
    config: RunConfig, launcher: Launcher, on: LauncherName, *, after: Sequence[str] = ()
) -> PlannedJob:
    """The job that trains a run."""
    launch = checked(config, launcher, on)
    folder = RunFolder(run_folder(config).path.absolute())
    settings = dump_run(_with_time_limit(config, on))
    job = BatchJob(
        name=config.name,
        command=train_command(launch, folder.job / SETTINGS),
        launch=launch,
        folder=folder.job,
        logs=folder.logs,
        work=Path.cwd(),
        run=folder.path,
        settings=settings,
        after=after,
        elastic=config.parallel.elastic,
    )
    return PlannedJob(job, {**launcher.files(job), SETTINGS: settings})


def sweep_folder(run: RunFolder) -> RunFolder:
    """Where the job is that trains variants of a run."""
    return RunFolder(run.path.with_name(f"{run.path.name}-sweep"))


def plan_sweep(
    config: RunConfig,
    runs: Sequence[tuple[Sequence[str], RunConfig]],
    launcher: Launcher,
    on: LauncherName,
    *,
    at_once: int | None = None,
    after: Sequence[str] = (),
) -> PlannedJob:
    """The array of jobs that trains several runs, each with the words that make it."""
    launch = checked(config, launcher, on)
    for _, variant in runs:
        check_mesh(variant, processes=variant.runtime.devices_of(launch.processes))
    folder = sweep_folder(RunFolder(run_folder(config).path.absolute()))
    tasks = {
        number: ArrayTask(words, run_folder(variant).path.absolute())
        for number, (words, variant) in enumerate(runs, 1)
    }
    planned = plan_training(config, launcher, on, after=after)
    job = replace(
        planned.job,
        name=f"{config.name}-sweep",
        command=train_command(launch, folder.job / SETTINGS),
        folder=folder.job,
        logs=folder.logs,
        run=None,
        settings=None,
        array=tasks,
        at_once=at_once,
    )
    return PlannedJob(job, {**launcher.files(job), SETTINGS: planned.files[SETTINGS]})


def plan_command(
    words: Sequence[str], planned: PlannedJob, launcher: Launcher, *, after: Sequence[str]
) -> PlannedJob:
    """The job of one process that follows another one and runs a command of gristmill."""
    before = planned.job
    name = f"{before.name}-{words[0]}"
    alone: dict[str, Any] = {"nodes": 1, "processes_per_node": 1, "requeue": False, "restarts": 0}
    if before.launch.gpus_per_node:
        alone["gpus_per_node"] = 1
    launch = before.launch.model_copy(update={**alone, "starter": "tasks"})
    job = replace(
        before,
        name=name,
        command=(*gristmill_command(launch), *words),
        launch=launch,
        folder=before.folder / words[0],
        run=None,
        settings=None,
        array=None,
        after=after,
        elastic=False,
    )
    return PlannedJob(job, launcher.files(job))


def submit(planned: PlannedJob, launcher: Launcher) -> JobRecord:
    """Write the files of a job and submit it, unless it runs or waits already."""
    before = refuse_active(planned.job, launcher)
    with files_of_submission(planned.job, planned.files) as file:
        record = launcher.submit(planned.job, file)
    if before is not None:
        record = replace(record, earlier=[*before.earlier, before.id])
    write_record(planned.job.folder, record)
    for task in record.tasks:
        folder = RunFolder(Path(task.run)).job
        earlier = read_record(folder)
        own = JobRecord(record.launcher, task.id, task.logs, record.submitted, task.facts)
        if earlier is not None:
            own = replace(own, earlier=[*earlier.earlier, earlier.id])
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_record(folder, own)
    return record


def refuse_active(job: BatchJob, launcher: Launcher) -> JobRecord | None:
    """Refuse to submit a run that is a job already, by itself or in a sweep; returns the record of
    one that it was."""
    runs = [task.run for task in (job.array or {}).values() if task.run is not None]
    before = read_record(job.folder)
    records = {run: read_record(RunFolder(run).job) for run in runs}
    for folder, record in {job.folder.parent: before, **records}.items():
        if record is None:
            continue
        where = launcher_of(record.launcher)[1]
        try:
            state = where.state(record)
        except UserError:
            if type(where) is type(launcher):
                raise
            # The commands of that scheduler are not here: it was another cluster.
            continue
        if state.active:
            raise UserError(
                f"this run is job {record.id} already: {state.text}",
                where=str(folder),
                remedy=f"wait for it, or end it with: gristmill launch cancel {folder}",
                exit=Exit.REFUSED,
            )
    return before


# ------------------------------------------------------------------ the settings


def checked(config: RunConfig, launcher: Launcher, on: LauncherName) -> LaunchConfig:
    """The `[launch]` table of a run, with everything that is wrong with it for a launcher."""
    require_utf8(Path.cwd())
    launch = config.launch or LaunchConfig()
    problems = has_no_effect(launch, launcher.unused, f"with {on}")
    if launch.time and parse_seconds(launch.stop_early) >= parse_seconds(launch.time):
        what = f"leaves no time to train: the job has {launch.time}"
        problems.append(
            Problem(what, "launch.stop_early", "make it shorter, or launch.time longer")
        )
    problems += [
        Problem(f"{mount!r} does not say where to mount what", "launch.mounts", 'write "/out:/in"')
        for mount in launch.mounts
        if not re.fullmatch(r"/[^:]*:/[^:]*(:\w+)?", mount)
    ]
    if launch.mounts and not launch.container:
        problems.append(
            Problem("has no effect without launch.container", "launch.mounts", "remove it")
        )
    problems += launcher.problems(launch)
    if problems:
        raise UserError(problems)
    check_mesh(config, processes=config.runtime.devices_of(launch.processes))
    _require_gpus(config, launch)
    return launch


def _require_gpus(config: RunConfig, launch: LaunchConfig) -> None:
    """Refuse a job whose processes would not have a GPU each; where none are asked for, what nodes
    have is not known."""
    asked, on_gpus = launch.gpus_per_node, config.runtime.device in ("auto", "cuda")
    if asked and on_gpus and config.parallel.needs_own_gpus and launch.each > asked:
        gpus = "GPU is" if asked == 1 else "GPUs are"
        raise UserError(
            f"{launch.each} processes on each node need a GPU each, and {asked} {gpus} asked for",
            where="launch.processes_per_node",
            remedy=f"give {asked}, or ask for more with launch.gpus_per_node; let processes share "
            "a GPU with parallel.share_gpu = true, to try a layout; or train on the CPU with "
            'runtime.device = "cpu"',
        )


def _with_time_limit(config: RunConfig, on: LauncherName) -> RunConfig:
    """Where no scheduler sends a signal before the time is over, the run has to look at the clock
    itself."""
    launch = config.launch
    if on == "slurm" or launch is None or launch.time is None:
        return config
    seconds = parse_seconds(launch.time) - parse_seconds(launch.stop_early)
    given = config.train.time_limit
    if given is not None and parse_seconds(given) <= seconds:
        return config
    train = config.train.model_copy(update={"time_limit": format_seconds(seconds)})
    return config.model_copy(update={"train": train})


def gristmill_command(launch: LaunchConfig) -> tuple[str, ...]:
    """The first words of every command of gristmill in a job."""
    python = launch.python or ("python" if launch.container else sys.executable)
    return (python, "-m", "gristmill")


def train_command(launch: LaunchConfig, settings: Path) -> tuple[str, ...]:
    """The command that every process of a training runs."""
    return (*gristmill_command(launch), "train", str(settings))


# ------------------------------------------------------------------ sweeps


def sweep_words(axes: Sequence[str], *, name: str) -> list[list[str]]:
    """For each run of a sweep its settings as words, the name of the run last.

    An axis is KEY=V1,V2,...; commas within brackets, braces and quotes belong to a value.
    """
    keys, values = [], []
    for axis in axes:
        key, equals, text = axis.partition("=")
        choices = [part.strip() for part in _split(text)]
        if not equals or not all(choices):
            raise UserError(
                f"{axis!r} is no setting with several values",
                where="--sweep",
                remedy="write KEY=VALUE,VALUE,... such as optim.lr=1e-3,6e-4",
                exit=Exit.USAGE,
            )
        keys.append(key)
        values.append(choices)
    if len(set(keys)) < len(keys):
        raise UserError("a setting is given twice", where="--sweep", exit=Exit.USAGE)
    runs, names = [], set[str]()
    for chosen in itertools.product(*values):
        pairs = list(zip(keys, chosen, strict=True))
        parts = [f"{key.rpartition('.')[2]}-{_plain(value)}" for key, value in pairs]
        own = "-".join([name, *parts])
        while own in names:
            own += "_"
        names.add(own)
        runs.append([*(f"{key}={value}" for key, value in pairs), f"name={own}"])
    return runs


def _split(text: str) -> list[str]:
    parts, depth, quote, current = [], 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and not depth and not quote:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [*parts, current]


def _plain(value: Any) -> str:
    """A value as a part of a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-") or "empty"
