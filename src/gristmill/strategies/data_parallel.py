"""Data parallelism: gradient synchronisation, and sharding of parameters.

    dp_shard 1    every process has all weights; gradients are all-reduced
    dp_shard n    weights, gradients and optimizer state are sharded by rows (FSDP2); weights are
                  all-gathered block by block as needed, gradients are reduce-scattered

Gradients are summed, never averaged: the loss is already divided by the tokens of the whole step.
Optimizers and checkpoints see each process's shard as a plain tensor (`ShardedParameter.local`) in
both cases.

Torch's DDP is not used. An all-reduce adds the gradients of three or more processes in an order
that depends on their positions in its buffer, and DDP rebuilds its buckets after the first backward
pass of a process. So the first step after every start would round differently, and a resumed run
would differ from an uninterrupted one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gristmill.config.parallel import Mesh
from gristmill.models.spec import CausalLM
from gristmill.strategies.sharding import ShardedParameter, ShardedParameters, ShardLayout

BUCKET = 2**23
"""Elements of gradients or factors per collective."""


def shard_parameters(model: CausalLM, mesh: Mesh, rank: int) -> dict[str, ShardedParameter]:
    """A process's shard of each parameter of a placed model, by its name in the whole model."""
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

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context for forward and backward of one micro-batch; the last one synchronises."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Store the step's gradients where the optimizer reads them."""

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for sharded in self.parameters.values():
            sharded.local.grad = None


class ReplicaSync(GradientSync):
    """All weights on every process. Gradients are all-reduced in buckets, each as soon as the last
    backward pass has computed it. Without `overlap` all are reduced after that pass, for pipelines,
    whose schedules compute gradients in their own order."""

    def __init__(
        self,
        model: CausalLM,
        parameters: ShardedParameters,
        *,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        overlap: bool,
    ) -> None:
        super().__init__(model, parameters)
        self.group, self.dtype = group, dtype
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # A backward pass computes gradients in about the reverse order of the parameters. Neither
        # the buckets nor their order may depend on anything that happens in a run.
        self._buckets = list(buckets(trained[::-1]))
        self._bucket_of = {one: at for at, bucket in enumerate(self._buckets) for one in bucket}
        self._missing: list[int] | None = None
        """How many gradients of each bucket are not computed yet, during the last backward pass."""
        self._sums: list[tuple[torch.Tensor, Any]] = []
        """The buckets that are being summed: buffer and pending work."""
        if overlap:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._computed)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self._missing = [len(bucket) for bucket in self._buckets] if last else None
        try:
            yield
        finally:
            self._missing = None

    def _computed(self, parameter: torch.Tensor) -> None:
        """Send complete buckets. All processes must start their collectives in the same order, so a
        bucket waits for those before it."""
        if self._missing is None:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._sums) < len(self._buckets) and self._missing[len(self._sums)] == 0:
            self._send(self._buckets[len(self._sums)])

    def _send(self, bucket: Sequence[torch.Tensor]) -> None:
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        buffer = torch.cat([gradient.flatten() for gradient in gradients]).to(self.dtype)
        for parameter, gradient, part in zip(
            bucket, gradients, views_of(buffer, bucket), strict=True
        ):
            # The buffer replaces the gradients, so both exist for one bucket at a time.
            parameter.grad = part if part.dtype == gradient.dtype else gradient
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        self._sums.append((buffer, work))

    def finish(self) -> None:
        # The rest after an overlapped pass: parameters that it did not use have no gradient.
        for bucket in self._buckets[len(self._sums) :]:
            self._send(bucket)
        for bucket, (buffer, work) in zip(self._buckets, self._sums, strict=True):
            work.wait()
            for parameter, part in zip(bucket, views_of(buffer, bucket), strict=True):
                assert parameter.grad is not None
                if part.dtype != parameter.dtype:
                    parameter.grad.copy_(part)
        self._sums = []


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


def sum_together(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors in place with one collective."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, views_of(flat, tensors), strict=True):
        tensor.copy_(part)


def views_of(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat buffer with the shapes of these tensors, in their order."""
    parts = buffer.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
