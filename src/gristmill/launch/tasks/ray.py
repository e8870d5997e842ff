"""Numbered commands as tasks on a Ray cluster that runs already.

Each task starts its command as a process on the node that Ray chooses, in the folder from which
this process was started; so all nodes need the same file system, and the program. A task ends with
this process, since Ray ends the tasks of a job whose driver is gone, and the command ends with its
task (`gristmill.launch.parent_death`). Ray itself does not retry: whoever uses the engine decides.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError, optional
from gristmill.launch.tasks.local import start_task, stop_tasks

_GRACE = 20.0
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

    def stop(self) -> str:
        self._waiting.clear()
        references, exceptions = list(self._under_way.values()), self._ray.exceptions
        for force in (False, True):
            for reference in references:
                with contextlib.suppress(exceptions.RayError, ValueError):
                    self._ray.cancel(reference, force=force)
            if references:
                _, references = self._ray.wait(
                    references, num_returns=len(references), timeout=_GRACE
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
            socket.create_connection((host.strip("[]"), int(port)), timeout=_GRACE).close()
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
