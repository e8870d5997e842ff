"""Tensor parallelism: the collectives before and after layers that are sharded over ranks.

                    forward                    backward
    copy_to         as it is                   all-reduce
    reduce_from     all-reduce                 as it is
    with the residual stream sharded along the sequence between blocks (sequence parallel):
    copy_to         all-gather                 reduce-scatter
    reduce_from     reduce-scatter             all-gather

The second form sends as many bytes as the first, and a rank keeps only a shard of the stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from gristmill.models.spec import ShardComm

SEQUENCE = 1
"""The dimension of positions in a residual stream (B, T, D)."""

# torch 2.13 renamed these.
_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class TensorParallelComm(ShardComm):
    """Communication among the ranks that share layers."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        dropout: bool,
    ) -> None:
        # A compiled model can hold the name of any group, but only groups of torch's own type. The
        # type of a name differs between versions of torch.
        self.group: Any = group.group_name
        self.rank, self.shards = group.rank(), group.size()
        self.sequence_parallel = sequence_parallel
        # With sequence parallelism all random numbers differ already.
        self.forks_rng = dropout and not sequence_parallel

    def copy_to(self, x_BTD: torch.Tensor) -> torch.Tensor:
        pair = ("gather", "scatter") if self.sequence_parallel else ("copy", "sum")
        return _Collective.apply(x_BTD, self.group, *pair)

    def reduce_from(self, x_BTD: torch.Tensor) -> torch.Tensor:
        pair = ("scatter", "gather") if self.sequence_parallel else ("sum", "copy")
        return _Collective.apply(x_BTD, self.group, *pair)

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        if not self.sequence_parallel:
            return positions
        return positions.chunk(self.shards, dim=-1)[self.rank]

    def distinct_rng(self) -> contextlib.AbstractContextManager[None]:
        return _rng_of_rank(self.rank) if self.forks_rng else contextlib.nullcontext()

    def gather_features(self, x_NF: torch.Tensor) -> torch.Tensor:
        return _gather_along(x_NF.contiguous(), 1, self.group)

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        return _communicate(x, "max", self.group)

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        return _communicate(x, "sum", self.group)


def _communicate(x: torch.Tensor, how: str, group: Any) -> torch.Tensor:
    if how == "copy":
        return x.view_as(x)
    x = x.contiguous()
    if how == "gather":
        result = _gather_along(x, SEQUENCE, group)
    elif how == "scatter":
        result = _scatter(x, "sum", SEQUENCE, group)
    else:
        result = functional.all_reduce(x, how, group)
    return functional.wait_tensor(result)


def _gather_along(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """The shards of all processes, concatenated. Along other dimensions than the first, torch 2.11
    uses a function that it refuses to compile."""
    count = x.shape[0]
    parts = functional.wait_tensor(_gather(x, 0, group)).split(count)
    return torch.cat(parts, dim)


class _Collective(torch.autograd.Function):
    """A collective whose gradient is another collective."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, forward: str, backward: str) -> torch.Tensor:
        ctx.group, ctx.how = group, backward
        return _communicate(x, forward, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _communicate(gradients[0], ctx.how, ctx.group), None, None, None


@contextlib.contextmanager
def _rng_of_rank(rank: int) -> Iterator[None]:
    """A context whose random numbers depend on the common state and the rank, and which leaves that
    state unchanged. So recomputation in the backward pass draws the same numbers."""
    common = int(torch.randint(2**62, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(common + rank)
        yield
