"""Cross-entropy over rows of logits, and its gradient in their place: one kernel.

A program holds one row of logits z with target t and computes, with c the soft cap,

    y = c tanh(z / c)                                      (y = z without a cap)
    loss = log sum exp(y) - y_t
    dz = f (exp(y - log sum exp(y)) - [v = t]) (1 - (y / c)^2)

in two passes over the row, in powers of two: the first keeps a maximum and a sum for each lane,
which meet at the end, the second writes. A row of 50 thousand bf16 logits fits the cache, so memory
sees it read once and written once. Everything is computed in fp32, whatever the logits' format.
Columns from `vocab` on are padding: never predicted, gradient zero.

For half-precision logits tanh is the GPU's own instruction. The arithmetic of a row is in
`softmax.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gristmill.models.kernels.softmax import capped, log_sum_of_row, read, slope

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
        gradient = gradient * slope(z, cap)
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
    picked = capped(tl.load(line + target).to(tl.float32), cap, CAPPED, NATIVE)
    log_sum = log_sum_of_row(line, cap, VOCAB, CAPPED, NATIVE, BLOCK)
    tl.store(losses + row, 0.6931471805599453 * (log_sum - picked))

    if GRADIENT:
        factor = tl.load(factors + row)
        for begin in range(0, whole, BLOCK):
            z = read(line, begin + lanes, cap, VOCAB, CAPPED, NATIVE, END=False)
            _write(line, begin + lanes, z, log_sum, factor, cap, COLUMNS, CAPPED, END=False)
        for begin in tl.static_range(whole, COLUMNS, BLOCK):
            z = read(line, begin + lanes, cap, VOCAB, CAPPED, NATIVE, END=True)
            _write(line, begin + lanes, z, log_sum, factor, cap, COLUMNS, CAPPED, END=True)
        tl.debug_barrier()  # the target's column is written last
        gradient = factor * (tl.exp2(picked - log_sum) - 1.0)
        if CAPPED:
            gradient = gradient * slope(picked, cap)
        tl.store(line + target, gradient.to(logits.dtype.element_ty))
