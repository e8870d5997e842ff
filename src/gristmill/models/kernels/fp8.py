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
#
# A thread has the same columns of four rows. Four values below one another become one word of the
# transposed matrix before threads exchange anything, so that they exchange words, not bytes.

CAST_COLUMNS, CAST_WARPS = 128, 8


def cast(
    x_RC: torch.Tensor,
    h_RC: torch.Tensor | None,
    scales: torch.Tensor,
    amax: torch.Tensor,
    operand: int,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    activation: str,
    rows: int,
) -> None:
    """Cast x, its activation, or with h x times the activation's slope there. `results`: where to
    write it as it is, transposed, and the sums of its columns over so many rows; what is empty is
    not written. The scale is the first in row `operand` of `scales`; that place of `amax` is raised
    to the largest absolute value. If one of the values of a program is infinite, all become NaN."""
    assert x_RC.is_contiguous() and (h_RC is None or h_RC.is_contiguous()), "rows are contiguous"
    cast_RC, transposed_CR, sums = results
    count, columns = x_RC.shape
    assert count % 4 == 0, "whole words of a transposed matrix"
    _cast[(triton.cdiv(count, rows), triton.cdiv(columns, CAST_COLUMNS))](
        x_RC,
        x_RC if h_RC is None else h_RC,
        scales,
        amax,
        cast_RC.view(torch.uint8),
        transposed_CR.view(torch.int32),
        sums,
        count,
        columns,
        OPERAND=operand,
        SCALE=operand * scales.stride(0),
        ACTIVATION=activation,
        SLOPE=h_RC is not None,
        UNTRANSPOSED=cast_RC.numel() > 0,
        TRANSPOSED=transposed_CR.numel() > 0,
        SUMS=sums.numel() > 0,
        FORMAT="e5m2" if cast_RC.dtype == E5M2 else "e4m3",
        NATIVE=x_RC.is_cuda,
        QUADS=rows // 4,
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
def _operand(x, h, at, inside, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, NATIVE: tl.constexpr):
    """What is cast, in fp32."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SLOPE:
        _, slope = _activated(
            tl.load(h + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION, NATIVE
        )
        value = value * slope
    elif ACTIVATION != "":
        value, _ = _activated(value, ACTIVATION, NATIVE)
    return value


# Four numbers in fp8 as one word, the first in its lowest byte. Clamps to the format's range.
_E4M3_WORD: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")
_E5M2_WORD: tl.constexpr = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
    cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")


@triton.jit
def _bytes(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Numbers in fp8, as bytes."""
    if NATIVE:
        WORD: tl.constexpr = _E4M3_WORD if FORMAT == "e4m3" else _E5M2_WORD
        return tl.inline_asm_elementwise(
            WORD, "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    fp8: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
    return fitted(x, FORMAT, NATIVE).to(fp8).to(tl.uint8, bitcast=True)


@triton.jit
def _words(a, b, c, d, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Four numbers in fp8 each, as words."""
    if NATIVE:
        WORD: tl.constexpr = _E4M3_WORD if FORMAT == "e4m3" else _E5M2_WORD
        return tl.inline_asm_elementwise(
            WORD, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    low = _bytes(a, FORMAT, NATIVE).to(tl.int32) | (_bytes(b, FORMAT, NATIVE).to(tl.int32) << 8)
    high = _bytes(c, FORMAT, NATIVE).to(tl.int32) | (_bytes(d, FORMAT, NATIVE).to(tl.int32) << 8)
    return low | (high << 16)


@triton.jit
def _cast(
    x,
    h,
    scales,
    amax,
    untransposed,
    transposed,
    sums,
    rows,
    columns,
    OPERAND: tl.constexpr,
    SCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    UNTRANSPOSED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SUMS: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    QUADS: tl.constexpr,
    TILE_C: tl.constexpr,
):
    first_quad = tl.program_id(0).to(tl.int64) * QUADS
    first_column = tl.program_id(1).to(tl.int64) * TILE_C
    quad, column = tl.arange(0, QUADS), tl.arange(0, TILE_C)
    quad_inside = quad < rows // 4 - first_quad
    column_inside = column < columns - first_column
    inside = quad_inside[:, None] & column_inside[None, :]
    corner = first_quad * 4 * columns + first_column
    at = quad[:, None] * (4 * columns) + column[None, :]
    x += corner
    h += corner
    a = _operand(x, h, at, inside, ACTIVATION, SLOPE, NATIVE)
    b = _operand(x + columns, h + columns, at, inside, ACTIVATION, SLOPE, NATIVE)
    c = _operand(x + 2 * columns, h + 2 * columns, at, inside, ACTIVATION, SLOPE, NATIVE)
    d = _operand(x + 3 * columns, h + 3 * columns, at, inside, ACTIVATION, SLOPE, NATIVE)
    largest = tl.max(tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d))))
    tl.atomic_max(amax + OPERAND, largest, sem="relaxed")
    if SUMS:
        here = sums + tl.program_id(0) * columns + first_column + column
        tl.store(here, tl.sum((a + b) + (c + d), 0), mask=column_inside)
    # The casts turn infinities into the format's largest. Infinity minus itself is NaN, so a tile
    # with one becomes NaN, and the step is skipped.
    factor = 1.0 / tl.load(scales + SCALE) + (largest - largest)
    a, b, c, d = a * factor, b * factor, c * factor, d * factor
    if UNTRANSPOSED:
        untransposed += corner
        tl.store(untransposed + at, _bytes(a, FORMAT, NATIVE), mask=inside)
        tl.store(untransposed + columns + at, _bytes(b, FORMAT, NATIVE), mask=inside)
        tl.store(untransposed + 2 * columns + at, _bytes(c, FORMAT, NATIVE), mask=inside)
        tl.store(untransposed + 3 * columns + at, _bytes(d, FORMAT, NATIVE), mask=inside)
    if TRANSPOSED:
        transposed += first_column * (rows // 4) + first_quad
        across = column[:, None] * (rows // 4) + quad[None, :]
        words = tl.trans(_words(a, b, c, d, FORMAT, NATIVE))
        tl.store(transposed + across, words, mask=column_inside[:, None] & quad_inside[None, :])
