"""The workers of a decentralized run: copies of the model, each with weights of its own.

    processes    0 1 | 2 3 | 4 5 | 6 7      dp_shard = 2
    workers       0  |  1  |  2  |  3       the dp_replicate axis

Within a worker everything works as in a run of that worker alone: sharding, gradients, clipping.
Across workers, processes at the same position in their workers exchange the shards that they hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from gristmill.base.errors import UserError
from gristmill.config.parallel import AXES, TOPOLOGY_SIZES, Mesh, ParallelConfig, topology_misfit
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import Groups, World

INTERVAL = 0.2
"""Seconds between two messages."""


class StopAgreement:
    """Agrees with all other processes on the last step, without a collective in every step;
    `control` is used for nothing else.

    Workers may be at different steps, and between two exchanges they do not synchronize. A thread
    of each process gathers a small message from all others a few times per second:

        a process is asked to stop      all threads learn of it with the next message
        the message after that          each reports its current step, and holds at the end of it
        the same message, gathered      all stop after the largest of these steps

    A process that holds may make another one wait for an exchange, but the thread of that one
    still reports; so no process holds for longer than a message takes.
    """

    def __init__(self, control: ControlGroup, *, interval: float = INTERVAL) -> None:
        self.control, self.interval = control, interval
        self._condition = threading.Condition()
        self._step = 0
        """The current step of this process, or its next one."""
        self._asked, self._closing = False, False
        self._holding = False
        """Whether `_step` was reported as the one to hold at."""
        self._stop_step: int | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stop agreement", daemon=True)

    def start(self, step: int) -> None:
        """Start the thread, before this step."""
        self._step = step
        if self.control.size > 1:
            self._thread.start()

    def after_step(self, step: int, *, asked: bool) -> int | None:
        """The step after which all processes stop, once they agree on one. `asked`: this process
        was asked to stop."""
        if self.control.size == 1:
            return step if asked else None
        with self._condition:
            self._asked = self._asked or asked
            while self._holding and self._stop_step is None and self._failure is None:
                self._condition.wait(self.interval)
            if self._failure is not None:
                raise self._failure
            self._step = step + 1
            return self._stop_step

    def close(self) -> None:
        """Leave, together with all others."""
        with self._condition:
            self._closing = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._exchange():
                threading.Event().wait(self.interval)
        except BaseException as error:
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _exchange(self) -> bool:
        """Exchange one message with all others; returns whether to continue."""
        with self._condition:
            mine = [self._step, self._asked, self._holding, self._closing]
        gathered = self.control.all_gather(mine)
        with self._condition:
            if self._stop_step is None and all(holding for _, _, holding, _ in gathered):
                self._stop_step = max(step for step, *_ in gathered)
                self._condition.notify_all()
            elif any(asked for _, asked, _, _ in gathered):
                self._asked = self._holding = True
        return not all(closing for *_, closing in gathered)


INNER_AXES = tuple(axis for axis in AXES if axis != "dp_replicate")

Connect = Callable[[Sequence[int]], "dist.ProcessGroup | None"]


@dataclass(frozen=True)
class WorkerSet:
    """The workers that take part, and the groups of this process with its counterparts in them."""

    mine: int
    """This process's worker."""
    members: tuple[int, ...]
    """All workers that take part, in order."""
    per_node: int
    connect: Connect
    """The group of this process's counterparts in some workers, itself included; None if it is
    alone. Only its members take part in creating it."""
    on_host: bool = False
    """Whether exchanges go through host memory: the groups use gloo, and the weights are on a
    GPU."""
    interrupt: Callable[[], None] | None = None
    """Raises to stop waiting for the others."""

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        """This worker's number among those that take part."""
        return self.members.index(self.mine)


def worker_world(world: World) -> World:
    """The world of this process's worker."""
    ranks = world.mesh.group(world.rank, *INNER_AXES)
    mesh, rank = world.mesh.worker, ranks.index(world.rank)
    groups = Groups(mesh, rank, timeout=world.groups.timeout, members=ranks)
    place = replace(world.place, rank=rank, world=len(ranks))
    return World(world.device, place, mesh, groups)


def all_workers(world: World, config: ParallelConfig) -> WorkerSet:
    """The workers of a run in which all of them take part."""
    mesh, at = world.mesh, world.at

    def connect(members: Sequence[int]) -> dist.ProcessGroup | None:
        ranks = [mesh.rank({**at, "dp_replicate": worker}) for worker in members]
        return world.groups.of(ranks, purpose="exchange")

    return WorkerSet(
        mine=at["dp_replicate"],
        members=tuple(range(mesh.dp_replicate)),
        per_node=workers_per_node(config, mesh, local_world=world.place.local_world),
        connect=connect,
        on_host=world.device.kind == "cuda" and "nccl" not in _backend(),
    )


def _backend() -> str:
    return str(dist.get_backend()) if dist.is_initialized() else "nccl"


def workers_per_node(config: ParallelConfig, mesh: Mesh, *, local_world: int | None) -> int:
    """Workers on each node; refuses a topology that does not support them."""
    if mesh.dp_replicate == 1:
        return 1  # a single worker has no peers
    given = None if config.gossip is None else config.gossip.workers_per_node
    per_node, inside = given, mesh.worker.processes
    if per_node is None and local_world is not None and local_world % inside == 0:
        per_node = local_world // inside
    if per_node is None or mesh.dp_replicate % per_node:
        if TOPOLOGY_SIZES[config.topology].knows_nodes:
            held = "is not known" if per_node is None else f"is {per_node}, of {mesh.dp_replicate}"
            raise UserError(
                f"the number of workers on each node {held}, and {config.topology} needs the same "
                "number on all nodes",
                where="parallel.gossip.workers_per_node",
                remedy="set it, or choose another topology",
            )
        per_node = 1
    problem = topology_misfit(config.topology, workers=mesh.dp_replicate, per_node=per_node)
    if problem is not None:
        raise UserError([problem])
    return per_node
