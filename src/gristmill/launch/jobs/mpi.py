"""MPI: mpiexec by itself, on this machine or on the hosts of a file.

The job is a script in the background of this machine, in a session of its own. Its id is the
process id; the time at which that process began tells it from a later one with the same number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gristmill.base.errors import Problem, UserError
from gristmill.base.process import JOB_BEGAN
from gristmill.base.units import timestamp
from gristmill.config.launch import LaunchConfig
from gristmill.launch.jobs.batch import (
    BatchJob,
    BatchState,
    JobRecord,
    Launcher,
    container_words,
    render,
    run_scheduler,
)

FILE = "train.sh"


class Mpi(Launcher):
    """Jobs of mpiexec."""

    unused = (
        *("account", "queue", "qos", "constraint", "reservation", "exclusive", "filesystems"),
        *("resources", "options", "mail", "mail_on", "memory", "requeue", "kubernetes", "address"),
    )
    lacks = ("--after", "--then", "--sweep")

    def problems(self, launch: LaunchConfig) -> Iterator[Problem]:
        if launch.nodes > 1 and not launch.hostfile:
            what = f"launch.nodes is {launch.nodes}, and nothing says which machines these are"
            yield Problem(what, "launch.hostfile", "name a file with one host per line")
        if launch.container_runtime == "pyxis":
            yield Problem("pyxis belongs to Slurm", "launch.container_runtime", 'use "apptainer"')

    def files(self, job: BatchJob) -> dict[str, str]:
        return {FILE: render("mpi.sh.jinja", **mpi_values(job))}

    def submit(self, job: BatchJob, file: Path) -> JobRecord:
        run_scheduler(["mpiexec", "--version"], needs="where an MPI is installed")
        log = job.logs / f"job-{timestamp().replace(':', '').replace('+', '-')}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["bash", "-l", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=job.work,
            )
        facts = {"host": socket.gethostname(), "began": _began(process.pid)}
        return JobRecord("mpi", str(process.pid), [str(log)], timestamp(), facts)

    def state(self, record: JobRecord) -> BatchState:
        host = record.facts.get("host")
        if host != socket.gethostname():
            return BatchState("unknown", f"it was started on {host}; ask there")
        if _began(int(record.id)) == record.facts.get("began") is not None:
            return BatchState("running", f"running as process {record.id} on {host}")
        return BatchState("ended", "ended")

    def cancel(self, record: JobRecord) -> None:
        if self.state(record).phase != "running":
            raise UserError(
                f"process {record.id} does not run on {socket.gethostname()}",
                where=f"job {record.id}",
                remedy=f"cancel it on {record.facts.get('host')}",
            )
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(record.id), signal.SIGTERM)


def mpi_values(job: BatchJob) -> dict[str, object]:
    """What the templates with mpiexec need."""
    variables = list(job.launch.environment)
    if job.launch.cpus_per_process and "OMP_NUM_THREADS" not in variables:
        variables.append("OMP_NUM_THREADS")
    return {
        "job": job,
        "title": f"the run {job.name}",
        "container": container_words(job),
        "python": [job.command[0]],
        "variables": variables,
        "began": JOB_BEGAN,
    }


def _began(process: int) -> str | None:
    """When a process began, in the words of the system; None if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        words = ["ps", "-o", "lstart=", "-p", str(process)]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        return result.stdout.strip() or None
