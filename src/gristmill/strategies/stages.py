"""Which layers are on which rank of a pipeline."""

from __future__ import annotations

from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.distributed.world import World
from gristmill.models.spec import ModelShard


def stage_layers(config: ParallelConfig, mesh: Mesh, *, layers: int, rank: int) -> list[range]:
    """The layers of each stage of a rank of the pipeline."""
    stages = mesh.pp * config.stages_each
    each = layers // stages
    return [range(stage * each, (stage + 1) * each) for stage in range(rank, stages, mesh.pp)]


def model_shard(config: ParallelConfig, world: World, *, layers: int) -> ModelShard:
    """The part of the model on this rank."""
    at, mesh = world.at, world.mesh
    if mesh.pp == 1:
        return ModelShard(tp_rank=at["tp"], tp_size=mesh.tp)
    mine = stage_layers(config, mesh, layers=layers, rank=at["pp"])
    return ModelShard(
        tuple(layer for stage in mine for layer in stage),
        first=at["pp"] == 0,
        last=at["pp"] == mesh.pp - 1,
        tp_rank=at["tp"],
        tp_size=mesh.tp,
    )
