"""From settings and processes to the model's part here and the strategy that runs a step.

A model is put in its place in this order: its part is made without memory; it gets its links to the
other parts; block by block memory, start weights, compilation and division by rows, so that no
process ever holds more than its share and one block; then what lies around the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from gristmill.base.errors import UserError
from gristmill.config.roles import Role
from gristmill.config.schema import RunConfig
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.models.recompute import Recompute
from gristmill.models.spec import Links, Portion
from gristmill.parallel.context import heads_attention, ring_attention
from gristmill.parallel.council import Council
from gristmill.parallel.flow import Flow, Straight
from gristmill.parallel.held import Held
from gristmill.parallel.matrices import MatrixExchange
from gristmill.parallel.offload import Offload
from gristmill.parallel.pipeline import Pipeline, Stage, build_stages, pipeline_portion
from gristmill.parallel.precision import Precision
from gristmill.parallel.replicas import Replicas, build_layout, build_replicas, divide_rows
from gristmill.parallel.spmd import Spmd
from gristmill.parallel.strategy import Strategy
from gristmill.parallel.tensor import TensorLinks
from gristmill.parallel.world import World

_ATTENTION = {"ring": ring_attention, "heads": heads_attention}


GRAPHS = 128
"""Compiled versions of a function that a process may hold."""


@dataclass(frozen=True)
class Placed:
    """This process's part of the model, ready to run beside the others."""

    replicas: Replicas
    stages: list[Stage]
    """Its stages, if it is one of a pipeline."""


def place_model(config: RunConfig, *, vocab: int, world: World) -> Placed:
    """Make this process's part of the model, with start weights."""
    precision = Precision(config.precision, world.device)
    model = build_model(
        config.model,
        vocab=vocab,
        device=torch.device("meta"),
        recompute=Recompute(config.train.recompute, config.train.recompute_every or 1),
        portion=portion_of(config, world),
    )
    model.compute = precision.dtype
    model.kernels = precision.kernels(wanted=config.runtime.kernels)
    model.links = build_links(config, world)
    divide = partial(
        divide_rows,
        world=world,
        config=config.parallel,
        compute=precision.dtype,
        reduce=precision.reduce,
    )
    divides = world.mesh.divides_rows
    compiles = _compiles(config, world) == "blocks"
    for layer, block in model.blocks.items():
        _begin(block, model, f"blocks.{layer}.", world.device, seed=config.train.seed)
        if compiles:
            # The wrappers around a block stay outside, and all blocks have one graph.
            block.forward = _compiled(block.forward)
        if divides:
            divide(block)
    for name, child in model.named_children():
        if child is not model.blocks:
            _begin(child, model, f"{name}.", world.device, seed=config.train.seed)
    model.tie()
    stages = build_stages(config.parallel, model, world) if world.mesh.pp > 1 else []
    if divides:
        for module in (*stages, *(() if stages else (model,))):
            divide(module)
    replicas = build_replicas(model, world, config=config.parallel, reduce=precision.reduce)
    return Placed(replicas, stages)


def _begin(module: nn.Module, model: GPT, prefix: str, device: torch.device, *, seed: int) -> None:
    """Give a module memory and start weights; on the device `meta`, which has none, nothing."""
    if device.type == "meta":
        return
    module.to_empty(device=device)
    if module is model.rotary:
        model.rotary.fill()
    model.initialise(seed, [prefix + name for name, _ in module.named_parameters()])


def portion_of(config: RunConfig, world: World) -> Portion:
    """Which part of the model is this process's."""
    return pipeline_portion(config.parallel, world, layers=config.model.layers)


def build_links(config: RunConfig, world: World) -> Links:
    """The way from this part of a model to the others."""
    parallel, tensor, context = (
        config.parallel,
        world.groups.along("tp"),
        world.groups.along("cp"),
    )
    attend: Any = None
    if context is not None:
        attend = partial(_ATTENTION[parallel.attention or "ring"], group=context)
    if tensor is not None:
        sequence = True if parallel.sequence is None else parallel.sequence
        dropout = config.model.dropout > 0
        return TensorLinks(tensor, sequence=sequence, dropout=dropout, attend=attend)
    links = Links()
    links.attend = attend
    return links


def build_exchange(replicas: Replicas, world: World) -> MatrixExchange | None:
    """The way between processes that hold parts of matrices; None for a process alone."""
    model, mesh = replicas.model, world.mesh
    if mesh.processes == mesh.pp:
        return None
    names = [name for name, role in model.roles().items() if role is Role.MATRIX]
    return MatrixExchange(build_layout(model, mesh), world, names=names)


def build_offload(config: RunConfig, held: Mapping[str, Held], world: World) -> Offload | None:
    """Where the optimizer's state is, if not on the device."""
    if config.runtime.offload is None:
        return None
    if world.device.type != "cuda":
        raise UserError(
            f"has no effect on {world.device.type}, whose memory is the host's",
            where="runtime.offload",
            remedy="remove it",
        )
    return Offload(held)


def build_strategy(
    config: RunConfig,
    *,
    placed: Placed,
    optimizer: torch.optim.Optimizer,
    world: World,
    council: Council | None = None,
    offload: Offload | None = None,
) -> Strategy:
    """What runs the steps."""
    replicas = placed.replicas
    forward = replicas.forward
    if _compiles(config, world) == "whole":
        forward = _compiled(replicas.model)
    flow: Flow = Straight(replicas, forward)
    if placed.stages:
        flow = Pipeline(replicas, placed.stages, world, config=config.parallel)
    return Spmd(
        config,
        replicas=replicas,
        flow=flow,
        optimizer=optimizer,
        world=world,
        council=council or Council(),
        offload=offload,
    )


def _compiles(config: RunConfig, world: World) -> Literal["whole", "blocks"] | None:
    """What of the model is compiled; around blocks that exchange something the rest cannot be."""
    if not config.runtime.compiles(world.device.type):
        return None
    parted = world.mesh.processes > 1 or config.runtime.compile == "blocks"
    return "blocks" if parted else "whole"


def _compiled(function: Any) -> Any:
    """A model or a block of it as one graph, for the shapes that it meets."""
    # torch counts the versions of a function over all models of a process, stops at 8, and what has
    # to be one graph fails then.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(GRAPHS, dynamo.recompile_limit)
    return torch.compile(function, dynamic=False, fullgraph=True)
