"""Matrices in fp8, and their products.

    format   digits   largest   smallest   used for
    e4m3     1 + 3    448       2^-9       activations and weights
    e5m2     1 + 2    57344     2^-16      gradients, whose range is wide

Values are clamped to a format's largest. So are non-finite values, but the scale computed from them
is not finite, and neither is any product with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from gristmill.models.kernels.products import gelu, gelu_tanh

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Dimensions of an fp8 product must be multiples of this."""
BLOCK = 4096


class Fp8(NamedTuple):
    """A matrix in fp8: values times an fp32 scale."""

    values: torch.Tensor
    scale: torch.Tensor


def quantised(x: torch.Tensor) -> Fp8:
    """A matrix in e4m3, scaled so that its largest number is the format's largest."""
    assert x.is_contiguous(), "rows must be contiguous"
    largest = torch.linalg.vector_norm(x, ord=torch.inf, dtype=torch.float32)
    scale = largest.clamp(min=2.0**-40) / 448.0  # not zero for a matrix of zeros
    values = torch.empty_like(x, dtype=E4M3)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _quantise[grid](x, scale, values, x.numel(), NATIVE=x.is_cuda, BLOCK=BLOCK)
    return Fp8(values, scale)


def product(a_MK: Fp8, b_NK: Fp8, *, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """a b^T. `fast`: accumulate in the tensor cores, with about 14 bits."""
    return torch._scaled_mm(
        a_MK.values,
        b_NK.values.T,
        a_MK.scale,
        b_NK.scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


@triton.jit
def fitted(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 numbers ready for a cast to fp8: clamped to its range and, for Triton's interpreter,
    whose cast drops the carry, already rounded to nearest."""
    MOST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
    x = tl.minimum(tl.maximum(x, -MOST), MOST)
    if not NATIVE:
        # Adding 1.5 x 2^23 units in the last place rounds everything below them away.
        UNITS: tl.constexpr = 1572864.0 if FORMAT == "e4m3" else 3145728.0
        LEAST: tl.constexpr = 0.015625 if FORMAT == "e4m3" else 0.00006103515625
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, LEAST) * UNITS
        x = (x + shift) - shift
    return x


@triton.jit
def _quantise(x, scale, values, count, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * (1.0 / tl.load(scale))
    value = fitted(value, "e4m3", NATIVE).to(values.dtype.element_ty)
    tl.store(values + at, value, mask=inside)


# ------------------------------------------------------------------ operands of blocks
#
# With a scale that is known, one kernel reads a matrix once, applies an activation or its slope,
# records the amax, and writes the matrix in fp8 as it is and transposed; of a gradient also
# the sums of its columns over the rows of a program, which are added up elsewhere, in a fixed
# order.

CAST_COLUMNS, CAST_WARPS = 128, 8


def cast(
    x_RC: torch.Tensor,
    h_RC: torch.Tensor | None,
    scale: torch.Tensor,
    amax: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    activation: str,
    rows: int,
) -> None:
    """Cast x, its activation, or with h x times the activation's slope there. `results`: where to
    write it as it is, transposed, and the sums of its columns over so many rows; what is empty is
    not written. `amax` is raised to the largest absolute value."""
    assert x_RC.is_contiguous() and (h_RC is None or h_RC.is_contiguous()), "rows are contiguous"
    cast_RC, transposed_CR, sums = results
    count, columns = x_RC.shape
    _cast[(triton.cdiv(count, rows), triton.cdiv(columns, CAST_COLUMNS))](
        x_RC,
        x_RC if h_RC is None else h_RC,
        scale,
        amax,
        cast_RC,
        transposed_CR,
        sums,
        count,
        columns,
        ACTIVATION=activation,
        SLOPE=h_RC is not None,
        UNTRANSPOSED=cast_RC.numel() > 0,
        TRANSPOSED=transposed_CR.numel() > 0,
        SUMS=sums.numel() > 0,
        FORMAT="e5m2" if cast_RC.dtype == E5M2 else "e4m3",
        NATIVE=x_RC.is_cuda,
        TILE_R=rows,
        TILE_C=CAST_COLUMNS,
        num_warps=CAST_WARPS,
    )


@triton.jit
def _activated(h, ACTIVATION: tl.constexpr, NATIVE: tl.constexpr):
    """An activation and its slope."""
    if ACTIVATION == "gelu":
        value, slope = gelu(h, NATIVE)
    elif ACTIVATION == "gelu_tanh":
        value, slope = gelu_tanh(h, NATIVE)
    else:
        value = tl.maximum(h, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if ACTIVATION == "relu2":
            slope = 2.0 * value
            value = value * value
        else:
            slope = (h > 0).to(tl.float32)
    return value, slope


@triton.jit
def _cast(
    x,
    h,
    scale,
    amax,
    untransposed,
    transposed,
    sums,
    rows,
    columns,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    UNTRANSPOSED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SUMS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SLOPE:
        _, slope = _activated(
            tl.load(h + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION, NATIVE
        )
        value = value * slope
    elif ACTIVATION != "":
        value, _ = _activated(value, ACTIVATION, NATIVE)
    tl.atomic_max(amax, tl.max(tl.abs(value)), sem="relaxed")
    if SUMS:
        here = sums + tl.program_id(0) * columns + column
        tl.store(here, tl.sum(value, 0), mask=column < columns)
    value = value * (1.0 / tl.load(scale))
    # Infinity minus itself is not a number, and stays it in fp8.
    value = fitted(value, FORMAT, NATIVE) + (value - value)
    if UNTRANSPOSED:
        tl.store(untransposed + at, value.to(untransposed.dtype.element_ty), mask=inside)
    if TRANSPOSED:
        # Cast anew: where one conversion to e4m3 is both stored and moved between threads, ptxas
        # 12.8 lets the latter read it too early. No compiler may leave out adding 0, because of -0.
        again = tl.trans((value + 0.0).to(transposed.dtype.element_ty))
        across = column[:, None] * rows + row[None, :]
        tl.store(
            transposed + across, again, mask=(column < columns)[:, None] & (row < rows)[None, :]
        )
