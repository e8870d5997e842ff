"""Cross-entropy over rows of logits, with the gradient in fp8: two kernels.

    losses       one program a row, one pass: loss and log sum exp(y)
    gradient     one program a tile: f (exp(y - log sum exp(y)) - [v = t]) dy/dz, as e5m2,
                 as it is and turned

Symbols as in `cross_entropy.py`, and the arithmetic of a row is the same. There the gradient takes
the place of the logits; here it cannot, since products in fp8 need it in two layouts, and a turned
tile has rows from 64 programs of the first kernel. So the logits are read once more.

A probability of one in 50 thousand is 2^-16, where e5m2 ends. With factors of about 2^13 what is
kept goes from 2^-29 to 1, and a gradient of 1 is still seven times below the format's largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gristmill.models.kernels import fp8
from gristmill.models.kernels.fp8 import Fp8, fitted, store_both
from gristmill.models.kernels.softmax import capped, log_sum_of_row, slope

BLOCK = 2048
WARPS = 4
SHIFT = 2.0**13
"""The largest factor that a row of the gradient should be given."""


def losses_and_log_sums(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, *, vocab: int, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all rows in fp32: losses, and the logs of sums of powers in units of log 2."""
    rows, columns = logits_NV.shape
    assert logits_NV.is_contiguous(), "rows lie one after the other"
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    log_sums_N = torch.empty_like(losses_N)
    _losses[(rows,)](
        logits_NV,
        targets_N,
        losses_N,
        log_sums_N,
        cap if cap is not None else 1.0,
        VOCAB=vocab,
        COLUMNS=columns,
        CAPPED=cap is not None,
        NATIVE=logits_NV.is_cuda,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS,
    )
    return losses_N, log_sums_N


def gradient(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    log_sums_N: torch.Tensor,
    factors_N: torch.Tensor,
    *,
    vocab: int,
    cap: float | None,
    scale: torch.Tensor,
) -> Fp8:
    """Factor x gradient of all rows; `scale` is what the result says it counts for."""
    rows, columns = logits_NV.shape
    result = fp8.empty(logits_NV, dtype=fp8.E5M2, scale=scale)
    padded = result.turned_NM.shape[1]
    _gradient[fp8.grid(padded, columns)](
        logits_NV,
        targets_N,
        log_sums_N,
        factors_N,
        result.rows_MN,
        result.turned_NM,
        rows,
        padded,
        cap if cap is not None else 1.0,
        VOCAB=vocab,
        N=columns,
        CAPPED=cap is not None,
        NATIVE=logits_NV.is_cuda,
        ROWS=fp8.ROWS,
        COLUMNS=fp8.COLUMNS,
        num_warps=fp8.WARPS,
    )
    return result


@triton.jit
def _losses(
    logits,
    targets,
    losses,
    log_sums,
    cap,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * COLUMNS
    picked = tl.load(line + tl.load(targets + row)).to(tl.float32)
    log_sum = log_sum_of_row(line, cap, VOCAB, CAPPED, NATIVE, BLOCK)
    tl.store(log_sums + row, log_sum)
    picked = capped(picked, cap, CAPPED, NATIVE)
    tl.store(losses + row, 0.6931471805599453 * (log_sum - picked))


@triton.jit
def _gradient(
    logits,
    targets,
    log_sums,
    factors,
    rows,
    turned,
    m,
    padded,
    cap,
    VOCAB: tl.constexpr,
    N: tl.constexpr,
    CAPPED: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS
    down, across = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    exists = row + down < m
    target = tl.load(targets + row + down, mask=exists, other=0)
    log_sum = tl.load(log_sums + row + down, mask=exists, other=0.0)
    # Rows beyond the last have the factor 0: they fill up the turned matrix.
    factor = tl.load(factors + row + down, mask=exists, other=0.0)

    # Padding is read like the rest, so that rows are read in wide pieces, and set to 0 at the end.
    at = column + across
    place = logits + row.to(tl.int64) * N + column + down[:, None] * N + across[None, :]
    z = tl.load(place, mask=exists[:, None] & (at < N)[None, :], other=0.0).to(tl.float32)
    z = capped(z, cap, CAPPED, NATIVE)
    value = tl.exp2(z - log_sum[:, None]) - tl.where(at[None, :] == target[:, None], 1.0, 0.0)
    if CAPPED:
        value = value * slope(z, cap)
    value = tl.where(at[None, :] < VOCAB, value * factor[:, None], 0.0)
    value = fitted(value, "e5m2", NATIVE).to(rows.dtype.element_ty)
    store_both(value, rows, turned, row, column, m, padded, N, ROWS, COLUMNS)
