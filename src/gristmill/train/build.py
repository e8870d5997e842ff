"""Builds the world and the strategy of a run.

    open_run_world   the devices of this process, and its process groups
    build_strategy   place the model -> shard its parameters -> gradient sync -> optimizer;
                     in a decentralized run, the same for each worker, wrapped in exchanges
    place_model      meta model -> communication -> compile and checkpoint blocks -> block by block:
                     memory, initial weights, FSDP -> the same for embedding, norm and head

FSDP and torch's pipelines are imported only by runs that use them, since each import takes seconds.
JAX is an optional extra, imported only by runs on XLA devices.

No process ever holds more than its shard of the weights and one whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from gristmill.base.errors import UserError
from gristmill.base.process import ProcessInfo
from gristmill.config.model import Role
from gristmill.config.optim import KfacConfig
from gristmill.config.parallel import ROW_AXES, Mesh, ParallelConfig
from gristmill.config.resolve import Resolved, with_formats
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import World, close_world, open_world
from gristmill.models.build import build_meta_model, initialise, materialise
from gristmill.models.fp8 import Fp8Scales
from gristmill.models.lora import keep_frozen_in
from gristmill.models.recompute import Recompute
from gristmill.models.spec import CausalLM, Execution, ShardComm
from gristmill.optim.build import build_optimizer
from gristmill.optim.kfac import PreconditionedOptimizer
from gristmill.optim.spec import Optimizer
from gristmill.strategies.compiling import (
    choose_graphs,
    compile_ahead,
    compiled,
    compiled_for_training,
    start_compile_workers,
    uses_cuda_graphs,
)
from gristmill.strategies.context import heads_attention, ring_attention
from gristmill.strategies.data_parallel import GradientSync, ReplicaSync, shard_parameters
from gristmill.strategies.decentralized.strategy import Decentralized, build_mixing
from gristmill.strategies.decentralized.workers import (
    StopAgreement,
    WorkerSet,
    all_workers,
    worker_world,
)
from gristmill.strategies.kfac import build_kfac
from gristmill.strategies.matrix_exchange import ShardedMatrixExchange
from gristmill.strategies.precision import Precision
from gristmill.strategies.sharding import Offload, ShardedParameters, ShardLayout, model_shard
from gristmill.strategies.spmd import MicroBatches, SequentialMicroBatches, Spmd
from gristmill.strategies.strategy import Strategy
from gristmill.strategies.tensor import TensorParallelComm

if TYPE_CHECKING:
    from gristmill.strategies.pipeline import StageModule

_ATTENTION = {"ring": ring_attention, "heads": heads_attention}


def device_mesh(config: RunConfig, place: ProcessInfo) -> Mesh:
    """The mesh of all devices of a run. A process has one device or, with XLA, all that JAX finds
    on its host; JAX is started to count them."""
    if config.runtime.device != "xla":
        return check_mesh(config, processes=place.world)
    from gristmill.strategies.xla.backend import start_xla

    tf32 = config.precision.tf32
    return check_mesh(
        config, processes=start_xla(config.runtime, config.parallel, place, tf32=tf32)
    )


def open_run_world(
    config: RunConfig, mesh: Mesh | None = None, place: ProcessInfo | None = None
) -> World:
    """This process's device and groups, for a run on the devices of `mesh`."""
    place, open_ = (
        place or ProcessInfo(),
        partial(open_world, config.runtime, parallel=config.parallel),
    )
    if config.runtime.device != "xla":
        return open_(tf32=config.precision.tf32, mesh=mesh, place=place)
    mesh = mesh or device_mesh(config, place)
    from gristmill.strategies.xla.device import XlaDevice

    return open_(
        tf32=config.precision.tf32,
        mesh=Mesh(dp_replicate=place.world),
        place=place,
        device=XlaDevice(),
        devices=mesh,
    )


def close_run_world(world: World) -> None:
    """Disconnect from the other processes. Not after an error, since they may never answer."""
    if world.device.kind == "xla":
        from gristmill.strategies.xla.backend import leave_xla

        leave_xla()
    close_world()


def build_strategy(
    config: RunConfig,
    *,
    vocab: int,
    world: World,
    control: ControlGroup | None = None,
    resolved: Resolved | None = None,
    workers: WorkerSet | None = None,
) -> Strategy:
    """The strategy of a run, with initial weights. Without `resolved`, nothing that depends on the
    learning-rate schedule is available. `workers`: the participants of a decentralized run, if not
    all."""
    control = control or ControlGroup()
    config = with_formats(
        config, has_bf16=world.device.has_bf16, on_gpu=world.device.kind == "cuda"
    )
    if world.device.kind == "xla":
        from gristmill.strategies.xla.strategy import build_xla

        return build_xla(config, vocab=vocab, world=world, control=control)
    if not config.parallel.decentralized:
        return _build_spmd(config, vocab=vocab, world=world, control=control, resolved=resolved)
    workers = workers or all_workers(world, config.parallel)
    return Decentralized(
        config.parallel,
        inner=_build_spmd(
            config,
            vocab=vocab,
            world=worker_world(world),
            control=control,
            resolved=resolved,
            worker=workers.mine,
        ),
        workers=workers,
        slots=world.mesh.dp_replicate,
        control=control,
        agreement=StopAgreement(world.control_group("stop")),
        mixing=build_mixing(config, resolved),
        seed=config.train.seed,
    )


def _build_spmd(
    config: RunConfig,
    *,
    vocab: int,
    world: World,
    control: ControlGroup,
    resolved: Resolved | None,
    worker: int = 0,
) -> Spmd:
    precision = Precision(config.precision, world.device)
    graphs = choose_graphs(config, world, resolved)
    cuda_graphs = uses_cuda_graphs(config, world, resolved, graphs)
    ahead = None
    if graphs == "blocks" and resolved is not None:
        ahead = compile_ahead(
            config, vocab=vocab, world=world, resolved=resolved, cuda_graphs=cuda_graphs
        )
    if graphs is not None and world.device.kind == "cuda" and ahead is None:
        start_compile_workers()
    model, stages = place_model(
        config,
        vocab=vocab,
        world=world,
        precision=precision,
        graphs=graphs,
        cuda_graphs=cuda_graphs,
    )
    fp8 = blocks_in_fp8(config, model)
    parameters = shard_parameters(model, world.mesh, world.rank)
    sync = _gradient_sync(model, parameters, world, config=config.parallel, reduce=precision.reduce)
    in_one_graph = compiled(model, cuda_graphs=cuda_graphs) if graphs == "whole" else None
    micro_batches: MicroBatches = SequentialMicroBatches(model, sync, in_one_graph)
    if stages:
        from gristmill.strategies.pipeline import PipelineMicroBatches

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
    optimized = parameters if offload is None else offload.parameters
    optimizer: Optimizer = build_optimizer(
        config.optim,
        model,
        parameters={name: shard.local for name, shard in optimized.items()},
        compiled=config.runtime.compiles(world.device.kind),
        exchange=_matrix_exchange(model, world),
        kernel=model.kernels.adamw,
    )
    preconditioner, settings = None, config.optim.preconditioning
    if isinstance(settings, KfacConfig):
        preconditioner = build_kfac(settings, model, world)
        optimizer = PreconditionedOptimizer(optimizer, preconditioner)
    return Spmd(
        config,
        model=model,
        parameters=parameters,
        sync=sync,
        micro_batches=micro_batches,
        optimizer=optimizer,
        world=world,
        control=control,
        loss_scale=precision.loss_scale(),
        offload=offload,
        preconditioner=preconditioner,
        worker=worker,
        ahead=ahead,
        cuda_graphs=cuda_graphs,
        fp8=fp8,
    )


def _gradient_sync(
    model: CausalLM,
    parameters: ShardedParameters,
    world: World,
    *,
    config: ParallelConfig,
    reduce: torch.dtype,
) -> GradientSync:
    """The gradient synchronization of data-parallel processes."""
    if world.mesh.shards_rows:
        from gristmill.strategies.fsdp import FSDPSync

        return FSDPSync(model, parameters, config=config)
    group = world.groups.along("dp_replicate", *ROW_AXES)
    if group is None:
        return GradientSync(model, parameters)
    overlap = world.mesh.pp == 1
    return ReplicaSync(model, parameters, group=group, dtype=reduce, overlap=overlap)


def place_model(
    config: RunConfig,
    *,
    vocab: int,
    world: World,
    precision: Precision | None = None,
    graphs: Literal["whole", "blocks"] | None = None,
    cuda_graphs: bool = False,
) -> tuple[CausalLM, list[StageModule]]:
    """This process's shard of the model, with initial weights, and its pipeline stages, if any."""
    config = with_formats(
        config, has_bf16=world.device.has_bf16, on_gpu=world.device.kind == "cuda"
    )
    precision = precision or Precision(config.precision, world.device)
    device, seed = world.device.torch_device, config.train.seed
    layers = len(build_meta_model(config.model, vocab=vocab).block_names())
    shard = model_shard(config.parallel, world, layers=layers)
    kernels = precision.kernels(wanted=config.runtime.kernels)
    kernels = kernels._replace(document_blocks=graphs is not None and device.type == "cuda")
    execution = Execution(precision.dtype, kernels, build_comm(config, world))
    model = build_meta_model(config.model, vocab=vocab, shard=shard, execution=execution)
    if model.adapters and model.casts_weights:
        keep_frozen_in(model, precision.dtype)
    fsdp = _sharding(config, world, precision)
    blocks = [model.get_submodule(name) for name in model.block_names()]
    if graphs == "blocks":
        # Attention within documents is too slow without compilation.
        compiled_for = compiled if config.masks_documents else compiled_for_training
        for block in blocks:
            # Wrappers stay outside of the compiled function, and all blocks share one graph.
            block.forward = compiled_for(
                block.forward, whole_graph=not model.comm.forks_rng, cuda_graphs=cuda_graphs
            )
        if world.mesh.pp == 1 and fsdp is None and model.comm.single:
            for name in model.parts_beside_blocks:
                setattr(model, name, compiled_for(getattr(model, name), cuda_graphs=cuda_graphs))
    model.recompute_blocks(Recompute(config.train.recompute, config.train.recompute_every or 1))
    for block in blocks:
        _initialise(model, block, device, seed=seed)
        if fsdp is not None:
            fsdp(block, compute=precision.dtype)
    _initialise(model, model, device, seed=seed)
    if device.type != "meta":
        model.tie()
        model.reset_buffers()
    stages: list[StageModule] = []
    if world.mesh.pp > 1:
        from gristmill.strategies.pipeline import build_stages

        stages = build_stages(config.parallel, model, world, layers=layers)
    if fsdp is not None:
        roots: Sequence[nn.Module] = stages or [model]
        for root in roots:
            # Gradients of embedding and head sum over many tokens, so both stay in fp32.
            fsdp(root, compute=torch.float32)
    return model, stages


def blocks_in_fp8(config: RunConfig, model: CausalLM) -> Fp8Scales | None:
    """Switch the parts of blocks that the settings name to fp8, with these scales."""
    parts = config.precision.fp8_of_blocks
    return Fp8Scales(model.fp8_layers(parts), model.device) if parts else None


def _sharding(config: RunConfig, world: World, precision: Precision) -> Callable[..., None] | None:
    """Shards a module by rows, if this run does so."""
    if not world.mesh.shards_rows:
        return None
    from gristmill.strategies.fsdp import shard_module

    return partial(shard_module, world=world, config=config.parallel, reduce=precision.reduce)


def _initialise(model: CausalLM, module: nn.Module, device: torch.device, *, seed: int) -> None:
    """Materialise and initialise a module's meta parameters, unless the device is `meta`."""
    if device.type == "meta":
        return
    inside = set(module.parameters())
    named = model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in named if parameter.is_meta and parameter in inside]
    materialise(module, device)
    initialise(model, seed, names)


def build_comm(config: RunConfig, world: World) -> ShardComm:
    """The communication of this model shard with the other shards."""
    parallel, tp, cp = config.parallel, world.groups.along("tp"), world.groups.along("cp")
    comm = ShardComm()
    if tp is not None:
        comm = TensorParallelComm(
            tp,
            sequence_parallel=True if parallel.sequence is None else parallel.sequence,
            dropout=config.model.attention_drop > 0,
        )
    if cp is not None:
        comm.attend = partial(_ATTENTION[parallel.attention or "ring"], group=cp)
    return comm


def _matrix_exchange(model: CausalLM, world: World) -> ShardedMatrixExchange | None:
    """The exchange of matrices between processes that hold shards or copies of them, for the
    optimizer; None if it is not needed."""
    if world.mesh.processes == world.mesh.pp:
        return None
    names = [name for name, role in model.roles().items() if role is Role.MATRIX]
    return ShardedMatrixExchange(ShardLayout.of(model, world.mesh), world, names=names)
