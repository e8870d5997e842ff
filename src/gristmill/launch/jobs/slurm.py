"""Slurm: sbatch, one task of srun for each process, or one torchrun on each node.

`stop_early` before the time limit Slurm sends USR1 to the script, which forwards it. The processes
save and stop, and the script puts the job back into the queue, where it keeps its id. scancel sends
TERM to all processes, which then have the cluster's KillWait to save. After a node has failed,
Slurm puts the job back into the queue by itself.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
    container_words,
    render,
    run_scheduler,
    try_scheduler,
)

NEEDS = "on a login node of the cluster"
_PHASES: dict[Phase, tuple[str, ...]] = {
    "waiting": ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"),
    "running": ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING"),
}
_MAIL = {"begin": "BEGIN", "end": "END", "fail": "FAIL"}
_MOST_SIGNAL = 65535
_EARLY = 60
"""Seconds by which Slurm may send a signal before its time."""
_WAIT = 900
"""Seconds from the end of the first process to the end of those that do not end by themselves.
Slurm takes minutes to notice that a node is lost; then it requeues the job."""


class Slurm(Launcher):
    """Jobs of Slurm."""

    unused = ("filesystems", "resources", "mpi", "hostfile", "kubernetes", "address")

    def problems(self, launch: LaunchConfig) -> Iterator[Problem]:
        if launch.time is None:
            return
        left = parse_seconds(launch.time) - parse_seconds(launch.stop_early)
        if 0 < left < _EARLY:
            what = f"leaves {left:.0f} seconds, and Slurm may send the signal {_EARLY} s too early"
            yield Problem(what, "launch.stop_early", "make it shorter, or launch.time longer")

    def files(self, job: BatchJob) -> dict[str, str]:
        text = render(
            "slurm.sbatch.jinja",
            job=job,
            title=_title(job),
            tasks=1 if job.launch.starter == "torchrun" else job.launch.each,
            options=list(_options(job)),
            srun=list(_srun(job)),
            container=container_words(job) if job.launch.container_runtime else [],
            python=[job.command[0]],
        )
        return {f"{job.name}.sbatch" if job.array is not None else "train.sbatch": text}

    def submit(self, job: BatchJob, file: Path) -> JobRecord:
        words = ["sbatch", "--parsable"]
        if job.after:
            words.append(f"--dependency=afterok:{':'.join(job.after)}")
            words.append("--kill-on-invalid-dep=yes")
        answer = run_scheduler([*words, str(file)], needs=NEEDS)
        # With several clusters it is "id;cluster".
        match = re.fullmatch(r"(\d+)(?:;.*)?", answer.strip().splitlines()[-1] if answer else "")
        if match is None:
            raise UncertainError(
                f"sbatch gave no id of a job: {answer.strip()!r}",
                where=str(file),
                remedy="see `squeue --me` for whether it was submitted",
            )
        id, logs = match[1], Path(glob.escape(str(job.logs)))
        log = "job-*.log" if job.array is None else f"job-{id}_*.log"
        tasks = [
            TaskRecord(str(task.run), f"{id}_{number}", [str(logs / f"job-{id}_{number}.log")])
            for number, task in (job.array or {}).items()
            if task.run is not None
        ]
        return JobRecord("slurm", id, [str(logs / log)], timestamp(), tasks=tasks)

    def state(self, record: JobRecord) -> BatchState:
        shown = try_scheduler(["scontrol", "show", "job", "--oneliner", record.id], needs=NEEDS)
        if shown.returncode == 0 and "JobState=" in shown.stdout:
            return _from_scontrol(shown.stdout)
        words = ["sacct", "-n", "-X", "-P", "-j", record.id, "-o", "State,ExitCode,Elapsed"]
        kept = try_scheduler(words, needs=NEEDS)
        if kept.returncode == 0 and kept.stdout.strip():
            state, code, elapsed = kept.stdout.strip().splitlines()[-1].split("|")[:3]
            return BatchState(phase_of(state), f"{state} after {elapsed}", exit_code(code))
        return BatchState("unknown", "Slurm no longer knows it, so it has ended")

    def cancel(self, record: JobRecord) -> None:
        run_scheduler(["scancel", record.id], needs=NEEDS)


def _title(job: BatchJob) -> str:
    if job.array is None:
        return f"the run {job.name}"
    return f"{job.name}: an array of {len(job.array)} tasks"


def _options(job: BatchJob) -> Iterator[tuple[str, Any]]:
    """The directives of the script."""
    launch = job.launch
    yield "chdir", job.work
    # Slurm replaces what follows a percent sign.
    logs = str(job.logs).replace("%", "%%")
    yield "output", f"{logs}/job-{'%j' if job.array is None else '%A_%a'}.log"
    yield "open-mode", "append"
    if job.array is not None:
        at_once = f"%{job.at_once}" if job.at_once else ""
        yield "array", f"{ranges(list(job.array))}{at_once}"
    if cores := _cores(job):
        yield "cpus-per-task", cores
    for name, value in (
        ("gpus-per-node", launch.gpus_per_node),
        ("mem", launch.memory),
        ("account", launch.account),
        ("partition", launch.queue),
        ("qos", launch.qos),
        ("constraint", launch.constraint),
        ("reservation", launch.reservation),
        ("mail-user", launch.mail),
    ):
        if value:
            yield name, value
    if launch.mail:
        yield "mail-type", ",".join(_MAIL[event] for event in launch.mail_on)
    if launch.exclusive:
        yield "exclusive", True
    if launch.time:
        limit, early = parse_seconds(launch.time), parse_seconds(launch.stop_early)
        yield "time", clock(limit)
        yield "signal", f"B:USR1@{min(int(early), _MOST_SIGNAL)}"
    yield "requeue" if launch.requeue else "no-requeue", True
    yield from launch.options.items()


def _cores(job: BatchJob) -> int:
    """CPU cores of a task of Slurm; 0 if it decides."""
    each = job.launch.each if job.launch.starter == "torchrun" else 1
    return (job.launch.cpus_per_process or 0) * each


def _srun(job: BatchJob) -> Iterator[str]:
    """Options of srun; it does not take those of the script by itself."""
    launch = job.launch
    if job.elastic:
        # A worker that is lost is no reason to end the others.
        yield from ("--no-kill", "--kill-on-bad-exit=0")
    else:
        # The processes notice themselves, and report which of them failed.
        yield from ("--kill-on-bad-exit=0", f"--wait={_WAIT}")
    if cores := _cores(job):
        yield f"--cpus-per-task={cores}"
    if launch.container and launch.container_runtime != "apptainer":
        yield f"--container-image={launch.container}"
        inside = [f"{path}:{path}" for path in dict.fromkeys((job.work, job.folder.parent))]
        yield f"--container-mounts={','.join([*inside, *launch.mounts])}"
        yield f"--container-workdir={job.work}"
    yield "--"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as Slurm writes them: 1-3,7."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(
        f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups
    )


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"


def phase_of(state: str) -> Phase:
    """The phase of a job in a state of Slurm."""
    first = state.split()[0].rstrip("+") if state else ""
    return next((phase for phase, names in _PHASES.items() if first in names), "ended")


def exit_code(text: str) -> int | None:
    """The exit status of "75:0"; 128 and the signal for "0:15"."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    return int(match[1]) or (128 + int(match[2]) if int(match[2]) else 0)


def _from_scontrol(text: str) -> BatchState:
    """The state of a job, or of an array, of which there is one line for each task."""
    lines = [line for line in text.splitlines() if "JobState=" in line]
    tasks = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    phases = [phase_of(task["JobState"]) for task in tasks]
    overall: Phase = next((phase for phase in ("running", "waiting") if phase in phases), "ended")
    first = tasks[phases.index(overall)]
    words = first["JobState"]
    if len(tasks) > 1:
        counts = Counter(task["JobState"] for task in tasks)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
    elif overall == "waiting" and first.get("Reason", "None") != "None":
        words += f" ({first['Reason']})"
    elif overall == "running":
        words += f" for {first.get('RunTime', '?')} on {first.get('NodeList', '?')}"
    if len(tasks) == 1 and first.get("Restarts", "0") != "0":
        words += f", started {int(first['Restarts']) + 1} times"
    code = max((exit_code(task.get("ExitCode", "")) or 0 for task in tasks), default=0)
    return BatchState(overall, words, code if overall == "ended" else None)
