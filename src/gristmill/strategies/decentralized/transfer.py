"""Sums over a group of workers, in a number format of few bytes.

    fp32           all-reduce
    two workers    each sends its payload to the other
    top-k          each sends its payload to all others: a sum has more elements than its terms
    bf16, int8     all-to-all: worker i gets the i-th chunk of all others and sums it in fp32;
                   all-gather: it sends the sum of its chunk to all others, again in this format if
                   `round_sum` allows that, else in fp32

Whatever the way, all members of a group get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from gristmill.distributed.control import wait_for
from gristmill.strategies.decentralized.codecs import BLOCK, Codec, TopKCodec

_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since torch 2.13, which warns of the old one."""


class GroupSum(NamedTuple):
    """The sum over a group, and what this process contributed to it."""

    total: torch.Tensor
    own: torch.Tensor
    """What the others got of this process's values: the values themselves, if nothing is lost."""
    sent: int
    """Bytes that this process sent."""


@dataclass(frozen=True)
class Transfer:
    """Sums tensors over groups of workers."""

    codec: Codec
    on_host: bool = False
    """Whether what is sent goes through host memory."""
    interrupt: Callable[[], None] | None = None
    """Raises if waiting for the others no longer makes sense."""

    def sum(self, values: torch.Tensor, group: dist.ProcessGroup, *, round_sum: bool) -> GroupSum:
        """The sum of flat fp32 values over a group."""
        codec, size, n = self.codec, group.size(), values.numel()
        if not codec.lossy:
            total = self.all_reduce(values.clone(), group)
            return GroupSum(total, values, all_reduce_bytes(4 * n, size))
        if size > 2 and not isinstance(codec, TopKCodec):
            return self._sum_chunks(values, group, round_sum=round_sum)
        payload = codec.encode(values)
        payloads = self._all_gather(payload, group)
        decoded = [codec.decode(one, n) for one in payloads.view(size, -1)]
        total = torch.stack(decoded).sum(0) if size == 2 else _sum_in_order(decoded)
        return GroupSum(total, decoded[group.rank()], (size - 1) * payload.numel())

    def all_reduce(self, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The exact sum, in place."""
        sent = self._staged(values)
        work = dist.all_reduce(sent, group=group, async_op=True)
        wait_for(work, self.interrupt, group=group)
        return values if sent is values else values.copy_(sent)

    def _sum_chunks(
        self, values: torch.Tensor, group: dist.ProcessGroup, *, round_sum: bool
    ) -> GroupSum:
        codec, size, n = self.codec, group.size(), values.numel()
        unit = size * BLOCK
        chunks = pad(values, (0, -n % unit)).view(size, -1)
        length = chunks.shape[1]
        sent = torch.stack([codec.encode(chunk) for chunk in chunks])
        staged = self._staged(sent)
        received = torch.empty_like(staged)
        work = dist.all_to_all_single(received, staged, group=group, async_op=True)
        wait_for(work, self.interrupt, group=group)
        received = received.to(sent.device)
        mine = _sum_in_order([codec.decode(one, length) for one in received])
        own = torch.cat([codec.decode(one, length) for one in sent])[:n]
        if round_sum:
            payloads = self._all_gather(codec.encode(mine), group).view(size, -1)
            total = torch.cat([codec.decode(one, length) for one in payloads])
        else:
            payloads = self._all_gather(mine, group)
            total = payloads
        bytes_sent = (size - 1) * (sent[0].numel() + payloads.nbytes // size)
        return GroupSum(total[:n], own, bytes_sent)

    def _all_gather(self, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sent = self._staged(values.contiguous())
        count, pinned = group.size() * values.numel(), sent.is_pinned()
        gathered = torch.empty(count, dtype=sent.dtype, device=sent.device, pin_memory=pinned)
        work = _gather_flat(gathered, sent, group=group, async_op=True)
        wait_for(work, self.interrupt, group=group)
        return gathered.to(values.device)

    def _staged(self, values: torch.Tensor) -> torch.Tensor:
        """What the network takes: the values, or a copy in pinned host memory."""
        if not self.on_host or not values.is_cuda:
            return values
        return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)


def all_reduce_bytes(size: int, ranks: int) -> int:
    """What each rank sends in an all-reduce of so many bytes."""
    return 2 * (ranks - 1) * size // ranks


def _sum_in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
