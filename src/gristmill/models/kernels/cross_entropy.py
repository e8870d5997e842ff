"""Cross-entropy over rows of logits, and its gradient in their place: one kernel.

A program holds one row of logits z with target t and computes, with c the soft cap,

    y = c tanh(z / c)                                      (y = z without a cap)
    loss = log sum exp(y) - y_t
    dz = f (exp(y - log sum exp(y)) - [v = t]) (1 - (y / c)^2)

in two passes over the row, in powers of two: the first keeps a maximum and a sum for each lane,
which meet at the end, the second writes. A row of 50 thousand bf16 logits fits the cache, so memory
sees it read once and written once. Everything is computed in fp32, whatever the logits' format.
Columns from `vocab` on are padding: never predicted, gradient zero.

With a cap no logit is above it, so the cap serves as the maximum. For half-precision logits tanh is
the GPU's own instruction, exact to 11 bits, three more than a bf16 logit has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
WARPS = 4


def cross_entropy_(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    factors_N: torch.Tensor | None,
    *,
    vocab: int,
    cap: float | None,
) -> torch.Tensor:
    """Losses of all rows in fp32; where `factors_N` is given, logits become factor x gradient."""
    rows, columns = logits_NV.shape
    assert logits_NV.stride(1) == 1, "rows of logits lie in one piece"
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _rows[(rows,)](
        logits_NV,
        targets_N,
        factors_N if factors_N is not None else losses_N,
        losses_N,
        logits_NV.stride(0),
        cap if cap is not None else 1.0,
        VOCAB=vocab,
        COLUMNS=columns,
        CAPPED=cap is not None,
        GRADIENT=factors_N is not None,
        NATIVE=logits_NV.is_cuda and logits_NV.element_size() == 2,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS,
    )
    return losses_N


@triton.jit
def _tanh(x, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _read(
    line,
    at,
    cap,
    VOCAB: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    END: tl.constexpr,
):
    """Logits of some columns, capped, in units of log 2; only the last block has columns to mask,
    so that all others are read in wide pieces."""
    if END:
        z = tl.load(line + at, mask=at < VOCAB, other=0.0).to(tl.float32)
    else:
        z = tl.load(line + at).to(tl.float32)
    if CAPPED:
        z = cap * _tanh(z / cap, NATIVE)
    z = z * 1.4426950408889634
    if END:
        z = tl.where(at < VOCAB, z, -float("inf"))
    return z


@triton.jit
def _take(sums, tops, z, cap, CAPPED: tl.constexpr):
    """Add a block to the running sums of powers; `tops` are the lanes' maxima."""
    if CAPPED:
        return sums + tl.exp2(z - 1.4426950408889634 * cap), tops
    higher = tl.maximum(tops, z)
    return sums * tl.exp2(tops - higher) + tl.exp2(z - higher), higher


@triton.jit
def _write(
    line,
    at,
    z,
    log_sum,
    factor,
    cap,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
    END: tl.constexpr,
):
    """The gradient of some columns, without what the target adds."""
    gradient = factor * tl.exp2(z - log_sum)
    if CAPPED:
        # Padding has z = -inf and gradient 0, which any finite slope leaves at 0.
        y = tl.maximum(z, -1e6) * (0.6931471805599453 / cap)
        gradient = gradient * (1.0 - y * y)
    value = gradient.to(line.dtype.element_ty)
    if END:
        tl.store(line + at, value, mask=at < COLUMNS)
    else:
        tl.store(line + at, value)


@triton.jit
def _rows(
    logits,
    targets,
    factors,
    losses,
    stride,
    cap,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    whole: tl.constexpr = VOCAB // BLOCK * BLOCK
    target = tl.load(targets + row)
    picked = tl.load(line + target).to(tl.float32)
    if CAPPED:
        picked = cap * _tanh(picked / cap, NATIVE)
    picked = picked * 1.4426950408889634

    # A finite start, so that lanes without any column stay at zero.
    sums, tops = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), -1e30, tl.float32)
    for begin in range(0, whole, BLOCK):
        z = _read(line, begin + lanes, cap, VOCAB, CAPPED, NATIVE, END=False)
        sums, tops = _take(sums, tops, z, cap, CAPPED)
    z = _read(line, whole + lanes, cap, VOCAB, CAPPED, NATIVE, END=True)
    sums, tops = _take(sums, tops, z, cap, CAPPED)
    top = 1.4426950408889634 * cap if CAPPED else tl.max(tops, 0)
    total = tl.sum(sums, 0) if CAPPED else tl.sum(sums * tl.exp2(tops - top), 0)
    log_sum = top + tl.log2(total)
    tl.store(losses + row, 0.6931471805599453 * (log_sum - picked))

    if GRADIENT:
        factor = tl.load(factors + row)
        for begin in range(0, whole, BLOCK):
            z = _read(line, begin + lanes, cap, VOCAB, CAPPED, NATIVE, END=False)
            _write(line, begin + lanes, z, log_sum, factor, cap, COLUMNS, CAPPED, END=False)
        for begin in tl.static_range(whole, COLUMNS, BLOCK):
            z = _read(line, begin + lanes, cap, VOCAB, CAPPED, NATIVE, END=True)
            _write(line, begin + lanes, z, log_sum, factor, cap, COLUMNS, CAPPED, END=True)
        tl.debug_barrier()  # the target's column is written last
        gradient = factor * (tl.exp2(picked - log_sum) - 1.0)
        if CAPPED:
            y = picked * (0.6931471805599453 / cap)
            gradient = gradient * (1.0 - y * y)
        tl.store(line + target, gradient.to(logits.dtype.element_ty))
