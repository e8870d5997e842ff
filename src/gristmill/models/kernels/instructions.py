"""Functions of fp32 numbers inside kernels, each one instruction of an NVIDIA GPU.

`NATIVE` is for such a GPU; without it, in Triton's interpreter say, they are computed. Triton's own
exp2 and division take several instructions more, for subnormal numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x, NATIVE: tl.constexpr):
    """Accurate to 11 bits as an instruction."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def exp2(x, NATIVE: tl.constexpr):
    """Accurate to 22 bits; results below 2^-126 are 0."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def reciprocal(x, NATIVE: tl.constexpr):
    """Accurate to 23 bits."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x
