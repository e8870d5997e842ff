"""Numbered commands that run side by side: on this machine, as Slurm's arrays, or on a Ray cluster.

LocalTasks   processes of this machine, a few at a time. They do not outlive this one, however it
             ends (`follow_supervisor`). Each leads a process group, so that a Ctrl-C in the
             terminal does not reach it: `stop` interrupts it once, so that it can clean up, and
             kills the whole group if it does not end soon.
SlurmTasks   all numbers that start together are one array, submitted once; those that run again are
             another. Slurm says of all tasks at once how they are. It forgets tasks that have ended
             after a while (its MinJobAge), and so do we: their files tell whether they are done.
RayTasks     each task starts its command as a process on the node that Ray chooses, in the folder
             from which this process was started; so all nodes need the same file system, and the
             program. A task ends with this process, since Ray ends the tasks of a job whose driver
             is gone, and the command ends with its task. Ray itself does not retry: whoever uses
             the engine decides.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.base.errors import UserError, optional
from gristmill.base.exits import SUPERVISOR, start_line
from gristmill.base.files import storage_errors
from gristmill.config.launch import LaunchConfig
from gristmill.launch.jobs.batch import (
    ArrayTask,
    BatchJob,
    run_scheduler,
    try_scheduler,
    write_files,
)
from gristmill.launch.jobs.slurm import NEEDS, Slurm, exit_code, phase_of

_GRACE = 10.0
"""Seconds from the interruption of a process to its end by force."""


def open_task_log(path: Path, command: Sequence[str]) -> BinaryIO:
    """Open a log to append to it; a first line tells this attempt from those before."""
    with storage_errors(path):
        log = path.open("ab")
        log.write(start_line(command))
        log.flush()
        return log


def start_task(
    command: Sequence[str],
    log: Path,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, with its output in a log."""
    with open_task_log(log, command) as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {}), SUPERVISOR: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )


def stop_tasks(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes, by force if need be."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class LocalTasks:
    """Runs numbered commands on this machine."""

    name = "local"
    poll_seconds = 0.1

    def __init__(self, command: Sequence[str], *, logs: str, at_once: int) -> None:
        """`logs % number` is the log of a task."""
        self._command = command
        self._logs = logs
        self._at_once = at_once
        self._waiting: deque[int] = deque()
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def attach(self, jobs: Mapping[str, Any]) -> Collection[int]:
        """None: they have ended with the process that started them."""
        return ()

    def start(self, numbers: Sequence[int]) -> None:
        self._waiting.extend(numbers)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            number = self._waiting.popleft()
            command = [*self._command, str(number)]
            self._running[number] = start_task(command, Path(self._logs % number))

    def jobs(self) -> Mapping[str, Any]:
        return {}

    def poll(self) -> Mapping[int, int | None]:
        codes = {number: process.poll() for number, process in self._running.items()}
        ended = {number: code for number, code in codes.items() if code is not None}
        for number in ended:
            del self._running[number]
        self._fill()
        return ended

    @property
    def running(self) -> Collection[int]:
        return self._running.keys()

    chooses_machine = False

    def end(self, number: int) -> None:
        # Its process is polled as before.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._running[number].pid, signal.SIGKILL)

    def stop(self) -> str:
        self._waiting.clear()
        count = len(self._running)
        stop_tasks(list(self._running.values()))
        self._running.clear()
        return f"{count:,} running parts were stopped; their work is kept" if count else ""


# ------------------------------------------------------------------ Slurm

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

    chooses_machine = True

    def end(self, number: int) -> None:
        for id, left in self._arrays.items():
            if number in left:
                # If Slurm does not answer, the task is left to itself.
                with contextlib.suppress(UserError):
                    try_scheduler(["scancel", f"{id}_{number}"], needs=NEEDS)

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


# ------------------------------------------------------------------ Ray

_RAY_GRACE = 20.0
"""Seconds for tasks to end when they are cancelled, before Ray kills their processes."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Variables that keep Ray's messages away from the terminal, and its statistics at home."""
_PASSED_ON = ("PYTHONPATH", "XDG_CACHE_HOME", "HF_", "GRISTMILL_")
"""How the variables begin that a command gets from here, and not from its node."""


def run_task(
    arguments: Sequence[str], log: Path, folder: Path, environment: Mapping[str, str]
) -> int:
    """Run a command on this node, with this node's Python; returns its exit status."""
    command = [sys.executable, "-m", "gristmill", *arguments]
    process = start_task(command, log, folder=folder, environment=environment)
    try:
        return process.wait()
    except BaseException:
        # The task was cancelled.
        stop_tasks([process])
        raise


class RayTasks:
    """Runs numbered commands on a Ray cluster."""

    name = "ray"
    poll_seconds = 0.5

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        logs: str,
        at_once: int | None,
        cores: int,
        address: str | None,
    ) -> None:
        """`logs % number` is the log of a task, which takes so many cores of its node."""
        self._arguments = arguments
        self._logs = logs
        self._at_once = at_once
        self._cores = cores
        self._room = 0
        """How many tasks the cluster has cores for."""
        self._ray = _connect(address or os.environ.get("RAY_ADDRESS") or "auto")
        self._task = self._ray.remote(num_cpus=cores, max_retries=0)(run_task)
        self._waiting: deque[int] = deque()
        self._under_way: dict[int, Any] = {}
        """The reference to the result of each task that Ray has."""

    def attach(self, jobs: Mapping[str, Any]) -> Collection[int]:
        """None: Ray has ended them with the process that started them."""
        return ()

    def start(self, numbers: Sequence[int]) -> None:
        self._waiting.extend(numbers)
        self._fill()

    def _fill(self) -> None:
        passed = {name: text for name, text in os.environ.items() if name.startswith(_PASSED_ON)}
        while self._waiting and (self._at_once is None or len(self._under_way) < self._at_once):
            number = self._waiting.popleft()
            arguments, log = [*self._arguments, str(number)], Path(self._logs % number)
            self._under_way[number] = self._task.remote(arguments, log, Path.cwd(), passed)

    def jobs(self) -> Mapping[str, Any]:
        return {}

    def poll(self) -> Mapping[int, int | None]:
        references = list(self._under_way.values())
        ready = set()
        if references:
            ready = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
        ended = {}
        for number, reference in list(self._under_way.items()):
            if reference in ready:
                ended[number] = self._status(reference)
                del self._under_way[number]
        self._fill()
        self._room = int(self._ray.cluster_resources().get("CPU", 0) // self._cores)
        return ended

    def _status(self, reference: Any) -> int | None:
        try:
            return int(self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            # The task could not start the command; its error says why.
            cause = error.as_instanceof_cause()
            raise UserError(
                f"a task of Ray failed: {str(cause).strip().splitlines()[-1]}",
                where=self.name,
                remedy="install the program on all nodes, and give them the same file system",
            ) from error
        except self._ray.exceptions.RayError:
            # Its process or its node is gone.
            return None

    @property
    def running(self) -> Collection[int]:
        # Ray does not tell, but it begins with those that it was given first.
        return list(self._under_way)[: self._room]

    chooses_machine = True

    def end(self, number: int) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.cancel(self._under_way[number], force=True)

    def stop(self) -> str:
        self._waiting.clear()
        references, exceptions = list(self._under_way.values()), self._ray.exceptions
        for force in (False, True):
            for reference in references:
                with contextlib.suppress(exceptions.RayError, ValueError):
                    self._ray.cancel(reference, force=force)
            if references:
                _, references = self._ray.wait(
                    references, num_returns=len(references), timeout=_RAY_GRACE
                )
        count = len(self._under_way)
        self._under_way.clear()
        self._ray.shutdown()
        return f"{count:,} parts on the cluster were stopped; their work is kept" if count else ""


def _connect(address: str) -> Any:
    """Connect to a cluster; Ray's own messages go to its log files."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    ray = optional("ray", extra="ray", purpose="--engine ray")
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            # Ray itself would try for ever.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_RAY_GRACE).close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level="CRITICAL")
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"no Ray cluster can be reached: {why}",
            where=f"--ray-address {address}",
            remedy="start one with `ray start --head`, or say where one is: --ray-address "
            "HOST:6379, or RAY_ADDRESS",
        ) from error
    return ray
