"""The sum of three products, whose left sides are three tensors:

    out = q Wq + k Wk + v Wv        q, k, v: rows x K     Wq, Wk, Wv: rows of one matrix, 3K x N

A product needs its left side in one tensor, or three launches that each read and write the sums.
Here one loop runs over all 3K columns; where it enters the next tensor, the distance between the
two in memory is added to its pointers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gristmill.models.kernels.tiles import Tiles, corner, halves

TILE = Tiles(128, 256, 64, 8, 1, 3)
"""The fastest of six on an H200."""
ALIGNMENT = 16
"""Bytes that a thread loads at once."""


def sum_of_products(parts: Sequence[torch.Tensor], weight_KN: torch.Tensor) -> torch.Tensor:
    """q Wq + k Wk + v Wv."""
    q, k, v = (_aligned(part) for part in parts)
    (rows, depth), width = q.shape, weight_KN.shape[1]
    out = q.new_empty(rows, width)
    launch = TILE.launch(out, depth)
    _sum_of_products[(launch["PROGRAMS"],)](
        q,
        k,
        v,
        TensorDescriptor.from_tensor(weight_KN, [TILE.K, TILE.N]),
        TensorDescriptor.from_tensor(out, [TILE.M, TILE.N // 2]),
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
