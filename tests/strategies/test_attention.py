"""Attention in blocks: every kernel against attention as a whole, in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from gristmill.strategies.attention import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    PLAIN,
    AttentionKernel,
    KeyBlock,
    PartialAttention,
    attend,
    attend_backward,
    kernel_for,
    merge,
    sum_dtype,
)

SCALE = 0.3


class Case(NamedTuple):
    """Queries that see their own keys causally or by a mask, and all or some of earlier keys."""

    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    masks: list[torch.Tensor | None]
    grad: torch.Tensor

    def block(self, number: int) -> KeyBlock:
        mask = self.masks[number]
        causal = number == 0 and mask is None
        key, value = self.keys[number], self.values[number]
        return KeyBlock(self.query, key, value, SCALE, causal, mask)


def make_case(
    dtype: torch.dtype, *, heads: int = 4, groups: int = 2, masked: bool, device: str = "cpu"
) -> Case:
    generator = torch.Generator().manual_seed(7)
    samples, length, width = 2, 6, 16

    def random(heads: int, length: int) -> torch.Tensor:
        x_BTHK = torch.randn(samples, length, heads, width, generator=generator).to(device, dtype)
        return x_BTHK.transpose(1, 2)

    lengths = (length, 10, 4)
    masks: list[torch.Tensor | None] = [None, None, None]
    if masked:
        masks = [torch.rand(samples, 1, length, n, generator=generator) < 0.4 for n in lengths]
        masks[0] |= torch.eye(length, dtype=torch.bool)
        masks[1][:, :, 2:4] = False  # these queries see nothing of the second block
        masks[2][1] = False  # nor the second sample anything of the third
        masks = [mask.to(device) for mask in masks]
    return Case(
        random(heads, length),
        [random(groups, n) for n in lengths],
        [random(groups, n) for n in lengths],
        masks,
        random(heads, length),
    )


def as_a_whole(case: Case) -> list[torch.Tensor]:
    """Result and gradients of attention to all keys at once, in float64 on the CPU."""
    query, *rest = (
        x.double().cpu().requires_grad_() for x in (case.query, *case.keys, *case.values)
    )
    keys, values = rest[:3], rest[3:]
    masks = [
        torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        if mask is None and number == 0
        else torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        if mask is None
        else mask.cpu()
        for number, (mask, key) in enumerate(zip(case.masks, keys, strict=True))
    ]
    y = functional.scaled_dot_product_attention(
        query,
        torch.cat(keys, dim=2),
        torch.cat(values, dim=2),
        attn_mask=torch.cat(masks, dim=-1),
        scale=SCALE,
        enable_gqa=True,
    )
    y.backward(case.grad.double().cpu())
    return [y.detach(), *(x.grad for x in (query, *keys, *values) if x.grad is not None)]


def in_blocks(case: Case) -> list[torch.Tensor]:
    """The same, block by block."""
    dtype = sum_dtype(case.query.dtype)
    blocks = [case.block(number) for number in range(3)]
    first, *others = (attend(block) for block in blocks)
    whole = PartialAttention(first.y_BHTK.to(dtype), first.log_sum_BHT.clone())
    for part in others:
        merge(whole, part)
    whole = PartialAttention(whole.y_BHTK.to(case.query.dtype), whole.log_sum_BHT)
    gradients = [attend_backward(block, whole, case.grad) for block in blocks]
    queries, keys, values = zip(*gradients, strict=True)
    query = sum(one.to(dtype) for one in queries)
    assert isinstance(query, torch.Tensor)
    return [x.double().cpu() for x in (whole.y_BHTK, query, *keys, *values)]


def assert_same(ours: list[torch.Tensor], reference: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kernel", "tolerance"),
    [
        (torch.float64, PLAIN, 1e-13),
        (torch.float32, CPU_FLASH, 1e-5),
        (torch.float16, CPU_FLASH, 1e-2),
        (torch.bfloat16, CPU_FLASH, 6e-2),
    ],
)
def test_blocks_make_the_whole(
    dtype: torch.dtype, kernel: AttentionKernel, tolerance: float, masked: bool
) -> None:
    for groups in (4, 2, 1):
        case = make_case(dtype, groups=groups, masked=masked)
        assert kernel_for(case.block(0)) is kernel
        assert_same(in_blocks(case), as_a_whole(case), tolerance)


@pytest.mark.parametrize("masked", [False, True])
def test_the_plain_kernel_sums_half_precision_in_fp32(
    monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    monkeypatch.setattr("gristmill.strategies.attention.KERNELS", {})
    case = make_case(torch.bfloat16, masked=masked)
    assert kernel_for(case.block(0)) is PLAIN
    part = attend(case.block(0))
    assert part.y_BHTK.dtype == part.log_sum_BHT.dtype == torch.float32
    assert_same(in_blocks(case), as_a_whole(case), 6e-2)


def test_what_is_not_seen_adds_nothing() -> None:
    y, log_sum = torch.randn(1, 1, 3, 4), torch.tensor([[[0.5, -2.0, -torch.inf]]])
    y[..., 2, :] = 0
    whole = PartialAttention(y.clone(), log_sum.clone())
    nothing = PartialAttention(torch.zeros_like(y), torch.full_like(log_sum, -torch.inf))
    merge(whole, nothing)
    assert torch.equal(whole.y_BHTK, y) and torch.equal(whole.log_sum_BHT, log_sum)
    merge(nothing, whole)
    assert torch.equal(nothing.y_BHTK, y) and torch.equal(nothing.log_sum_BHT, log_sum)


def test_merging_is_exact_where_sums_are_beyond_fp32() -> None:
    whole = PartialAttention(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 900.0))
    merge(whole, PartialAttention(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), 900.0)))
    assert torch.equal(whole.y_BHTK, torch.full((1, 1, 1, 2), 0.5))
    assert whole.log_sum_BHT.item() == pytest.approx(900.6931)


@pytest.mark.parametrize(
    ("kernel", "masked"), [(CUDA_FLASH, False), (CUDA_EFFICIENT, False), (CUDA_EFFICIENT, True)]
)
def test_calls_of_cuda_kernels_fit_their_signatures(kernel: AttentionKernel, masked: bool) -> None:
    """On tensors without contents, which any machine has; the values need a CUDA device."""
    groups = 2 if kernel.grouped else 4
    case = make_case(torch.bfloat16, groups=groups, masked=masked, device="meta")
    for block in (case.block(0), case.block(1)):
        part = kernel.forward(block)
        assert part.y_BHTK.shape == block.query_BHTK.shape
        assert part.log_sum_BHT.shape == block.query_BHTK.shape[:-1]
        gradients = kernel.backward(block, part, case.grad)
        for gradient, of in zip(gradients, block[:3], strict=True):
            assert gradient.shape == of.shape and gradient.dtype == of.dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "masked", "kernel", "tolerance"),
    [
        (torch.bfloat16, False, CUDA_FLASH, 6e-2),
        (torch.float16, False, CUDA_FLASH, 1e-2),
        (torch.bfloat16, True, CUDA_EFFICIENT, 6e-2),
        (torch.float16, True, CUDA_EFFICIENT, 1e-2),
        (torch.float32, False, CUDA_EFFICIENT, 1e-4),
        (torch.float32, True, CUDA_EFFICIENT, 1e-4),
        (torch.float64, True, PLAIN, 1e-12),
    ],
)
def test_cuda_blocks_make_the_whole(
    dtype: torch.dtype, masked: bool, kernel: AttentionKernel, tolerance: float
) -> None:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for groups in (4, 2, 1):
        case = make_case(dtype, groups=groups, masked=masked, device="cuda")
        assert kernel_for(case.block(1)) is kernel
        assert_same(in_blocks(case), as_a_whole(case), tolerance)
    torch.set_float32_matmul_precision(precision)
