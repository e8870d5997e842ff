"""Layers divided over processes: the collectives at their seams.

                    forward                    backward
    enter           as it is                   sum over processes
    leave           sum over processes         as it is
    with the stream divided along the sequence between blocks:
    enter           gather positions           sum, each its own positions
    leave           sum, each its own          gather positions

The second form moves as many bytes as the first and keeps a share of the stream only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from gristmill.models.spec import ShardComm

SEQUENCE = 1
"""The dimension of positions in a stream (B, T, D)."""

# torch 2.13 gave these other names.
_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


class TensorParallelComm(ShardComm):
    """Communication among the processes that share layers."""

    single = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool,
        dropout: bool,
        attend: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        # With sequence parallelism all random numbers differ already.
        self.forks_rng = dropout and not sequence_parallel
        self.attend = attend

    def enter(self, x_BTD: torch.Tensor) -> torch.Tensor:
        move = _Gathered if self.sequence_parallel else _Copied
        return move.apply(x_BTD, self.group)

    def leave(self, x_BTD: torch.Tensor) -> torch.Tensor:
        move = _Scattered if self.sequence_parallel else _Summed
        return move.apply(x_BTD, self.group)

    def local_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.sequence_parallel:
            return x
        return x.chunk(self.group.size(), dim=dim)[self.group.rank()]

    def distinct_rng(self) -> contextlib.AbstractContextManager[None]:
        return _own_numbers(self.group.rank()) if self.forks_rng else contextlib.nullcontext()

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        return _reduced(x, "max", self.group)

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        return _reduced(x, "sum", self.group)


def _reduced(x: torch.Tensor, how: str, group: dist.ProcessGroup) -> torch.Tensor:
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), how, group))


def _gathered(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = _gather(x_BTD.contiguous(), SEQUENCE, group)
    return functional.wait_tensor(whole)


def _scattered(x_BTD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    share = _scatter(x_BTD.contiguous(), "sum", SEQUENCE, group)
    return functional.wait_tensor(share)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduced(gradients[0], "sum", ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _reduced(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scattered(gradients[0], ctx.group), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(gradients[0], ctx.group), None


@contextlib.contextmanager
def _own_numbers(rank: int) -> Iterator[None]:
    """Random numbers that follow from the common ones and the rank, which go on as if nothing had
    been drawn. They are a function of the generators' state alone, so that what is computed again
    in the backward pass draws the same."""
    common = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=_used_devices()):
        torch.manual_seed(common + rank)
        yield


def _used_devices() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []
