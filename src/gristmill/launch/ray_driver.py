"""What a job of Ray runs: it reserves nodes, starts the processes on them and supervises these.

    python -m gristmill.launch.ray_driver RUN/job/run.toml
    ├── RayNode 0 on a node of the cluster      an actor, which starts ranks 0 to 3 as processes
    └── RayNode 1 on another node               ranks 4 to 7

The supervisor is the same as on one machine; only the starter is another. A node that is lost takes
its actor with it, and its processes count as killed. After that the supervisor restarts all
processes from the last checkpoint, on nodes that are reserved anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError, optional
from gristmill.base.process import Address
from gristmill.base.units import format_seconds, parse_seconds
from gristmill.config.launch import LaunchConfig
from gristmill.launch.jobs.submit import train_command
from gristmill.launch.processes import Job, supervise
from gristmill.launch.starting import LocalProcess, free_port, process_environment
from gristmill.track.folder import run_folder

_TICK = 0.2
_PATIENCE = 30.0
"""Seconds for a node to end processes that were killed."""


class RayNode:
    """The processes of one node: an actor of Ray."""

    def __init__(self) -> None:
        self._processes: dict[int, LocalProcess] = {}
        self._early: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def address(self) -> tuple[str, int]:
        """An address of this node, with a port that nobody uses."""
        ray: Any = optional("ray", extra="ray", purpose="launching on Ray")
        return str(ray.util.get_node_ip_address()), free_port("")

    def run(
        self, rank: int, command: Sequence[str], environment: dict[str, Any], log: str | Path
    ) -> int:
        """Run a process to its end; returns its exit status, or minus the signal that ended it."""
        threads = environment.pop("threads")
        if threads is not None:
            # Ray sets it to the cores of the whole node.
            os.environ["OMP_NUM_THREADS"] = str(threads)
        process = LocalProcess(command, process_environment(rank, **environment), Path(log))
        with self._lock:
            self._processes[rank] = process
            for number in self._early.pop(rank, ()):
                process.send_signal(signal.Signals(number))
        return process.wait()

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a process, or as soon as it runs."""
        with self._lock:
            if rank in self._processes:
                self._processes[rank].send_signal(signal.Signals(number))
            else:
                self._early.setdefault(rank, []).append(number)

    def kill(self, rank: int) -> None:
        """Kill a process with all that it has started."""
        if rank in self._processes:
            self._processes[rank].kill()


class RayProcess:
    """A process on a node of Ray."""

    def __init__(self, ray: Any, node: Any, rank: int, ending: Any, log: Path) -> None:
        self._ray, self._node, self._rank, self._ending = ray, node, rank, ending
        self._log, self._shown = log, log.stat().st_size
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            done, _ = self._ray.wait([self._ending], timeout=0)
            if done:
                self._code = self._result()
            self._show()
        return self._code

    def _result(self) -> int:
        try:
            return int(self._ray.get(self._ending))
        except self._ray.exceptions.RayActorError:
            print(f"the node of rank {self._rank} was lost", file=sys.stderr, flush=True)
            return -signal.SIGKILL

    def _show(self) -> None:
        """Print what rank 0 has printed since the last time."""
        if self._rank:
            return
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self._shown)
            text = log.read()
            self._shown += len(text)
            sys.stdout.buffer.write(text)
            sys.stdout.flush()

    def send_signal(self, number: signal.Signals) -> None:
        self._node.send.remote(self._rank, int(number))

    def kill(self) -> None:
        self._node.kill.remote(self._rank)

    def wait(self) -> None:
        self._ray.wait([self._ending], timeout=_PATIENCE)


class RayStarter:
    """Starts processes on nodes of Ray."""

    def __init__(self, ray: Any, launch: LaunchConfig, *, patience: float) -> None:
        self._ray, self._launch, self._patience = ray, launch, patience
        self._group: Any = None
        self._nodes: list[Any] = []
        self._address = Address("", 0)

    @property
    def ranks(self) -> range:
        return range(self._launch.processes)

    def prepare(self, interrupted: Callable[[], bool]) -> None:
        """Reserve the nodes, anew after each failure: those of before may be gone."""
        self.release()
        launch, scheduling = self._launch, self._ray.util.scheduling_strategies
        bundle = bundle_of(launch)
        self._group = self._ray.util.placement_group(
            [bundle] * launch.nodes, strategy="STRICT_SPREAD"
        )
        self._wait(interrupted)
        actor = self._ray.remote(RayNode)
        self._nodes = [
            actor.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources={name: amount for name, amount in bundle.items() if name not in _OWN},
                # Each process has a thread that waits for it; others bring signals meanwhile.
                max_concurrency=launch.each + 2,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(launch.nodes)
        ]
        try:
            self._address = Address(*self._ray.get(self._nodes[0].address.remote()))
        except self._ray.exceptions.RayError as error:
            raise _no_nodes(launch, "the first node was lost while it was reserved") from error

    def _wait(self, interrupted: Callable[[], bool]) -> None:
        begun, said = time.monotonic(), False
        while not self._group.wait(_TICK):
            waited = time.monotonic() - begun
            if interrupted():
                what = "stopped while the job waited for nodes"
                raise UserError(what, where="ray", exit=Exit.STOPPED)
            have = self._have()
            if waited > self._patience:
                raise _no_nodes(
                    self._launch, f"within {format_seconds(self._patience)}; the cluster has {have}"
                )
            if not said and waited > 2:
                said = True
                wants = f"{self._launch.nodes} nodes with {_words(bundle_of(self._launch))} each"
                print(f"waiting for {wants}; the cluster has {have}", flush=True)

    def _have(self) -> str:
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        names = {*bundle_of(self._launch), "CPU"}
        nodes = [
            _words({name: amount for name, amount in node["Resources"].items() if name in names})
            for node in alive
        ]
        return f"{len(alive)} nodes ({'; '.join(nodes)})"

    def start(self, rank: int, command: Sequence[str], log: Path) -> RayProcess:
        launch = self._launch
        node = self._nodes[rank // launch.each]
        threads = launch.environment.get("OMP_NUM_THREADS") or launch.cpus_per_process or 1
        environment = {
            "processes": launch.processes,
            "nodes": launch.nodes,
            "host": self._address.host,
            "port": self._address.port,
            "threads": threads,
        }
        ending = node.run.remote(rank, list(command), environment, str(log.absolute()))
        return RayProcess(self._ray, node, rank, ending, log)

    def release(self) -> None:
        """Give the nodes back."""
        for node in self._nodes:
            self._ray.kill(node)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._nodes, self._group = [], None


_OWN = ("CPU", "GPU")


def bundle_of(launch: LaunchConfig) -> dict[str, float]:
    """What is reserved on each node."""
    bundle: dict[str, float] = {"CPU": launch.each * (launch.cpus_per_process or 1)}
    if launch.gpus_per_node:
        bundle["GPU"] = launch.gpus_per_node
    return bundle | {name: int(amount) for name, amount in launch.resources.items()}


def _words(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "none"


def _no_nodes(launch: LaunchConfig, why: str) -> UserError:
    return UserError(
        f"Ray did not give {launch.nodes} nodes with {_words(bundle_of(launch))} each: {why}",
        where="launch.nodes",
        remedy="ask for less, or add nodes to the cluster; parallel.start_timeout is how long the "
        "job waits for them",
        exit=Exit.PEER,
    )


def main(words: Sequence[str]) -> int:
    """Train the run of a run file on the cluster; returns the exit status."""
    from gristmill.config.load import load_run
    from gristmill.hub.downloads import settings_folder

    [file] = words
    starter = None
    try:
        config = load_run(Path(file), find_model=settings_folder)
        launch = config.launch or LaunchConfig()
        ray: Any = optional("ray", extra="ray", purpose="launching on Ray")
        optional("ray.util.scheduling_strategies", extra="ray", purpose="launching on Ray")
        ray.init(log_to_driver=False, logging_level="ERROR")
        starter = RayStarter(ray, launch, patience=parse_seconds(config.parallel.start_timeout))
        job = Job(
            train_command(launch, Path(file)),
            launch.processes,
            run_folder(config),
            launch.restarts,
            elastic=config.parallel.elastic,
            starter=starter,
        )
        return supervise(job)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return error.exit
    finally:
        if starter is not None:
            starter.release()


if __name__ == "__main__":
    # The nodes find the actor by the name of this module, which `__main__` is not.
    from gristmill.base.exits import exit_on_stop_signals
    from gristmill.launch import ray_driver

    exit_on_stop_signals()
    sys.exit(ray_driver.main(sys.argv[1:]))
