"""Attention over sequences that are divided among processes (context parallel).

A sequence is cut into 2R chunks for R processes, and process r holds chunks r and 2R-1-r. What lies
early sees little, what lies late sees much, so that every process has as much to do as any other:

    R = 4    chunk    0  1  2  3  4  5  6  7
             process  0  1  2  3  3  2  1  0

Two ways to attend:

    ring    Keys and values go round, from each process to the next, while the ones at hand are
            attended to. Of R steps, the first is the process's own and causal; keys from an
            earlier process are seen by all queries, but only its first chunk; keys from a later
            one are all seen, but only by the second chunk of queries. Half of every pair is never
            computed. Going back, keys and values go round again, and their gradients with them.
    heads   One exchange gives every process the whole sequence for its share of the heads, another
            one gives the result back. Ordinary attention lies between them.

In the ring every process sends R-1 times what its keys and values are, hidden behind computation
where chunks are long, and takes any number of heads. Going back their gradients come on top, in
fp32 since R of them are added up: twice the bytes of a half-precision format. In the exchange it
sends queries, keys, values and results once, whatever R is, and hides nothing.

What communicates is registered with torch as operations of its own: a compiled model holds them
as they are, in one graph. Operations take a group by its name. None is a group of one.

Shapes: B samples, T positions of this process, H heads, G key and value heads, K head width; R
processes, h heads of one of them, S positions of all. A leading 2 is keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from gristmill.models.documents import document_mask
from gristmill.parallel.attention import (
    Block,
    Gradients,
    Part,
    attend,
    attend_backward,
    merge,
    repeat_heads,
    sums_in,
)

# ------------------------------------------------------------------ dividing


def share_of_sequence(x: torch.Tensor, dim: int, *, rank: int, ranks: int) -> torch.Tensor:
    """A process's part of a tensor with a whole sequence along `dim`."""
    assert x.shape[dim] % (2 * ranks) == 0, f"{x.shape[dim]} positions in {2 * ranks} chunks"
    if ranks == 1:
        return x
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def whole_sequence(shares: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The tensor of which these are the processes' parts, by rank."""
    halves = [share.chunk(2, dim) for share in shares]
    return torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]], dim)


def positions_of(
    rank: int, ranks: int, length: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Where a process's positions lie in the whole sequence of this length."""
    return share_of_sequence(torch.arange(length, device=device), 0, rank=rank, ranks=ranks)


# ------------------------------------------------------------------ groups


def _name(group: dist.ProcessGroup | None) -> str:
    return "" if group is None else group.group_name


_named: Any = dist.distributed_c10d
"""Knows groups by their names, whose type is not the same in all versions of torch."""


def _group(name: str) -> dist.ProcessGroup | None:
    return _named._resolve_process_group(name) if name else None


class _Arrival(NamedTuple):
    """Tensors under way: those that come, and those that must not be touched until they came."""

    tensors: list[torch.Tensor]
    sent: list[torch.Tensor]
    works: list[dist.Work]

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


class _Ring:
    """This process's place between two others."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def pass_on(self, tensors: list[torch.Tensor]) -> _Arrival:
        """Start sending tensors to the next process, and receiving such from the one before."""
        if self.group is None or self.size == 1:
            return _Arrival(tensors, [], [])
        after = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, after, self.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in arriving]
        return _Arrival(arriving, tensors, dist.batch_isend_irecv(operations))


# ------------------------------------------------------------------ the ring


class Pair(NamedTuple):
    """Which queries of a process see keys of another, and which of its keys."""

    queries: slice
    keys: slice
    own: bool


def pair_of(rank: int, source: int, length: int) -> Pair:
    """What process `rank` has to do with the keys of `source`; each has `length` positions."""
    everything, half = slice(None), length // 2
    if source < rank:
        return Pair(everything, slice(0, half), own=False)
    return Pair(slice(half, None) if source > rank else everything, everything, source == rank)


class _Travelling(NamedTuple):
    """What goes round."""

    kv_2BGTK: torch.Tensor
    documents_BT: torch.Tensor | None = None

    def block(
        self,
        pair: Pair,
        query_BHTK: torch.Tensor,
        *,
        scale: float,
        documents_BT: torch.Tensor | None,
    ) -> Block:
        """What is to be computed with it by the process whose queries and documents these are."""
        key, value = self.kv_2BGTK[:, :, :, pair.keys]
        mask = None
        if documents_BT is not None and self.documents_BT is not None:
            if pair.own:
                mask = document_mask(documents_BT)
            else:
                theirs = self.documents_BT[:, None, pair.keys]
                mask = (documents_BT[:, pair.queries, None] == theirs)[:, None]
        causal = pair.own and mask is None
        return Block(query_BHTK[:, :, pair.queries], key, value, scale, causal, mask)


def _departing(
    key_BGTK: torch.Tensor, value_BGTK: torch.Tensor, documents_BT: torch.Tensor | None
) -> list[torch.Tensor]:
    kv_2BGTK = torch.stack((key_BGTK, value_BGTK))
    return [kv_2BGTK] if documents_BT is None else [kv_2BGTK, documents_BT.contiguous()]


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The same, laid out so that kernels can read whole pieces of 16 bytes."""
    steps = (*x.stride()[:-1], x.storage_offset())
    if x.stride(-1) == 1 and all(step * x.element_size() % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _room_by_position(x_BHTK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of this shape, whose heads lie side by side at every position, as the layer
    that follows reads them."""
    samples, heads, length, width = x_BHTK.shape
    return x_BHTK.new_empty(samples, length, heads, width, dtype=dtype).transpose(1, 2)


@torch.library.custom_op(
    "gristmill::ring_forward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? documents, float scale, str group)"
    " -> (Tensor, Tensor)",
)
def _ring_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    scale: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the logarithms of its sums."""
    ring, whole = _Ring(_group(group)), None
    query = _aligned(query)
    held = _departing(key, value, documents)
    for step in range(ring.size):
        arriving = ring.pass_on(held) if step + 1 < ring.size else None
        pair = pair_of(ring.rank, (ring.rank - step) % ring.size, query.shape[2])
        part = attend(_Travelling(*held).block(pair, query, scale=scale, documents_BT=documents))
        if whole is None:
            room = _room_by_position(query, sums_in(query.dtype))
            log_sum_BHT = part.log_sum_BHT.clone(memory_format=torch.contiguous_format)
            whole = Part(room.copy_(part.y_BHTK), log_sum_BHT)
        else:
            merge(Part(*(one[:, :, pair.queries] for one in whole)), part)
        if arriving is not None:
            held = arriving.wait()
    assert whole is not None
    return whole.y_BHTK.to(query.dtype), whole.log_sum_BHT


@_ring_forward.register_fake
def _(query: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    log_sum_BHT = query.new_empty(query.shape[:-1], dtype=sums_in(query.dtype))
    return _room_by_position(query, query.dtype), log_sum_BHT


@torch.library.custom_op(
    "gristmill::ring_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? documents, Tensor y,"
    " Tensor log_sum, float scale, str group) -> (Tensor, Tensor)",
)
def _ring_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    y: torch.Tensor,
    log_sum: torch.Tensor,
    scale: float,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of queries, and of keys and values stacked."""
    ring, query = _Ring(_group(group)), _aligned(query)
    held = _departing(key, value, documents)
    dtype = sums_in(query.dtype)
    grad_query = _room_by_position(query, dtype).zero_()
    grad_kv = torch.zeros_like(held[0], dtype=dtype)
    returning = None
    for step in range(ring.size):
        arriving = ring.pass_on(held) if step + 1 < ring.size else None
        pair = pair_of(ring.rank, (ring.rank - step) % ring.size, query.shape[2])
        block = _Travelling(*held).block(pair, query, scale=scale, documents_BT=documents)
        whole = Part(y[:, :, pair.queries], log_sum[:, :, pair.queries])
        gradients = attend_backward(block, whole, grad[:, :, pair.queries])
        if returning is not None:
            (grad_kv,) = returning.wait()
        _add_gradients(gradients, pair, grad_query, grad_kv)
        returning = ring.pass_on([grad_kv])
        if arriving is not None:
            held = arriving.wait()
    assert returning is not None
    (grad_kv,) = returning.wait()
    return grad_query.to(query.dtype), grad_kv.to(key.dtype)


@_ring_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _room_by_position(query, query.dtype), key.new_empty(2, *key.shape)


def _add_gradients(
    gradients: Gradients, pair: Pair, grad_query: torch.Tensor, grad_kv: torch.Tensor
) -> None:
    grad_query[:, :, pair.queries] += gradients.query_BHTK
    grad_kv[0, :, :, pair.keys] += gradients.key_BGSK
    grad_kv[1, :, :, pair.keys] += gradients.value_BGSK


class _RingAttention(torch.autograd.Function):
    """Ties the two ways round together."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: torch.Tensor | None,
        scale: float,
        group: str,
    ) -> torch.Tensor:
        y, log_sum = _ring_forward(query, key, value, documents, scale, group)
        ctx.save_for_backward(query, key, value, documents, y, log_sum)
        ctx.scale, ctx.group = scale, group
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, kv = _ring_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.group)
        return query, kv[0], kv[1], None, None, None


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    scale: float | None,
    documents_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over the whole sequence, y_BHTK for this process's positions.

    All tensors are this process's parts: query_BHTK, key_BGTK, value_BGTK, and the numbers of the
    documents, outside of which nothing is seen.
    """
    assert query.shape[2] % 2 == 0 and query.shape[1] % key.shape[1] == 0
    assert key.shape == value.shape, "keys and values travel as one tensor"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(query, key, value, documents_BT, scale, _name(group))


# ------------------------------------------------------------------ heads for sequences


@torch.library.custom_op(
    "gristmill::exchange", mutates_args=(), schema="(Tensor x, str group) -> Tensor"
)
def _exchange(x: torch.Tensor, group: str) -> torch.Tensor:
    """From every process the part that is for this one: row r goes to process r."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=_group(group))
    return received


@_exchange.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Exchange(torch.autograd.Function):
    """Gradients go back the way their tensors came: the exchange is its own reverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad, ctx.group), None


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
    times = groups // key.shape[1]
    parts = query, repeat_heads(key, times), repeat_heads(value, times)
    sizes = [part.shape[1] // ranks for part in parts]
    together_RBhTK = torch.cat(
        [part.unflatten(1, (ranks, -1)).movedim(1, 0) for part in parts], dim=2
    )
    query, key, value = _positions_for_heads(together_RBhTK, group).split(sizes, dim=1)
    y_BhSK = _ordinary(query, key, value, scale=scale, mask=_mask_of_all(documents_BT, group))
    return _heads_for_positions(y_BhSK, group)


def _positions_for_heads(x_RBhTK: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if x_RBhTK.shape[0] == 1:
        return x_RBhTK[0]
    return whole_sequence(_Exchange.apply(x_RBhTK, _name(group)).unbind(), dim=2)


def _heads_for_positions(y_BhSK: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    ranks = 1 if group is None else group.size()
    if ranks == 1:
        return y_BhSK
    shares = [share_of_sequence(y_BhSK, 2, rank=rank, ranks=ranks) for rank in range(ranks)]
    mine_RBhTK = _Exchange.apply(torch.stack(shares), _name(group))
    return mine_RBhTK.movedim(0, 1).flatten(1, 2)


def _mask_of_all(
    documents_BT: torch.Tensor | None, group: dist.ProcessGroup | None
) -> torch.Tensor | None:
    if documents_BT is None:
        return None
    if group is None or group.size() == 1:
        return document_mask(documents_BT)
    copies_RBT = documents_BT.expand(group.size(), -1, -1)
    return document_mask(whole_sequence(_exchange(copies_RBT, _name(group)).unbind(), dim=1))


def _ordinary(
    query_BhSK: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    times = query_BhSK.shape[1] // key.shape[1]
    if mask is not None:
        # On CUDA, the kernel that takes masks does not know shared heads.
        key, value, times = repeat_heads(key, times), repeat_heads(value, times), 1
    return functional.scaled_dot_product_attention(
        query_BhSK,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=times > 1,
    )
