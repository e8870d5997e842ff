"""Data parallelism: how the gradients of all processes come together, and who keeps what.

    dp_shard 1    every process has all weights (DDP); gradients are summed over the processes
    dp_shard n    weights, gradients and optimizer state are sharded by rows (FSDP2); weights are
                  gathered block by block while they are needed, gradients are reduce-scattered

Gradients are summed, never averaged: the loss was divided by the tokens of the whole step already.
What a process keeps of each parameter is reached as a plain tensor (`ShardedParameter.local`), so
that optimizers and checkpoints need not know which of the two it is.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gristmill.config.parallel import ROW_AXES, Mesh, ParallelConfig
from gristmill.models.spec import CausalLM
from gristmill.parallel.sharding import ShardedParameter, ShardedParameters, ShardLayout
from gristmill.parallel.world import World

BUCKET = 2**24
"""Elements of gradients that are sent at once."""


def shard_parameters(model: CausalLM, mesh: Mesh, rank: int) -> dict[str, ShardedParameter]:
    """What a process keeps of each parameter of a model that is in its place, by name in the whole
    model."""
    layout, found = ShardLayout.of(model, mesh), {}
    for name, parameter in model.named_parameters():
        local = parameter
        if isinstance(parameter, DTensor):
            local = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
        whole = model.canonical_name(name)
        # Of a parameter that both ends of a pipeline hold, the last stage has a copy.
        owned = layout.owned(name, rank) and (whole == name or model.shard.first)
        slices = layout.slices(name, rank)
        found[whole] = ShardedParameter(whole, layout.shapes[name], local, slices, owned)
    return found


class GradientSync:
    """How the gradients of a model come together. This is for a process that is alone."""

    def __init__(self, model: CausalLM, parameters: ShardedParameters) -> None:
        self.model, self.parameters = model, parameters
        self.forward: Callable[..., Any] = model
        """The model as training calls it."""

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Within it one micro-batch runs forward and backward; gradients are those of all processes
        after the last."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Put the step's gradients where the optimizer finds them."""

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for sharded in self.parameters.values():
            sharded.local.grad = None


class DDPSync(GradientSync):
    """All weights on every process, gradients summed while the backward pass runs."""

    def __init__(
        self,
        model: CausalLM,
        parameters: ShardedParameters,
        *,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, parameters)
        with warnings.catch_warnings():
            # torch 2.13 deprecates the only name that earlier versions know.
            warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
            self.wrapped = DistributedDataParallel(
                model,
                process_group=group,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        self.wrapped.register_comm_hook(_Summing(group, dtype), _start_sum)
        self.forward = self.wrapped

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()


class LateSync(GradientSync):
    """All weights on every process, gradients summed after the last backward pass: for pipelines,
    whose schedules compute gradients in an order of their own."""

    def __init__(
        self,
        model: CausalLM,
        parameters: ShardedParameters,
        *,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(model, parameters)
        self.group, self.dtype = group, dtype

    def finish(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for bucket in _buckets(gradients):
            sum_together(bucket, self.group, dtype=self.dtype)


class FSDPSync(GradientSync):
    """Weights sharded by rows."""

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


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors in the order given, in lists that are sent at once."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


class _Summing(NamedTuple):
    """How gradients are summed."""

    group: dist.ProcessGroup
    dtype: torch.dtype


def _start_sum(how: _Summing, bucket: Any) -> Any:
    """Sum a bucket of gradients, in a narrower format if that is asked for."""
    gradients = bucket.buffer()
    sent = gradients.to(how.dtype)
    work = dist.all_reduce(sent, group=how.group, async_op=True)

    def arrived(future: Any) -> torch.Tensor:
        return gradients if sent is gradients else gradients.copy_(sent)

    return work.get_future().then(arrived)


# DDP reads these, and knows types only, not their names.
_start_sum.__annotations__.update(
    bucket=torch._C._distributed_c10d.GradBucket,
    **{"return": torch.futures.Future[torch.Tensor]},
)


def shard_module(
    module: nn.Module,
    world: World,
    *,
    config: ParallelConfig,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> None:
    """Let FSDP2 shard a module's weights, apart from those of inner modules that are sharded
    already. Weights are gathered in the number format `compute`, in which gradients arrive too."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute is torch.float32 else compute,
        reduce_dtype=None if reduce is torch.float32 and compute is torch.float32 else reduce,
        cast_forward_inputs=False,
    )
    sharded = fully_shard(
        module,
        mesh=_device_mesh(world),
        # A pipeline's schedule gathers weights and sums gradients once in a step.
        reshard_after_forward=config.keep in (None, "nothing") and world.mesh.pp == 1,
        mp_policy=policy,
    )
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _device_mesh(world: World) -> DeviceMesh:
    """The processes that hold copies (rows) of shards (columns), as FSDP2 wants them."""
    mesh, rank = world.mesh, world.rank
    shards = world.groups.along(*ROW_AXES)
    assert shards is not None
    # A model without memory is sharded too, but not on a device.
    kind = "cpu" if world.device.kind == "meta" else world.device.kind
    if mesh.dp_replicate == 1:
        return DeviceMesh.from_group(shards, kind, mesh_dim_names=("shard",))
    copies = world.groups.along("dp_replicate")
    assert copies is not None
    ranks = torch.tensor(mesh.group(rank, "dp_replicate", *ROW_AXES)).view(mesh.dp_replicate, -1)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([copies, shards], kind, mesh=ranks, mesh_dim_names=names)


def build_gradient_sync(
    model: CausalLM,
    parameters: ShardedParameters,
    world: World,
    *,
    config: ParallelConfig,
    reduce: torch.dtype,
) -> GradientSync:
    """How the gradients of a model that is in its place in the mesh come together."""
    if world.mesh.shards_rows:
        return FSDPSync(model, parameters, config=config)
    group = world.groups.along("dp_replicate", *ROW_AXES)
    if group is None:
        return GradientSync(model, parameters)
    kind = DDPSync if world.mesh.pp == 1 else LateSync
    return kind(model, parameters, group=group, dtype=reduce)


def sum_together(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, dtype: torch.dtype | None = None
) -> None:
    """Sum tensors over a group, each in its place, in one go; sent in another format if given."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sent = flat.to(dtype or flat.dtype)
    dist.all_reduce(sent, group=group)
    parts = sent.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
