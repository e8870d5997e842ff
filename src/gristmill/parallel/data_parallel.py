"""Data parallelism: gradient synchronisation, and sharding of parameters.

    dp_shard 1    every process has all weights (DDP); gradients are all-reduced
    dp_shard n    weights, gradients and optimizer state are sharded by rows (FSDP2); weights are
                  all-gathered block by block as needed, gradients are reduce-scattered

Gradients are summed, never averaged: the loss is already divided by the tokens of the whole step.
Optimizers and checkpoints see each process's shard as a plain tensor (`ShardedParameter.local`) in
both cases.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gristmill.config.parallel import ROW_AXES, Mesh, ParallelConfig
from gristmill.models.spec import CausalLM
from gristmill.parallel.sharding import ShardedParameter, ShardedParameters, ShardLayout
from gristmill.parallel.world import World

BUCKET = 2**24
"""Elements of gradients or factors per collective."""


def shard_parameters(model: CausalLM, mesh: Mesh, rank: int) -> dict[str, ShardedParameter]:
    """A process's shard of each parameter of a placed model, by name in the whole model."""
    layout, found = ShardLayout.of(model, mesh), {}
    for name, parameter in model.named_parameters():
        local = parameter
        if hasattr(parameter, "to_local"):
            local = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
        whole = model.canonical_name(name)
        # Of a parameter tied across pipeline stages, the last stage has a copy.
        owned = layout.owned(name, rank) and (whole == name or model.shard.first)
        slices = layout.slices(name, rank)
        found[whole] = ShardedParameter(whole, layout.shapes[name], local, slices, owned)
    return found


class GradientSync:
    """Synchronises the gradients of a model. This base class is for a single process."""

    def __init__(self, model: CausalLM, parameters: ShardedParameters) -> None:
        self.model, self.parameters = model, parameters
        self.forward: Callable[..., Any] = model
        """The model to call in training."""

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context for forward and backward of one micro-batch; the last one synchronises."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Put the step's gradients where the optimizer finds them."""

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for sharded in self.parameters.values():
            sharded.local.grad = None


class DDPSync(GradientSync):
    """All weights on every process; gradients are all-reduced during the backward pass."""

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
            # Deprecated since torch 2.13; earlier versions know no other name.
            warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
            self.wrapped = DistributedDataParallel(
                model,
                process_group=group,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        self.wrapped.register_comm_hook(_ReduceState(group, dtype), _reduce_hook)
        self.forward = self.wrapped

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()


class LateSync(GradientSync):
    """All weights on every process; gradients are all-reduced after the last backward pass, for
    pipelines, whose schedules compute gradients in their own order."""

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
        for bucket in buckets(gradients):
            sum_together(bucket, self.group, dtype=self.dtype)


class _ReduceState(NamedTuple):
    """The state of DDP's communication hook."""

    group: dist.ProcessGroup
    dtype: torch.dtype


def _reduce_hook(state: _ReduceState, bucket: Any) -> Any:
    """All-reduce a bucket of gradients, in the reduce dtype."""
    gradients = bucket.buffer()
    sent = gradients.to(state.dtype)
    work = dist.all_reduce(sent, group=state.group, async_op=True)

    def arrived(future: Any) -> torch.Tensor:
        return gradients if sent is gradients else gradients.copy_(sent)

    return work.get_future().then(arrived)


# DDP checks these annotations and needs types, not strings.
_reduce_hook.__annotations__.update(
    bucket=torch._C._distributed_c10d.GradBucket,
    **{"return": torch.futures.Future[torch.Tensor]},
)


def build_gradient_sync(
    model: CausalLM,
    parameters: ShardedParameters,
    world: World,
    *,
    config: ParallelConfig,
    reduce: torch.dtype,
) -> GradientSync:
    """The gradient synchronisation of a placed model."""
    if world.mesh.shards_rows:
        # Importing FSDP takes seconds.
        from gristmill.parallel.fsdp import FSDPSync

        return FSDPSync(model, parameters, config=config)
    group = world.groups.along("dp_replicate", *ROW_AXES)
    if group is None:
        return GradientSync(model, parameters)
    kind = DDPSync if world.mesh.pp == 1 else LateSync
    return kind(model, parameters, group=group, dtype=reduce)


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors in groups that are sent together."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(one.numel() for one in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def sum_together(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, dtype: torch.dtype | None = None
) -> None:
    """All-reduce tensors in place with one collective, in `dtype` if given."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    sent = flat.to(dtype or flat.dtype)
    dist.all_reduce(sent, group=group)
    parts = sent.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
