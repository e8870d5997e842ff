"""Matrix products in persistent kernels, which need not read what is before or behind them from
memory: one with an activation, and the sum of three.

One or two programs per SM compute one tile of the output after another, along the rows, so that
programs side by side share what they load. Loads and stores use the tensor memory accelerator of
Hopper and later. Sums are in fp32. Sizes must be multiples of the tile's; other shapes use the
plain version (`models/products.py`, with what each of them gains).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gristmill.models.kernels.instructions import exp2, reciprocal, tanh


class ProductTiles(NamedTuple):
    """Rows, columns and depth of a tile, and how it is launched."""

    M: int
    N: int
    K: int
    warps: int
    programs: int
    """Per SM."""
    stages: int
    """Loads that are under way at a time."""

    def launch(self, out_MN: torch.Tensor, depth: int) -> dict[str, int]:
        """The sizes that a kernel which computes this output is compiled for, and its options; the
        grid is `PROGRAMS`."""
        rows, columns = out_MN.shape
        assert rows % self.M == columns % self.N == depth % self.K == 0, "whole tiles"
        tiles = (rows // self.M) * (columns // self.N)
        sizes = {"M": rows, "N": columns, "K": depth}
        return {
            **sizes,
            **{f"TILE_{name}": getattr(self, name) for name in sizes},
            "PROGRAMS": min(tiles, self.programs * _sm_count(out_MN.device)),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # for the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def corner(
    turn,
    M: tl.constexpr,
    N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """First row and column of this program's tile in a round. In the last round, programs without
    a tile repeat the last one."""
    across: tl.constexpr = N // TILE_N
    last: tl.constexpr = (M // TILE_M) * across - 1
    tile = tl.minimum(tl.program_id(0) + turn * PROGRAMS, last)
    return tile // across * TILE_M, tile % across * TILE_N


@triton.jit
def halves(sums, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The left and the right half of a tile, which need less shared memory on their way out."""
    half: tl.constexpr = TILE_N // 2
    return tl.split(tl.permute(tl.reshape(sums, (TILE_M, 2, half)), (0, 2, 1)))


# ------------------------------------------------------------------ with an activation
#
#     forward    h = x W^T + b,  y = f(h)      stores y and what the backward pass needs of f
#     backward   dh = (dz V) f'(h)             V: weights of the next layer, z = y V^T
#
#     f                 saved for the backward pass
#     gelu, gelu_tanh   f'(h): the forward pass has most of it at hand, and more time for it
#     relu2             nothing but y, since f'(h) = 2 relu(h) = 2 sqrt(y)
#
# One kernel for both. f is computed from the sums before they are rounded. The erf of GELU is
# accurate to 1e-6 (Abramowitz and Stegun, 7.1.26).

# The fastest of ten on an H200. With two programs per SM the epilogue of one overlaps with the
# products of the other; the backward pass, which also loads saved values, has no room for that.
FORWARD, BACKWARD = ProductTiles(128, 128, 64, 8, 2, 3), ProductTiles(128, 256, 64, 8, 1, 3)


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
def gelu(h, NATIVE: tl.constexpr):
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
def gelu_tanh(h, NATIVE: tl.constexpr):
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
                result, slope = gelu(sums, NATIVE)
            else:
                result, slope = gelu_tanh(sums, NATIVE)
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


# ------------------------------------------------------------------ the sum of three
#
#     out = q Wq + k Wk + v Wv        q, k, v: rows x K     Wq, Wk, Wv: rows of one matrix, 3K x N
#
# A product needs its left side in one tensor, or three launches that each read and write the sums.
# Here one loop runs over all 3K columns; where it enters the next tensor, the distance between the
# two in memory is added to its pointers.

QKV_TILES = ProductTiles(128, 256, 64, 8, 1, 3)
"""The fastest of six on an H200."""
ALIGNMENT = 16
"""Bytes that a thread loads at once."""


def sum_of_products(parts: Sequence[torch.Tensor], weight_KN: torch.Tensor) -> torch.Tensor:
    """q Wq + k Wk + v Wv."""
    q, k, v = (_aligned(part) for part in parts)
    (rows, depth), width = q.shape, weight_KN.shape[1]
    out = q.new_empty(rows, width)
    launch = QKV_TILES.launch(out, depth)
    _sum_of_products[(launch["PROGRAMS"],)](
        q,
        k,
        v,
        TensorDescriptor.from_tensor(weight_KN, [QKV_TILES.K, QKV_TILES.N]),
        TensorDescriptor.from_tensor(out, [QKV_TILES.M, QKV_TILES.N // 2]),
        **launch,
    )
    return out


def _aligned(part: torch.Tensor) -> torch.Tensor:
    part = part.contiguous()
    return part if part.data_ptr() % ALIGNMENT == 0 else part.clone()


@triton.jit
def _sum_of_products(
    q,
    k,
    v,
    weight,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    # In elements of two bytes, from the first tensor.
    to_k = tl.multiple_of((k.to(tl.int64) - q.to(tl.int64)) // 2, 8)
    to_v = tl.multiple_of((v.to(tl.int64) - q.to(tl.int64)) // 2, 8)
    for turn in tl.range(0, tl.cdiv((M // TILE_M) * (N // TILE_N), PROGRAMS), flatten=True):
        row, column = corner(turn, M, N, PROGRAMS, TILE_M, TILE_N)
        lines = (row + tl.arange(0, TILE_M)).to(tl.int64)[:, None] * K
        first = q + lines + tl.arange(0, TILE_K)[None, :]
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for begin in range(0, 3 * K, TILE_K):
            behind = tl.where(begin < 2 * K, to_k + begin - K, to_v + begin - 2 * K)
            at = tl.multiple_of(tl.where(begin < K, begin, behind), 8)
            sums = tl.dot(tl.load(first + at), weight.load([begin, column]), sums)
        left, right = halves(sums, TILE_M, TILE_N)
        out.store([row, column], left.to(q.dtype.element_ty))
        out.store([row, column + TILE_N // 2], right.to(q.dtype.element_ty))
