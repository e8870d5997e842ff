"""Queries, keys and values from one product, for GPUs.

    q, k, v = x W^T + b    dx = dq Wq + dk Wk + dv Wv    dW = (dq^T x, dk^T x, dv^T x)

Autograd would copy the three gradients into one tensor first, which takes half as long as a
product of it. A Triton kernel (`kernels/qkv.py`) sums the products instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gristmill.models.casts import product

WIDEST = 1280
"""Width up to which this beat the copy on an H200."""
ROWS, WIDTH, DEPTH = 128, 256, 64
"""Sizes must be multiples of the kernel's tiles."""


def worth_fusing_qkv(x: torch.Tensor, *, outputs: int) -> bool:
    """Whether the kernel supports this (half precision, whole tiles) and is faster."""
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    whole = rows % ROWS == width % WIDTH == outputs % (3 * DEPTH) == 0
    return x.dtype != torch.float32 and whole and width <= WIDEST


def project_qkv(
    x_ND: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three outputs of a linear layer, of equal width."""
    return _QKV.apply(x_ND, weight_OD, bias_O)


class _QKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        half_OD = weight_OD.to(x_ND.dtype)
        ctx.dtype, ctx.biased = weight_OD.dtype, bias_O is not None
        ctx.save_for_backward(x_ND, half_OD)
        return functional.linear(x_ND, half_OD, bias_O).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, half_OD = ctx.saved_tensors
        d_x_ND, d_weight_OD = qkv_backward(*gradients, x_ND, half_OD, ctx.dtype)
        d_bias_O = torch.cat([one.sum(0) for one in gradients]) if ctx.biased else None
        return d_x_ND, d_weight_OD, d_bias_O


@torch.library.custom_op("gristmill::qkv_backward", mutates_args=())
def qkv_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight, from those of queries, keys and values."""
    from gristmill.models.kernels.qkv import sum_of_products

    parts = query, key, value
    d_weight = weight.new_empty(weight.shape, dtype=dtype)
    for part, rows in zip(parts, d_weight.chunk(3), strict=True):
        product(part.T, x, dtype, out=rows)
    return sum_of_products(parts, weight), d_weight


@qkv_backward.register_fake
def _(query: Any, key: Any, value: Any, x: Any, weight: Any, dtype: torch.dtype) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=dtype)
