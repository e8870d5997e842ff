"""Attention over sequences that are sharded over ranks (context parallel).

A sequence is cut into 2R chunks for R ranks, and rank r holds chunks r and 2R-1-r. Early positions
see few keys and late ones see many, so that every rank has the same amount of work:

    R = 4    chunk    0  1  2  3  4  5  6  7
             rank     0  1  2  3  3  2  1  0

There are two ways to attend:

    ring    Each rank sends keys and values to the next one while it attends to those that it has.
            In the first of R steps these are its own, and attention is causal. All queries see
            keys of an earlier rank, but only its first chunk; only the second chunk of queries
            sees keys of a later rank. The unseen half is never computed. The backward pass sends
            keys and values round again, and their gradients with them.
    heads   One all-to-all gives every rank the whole sequence for some of the heads, another one
            returns the result. In between is ordinary attention.

The ring sends R-1 times a rank's keys and values, hidden behind computation where chunks are long,
for any number of heads; the backward pass sends their gradients too, in fp32 since R of them are
summed. The all-to-all sends queries, keys, values and results once, and hides nothing.

Operations that communicate are registered with torch as custom operators, so that a compiled model
holds them in one graph. They take a group by its name; "" stands for a group of one rank.

Shapes: B samples, T positions of this rank, H heads, G key and value heads, K head width; R ranks,
h heads of one of them, S positions of all. A leading 2 is keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from gristmill.models.spec import document_mask
from gristmill.strategies.attention import (
    KeyBlock,
    PartialAttention,
    attend,
    attend_backward,
    merge,
    repeat_heads,
    sum_dtype,
)

# ------------------------------------------------------------------ sharding


def shard_sequence(x: torch.Tensor, dim: int, *, rank: int, ranks: int) -> torch.Tensor:
    """A rank's shard of a tensor with a whole sequence along `dim`."""
    assert x.shape[dim] % (2 * ranks) == 0, f"{x.shape[dim]} positions in {2 * ranks} chunks"
    if ranks == 1:
        return x
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def unshard_sequence(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The tensor of which these are the shards, by rank."""
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]], dim)


def shard_positions(rank: int, ranks: int, length: int) -> torch.Tensor:
    """The positions of a rank's shard in a whole sequence of this length, on the CPU."""
    return shard_sequence(torch.arange(length, device="cpu"), 0, rank=rank, ranks=ranks)


def _group_name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name


def _group(name: str) -> dist.ProcessGroup | None:
    # The type of a group's name differs between versions of torch.
    by_name: Any = dist.distributed_c10d
    return by_name._resolve_process_group(name) if name else None


# ------------------------------------------------------------------ the ring


class _RingTransfer(NamedTuple):
    """Tensors that are being received, and those sent, which must not change meanwhile."""

    received: list[torch.Tensor]
    sent: list[torch.Tensor]
    works: list[dist.Work]

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.received


class RingStep(NamedTuple):
    """Which of a rank's queries see which of another rank's keys."""

    queries: slice
    keys: slice
    own: bool


def ring_step(rank: int, source: int, length: int) -> RingStep:
    """What `rank` computes with the keys of `source`; each has `length` positions."""
    everything, half = slice(None), length // 2
    if source < rank:
        return RingStep(everything, slice(0, half), own=False)
    return RingStep(slice(half, None) if source > rank else everything, everything, source == rank)


class _Ring:
    """This rank's place in the ring, and its inputs of attention."""

    def __init__(
        self,
        query_BHTK: torch.Tensor,
        key_BGTK: torch.Tensor,
        value_BGTK: torch.Tensor,
        documents_BT: torch.Tensor | None,
        scale: float,
        group: str,
    ) -> None:
        self.group = _group(group)
        self.rank = 0 if self.group is None else self.group.rank()
        self.size = 1 if self.group is None else self.group.size()
        self.query, self.documents, self.scale = _aligned(query_BHTK), documents_BT, scale
        self.held = [torch.stack((key_BGTK, value_BGTK))]
        if documents_BT is not None:
            self.held.append(documents_BT.contiguous())

    def send(self, tensors: list[torch.Tensor]) -> _RingTransfer:
        """Start to send tensors to the next rank, and to receive the like from the one before."""
        if self.group is None or self.size == 1:
            return _RingTransfer(tensors, [], [])
        after = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, after, self.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in received]
        return _RingTransfer(received, tensors, dist.batch_isend_irecv(operations))

    def steps(self) -> Iterator[tuple[RingStep, KeyBlock]]:
        """The keys of all ranks, own ones first; the next are received while these are used."""
        held, self.held = self.held, []  # freed as soon as they were sent
        for number in range(self.size):
            transfer = self.send(held) if number + 1 < self.size else None
            source = (self.rank - number) % self.size
            step = ring_step(self.rank, source, self.query.shape[2])
            yield step, self._block(step, *held)
            if transfer is not None:
                held = transfer.wait()

    def _block(
        self, step: RingStep, kv_2BGTK: torch.Tensor, documents_BT: torch.Tensor | None = None
    ) -> KeyBlock:
        key, value = kv_2BGTK[:, :, :, step.keys]
        mask = None
        if self.documents is not None and documents_BT is not None:
            if step.own:
                mask = document_mask(self.documents)
            else:
                theirs = documents_BT[:, None, step.keys]
                mask = (self.documents[:, step.queries, None] == theirs)[:, None]
        query, causal = self.query[:, :, step.queries], step.own and mask is None
        return KeyBlock(query, key, value, self.scale, causal, mask)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, laid out so that kernels can read vectors of 16 bytes."""
    strides = (*x.stride()[:-1], x.storage_offset())
    if x.stride(-1) == 1 and all(stride * x.element_size() % 16 == 0 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _empty_by_position(x_BHTK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of this shape that keeps the heads of a position together, as the next layer
    reads them."""
    x_BTHK = x_BHTK.transpose(1, 2)
    return x_BTHK.new_empty(x_BTHK.shape, dtype=dtype).transpose(1, 2)


@torch.library.custom_op(
    "gristmill::ring_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? documents, float scale, str group)"
    " -> (Tensor, Tensor)",
)
def _ring_forward(query: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithms of the sums that it was divided by."""
    whole = None
    for step, block in _Ring(query, *inputs).steps():
        part = attend(block)
        if whole is None:
            y_BHTK = _empty_by_position(query, sum_dtype(query.dtype)).copy_(part.y_BHTK)
            log_sum_BHT = part.log_sum_BHT.clone(memory_format=torch.contiguous_format)
            whole = PartialAttention(y_BHTK, log_sum_BHT)
        else:
            merge(PartialAttention(*(one[:, :, step.queries] for one in whole)), part)
    assert whole is not None
    return whole.y_BHTK.to(query.dtype), whole.log_sum_BHT


@_ring_forward.register_fake
def _(query: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    log_sum_BHT = query.new_empty(query.shape[:-1], dtype=sum_dtype(query.dtype))
    return _empty_by_position(query, query.dtype), log_sum_BHT


@torch.library.custom_op(
    "gristmill::ring_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor y, Tensor log_sum, Tensor query, Tensor key, Tensor value,"
    " Tensor? documents, float scale, str group) -> (Tensor, Tensor)",
)
def _ring_backward(
    grad: torch.Tensor, y: torch.Tensor, log_sum: torch.Tensor, query: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of queries, and of keys and values stacked."""
    ring, dtype = _Ring(query, *inputs), sum_dtype(query.dtype)
    grad_query = _empty_by_position(query, dtype).zero_()
    grad_kv = torch.zeros_like(ring.held[0], dtype=dtype)
    returning = None
    for (queries, keys, _), block in ring.steps():
        whole = PartialAttention(y[:, :, queries], log_sum[:, :, queries])
        query_part, key_part, value_part = attend_backward(block, whole, grad[:, :, queries])
        if returning is not None:
            (grad_kv,) = returning.wait()
        grad_query[:, :, queries] += query_part
        grad_kv[0, :, :, keys] += key_part
        grad_kv[1, :, :, keys] += value_part
        returning = ring.send([grad_kv])
    assert returning is not None
    (grad_kv,) = returning.wait()
    return grad_query.to(query.dtype), grad_kv.to(inputs[0].dtype)


@_ring_backward.register_fake
def _(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, _, query, key, *_ = inputs
    return _empty_by_position(query, query.dtype), key.new_empty(2, *key.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.group = inputs
    ctx.save_for_backward(*output, *tensors)


def _differentiate_ring(
    ctx: Any, grad: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    query, kv = _ring_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.group)
    return query, kv[0], kv[1], None, None, None


_ring_forward.register_autograd(_differentiate_ring, setup_context=_save_for_backward)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    scale: float | None,
    documents_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over the whole sequence, y_BHTK for this rank's positions.

    All tensors are this rank's shards: query_BHTK, key_BGTK, value_BGTK, and the numbers of the
    documents, across which nothing is seen.
    """
    assert query.shape[2] % 2 == 0 and query.shape[1] % key.shape[1] == 0
    assert key.shape == value.shape, "keys and values are sent as one tensor"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    y_BHTK, _ = _ring_forward(query, key, value, documents_BT, scale, _group_name(group))
    return y_BHTK


# ------------------------------------------------------------------ heads for sequences


@torch.library.custom_op(
    "gristmill::exchange", mutates_args=(), schema="(Tensor x, str group) -> Tensor"
)
def _all_to_all(x: torch.Tensor, group: str) -> torch.Tensor:
    """Send row r to rank r; returns the rows that were sent to this one."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=_group(group))
    return received


@_all_to_all.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_group(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.group = inputs


def _send_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _all_to_all(grad, ctx.group), None


_all_to_all.register_autograd(_send_back, setup_context=_save_group)


def heads_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    scale: float | None,
    documents_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `ring_attention`, by exchanging positions for heads; R divides H.

    Where R does not divide G, key and value heads are repeated until it does.
    """
    ranks = 1 if group is None else group.size()
    groups = math.lcm(key.shape[1], ranks)
    assert query.shape[1] % groups == 0, f"{query.shape[1]} heads for {ranks} processes"
    times, name = groups // key.shape[1], _group_name(group)
    inputs = query, repeat_heads(key, times), repeat_heads(value, times)
    if ranks > 1:
        sizes = [one.shape[1] // ranks for one in inputs]
        all_RBhTK = torch.cat(
            [one.unflatten(1, (ranks, -1)).movedim(1, 0) for one in inputs], dim=2
        )
        all_BhSK = unshard_sequence(_all_to_all(all_RBhTK, name).unbind(), dim=2)
        inputs = all_BhSK.split(sizes, dim=1)
        if documents_BT is not None:
            copies_RBT = documents_BT.expand(ranks, -1, -1)
            documents_BT = unshard_sequence(_all_to_all(copies_RBT, name).unbind(), dim=1)
    query, key, value = inputs
    mask = None if documents_BT is None else document_mask(documents_BT)
    times = query.shape[1] // key.shape[1]
    if mask is not None:
        # On CUDA, the kernel that takes masks does not support grouped heads.
        key, value, times = repeat_heads(key, times), repeat_heads(value, times), 1
    y_BhSK = functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=times > 1
    )
    if ranks == 1:
        return y_BhSK
    shards = [shard_sequence(y_BhSK, 2, rank=rank, ranks=ranks) for rank in range(ranks)]
    return _all_to_all(torch.stack(shards), name).movedim(0, 1).flatten(1, 2)
