"""Matrices in fp8, in both layouts at once.

    format   digits   largest   smallest   used for
    e4m3     1 + 3    448       2^-9       activations and weights
    e5m2     1 + 2    57344     2^-16      gradients, whose range is wide

A product in fp8 reads both operands along the dimension that it sums over, so whatever takes part
in a forward and in a backward product is needed twice: as it is, and turned. torch turns fp8
matrices byte by byte; here each tile is computed once and stored both ways, in whole pieces of 128
and 64 bytes. The summed dimension of a product comes in multiples of 16, so turned rows are filled
up with zeros.

Numbers beyond a format's largest become the largest. What is not finite is not kept either, but a
scale made from it is not finite, and with that no product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Dimensions of a product in fp8 are multiples of this."""
ROWS, COLUMNS = 64, 128
WARPS = 8


class Fp8(NamedTuple):
    """A matrix in fp8: its numbers are those stored times the scale."""

    rows_MN: torch.Tensor
    turned_NM: torch.Tensor
    """The same turned, with M filled up by zeros to whole multiples."""
    scale: torch.Tensor
    """In fp32, on the device."""


def quantised(x_MN: torch.Tensor) -> Fp8:
    """A matrix in e4m3, its largest number at the format's largest."""
    assert x_MN.is_contiguous(), "rows lie one after the other"
    largest = torch.linalg.vector_norm(x_MN, ord=torch.inf, dtype=torch.float32)
    scale = largest.clamp(min=2.0**-40) / 448.0  # a matrix of zeros has some scale too
    result = empty(x_MN, dtype=E4M3, scale=scale)
    m, n = x_MN.shape
    padded = result.turned_NM.shape[1]
    _quantise[grid(padded, n)](
        x_MN,
        scale,
        result.rows_MN,
        result.turned_NM,
        m,
        padded,
        N=n,
        NATIVE=x_MN.is_cuda,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    return result


def empty(like_MN: torch.Tensor, *, dtype: torch.dtype, scale: torch.Tensor) -> Fp8:
    """Room for a matrix in fp8, of the shape and on the device of another."""
    m, n = like_MN.shape
    padded = triton.cdiv(m, MULTIPLE) * MULTIPLE
    return Fp8(
        like_MN.new_empty((m, n), dtype=dtype), like_MN.new_empty((n, padded), dtype=dtype), scale
    )


def grid(m: int, n: int) -> tuple[int, int]:
    """One program for each tile of a matrix."""
    return triton.cdiv(n, COLUMNS), triton.cdiv(m, ROWS)


def product(
    a_MK: torch.Tensor,
    b_NK: torch.Tensor,
    *,
    scales: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """a b^T with both scales. `fast`: summed inside the tensor cores, in about 14 bits."""
    return torch._scaled_mm(a_MK, b_NK.T, *scales, out_dtype=dtype, use_fast_accum=fast)


@triton.jit
def fitted(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Numbers in fp32 that a cast to fp8 can take: held within its range and, for Triton's
    interpreter, whose own cast loses what is carried, already rounded to the nearest."""
    MOST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
    x = tl.minimum(tl.maximum(x, -MOST), MOST)
    if not NATIVE:
        # Adding 1.5 x 2^23 units of the last place leaves no room for what is below them.
        UNITS: tl.constexpr = 1572864.0 if FORMAT == "e4m3" else 3145728.0
        LEAST: tl.constexpr = 0.015625 if FORMAT == "e4m3" else 0.00006103515625
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, LEAST) * UNITS
        x = (x + shift) - shift
    return x


@triton.jit
def store_both(
    value,
    rows,
    turned,
    row,
    column,
    m,
    padded,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store a tile of a matrix as it is and turned."""
    down, across = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = rows + row.to(tl.int64) * N + column
    inside = (row + down < m)[:, None] & (column + across < N)[None, :]
    tl.store(place + down[:, None] * N + across[None, :], value, mask=inside)
    place = turned + column.to(tl.int64) * padded + row
    inside = (column + across < N)[:, None] & (row + down < padded)[None, :]
    tl.store(place + across[:, None] * padded + down[None, :], tl.trans(value), mask=inside)


@triton.jit
def _quantise(
    x,
    scale,
    rows,
    turned,
    m,
    padded,
    N: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS
    down, across = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = x + row.to(tl.int64) * N + column + down[:, None] * N + across[None, :]
    inside = (row + down < m)[:, None] & (column + across < N)[None, :]
    # Rows beyond the last are zeros: they fill up the turned matrix.
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * (1.0 / tl.load(scale))
    value = fitted(value, "e4m3", NATIVE).to(rows.dtype.element_ty)
    store_both(value, rows, turned, row, column, m, padded, N, ROWS, COLUMNS)
