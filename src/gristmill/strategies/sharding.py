"""Sharding: the part of the model, and the slices of each parameter, that a process holds.

A parameter is divided at most three times: by layers over pp, within a layer over tp, as the
model's `Split`s declare, and by rows over dp_shard and cp together, if weights are sharded. Along
all other axes processes hold copies.

However a model is sharded, norms, optimizers and checkpoints see the same interface: a plain local
tensor, and the slices of the whole parameter that it consists of. Of the processes that hold a
slice, exactly one owns it, counts it in norms and writes it.

Two things that depend on this are here too: `Offload`, which keeps the optimizer's parameters in
host memory, and `gather_model`, which assembles the whole model on rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from gristmill.base.tensor_slices import (
    ShardSlice,
    TensorSlice,
    row_slices,
    split_slices,
    whole_slice,
)
from gristmill.config.parallel import ROW_AXES, Mesh, ParallelConfig
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import World
from gristmill.models.build import build_meta_model, build_model
from gristmill.models.spec import CausalLM, Execution, Kernels, ModelShard, Split
from gristmill.optim.spec import Optimizer


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


# ------------------------------------------------------------------ slices of parameters


@dataclass(frozen=True)
class ShardedParameter:
    """This process's shard of one parameter."""

    name: str
    """The parameter's name in the whole model."""
    shape: tuple[int, ...]
    """The whole parameter's shape."""
    local: nn.Parameter
    """The shard as a plain tensor, which shares memory with the model's parameter."""
    slices: tuple[ShardSlice, ...]
    """Its slices of the whole; none if the shard is empty."""
    owned: bool = True
    """Whether this process counts it in norms and writes it."""

    @property
    def writes_replicated(self) -> bool:
        """Whether this process writes the parameter's replicated state, such as step counters."""
        origin = (0,) * len(self.shape)
        return self.owned and any(part.whole.begin == origin for part in self.slices)


ShardedParameters = Mapping[str, ShardedParameter]


def whole_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """The parameters of a model that is not sharded."""
    return {
        name: ShardedParameter(
            name, tuple(parameter.shape), parameter, whole_slice(parameter.shape)
        )
        for name, parameter in model.named_parameters()
    }


def owned_squares(parameters: ShardedParameters) -> torch.Tensor:
    """The sum of squares of the gradients that this process owns."""
    gradients = [
        parameter.local.grad
        for parameter in parameters.values()
        if parameter.owned and parameter.local.grad is not None
    ]
    if not gradients:
        device = next(iter(parameters.values())).local.device
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(gradients)).square().sum()


@dataclass(frozen=True)
class ShardLayout:
    """The sharding of one pipeline stage's parameters over its processes."""

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the whole parameters."""
    splits: Mapping[str, Split]

    @classmethod
    def of(cls, model: CausalLM, mesh: Mesh) -> ShardLayout:
        shapes = model.whole_shapes()
        own = {name: shapes[name] for name, _ in model.named_parameters()}
        return cls(mesh, own, model.splits())

    def slices(self, name: str, rank: int) -> tuple[ShardSlice, ...]:
        """The slices of a parameter that a process holds, and where they are in its tensor."""
        shape, place = self.shapes[name], self.mesh.place(rank)
        slices, local = whole_slice(shape), list(shape)
        if name in self.splits:
            dim, parts = self.splits[name]
            slices = split_slices(shape, dim=dim, parts=parts, rank=place["tp"], ranks=self.mesh.tp)
            local[dim] //= self.mesh.tp
        if self.mesh.shards_rows:
            group = self.mesh.group(rank, *ROW_AXES)
            slices = row_slices(slices, local, rank=group.index(rank), ranks=len(group))
        return slices

    def owned(self, name: str, rank: int) -> bool:
        """Whether a process owns its slices, among all that hold copies. The owner depends on the
        name, to spread writing over the copies."""
        axes = [*self.mesh.copy_axes, *(() if name in self.splits else ("tp",))]
        holders = self.mesh.group(rank, *axes)
        return holders[crc32(name.encode()) % len(holders)] == rank


# ------------------------------------------------------------------ offloading and gathering


class Offload:
    """Host copies of a process's parameters, for models too large for the device.

        device    weights, gradients, activations
        host      a copy of this process's trained weights, and all optimizer state

    A step copies gradients to the host, updates the weights there, and copies them back: 8 bytes
    over the bus per parameter, amortised over the micro-batches of a step. To the optimizer and to
    checkpoints, the host copies are the parameters.
    """

    def __init__(self, parameters: ShardedParameters) -> None:
        self.on_device = {
            n: parameter for n, parameter in parameters.items() if parameter.local.requires_grad
        }
        self.parameters = dict(parameters)
        for name, one in self.on_device.items():
            copy = torch.empty_like(one.local, device="cpu", pin_memory=one.local.is_cuda)
            copy.copy_(one.local.detach())
            local = nn.Parameter(copy, one.local.requires_grad)
            self.parameters[name] = replace(one, local=local)

    def send_weights(self) -> None:
        """Copy the host's weights to the device."""
        for name, one in self.on_device.items():
            host = self.parameters[name].local.detach()
            one.local.detach().copy_(host, non_blocking=True)

    def step(self, optimizer: Optimizer, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Step the optimizer with the device's gradients."""
        for name, one in self.on_device.items():
            gradient, host = one.local.grad, self.parameters[name].local
            host.grad = None if gradient is None else gradient.to("cpu", non_blocking=True)
        # These blocking copies also wait for the gradients queued before them.
        optimizer.step(divisor=divisor.cpu(), skip=skip.cpu())
        self.send_weights()
        for name in self.on_device:
            self.parameters[name].local.grad = None


ROOM = 1.25
"""Memory for generation, as a multiple of the weights."""


def gather_model(
    shard: CausalLM, parameters: ShardedParameters, world: World, control: ControlGroup
) -> CausalLM | None:
    """The whole model on rank 0, to generate samples; None on the others. A collective call.

    Weights are sent slice by slice over the host network, so other ranks need no extra memory. It
    takes as long as sending the model once."""
    owned = [parameter for parameter in parameters.values() if parameter.owned and parameter.slices]
    announced = control.gather(
        [[one.name, [[part.whole.begin, part.whole.end] for part in one.slices]] for one in owned]
    )
    if not control.is_rank0:
        for one in owned:
            for tensor in _local_slices(one):
                dist.send(tensor, group_dst=0, group=control.group)
        return None
    whole = _empty_whole(shard, world)
    target = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for rank, names in enumerate(announced):
        for name, bounds in names:
            local = iter(_local_slices(parameters[name])) if rank == 0 else None
            for begin, end in bounds:
                where = TensorSlice(tuple(begin), tuple(end))
                if local is not None:
                    tensor = next(local)
                else:
                    tensor = torch.empty(where.shape)
                    dist.recv(tensor, group_src=rank, group=control.group)
                # Padding rows of a sharded vocabulary are not part of the whole model.
                common = where.intersect(TensorSlice.whole(target[name].shape))
                if common is not None:
                    part = tensor[common.relative_to(where).slices]
                    target[name][common.slices] = part.to(target[name].device)
    whole.eval()
    return whole


def _empty_whole(shard: CausalLM, world: World) -> CausalLM:
    """An empty whole model in its compute dtype; on the host if the device has too little free
    memory."""
    meta_model = build_meta_model(shard.config, vocab=shard.vocab)
    size = shard.compute.itemsize * sum(parameter.numel() for parameter in meta_model.parameters())
    free = world.device.free_memory()
    fits = free is None or ROOM * size < free
    device = world.device.torch_device if fits else torch.device("cpu")
    execution = Execution(shard.compute, shard.kernels if fits else Kernels())
    return build_model(
        shard.config, vocab=shard.vocab, device=device, execution=execution, dtype=shard.compute
    )


def _local_slices(parameter: ShardedParameter) -> list[torch.Tensor]:
    local = parameter.local.detach().cpu().float()
    return [local[part.local.slices].contiguous() for part in parameter.slices]
