"""Matrix products with a fused activation, which need not read its input from memory.

    forward    h = x W^T + b,  y = f(h)      stores y and what the backward pass needs of f
    backward   dh = (dz V) f'(h)             V: weights of the next layer, z = y V^T

    f                 saved for the backward pass
    gelu, gelu_tanh   f'(h): the forward pass has most of it at hand, and more time for it
    relu2             nothing but y, since f'(h) = 2 relu(h) = 2 sqrt(y)

One persistent kernel for both. Loads and stores use the tensor memory accelerator of Hopper and
later. Sums are in fp32, and f is computed from them before they are rounded. The erf of GELU is
accurate to 1e-6 (Abramowitz and Stegun, 7.1.26).
Sizes must be multiples of the tile's; other shapes use the unfused version.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gristmill.models.kernels.instructions import exp2, reciprocal, tanh
from gristmill.models.kernels.tiles import Tiles, corner, halves

# The fastest of ten on an H200. With two programs per SM the epilogue of one overlaps with the
# products of the other; the backward pass, which also loads saved values, has no room for that.
FORWARD, BACKWARD = Tiles(128, 128, 64, 8, 2, 3), Tiles(128, 256, 64, 8, 1, 3)


def linear_activation(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """f'(h), empty if the backward pass does not need it, and f(h) of h = x W^T + b."""
    shape = (x_MK.shape[0], weight_NK.shape[0])
    out_MN = x_MK.new_empty(shape)
    keeps = activation != "relu2"
    kept_MN = x_MK.new_empty(shape) if keeps else out_MN
    _launch(x_MK, weight_NK, bias_N, kept_MN, out_MN, activation=activation, backward=False)
    return kept_MN if keeps else x_MK.new_empty(0), out_MN


def activation_backward(
    d_MK: torch.Tensor, weight_KN: torch.Tensor, kept_MN: torch.Tensor, activation: str
) -> torch.Tensor:
    """(d W) f'(h), from the saved f'(h) or f(h)."""
    out_MN = torch.empty_like(kept_MN)
    _launch(d_MK, weight_KN, None, kept_MN, out_MN, activation=activation, backward=True)
    return out_MN


def _launch(
    a_MK: torch.Tensor,
    b: torch.Tensor,
    bias_N: torch.Tensor | None,
    kept_MN: torch.Tensor,
    out_MN: torch.Tensor,
    *,
    activation: str,
    backward: bool,
) -> None:
    """b has the dimensions KN in the backward pass, and NK in the forward pass."""
    tile = BACKWARD if backward else FORWARD
    if activation == "relu2" and not backward:  # a short epilogue
        tile = tile._replace(warps=tile.warps // 2)
    launch = tile.launch(out_MN, a_MK.shape[1])
    _activated_product[(launch["PROGRAMS"],)](
        TensorDescriptor.from_tensor(a_MK, [tile.M, tile.K]),
        TensorDescriptor.from_tensor(b, [tile.K, tile.N] if backward else [tile.N, tile.K]),
        bias_N if bias_N is not None else out_MN,
        TensorDescriptor.from_tensor(kept_MN, [tile.M, tile.N // 2]),
        TensorDescriptor.from_tensor(out_MN, [tile.M, tile.N // 2]),
        ACTIVATION=activation,
        BACKWARD=backward,
        BIASED=bias_N is not None,
        NATIVE=a_MK.is_cuda,
        **launch,
    )


@triton.jit
def _gelu(h, NATIVE: tl.constexpr):
    """GELU and its derivative: h P and P + h p, with the normal distribution P and its density p.
    Both come from those of -|h|, in few instructions: they decide how fast the kernel is."""
    size, scaled = tl.abs(h), 0.8493218002880191 * h
    root = exp2(-scaled * scaled, NATIVE)  # exp(-h^2 / 2)
    t = reciprocal(1.0 + 0.23164189 * size, NATIVE)
    series = 0.127414796 + t * (
        -0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    )
    tail = t * series * root  # P(-|h|)
    slope = tail - 0.3989422804014327 * (size * root)
    return tl.maximum(h, 0.0) - size * tail, tl.where(h < 0, slope, 1.0 - slope)


@triton.jit
def _gelu_tanh(h, NATIVE: tl.constexpr):
    """The approximation of GELU with tanh, and its derivative."""
    square = h * h
    t = tanh(0.7978845608028654 * h * (1.0 + 0.044715 * square), NATIVE)
    below = 0.5 + 0.5 * t
    inner = 0.7978845608028654 * (1.0 + 0.134145 * square)
    return h * below, below + 0.5 * h * (1.0 - t * t) * inner


@triton.jit
def _finish(
    sums,
    row,
    column,
    bias,
    kept,
    out,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BACKWARD: tl.constexpr,
    BIASED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Apply the activation to half a tile and store it."""
    if BACKWARD:
        old = kept.load([row, column])
        dtype = old.dtype
        slope = old.to(tl.float32)
        if ACTIVATION == "relu2":
            slope = 2.0 * tl.sqrt(slope)
        result = sums * slope
    else:
        dtype = bias.dtype.element_ty
        if BIASED:
            sums = sums + tl.load(bias + column + tl.arange(0, COLUMNS)).to(tl.float32)[None, :]
        if ACTIVATION == "relu2":
            positive = tl.maximum(sums, 0.0)
            result = positive * positive
        else:
            if ACTIVATION == "gelu":
                result, slope = _gelu(sums, NATIVE)
            else:
                result, slope = _gelu_tanh(sums, NATIVE)
            kept.store([row, column], slope.to(dtype))
    out.store([row, column], result.to(dtype))


@triton.jit
def _activated_product(
    a,
    b,
    bias,
    kept,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BACKWARD: tl.constexpr,
    BIASED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    half: tl.constexpr = TILE_N // 2
    for turn in tl.range(0, tl.cdiv((M // TILE_M) * (N // TILE_N), PROGRAMS), flatten=True):
        row, column = corner(turn, M, N, PROGRAMS, TILE_M, TILE_N)
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for begin in range(0, K, TILE_K):
            other = b.load([begin, column]) if BACKWARD else b.load([column, begin]).T
            sums = tl.dot(a.load([row, begin]), other, sums)
        left, right = halves(sums, TILE_M, TILE_N)
        _finish(left, row, column, bias, kept, out, half, ACTIVATION, BACKWARD, BIASED, NATIVE)
        column += half
        _finish(right, row, column, bias, kept, out, half, ACTIVATION, BACKWARD, BIASED, NATIVE)
