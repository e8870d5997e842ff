"""Data parallel: how gradients of the same weights come together, and who keeps what.

    dp_shard 1    every process has all weights (DDP); gradients are summed over the processes
    dp_shard n    weights, gradients and optimizer state are divided by rows (FSDP2); weights are
                  gathered block by block for the time they are needed, gradients summed into shares

Gradients are summed, never averaged: the loss was divided by the tokens of the whole step already.
What a process keeps of each parameter is reached as a plain tensor (`Held.local`), so that
optimizers and checkpoints need not know which of the two it is.
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

from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.models.gpt import GPT
from gristmill.parallel.held import Held
from gristmill.parallel.layout import SHARED, Layout
from gristmill.parallel.world import World

BUCKET = 2**24
"""Elements of gradients that are sent at once."""


class Replicas:
    """One process's model among those that see other parts of the batch. This is the plain one,
    which is alone."""

    def __init__(self, model: GPT, layout: Layout, rank: int) -> None:
        self.model = model
        self.forward: Callable[..., Any] = model
        self.held = {
            model.whole_name(name): _held(model, name, parameter, layout, rank)
            for name, parameter in model.named_parameters()
        }
        self._parameters = dict(model.named_parameters())

    def summing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Within it one micro-batch runs forward and backward; the step's gradients must be
        complete after the last."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Make the step's gradients those of the held tensors."""

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for held in self.held.values():
            held.local.grad = None


def _held(model: GPT, name: str, parameter: nn.Parameter, layout: Layout, rank: int) -> Held:
    local = parameter
    if isinstance(parameter, DTensor):
        local = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
    whole = model.whole_name(name)
    # The head at the end of a pipeline that is tied to an embedding at its beginning is a copy.
    owned = layout.owned(name, rank) and (whole == name or model.portion.first)
    return Held(whole, layout.shapes[name], local, layout.pieces(name, rank), owned)


class Copies(Replicas):
    """All weights on every process, gradients summed while the backward pass goes on."""

    def __init__(
        self, model: GPT, layout: Layout, rank: int, *, group: dist.ProcessGroup, dtype: torch.dtype
    ) -> None:
        super().__init__(model, layout, rank)
        with warnings.catch_warnings():
            # The name that torch 2.13 prefers is unknown to those before it.
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

    def summing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()


class LateCopies(Replicas):
    """All weights on every process, gradients summed after the last backward pass: for pipelines,
    whose schedules compute gradients in an order of their own."""

    def __init__(
        self, model: GPT, layout: Layout, rank: int, *, group: dist.ProcessGroup, dtype: torch.dtype
    ) -> None:
        super().__init__(model, layout, rank)
        self.group, self.dtype = group, dtype

    def settle(self) -> None:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        for bucket in _buckets(gradients):
            sum_together(bucket, self.group, dtype=self.dtype)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors in the order given, so many at a time as are sent at once."""
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


class Shares(Replicas):
    """Weights divided by rows."""

    def __init__(self, model: GPT, layout: Layout, rank: int, *, config: ParallelConfig) -> None:
        super().__init__(model, layout, rank)
        self.keep = config.keep or "nothing"

    def summing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        root = self.model
        assert isinstance(root, FSDPModule)
        if self.keep != "nothing":
            root.set_reshard_after_backward(last)
        if self.keep == "gradients":
            root.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def settle(self) -> None:
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            local = None if gradient is None else _local(gradient)
            self.held[self.model.whole_name(name)].local.grad = local


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def divide_rows(
    module: nn.Module,
    world: World,
    *,
    config: ParallelConfig,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> None:
    """Let FSDP2 divide a module's weights; those of modules inside that are divided already stay
    so."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute is torch.float32 else compute,
        reduce_dtype=None if reduce is torch.float32 and compute is torch.float32 else reduce,
        cast_forward_inputs=False,
    )
    divided = fully_shard(
        module,
        mesh=_device_mesh(world),
        # A pipeline's schedule gathers weights and sums gradients once in a step.
        reshard_after_forward=config.keep in (None, "nothing") and world.mesh.pp == 1,
        mp_policy=policy,
    )
    divided.set_gradient_divide_factor(1.0)
    divided.set_force_sum_reduction_for_comms(True)


def _device_mesh(world: World) -> DeviceMesh:
    """The processes that hold copies (rows) of shares (columns), as FSDP2 wants them."""
    mesh, rank = world.mesh, world.rank
    shares = world.groups.along(*SHARED)
    assert shares is not None
    # A model without memory is divided too, but not on a device.
    kind = "cpu" if world.device.type == "meta" else world.device.type
    if mesh.dp_replicate == 1:
        return DeviceMesh.from_group(shares, kind, mesh_dim_names=("share",))
    copies = world.groups.along("dp_replicate")
    assert copies is not None
    ranks = torch.tensor(mesh.group(rank, "dp_replicate", *SHARED)).view(mesh.dp_replicate, -1)
    names = ("copy", "share")
    return DeviceMesh.from_group([copies, shares], kind, mesh=ranks, mesh_dim_names=names)


def build_replicas(
    model: GPT, world: World, *, config: ParallelConfig, reduce: torch.dtype
) -> Replicas:
    """What a model needs that is prepared for its place in the mesh."""
    layout = build_layout(model, world.mesh)
    if world.mesh.divides_rows:
        return Shares(model, layout, world.rank, config=config)
    group = world.groups.along("dp_replicate", *SHARED)
    if group is None:
        return Replicas(model, layout, world.rank)
    kind = Copies if world.mesh.pp == 1 else LateCopies
    return kind(model, layout, world.rank, group=group, dtype=reduce)


def build_layout(model: GPT, mesh: Mesh) -> Layout:
    """How the parameters of a model's part lie on the processes that share it."""
    shapes = {name: model.whole_shape(name) for name, _ in model.named_parameters()}
    return Layout(mesh, shapes, model.splits())


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
