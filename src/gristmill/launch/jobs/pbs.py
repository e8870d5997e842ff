"""PBS Pro and OpenPBS: qsub, and one mpiexec over all nodes of the job.

PBS ends a job at its wall time with little warning, so the run stops by itself before
(`train.time_limit`), and the job then submits its successor. The ids of all of them are in
RUN/job/ids, the newest last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gristmill.base.errors import Problem, UserError
from gristmill.base.units import parse_seconds
from gristmill.config.launch import LaunchConfig
from gristmill.launch.jobs.batch import (
    BatchJob,
    BatchState,
    JobRecord,
    Phase,
    now,
    run_scheduler,
    try_scheduler,
)
from gristmill.launch.jobs.mpi import mpi_values
from gristmill.launch.jobs.rendering import render
from gristmill.launch.jobs.slurm import clock, ranges

IDS = "ids"
NEEDS = "on a login node of the cluster"
_FILE = "train.pbs"
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


class Pbs:
    """Jobs of PBS."""

    unused = ("qos", "constraint", "hostfile", "kubernetes", "address")
    lacks = ()

    def problems(self, launch: LaunchConfig) -> Iterator[Problem]:
        for name in launch.options:
            if len(name) > 1:
                what = f"{name!r} is no option of qsub, which are single letters"
                yield Problem(what, "launch.options", 'such as { "W" = "group_list=x" }')
        if launch.container_runtime == "pyxis":
            yield Problem("pyxis belongs to Slurm", "launch.container_runtime", 'use "apptainer"')

    def files(self, job: BatchJob) -> dict[str, str]:
        file = f"{job.name}.pbs" if job.array is not None else _FILE
        values = {**mpi_values(job), "options": list(_options(job)), "file": file, "ids": IDS}
        return {file: render("pbs.sh.jinja", **values)}

    def submit(self, job: BatchJob, file: Path) -> JobRecord:
        after = ["-W", f"depend=afterok:{':'.join(job.after)}"] if job.after else []
        id = run_scheduler(["qsub", *after, str(file)], needs=NEEDS).strip()
        if not re.fullmatch(r"\d+(\[\])?(\.[\w.-]+)?", id):
            raise UserError(
                f"qsub gave no id of a job: {id!r}",
                where=str(file),
                remedy="see `qstat -u $USER` for whether it was submitted",
            )
        ids = job.folder / IDS
        with ids.open("a") as log:
            log.write(f"{id}\n")
        return JobRecord("pbs", id, [str(job.logs / "job-*.log")], now(), {"ids": str(ids)})

    def state(self, record: JobRecord) -> BatchState:
        id = newest_id(record)
        # -x shows jobs that have ended, if the server keeps their history.
        asked = try_scheduler(["qstat", "-x", "-f", "-F", "json", id], needs=NEEDS)
        jobs = _jobs(asked.stdout)
        if asked.returncode or not jobs:
            return BatchState("unknown", f"PBS no longer knows {id}, so it has ended")
        return _state(next(iter(jobs.values())))

    def cancel(self, record: JobRecord) -> None:
        run_scheduler(["qdel", newest_id(record)], needs=NEEDS)

    def output(self, record: JobRecord) -> None:
        return None


def newest_id(record: JobRecord) -> str:
    """The id of the job, or of the last successor that it submitted."""
    try:
        ids = Path(record.facts["ids"]).read_text().split()
    except OSError:
        ids = []
    return ids[-1] if ids else record.id


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
        yield "m", "".join(sorted(_MAIL[one] for one in launch.mail_on))
    if job.array is not None:
        at_once = f"%{job.at_once}" if job.at_once else ""
        yield "J", f"{ranges(list(job.array))}{at_once}"
    yield "j", "oe"
    yield "o", f"{job.logs}/"
    yield "r", "y" if launch.requeue else "n"
    yield from launch.options.items()


def _jobs(text: str) -> dict[str, Any]:
    try:
        jobs = json.loads(text).get("Jobs", {})
    except (ValueError, AttributeError):
        return {}
    return jobs if isinstance(jobs, dict) else {}


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
