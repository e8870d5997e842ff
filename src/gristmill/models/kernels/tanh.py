"""tanh inside kernels: the GPU's instruction, accurate to 11 bits, or computed from exp2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x, NATIVE: tl.constexpr):
    """tanh of fp32 numbers; `NATIVE` uses the GPU's instruction."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)
