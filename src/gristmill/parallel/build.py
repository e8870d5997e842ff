"""From settings and processes to a strategy, which runs the steps: read it from top to bottom.

    build_strategy   place the model -> shard its parameters -> gradient sync -> optimizer
    place_model      outline without memory -> communication -> block by block: memory, start
                     weights, compilation, FSDP -> what lies around the blocks

No process ever holds more than its shard of the weights and one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from gristmill.base.errors import UserError
from gristmill.config.roles import Role
from gristmill.config.schema import RunConfig
from gristmill.models.build import materialise, outline_model
from gristmill.models.recompute import Recompute
from gristmill.models.spec import CausalLM, ShardComm
from gristmill.optim.build import build_optimizer
from gristmill.parallel.context import heads_attention, ring_attention
from gristmill.parallel.control import ControlGroup
from gristmill.parallel.data_parallel import build_gradient_sync, shard_module, shard_parameters
from gristmill.parallel.microbatches import MicroBatches, SequentialMicroBatches
from gristmill.parallel.muon_exchange import ShardedMuonExchange
from gristmill.parallel.offload import Offload
from gristmill.parallel.pipeline import PipelineMicroBatches, StageModule, build_stages, model_shard
from gristmill.parallel.precision import Precision
from gristmill.parallel.sharding import ShardLayout
from gristmill.parallel.spmd import Spmd
from gristmill.parallel.strategy import Strategy
from gristmill.parallel.tensor import TensorParallelComm
from gristmill.parallel.world import World

_ATTENTION = {"ring": ring_attention, "heads": heads_attention}

GRAPHS = 128
"""Compiled versions of a function that a process may hold."""


def build_strategy(
    config: RunConfig, *, vocab: int, world: World, control: ControlGroup | None = None
) -> Strategy:
    """Everything that runs the steps of a run, with start weights in place."""
    precision = Precision(config.precision, world.device)
    model, stages = place_model(config, vocab=vocab, world=world, precision=precision)
    parameters = shard_parameters(model, world.mesh, world.rank)
    sync = build_gradient_sync(
        model, parameters, world, config=config.parallel, reduce=precision.reduce
    )
    compiled = None
    if _compiles(config, world) == "whole":
        compiled = _compiled(model)
    micro_batches: MicroBatches = SequentialMicroBatches(model, sync, compiled)
    if stages:
        micro_batches = PipelineMicroBatches(model, stages, world, config=config.parallel)
    offload = None
    if config.runtime.offload is not None:
        if world.device.kind != "cuda":
            raise UserError(
                f"has no effect on {world.device.kind}, whose memory is the host's",
                where="runtime.offload",
                remedy="remove it",
            )
        offload = Offload(parameters)
    moved = parameters if offload is None else offload.parameters
    optimizer = build_optimizer(
        config.optim,
        model,
        parameters={name: one.local for name, one in moved.items()},
        compiled=config.runtime.compiles(world.device.kind),
        exchange=_muon_exchange(model, world),
    )
    return Spmd(
        config,
        model=model,
        parameters=parameters,
        sync=sync,
        micro_batches=micro_batches,
        optimizer=optimizer,
        world=world,
        control=control or ControlGroup(),
        loss_scale=precision.loss_scale(),
        offload=offload,
    )


def place_model(
    config: RunConfig, *, vocab: int, world: World, precision: Precision | None = None
) -> tuple[CausalLM, list[StageModule]]:
    """This process's shard of the model, with start weights, and its stages if it is one of a
    pipeline."""
    precision = precision or Precision(config.precision, world.device)
    device, seed = world.device.torch_device, config.train.seed
    layers = len(outline_model(config.model, vocab=vocab).block_names())
    shard = model_shard(config.parallel, world, layers=layers)
    model = outline_model(config.model, vocab=vocab, shard=shard)
    model.compute = precision.dtype
    kernels = precision.kernels(wanted=config.runtime.kernels)
    compiled = _compiles(config, world) is not None
    model.kernels = kernels._replace(document_blocks=compiled and device.type == "cuda")
    model.comm = build_comm(config, world)
    fsdp = partial(shard_module, world=world, config=config.parallel, reduce=precision.reduce)
    blocks = [model.get_submodule(name) for name in model.block_names()]
    if _compiles(config, world) == "blocks":
        for block in blocks:
            # Wrappers stay outside of what is compiled, and all blocks have one graph.
            block.forward = _compiled(block.forward, whole_graph=not model.comm.forks_rng)
    model.recompute_blocks(Recompute(config.train.recompute, config.train.recompute_every or 1))
    for block in blocks:
        _begin(model, block, device, seed=seed)
        if world.mesh.shards_rows:
            fsdp(block, compute=precision.dtype)
    _begin(model, model, device, seed=seed)
    if device.type != "meta":
        model.tie()
        model.reset_buffers()
    stages = build_stages(config.parallel, model, world, layers=layers) if world.mesh.pp > 1 else []
    if world.mesh.shards_rows:
        ends: Sequence[nn.Module] = stages or [model]
        for module in ends:
            # Embedding and head sum their gradients over many tokens: in fp32, and so are gathered.
            fsdp(module, compute=torch.float32)
    return model, stages


def _begin(model: CausalLM, module: nn.Module, device: torch.device, *, seed: int) -> None:
    """Give what has no memory yet in a module of a model memory and start weights; on the device
    `meta`, which has none, nothing."""
    if device.type == "meta":
        return
    inside = set(module.parameters())
    named = model.named_parameters(remove_duplicate=False)
    names = [name for name, one in named if one.is_meta and one in inside]
    materialise(module, device)
    model.initialise(seed, names)


def build_comm(config: RunConfig, world: World) -> ShardComm:
    """How this model shard communicates with the others."""
    parallel, tensor, context = (
        config.parallel,
        world.groups.along("tp"),
        world.groups.along("cp"),
    )
    attend: Any = None
    if context is not None:
        attend = partial(_ATTENTION[parallel.attention or "ring"], group=context)
    if tensor is not None:
        return TensorParallelComm(
            tensor,
            sequence_parallel=True if parallel.sequence is None else parallel.sequence,
            dropout=config.model.dropout > 0,
            attend=attend,
        )
    comm = ShardComm()
    comm.attend = attend
    return comm


def _muon_exchange(model: CausalLM, world: World) -> ShardedMuonExchange | None:
    """Communication between processes that hold shards of matrices; None for a process alone."""
    if world.mesh.processes == world.mesh.pp:
        return None
    names = [name for name, role in model.roles().items() if role is Role.MATRIX]
    return ShardedMuonExchange(ShardLayout.of(model, world.mesh), world, names=names)


def _compiles(config: RunConfig, world: World) -> Literal["whole", "blocks"] | None:
    """What of the model is compiled. Around blocks that communicate the rest cannot be. And in one
    graph with the whole model, torch 2.11 computes wrong gradients of attention in blocks."""
    if not config.runtime.compiles(world.device.kind):
        return None
    masked = config.data.documents == "masked" or config.data.reset_attention
    blocks = world.mesh.processes > 1 or config.runtime.compile == "blocks" or masked
    return "blocks" if blocks else "whole"


def _compiled(function: Any, *, whole_graph: bool = True) -> Any:
    """A model or a block of it, compiled for the shapes that it meets."""
    # torch counts the versions of a function over all models of a process, stops at 8, and what has
    # to be one graph fails then.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(GRAPHS, dynamo.recompile_limit)
    return torch.compile(function, dynamic=False, fullgraph=whole_graph)
