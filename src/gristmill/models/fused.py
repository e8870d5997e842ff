"""The MLP as one function with its own backward pass, for GPUs.

    h = x U^T + b    y = f(h)    z = y D^T
    dh = (dz D) f'(h)    dU = dh^T x    dD = dz^T y    dx = dh U

Triton kernels (`kernels/activated.py`) fuse the activation into the two products next to it, so
nothing rereads f's input, and y and f'(h) are saved rather than recomputed, at the cost of memory.
The other four products are ordinary matmuls, and weights have gradients in their own dtype
(`casts.py`). Results equal the unfused ones up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.models.casts import product

WIDEST = {"gelu": 1280, "gelu_tanh": 1024, "relu2": 1600}
"""Widths up to which this beat torch.compile on an H200. In wider models activations cost less
relative to matmuls, where cuBLAS is fastest."""
ROWS, WIDTH, INNER = 128, 64, 256
"""Sizes must be multiples of the kernels' tiles."""


def worth_fusing(x: torch.Tensor, *, inner: int, activation: str) -> bool:
    """Whether the kernels support this (half precision, whole tiles) and are faster."""
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    whole = rows % ROWS == 0 and width % WIDTH == 0 and inner % INNER == 0
    return x.dtype != torch.float32 and whole and width <= WIDEST.get(activation, 0)


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


@torch.library.custom_op("gristmill::linear_activation", mutates_args=())
def _linear_activation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    from gristmill.models.kernels.activated import linear_activation

    return linear_activation(x, weight, bias, activation)


@_linear_activation.register_fake
def _(x: Any, weight: Any, bias: Any, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    return x.new_empty(0) if activation == "relu2" else torch.empty_like(out), out


@torch.library.custom_op("gristmill::activation_backward", mutates_args=())
def _activation_backward(
    d: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, activation: str
) -> torch.Tensor:
    from gristmill.models.kernels.activated import activation_backward

    return activation_backward(d, weight, kept, activation)


@_activation_backward.register_fake
def _(d: Any, weight: Any, kept: Any, activation: str) -> torch.Tensor:
    return torch.empty_like(kept)
