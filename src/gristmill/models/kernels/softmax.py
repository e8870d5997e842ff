"""What the kernels of the loss share: capped logits, and the log of a row's sum of powers.

    y = c tanh(z / c)            c the soft cap; y = z without one
    log sum exp(y)               of a row
    dy / dz = 1 - (y / c)^2

Logits are handed on in units of log 2, since the GPU's own exponential is a power of two. Columns
from `VOCAB` on are padding. With a cap no logit is above it, so the cap serves as the maximum of
all rows; without one every lane keeps a maximum and a sum of its own, which meet at the end.
`NATIVE`: tanh is the GPU's own instruction, exact to 11 bits, three more than a bf16 logit has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gristmill.models.kernels.tanh import tanh


@triton.jit
def capped(z, cap, CAPPED: tl.constexpr, NATIVE: tl.constexpr):
    """Logits in fp32, capped, in units of log 2."""
    if CAPPED:
        z = cap * tanh(z / cap, NATIVE)
    return z * 1.4426950408889634


@triton.jit
def slope(z, cap):
    """By how much a capped logit (in units of log 2) grows with the logit itself."""
    # Padding may have z = -inf; any finite slope leaves its gradient at 0.
    y = tl.maximum(z, -1e6) * (0.6931471805599453 / cap)
    return 1.0 - y * y


@triton.jit
def read(
    line,
    at,
    cap,
    VOCAB: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    END: tl.constexpr,
):
    """Capped logits of some columns of a row; only the last block has columns to mask, so that all
    others are read in wide pieces."""
    if END:
        z = tl.load(line + at, mask=at < VOCAB, other=0.0).to(tl.float32)
    else:
        z = tl.load(line + at).to(tl.float32)
    z = capped(z, cap, CAPPED, NATIVE)
    if END:
        z = tl.where(at < VOCAB, z, -float("inf"))
    return z


@triton.jit
def log_sum_of_row(
    line,
    cap,
    VOCAB: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """log2 of the sum of a row's powers, in one pass over it."""
    lanes = tl.arange(0, BLOCK)
    whole: tl.constexpr = VOCAB // BLOCK * BLOCK
    # A finite start, so that lanes without any column stay at zero.
    sums, tops = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), -1e30, tl.float32)
    for begin in range(0, whole, BLOCK):
        z = read(line, begin + lanes, cap, VOCAB, CAPPED, NATIVE, END=False)
        sums, tops = _take(sums, tops, z, cap, CAPPED)
    z = read(line, whole + lanes, cap, VOCAB, CAPPED, NATIVE, END=True)
    sums, tops = _take(sums, tops, z, cap, CAPPED)
    top = 1.4426950408889634 * cap if CAPPED else tl.max(tops, 0)
    total = tl.sum(sums, 0) if CAPPED else tl.sum(sums * tl.exp2(tops - top), 0)
    return top + tl.log2(total)


@triton.jit
def _take(sums, tops, z, cap, CAPPED: tl.constexpr):
    """Add a block to the running sums of powers; `tops` are the lanes' maxima."""
    if CAPPED:
        return sums + tl.exp2(z - 1.4426950408889634 * cap), tops
    higher = tl.maximum(tops, z)
    return sums * tl.exp2(tops - higher) + tl.exp2(z - higher), higher
