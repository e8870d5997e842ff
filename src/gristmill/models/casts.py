"""Linear layers whose weights are in fp32 and are multiplied in half precision, on a GPU.

The gradient of such a weight is a product that is summed in fp32. Autograd would round it to half
precision and cast it back in a kernel of its own; here the product is written in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


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
    made = (a @ b).to(dtype)
    return made if out is None else out.copy_(made)


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
