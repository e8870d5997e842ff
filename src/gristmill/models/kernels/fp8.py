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
