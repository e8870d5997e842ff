"""PBS Pro and OpenPBS: qsub, and one mpiexec over all nodes of the job.

PBS ends a job at its wall time with little warning, so the run stops by itself before
(`train.time_limit`), and the job then submits its successor. The ids of all of them are in
RUN/job/ids, the newest last.

    4711.pbs    saves, submits 4720.pbs, ends with 0     job 4712.pbs waits for both: afterok
    4720.pbs    trains to the end

A job that has a successor has done its part, and ends with 0: jobs that wait for it with `afterok`
would be deleted otherwise, even if they no longer name it. They are made to wait for the successor
too before it ends (qalter). A task of a sweep cannot be a successor of its own array, so it
continues as a job of its own; those of task 3 are in ids-3.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import Problem
from gristmill.base.units import parse_seconds, timestamp
from gristmill.config.launch import LaunchConfig
from gristmill.launch.jobs.batch import (
    BatchJob,
    BatchState,
    JobRecord,
    Launcher,
    Phase,
    TaskRecord,
    UncertainError,
    render,
    run_scheduler,
    try_scheduler,
)
from gristmill.launch.jobs.mpi import mpi_values
from gristmill.launch.jobs.slurm import NEEDS, clock, ranges

IDS = "ids"
TASK = "GRISTMILL_TASK"
"""The task of a sweep that a job runs which is not part of its array."""
_FILE = "train.pbs"
_SUCCESSORS = "successors"
"""The ids of all jobs in which tasks of a sweep continue, in the order in which they were
submitted: so many run at once as tasks may."""
_MAIL = {"begin": "b", "end": "e", "fail": "a"}
_STATES: dict[str, tuple[Phase, str]] = {
    "Q": ("waiting", "queued"),
    "H": ("waiting", "held"),
    "W": ("waiting", "waiting for its time"),
    "T": ("waiting", "moving to another place"),
    "M": ("waiting", "moved to another server"),
    "B": ("running", "array has begun"),
    "R": ("running", "running"),
    "E": ("running", "ending"),
    "S": ("running", "suspended"),
    "U": ("running", "suspended by the user of the machine"),
    "F": ("ended", "finished"),
    "X": ("ended", "finished"),
}


class Pbs(Launcher):
    """Jobs of PBS."""

    unused = ("qos", "constraint", "hostfile", "kubernetes", "address")

    def problems(self, launch: LaunchConfig) -> Iterator[Problem]:
        for name in launch.options:
            if len(name) > 1:
                what = f"{name!r} is no option of qsub, which are single letters"
                yield Problem(what, "launch.options", 'such as { "W" = "group_list=x" }')
        if launch.container_runtime == "pyxis":
            yield Problem("pyxis belongs to Slurm", "launch.container_runtime", 'use "apptainer"')

    def files(self, job: BatchJob) -> dict[str, str]:
        file = f"{job.name}.pbs" if job.array is not None else _FILE
        values = {
            **mpi_values(job),
            "options": list(_options(job)),
            "array": shlex.join(_array(job)),
            "file": file,
            "ids": IDS,
            "successors": _SUCCESSORS,
            "task": TASK,
        }
        return {file: render("pbs.sh.jinja", **values)}

    def submit(self, job: BatchJob, file: Path) -> JobRecord:
        after = ["-W", f"depend=afterok:{':'.join(job.after)}"] if job.after else []
        id = run_scheduler(["qsub", *after, *_array(job), str(file)], needs=NEEDS).strip()
        if not re.fullmatch(r"\d+(\[\])?(\.[\w.-]+)?", id):
            raise UncertainError(
                f"qsub gave no id of a job: {id!r}",
                where=str(file),
                remedy="see `qstat -u $USER` for whether it was submitted",
            )
        ids, logs = job.folder / IDS, Path(glob.escape(str(job.logs)))
        with ids.open("a") as log:
            log.write(f"{id}\n")
        # Those of an earlier sweep of this name.
        for old in (job.folder / _SUCCESSORS, *job.folder.glob(f"{IDS}-*")):
            old.unlink(missing_ok=True)
        tasks = []
        for number, task in (job.array or {}).items():
            if task.run is not None:
                own = job.folder / f"{IDS}-{number}"
                task_id, log_file = id.replace("[]", f"[{number}]"), logs / f"job-*_{number}.log"
                tasks.append(TaskRecord(str(task.run), task_id, [str(log_file)], {"ids": str(own)}))
        facts = {"ids": str(ids)}
        return JobRecord("pbs", id, [str(logs / "job-*.log")], timestamp(), facts, tasks=tasks)

    def state(self, record: JobRecord) -> BatchState:
        if not record.tasks:
            id = newest_id(record)
            if answer := _ask(id).get(_number(id)):
                state = _state(answer)
                return replace(state, text=f"as {id}, {state.text}") if id != record.id else state
            return BatchState("unknown", f"PBS no longer knows {id}, so it has ended")
        # Of several ids, qstat shows only the first as JSON.
        jobs = _ask("-t", record.id)
        ids = [newest_id(task) for task in record.tasks]
        for id in ids:
            if _number(id) not in jobs:
                jobs |= _ask(id)
        states = [_state(jobs[_number(id)]) for id in ids if _number(id) in jobs]
        return _together(states, len(ids))

    def cancel(self, record: JobRecord) -> None:
        newest = [newest_id(task) for task in record.tasks]
        # The array goes as a whole, so that none of its tasks begins meanwhile.
        successors = [id for id, task in zip(newest, record.tasks, strict=True) if id != task.id]
        ids = [record.id, *successors] if record.tasks else [newest_id(record)]
        for id in ids:
            # qdel complains of jobs that have ended.
            if not record.tasks or _state(_ask(id).get(_number(id), {})).active:
                run_scheduler(["qdel", id], needs=NEEDS)


def newest_id(record: JobRecord | TaskRecord) -> str:
    """The id of a job, or of the last successor that it submitted."""
    try:
        ids = Path(record.facts["ids"]).read_text().split()
    except OSError:
        ids = []
    return ids[-1] if ids else record.id


def _number(id: str) -> str:
    """An id without the server, which PBS may write with its domain or without."""
    return id.partition(".")[0]


def _ask(*words: str) -> dict[str, Any]:
    """What PBS says of a job, by number; -x: also of one that has ended, if there is a history."""
    asked = try_scheduler(["qstat", "-x", "-f", "-F", "json", *words], needs=NEEDS)
    try:
        jobs = json.loads(asked.stdout).get("Jobs", {})
    except (ValueError, AttributeError):
        return {}
    return {_number(id): job for id, job in jobs.items()} if isinstance(jobs, dict) else {}


def _array(job: BatchJob) -> list[str]:
    """The options of qsub that make an array of a job. They are not directives of the script, since
    a task that continues as a job of its own runs the same script."""
    if job.array is None:
        return []
    if len(job.array) == 1:
        # PBS has no arrays of one task.
        return ["-v", f"{TASK}={next(iter(job.array))}"]
    return ["-J", f"{ranges(list(job.array))}{f'%{job.at_once}' if job.at_once else ''}"]


def _options(job: BatchJob) -> Iterator[tuple[str, Any]]:
    """The directives of the script."""
    launch = job.launch
    chunk = [str(launch.nodes)]
    if launch.cpus_per_process:
        chunk.append(f"ncpus={launch.cpus_per_process * launch.each}")
    if launch.gpus_per_node:
        chunk.append(f"ngpus={launch.gpus_per_node}")
    if launch.memory:
        chunk.append(f"mem={launch.memory.lower()}b")
    chunk += [f"{name}={value}" for name, value in launch.resources.items()]
    yield "l", f"select={':'.join(chunk)}"
    yield "l", f"place=scatter{':excl' if launch.exclusive else ''}"
    if launch.time:
        yield "l", f"walltime={clock(parse_seconds(launch.time))}"
    if launch.filesystems:
        yield "l", f"filesystems={':'.join(launch.filesystems)}"
    if launch.account:
        yield "A", launch.account
    if launch.reservation or launch.queue:
        yield "q", launch.reservation or launch.queue
    if launch.mail:
        yield "M", launch.mail
        yield "m", "".join(sorted(_MAIL[event] for event in launch.mail_on))
    yield "j", "oe"
    yield "o", f"{job.logs}/"
    yield "r", "y" if launch.requeue else "n"
    yield from launch.options.items()


def _together(states: Sequence[BatchState], total: int) -> BatchState:
    """The state of all runs of a sweep; those that PBS has forgotten have ended."""
    phases = [state.phase for state in states]
    overall: Phase = next((phase for phase in ("running", "waiting") if phase in phases), "ended")
    counts = Counter(state.text.split(" ")[0] for state in states)
    if total > len(states):
        counts["forgotten"] = total - len(states)
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    code = max((state.exit or 0 for state in states), default=0)
    return BatchState(overall, words, code if overall == "ended" else None)


def _state(job: dict[str, Any]) -> BatchState:
    letter = str(job.get("job_state", "?"))
    phase, words = _STATES.get(letter, ("unknown", f"in the state {letter}"))
    code = job.get("Exit_status")
    if phase == "running" and (hosts := job.get("exec_host")):
        words += f" on {hosts}"
    if used := job.get("resources_used", {}).get("walltime"):
        words += f" after {used}" if phase == "ended" else f" for {used}"
    if phase == "waiting" and (why := job.get("comment")):
        words += f" ({why})"
    return BatchState(phase, words, code if phase == "ended" and isinstance(code, int) else None)
