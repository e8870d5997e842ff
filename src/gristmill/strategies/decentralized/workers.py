"""The workers of a decentralized run: copies of the model, each with weights of its own.

    processes    0 1 | 2 3 | 4 5 | 6 7      dp_shard = 2
    workers       0  |  1  |  2  |  3       the dp_replicate axis

Inside a worker everything is as in a run of that worker alone: sharding, gradients, clipping.
Across workers, processes at the same place in their workers exchange the shards that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from gristmill.base.errors import UserError
from gristmill.config.parallel import AXES, TOPOLOGY_SIZES, Mesh, ParallelConfig, topology_misfit
from gristmill.distributed.world import Groups, World

INNER_AXES = tuple(axis for axis in AXES if axis != "dp_replicate")

Connect = Callable[[Sequence[int]], "dist.ProcessGroup | None"]


@dataclass(frozen=True)
class WorkerSet:
    """The workers that take part, and how this process reaches its counterparts in them."""

    mine: int
    """This process's worker."""
    members: tuple[int, ...]
    """All workers that take part, in order."""
    per_node: int
    connect: Connect
    """The group of this process's counterparts in some workers, itself included; None if it is
    alone. Only its members take part in creating it."""
    on_host: bool = False
    """Whether exchanges go through host memory: the network of the groups is the host's, and the
    weights are on a GPU."""
    interrupt: Callable[[], None] | None = None
    """Raises if waiting for the others no longer makes sense."""

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
    """Workers on each node; refuses a topology that they do not fit."""
    if mesh.dp_replicate == 1:
        return 1  # it has nobody to exchange with
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
