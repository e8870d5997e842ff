"""Divided sequences: attention over the parts is attention over the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from gristmill.models.spec import document_mask
from gristmill.strategies.context import (
    heads_attention,
    ring_attention,
    ring_step,
    shard_positions,
    shard_sequence,
    unshard_sequence,
)

Attend = Callable[..., torch.Tensor]
WAYS: dict[str, Attend] = {"ring": ring_attention, "heads": heads_attention}
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
SAMPLES, LENGTH, WIDTH = 2, 16, 8


class Whole(NamedTuple):
    """Inputs of attention over a whole sequence, the same in every process."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    documents: torch.Tensor | None


def make_whole(dtype: torch.dtype, *, heads: int, groups: int, documents: bool) -> Whole:
    generator = torch.Generator().manual_seed(3)

    def random(heads: int) -> torch.Tensor:
        x = torch.randn(SAMPLES, LENGTH, heads, WIDTH, generator=generator)
        return x.to(dtype).transpose(1, 2)

    starts = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.3
    return Whole(
        random(heads),
        random(groups),
        random(groups),
        random(heads),
        starts.cumsum(1) if documents else None,
    )


def reference(whole: Whole, scale: float | None) -> list[torch.Tensor]:
    """Result and gradients in float64."""
    inputs = [x.double().requires_grad_() for x in whole[:3]]
    mask = None if whole.documents is None else document_mask(whole.documents)
    y = functional.scaled_dot_product_attention(
        *inputs, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    y.backward(whole.grad.double())
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]


def divided(
    attend: Attend, whole: Whole, scale: float | None, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """This process's part of the same."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())

    def shard(x: torch.Tensor, dim: int = 2) -> torch.Tensor:
        return shard_sequence(x, dim, rank=rank, ranks=ranks)

    # A part as it lies in memory, by position: heads are not the outer dimension of a projection.
    inputs = [
        shard(x).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in whole[:3]
    ]
    documents = None if whole.documents is None else shard(whole.documents, 1)
    y = attend(*inputs, group=group, scale=scale, documents_BT=documents)
    assert y.dtype == whole.query.dtype
    with torch.no_grad():
        assert torch.equal(attend(*inputs, group=group, scale=scale, documents_BT=documents), y), (
            "two calls give the same bits"
        )
    gradients = torch.autograd.grad(y, inputs, shard(whole.grad), retain_graph=True)
    again = torch.autograd.grad(y, inputs, shard(whole.grad))
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))
    return [y.detach(), *gradients]


def check(attend: Attend, whole: Whole, scale: float | None, group: Any) -> None:
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    expected = reference(whole, scale)
    for ours, all_of_it in zip(divided(attend, whole, scale, group), expected, strict=True):
        torch.testing.assert_close(
            ours.double(),
            shard_sequence(all_of_it, 2, rank=rank, ranks=ranks),
            rtol=0,
            atol=TOLERANCES[whole.query.dtype],
        )


# ------------------------------------------------------------------ dividing


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_make_the_whole(ranks: int) -> None:
    x = torch.randn(2, 24, 3)
    shards = [shard_sequence(x, 1, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert {shard.shape for shard in shards} == {(2, 24 // ranks, 3)}
    assert torch.equal(unshard_sequence(shards, 1), x)
    for rank, shard in enumerate(shards):
        assert torch.equal(x[:, shard_positions(rank, ranks, 24)], shard)


def test_a_process_holds_an_early_and_a_late_chunk() -> None:
    assert shard_positions(1, 4, 16).tolist() == [2, 3, 12, 13]
    with pytest.raises(AssertionError, match="12 positions in 8 chunks"):
        shard_positions(0, 4, 12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ring_steps_cover_all_that_is_seen_evenly(ranks: int) -> None:
    """Every query meets every key it may see once, and all processes have the same work."""
    length = 4
    counts = torch.zeros(ranks * length, ranks * length, dtype=torch.int)
    work = [0] * ranks
    for rank, source in itertools.product(range(ranks), repeat=2):
        step = ring_step(rank, source, length)
        queries = shard_positions(rank, ranks, ranks * length)[step.queries]
        keys = shard_positions(source, ranks, ranks * length)[step.keys]
        seen = torch.ones(len(queries), len(keys), dtype=torch.int)
        counts[queries[:, None], keys] += seen.tril() if step.own else seen
        work[rank] += int(seen.tril().sum() if step.own else seen.sum())
    assert torch.equal(counts, torch.ones_like(counts).tril())
    assert len(set(work)) == 1


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("documents", [False, True])
def test_one_process_needs_no_group(way: str, documents: bool) -> None:
    for dtype in (torch.float64, torch.float32):
        whole = make_whole(dtype, heads=4, groups=2, documents=documents)
        check(WAYS[way], whole, None, None)


@pytest.mark.parametrize("way", WAYS)
def test_inputs_may_lie_anyhow_in_memory(way: str) -> None:
    whole = make_whole(torch.float32, heads=4, groups=4, documents=False)
    odd = [torch.stack((x, x), dim=-1)[..., 0].requires_grad_() for x in whole[:3]]
    y = WAYS[way](*odd, group=None, scale=None)
    y.sum().backward()  # its gradient is one number, seen from everywhere
    plain = [x.contiguous().requires_grad_() for x in whole[:3]]
    expected = functional.scaled_dot_product_attention(*plain, is_causal=True)
    expected.sum().backward()
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    for one, other in zip(odd, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)


def test_heads_must_be_enough_for_the_processes() -> None:
    class Three:
        def size(self) -> int:
            return 3

    whole = make_whole(torch.float32, heads=4, groups=4, documents=False)
    with pytest.raises(AssertionError, match="4 heads for 3 processes"):
        heads_attention(*whole[:3], group=Three(), scale=None)


# ------------------------------------------------------------------ several


def check_all(group: dist.ProcessGroup) -> None:
    for attend, dtype in itertools.product(WAYS.values(), TOLERANCES):
        half = dtype in (torch.float16, torch.bfloat16)
        for shared, documents in itertools.product((2,) if half else (4, 2, 1), (False, True)):
            whole = make_whole(dtype, heads=4, groups=shared, documents=documents)
            check(attend, whole, None if documents else 0.2, group)


def check_subgroups() -> None:
    """Two groups of two, in which a process has another rank than among all."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for attend in WAYS.values():
        whole = make_whole(torch.float64, heads=4, groups=2, documents=True)
        check(attend, whole, None, groups[dist.get_rank() % 2])


def check_odd_heads(group: dist.ProcessGroup) -> None:
    """Three key and value heads, which neither 2 nor 4 processes divide."""
    whole = make_whole(torch.float64, heads=12, groups=3, documents=False)
    check(heads_attention, whole, None, group)


def check_compiled(group: dist.ProcessGroup) -> None:
    """One graph holds attention, forward and backward, and gives the same bits."""
    documents = torch.arange(8).div(3, rounding_mode="floor").expand(2, -1)
    for attend in WAYS.values():
        inputs = [torch.randn(2, 4, 8, 8, requires_grad=True) for _ in range(3)]

        def layer(*x: torch.Tensor, attend: Attend = attend) -> torch.Tensor:
            y = attend(x[0] * 2, x[1], x[2] + 1, group=group, scale=None, documents_BT=documents)
            return y.transpose(1, 2).flatten(2).sin()

        whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
        plain, graph = layer(*inputs), whole(*inputs)
        assert torch.equal(plain, graph)
        gradients = [torch.autograd.grad(y.sum(), inputs) for y in (plain, graph)]
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def two() -> None:
    group = dist.group.WORLD
    check_all(group)
    check_odd_heads(group)
    check_compiled(group)


def four() -> None:
    group = dist.group.WORLD
    check_all(group)
    check_odd_heads(group)
    check_subgroups()


def test_two_processes(crowd: Callable[..., list[Any]]) -> None:
    crowd(2, two)


def test_four_processes_and_groups_of_two(crowd: Callable[..., list[Any]]) -> None:
    crowd(4, four)
