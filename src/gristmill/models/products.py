"""Matrix products with a backward pass of their own, for GPUs.

                                                            percent of a step of GPT-2 gained
                                                            124M   350M   774M   1.5B
    cast_linear   weights in fp32, products in half precision  0    0.4    0.9    2.6
    fused_mlp     up, activation (erf GELU) and down         2.9    2.7    1.5   not used
    project_qkv   queries, keys and values                   1.6    1.4    0.5   not used

These are not measured in whole steps: they are the milliseconds that one layer saves by itself on
an H200 (`docs/log.md`, 17 November, for the MLP, else `benchmarks/results/2026-11-18.md`), times
the layers, over the step of the latter. `benchmarks/kernels.py` measures a layer anew.

The gradient of a weight in fp32 is a product that is summed in fp32. Autograd would round it to
half precision and cast it back in a kernel of its own; here the product is written in fp32.
Results equal those of the plain layers up to rounding. The Triton kernels are in
`kernels/products.py`.

Shapes: N tokens, D width, F inner width; I inputs and O outputs of any layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gristmill.models.operations import fake, operation


def cast_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer in the dtype of its input; the gradient of the weight is in its own."""
    return _CastLinear.apply(x, weight, bias)


def product(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a b in a dtype, which on a GPU is the one in which it is written."""
    if dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype, out=out)
    cast = (a @ b).to(dtype)
    return cast if out is None else out.copy_(cast)


class _CastLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        half_OI = weight_OI.to(x.dtype)
        ctx.dtype, ctx.biased = weight_OI.dtype, bias_O is not None
        ctx.save_for_backward(x, half_OI)
        return functional.linear(x, half_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, half_OI = ctx.saved_tensors
        d = gradients[0]
        d_NO, x_NI = d.flatten(0, -2), x.flatten(0, -2)
        d_bias_O = d_NO.sum(0) if ctx.biased else None
        return d @ half_OI, product(d_NO.T, x_NI, ctx.dtype), d_bias_O


# ------------------------------------------------------------------ the MLP
#
#     h = x U^T + b    y = f(h)    z = y D^T
#     dh = (dz D) f'(h)    dU = dh^T x    dD = dz^T y    dx = dh U
#
# Triton kernels fuse the activation into the two products next to it, so nothing rereads f's
# input, and y and f'(h) are saved rather than recomputed, at the cost of memory. The other four
# products are ordinary matmuls.

MLP_WIDEST = {"gelu": 1280, "gelu_tanh": 1024, "relu2": 1600}
"""Widths up to which this beat torch.compile on an H200. In wider models activations cost less
relative to matmuls, where cuBLAS is fastest."""
MLP_ROWS, MLP_WIDTH, MLP_INNER = 128, 64, 256
"""Sizes must be multiples of the kernels' tiles."""


def worth_fusing_mlp(x: torch.Tensor, *, inner: int, activation: str) -> bool:
    """Whether the kernels support this (half precision, whole tiles) and are faster."""
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    whole = rows % MLP_ROWS == 0 and width % MLP_WIDTH == 0 and inner % MLP_INNER == 0
    return x.dtype != torch.float32 and whole and width <= MLP_WIDEST.get(activation, 0)


def fused_mlp(
    x_ND: torch.Tensor,
    up_FD: torch.Tensor,
    bias_F: torch.Tensor | None,
    down_DF: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Up, activation and down; the caller adds the bias of `down`."""
    return _FusedMLP.apply(x_ND, up_FD, bias_F, down_DF, activation)


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        up_FD: torch.Tensor,
        bias_F: torch.Tensor | None,
        down_DF: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        ctx.dtypes = up_FD.dtype, down_DF.dtype
        up_FD, down_DF = up_FD.to(x_ND.dtype), down_DF.to(x_ND.dtype)
        slope_NF, inner_NF = _linear_activation(x_ND, up_FD, bias_F, activation)
        ctx.activation, ctx.biased = activation, bias_F is not None
        ctx.save_for_backward(x_ND, up_FD, down_DF, slope_NF, inner_NF)
        return inner_NF @ down_DF.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, up_FD, down_DF, slope_NF, inner_NF = ctx.saved_tensors
        d_ND = gradients[0].contiguous()
        kept_NF = slope_NF if slope_NF.numel() else inner_NF
        d_pre_NF = _activation_backward(d_ND, down_DF, kept_NF, ctx.activation)
        d_bias_F = d_pre_NF.sum(0) if ctx.biased else None
        d_up_FD = product(d_pre_NF.T, x_ND, ctx.dtypes[0])
        d_down_DF = product(d_ND.T, inner_NF, ctx.dtypes[1])
        return d_pre_NF @ up_FD, d_up_FD, d_bias_F, d_down_DF, None


@operation()
def _linear_activation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from gristmill.models.kernels.products import linear_activation

    return linear_activation(x, weight, bias, activation)


@fake(_linear_activation)
def _(x: Any, weight: Any, bias: Any, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    return x.new_empty(0) if activation == "relu2" else torch.empty_like(out), out


@operation()
def _activation_backward(
    d: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, activation: str
) -> torch.Tensor:
    from gristmill.models.kernels.products import activation_backward

    return activation_backward(d, weight, kept, activation)


@fake(_activation_backward)
def _(d: Any, weight: Any, kept: Any, activation: str) -> torch.Tensor:
    return torch.empty_like(kept)


# ------------------------------------------------------------------ queries, keys and values
#
#     q, k, v = x W^T + b    dx = dq Wq + dk Wk + dv Wv    dW = (dq^T x, dk^T x, dv^T x)
#
# Autograd would copy the three gradients into one tensor first, which takes half as long as a
# product of it. A Triton kernel sums the products instead.

QKV_WIDEST = 1280
"""Width up to which this beat the copy on an H200."""
QKV_ROWS, QKV_WIDTH, QKV_DEPTH = 128, 256, 64
"""Sizes must be multiples of the kernel's tiles."""


def worth_fusing_qkv(x: torch.Tensor, *, outputs: int) -> bool:
    """Whether the kernel supports this (half precision, whole tiles) and is faster."""
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    whole = rows % QKV_ROWS == width % QKV_WIDTH == outputs % (3 * QKV_DEPTH) == 0
    return x.dtype != torch.float32 and whole and width <= QKV_WIDEST


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
        d_bias_O = torch.cat([part.sum(0) for part in gradients]) if ctx.biased else None
        return d_x_ND, d_weight_OD, d_bias_O


@operation()
def qkv_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the weight, from those of queries, keys and values."""
    from gristmill.models.kernels.products import sum_of_products

    parts = query, key, value
    d_weight = weight.new_empty(weight.shape, dtype=dtype)
    for part, rows in zip(parts, d_weight.chunk(3), strict=True):
        product(part.T, x, dtype, out=rows)
    return sum_of_products(parts, weight), d_weight


@fake(qkv_backward)
def _(query: Any, key: Any, value: Any, x: Any, weight: Any, dtype: torch.dtype) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=dtype)
