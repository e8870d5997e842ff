"""Weights sharded by rows with FSDP2. Imported only by runs that use it, since that takes
seconds."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gristmill.config.parallel import ROW_AXES, ParallelConfig
from gristmill.distributed.world import World
from gristmill.models.spec import CausalLM
from gristmill.strategies.data_parallel import GradientSync
from gristmill.strategies.sharding import ShardedParameters


class FSDPSync(GradientSync):
    """Weights sharded by rows (FSDP2)."""

    def __init__(
        self, model: CausalLM, parameters: ShardedParameters, *, config: ParallelConfig
    ) -> None:
        super().__init__(model, parameters)
        self.keep = config.keep or "nothing"

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        root = self.model
        assert isinstance(root, FSDPModule)
        if self.keep != "nothing":
            root.set_reshard_after_backward(last)
        if self.keep == "gradients":
            root.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def finish(self) -> None:
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            self.parameters[self.model.canonical_name(name)].local.grad = local


def shard_module(
    module: nn.Module,
    world: World,
    *,
    config: ParallelConfig,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> None:
    """Shard a module with FSDP2, except for inner modules that are already sharded. Weights are
    gathered, and gradients computed, in `compute`."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute is torch.float32 else compute,
        reduce_dtype=None if reduce is torch.float32 and compute is torch.float32 else reduce,
        cast_forward_inputs=False,
    )
    sharded = fully_shard(
        module,
        mesh=_device_mesh(world),
        # A pipeline schedule gathers weights and reduces gradients once per step.
        reshard_after_forward=config.keep in (None, "nothing") and world.mesh.pp == 1,
        mp_policy=policy,
    )
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _device_mesh(world: World) -> DeviceMesh:
    """FSDP2's device mesh: replicas (rows) of shards (columns)."""
    mesh, rank = world.mesh, world.rank
    shards = world.groups.along(*ROW_AXES)
    assert shards is not None
    # Models on the meta device are sharded too.
    kind = "cpu" if world.device.kind == "meta" else world.device.kind
    if mesh.dp_replicate == 1:
        return DeviceMesh.from_group(shards, kind, mesh_dim_names=("shard",))
    copies = world.groups.along("dp_replicate")
    assert copies is not None
    ranks = torch.tensor(mesh.group(rank, "dp_replicate", *ROW_AXES)).view(mesh.dp_replicate, -1)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([copies, shards], kind, mesh=ranks, mesh_dim_names=names)
