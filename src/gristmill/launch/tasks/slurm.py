"""Numbered commands as the tasks of job arrays of Slurm.

All numbers that start together are one array, submitted once; those that run again are another.
Slurm says of all tasks at once how they are. It forgets tasks that have ended after a while (its
MinJobAge), and so do we: their files tell whether they are done.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError
from gristmill.config.launch import LaunchConfig
from gristmill.launch.jobs.batch import (
    ArrayTask,
    BatchJob,
    run_scheduler,
    try_scheduler,
    write_files,
)
from gristmill.launch.jobs.slurm import NEEDS, Slurm, exit_code, phase_of
from gristmill.launch.tasks.local import open_task_log

_CODES = ("COMPLETED", "FAILED")
"""States in which the exit status of a task is its own; in the others Slurm ended it."""


class SlurmTasks:
    """Runs numbered commands as job arrays."""

    name = "slurm"
    poll_seconds = 2.0

    def __init__(
        self,
        command: Sequence[str],
        *,
        logs: str,
        at_once: int | None,
        launch: LaunchConfig,
        folder: Path,
    ) -> None:
        """`logs % number` is the log of a task; the script of the array goes into `folder`."""
        self._command = command
        self._logs = logs
        self._at_once = at_once
        self._launch = launch
        self._folder = folder
        self._arrays: dict[str, set[int]] = {}
        """The tasks of each array that have not ended, as far as is known."""
        self._running: set[int] = set()

    def attach(self, jobs: Mapping[str, Any]) -> Collection[int]:
        self._arrays = {id: set(numbers) for id, numbers in jobs.get("arrays", {}).items()}
        self.poll()
        return set().union(*self._arrays.values())

    def start(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            open_task_log(Path(self._logs % number), [*self._command, str(number)]).close()
        tasks = {
            number: ArrayTask([str(number)], log=Path(self._logs % number).absolute())
            for number in numbers
        }
        job = BatchJob(
            name="prepare",
            command=self._command,
            launch=self._launch,
            folder=self._folder.absolute(),
            logs=self._folder.absolute(),
            work=Path.cwd(),
            array=tasks,
            at_once=self._at_once,
        )
        slurm = Slurm()
        record = slurm.submit(job, write_files(job, slurm.files(job)))
        self._arrays[record.id] = set(numbers)

    def jobs(self) -> Mapping[str, Any]:
        arrays = {id: sorted(left) for id, left in self._arrays.items() if left}
        return {"arrays": arrays} if arrays else {}

    def poll(self) -> Mapping[int, int | None]:
        ended: dict[int, int | None] = {}
        self._running = set()
        for id, left in self._arrays.items():
            if not left:
                continue
            states = _states(id)
            if states is None:
                # Slurm did not answer; it will.
                continue
            for number in sorted(left):
                state, code = states.get(number, ("UNKNOWN", None))
                phase = phase_of(state) if number in states else "ended"
                if phase == "running":
                    self._running.add(number)
                elif phase == "ended":
                    ended[number] = code if state.startswith(_CODES) else None
                    # Told once: the same number may be started again, in another array.
                    left.remove(number)
        return ended

    @property
    def running(self) -> Collection[int]:
        return self._running

    def stop(self) -> str:
        ids = [id for id, left in self._arrays.items() if left]
        count = sum(len(left) for left in self._arrays.values())
        if ids:
            run_scheduler(["scancel", *ids], needs=NEEDS)
        self._arrays, self._running = {}, set()
        return f"{count:,} parts were cancelled; their work is kept" if count else ""


def _states(id: str) -> dict[int, tuple[str, int | None]] | None:
    """The state and exit status of all tasks of an array that Slurm knows; None if it gives no
    answer."""
    try:
        shown = try_scheduler(["scontrol", "show", "job", "--oneliner", id], needs=NEEDS)
    except UserError:
        return None
    if shown.returncode:
        return {} if "Invalid job id" in shown.stdout + shown.stderr else None
    states: dict[int, tuple[str, int | None]] = {}
    for line in shown.stdout.splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        state, code = values.get("JobState", ""), exit_code(values.get("ExitCode", ""))
        for number in numbers_of(values.get("ArrayTaskId", "")):
            states[number] = state, code
    return states


def numbers_of(text: str) -> list[int]:
    """The numbers that Slurm's "3-5,9%2" stands for."""
    numbers: list[int] = []
    for part in text.partition("%")[0].split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if ends:
            first, last = int(ends[1]), int(ends[2] or ends[1])
            numbers += range(first, last + 1, int(ends[3] or 1))
    return numbers
