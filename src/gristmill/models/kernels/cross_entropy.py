"""Cross-entropy over rows of logits, overwritten by its gradient, in one kernel.

A program handles one row of logits z with target t and computes, with c the soft cap,

    y = c tanh(z / c)                                      (y = z without a cap)
    loss = log sum exp(y) - y_t
    dz = ((f + g) exp(y - log sum exp(y)) - f [v = t] - g [v = u]) (1 - (y / c)^2)

where f is the row's factor, and g that of a second target u, if there is one
(multi-token prediction).

It takes two passes over the row, in base 2: the first keeps a maximum and a sum per lane, reduced
at the end, the second writes. A row of 50 thousand bf16 logits fits the cache, so it is read from
memory once and written once. All arithmetic is in fp32. Columns from `vocab` on are padding: never
predicted, gradient zero. In a sampled softmax (`models/loss_terms.py`) columns have
weights w, and log w is added to y in the sum.

The kernel can also write the gradient in fp8. A probability of one in 50 thousand is 2^-16, the
smallest number of e5m2; scaled so that a gradient of 1 is 2^13, gradients from 2^-29 to 1 survive.

On an H200 the rows of GPT-2 124M take 4.0 ms of a step under the profiler
(`benchmarks/results/2026-11-18.md`). What plain operations take in its place is not recorded.

For half-precision logits tanh is the GPU's instruction, accurate to 11 bits, three more than a bf16
logit has.
"""

from __future__ import annotations

from typing import Self

import torch
import triton
import triton.language as tl

from gristmill.models.kernels.fp8 import E5M2, MULTIPLE, Fp8, fitted, product, quantised
from gristmill.models.kernels.instructions import exp2, tanh
from gristmill.models.loss_terms import LossTerms, TokenTargets

BLOCK, WARPS = 2048, 8
WIDE, WIDE_BLOCK, WIDE_WARPS = 32768, 4096, 16
"""Longer rows are read by larger blocks: fewer are under way at a time, and stay in the cache."""
LOW_CAP = 40.0
"""Up to this cap, the cap can stand in for a row's maximum without underflow: the smallest power,
2^(-2 cap / log 2), is above 2^-126, where fp32 numbers become subnormal."""


def cross_entropy_(
    logits_NV: torch.Tensor,
    tokens: TokenTargets,
    factors_N: torch.Tensor | None,
    terms: LossTerms,
    *,
    vocab: int,
    copy: Fp8 | None = None,
    log_weights_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 losses of all rows. With `factors_N`, factor x gradient overwrites the logits, and
    `copy`, if given, receives the same in fp8. `log_weights_V`: of sampled columns. Second targets
    add to the gradient, not to the losses."""
    cap, targets_N = terms.cap, tokens.targets_N
    more_targets_N, more_factors_N = tokens.mtp_targets_N, tokens.mtp_factors_N
    rows, columns = logits_NV.shape
    block, warps = (WIDE_BLOCK, WIDE_WARPS) if columns > WIDE else (BLOCK, WARPS)
    assert logits_NV.stride(1) == 1, "rows must be contiguous"
    losses_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _cross_entropy_rows[(rows,)](
        logits_NV,
        targets_N,
        factors_N if factors_N is not None else losses_N,
        more_targets_N if more_targets_N is not None else targets_N,
        more_factors_N if more_factors_N is not None else losses_N,
        losses_N,
        copy.values if copy is not None else logits_NV,
        copy.scale if copy is not None else losses_N,
        log_weights_V if log_weights_V is not None else losses_N,
        logits_NV.stride(0),
        cap if cap is not None else 1.0,
        VOCAB=vocab,
        COLUMNS=columns,
        CAPPED=cap is not None,
        BOUNDED=cap is not None and cap <= LOW_CAP,
        GRADIENT=factors_N is not None,
        COPY=copy is not None,
        SAMPLED=log_weights_V is not None,
        SECOND=more_targets_N is not None,
        QUICK=logits_NV.is_cuda and logits_NV.element_size() == 2,
        NATIVE=logits_NV.is_cuda,
        BLOCK=min(block, triton.next_power_of_2(columns)),
        num_warps=warps,
    )
    return losses_N


@triton.jit
def _capped(z, cap, CAPPED: tl.constexpr, QUICK: tl.constexpr):
    """Capped fp32 logits in units of log 2, since the GPU's exponential is exp2."""
    if CAPPED:
        z = cap * tanh(z / cap, QUICK)
    return z * 1.4426950408889634


@triton.jit
def _weighted(z, at, log_weights, VOCAB: tl.constexpr, SAMPLED: tl.constexpr):
    """Logits in units of log 2, with the weights of their columns."""
    if SAMPLED:
        z += 1.4426950408889634 * tl.load(log_weights + at, mask=at < VOCAB, other=0.0)
    return z


@triton.jit
def _gradient(
    z,
    at,
    log_sum,
    factor,
    cap,
    share,
    log_weights,
    VOCAB: tl.constexpr,
    CAPPED: tl.constexpr,
    SAMPLED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Gradient of capped logits in units of log 2; `share`: of the factor, which targets in this
    column have."""
    power = exp2(_weighted(z, at, log_weights, VOCAB, SAMPLED) - log_sum, NATIVE)
    gradient = factor * (power - share)
    if CAPPED:
        # Padding may have z = -inf; any finite slope leaves its gradient at 0.
        y = tl.maximum(z, -1e6) * (0.6931471805599453 / cap)
        gradient = gradient * (1.0 - y * y)
    return gradient


@triton.jit
def _read(
    line,
    at,
    cap,
    VOCAB: tl.constexpr,
    CAPPED: tl.constexpr,
    QUICK: tl.constexpr,
    END: tl.constexpr,
):
    """Capped logits of some columns of a row. Only the last block needs a mask; the others use wide
    loads."""
    if END:
        z = tl.load(line + at, mask=at < VOCAB, other=0.0).to(tl.float32)
    else:
        z = tl.load(line + at).to(tl.float32)
    z = _capped(z, cap, CAPPED, QUICK)
    if END:
        z = tl.where(at < VOCAB, z, -float("inf"))
    return z


@triton.jit
def _take(sums, tops, z, cap, BOUNDED: tl.constexpr, NATIVE: tl.constexpr):
    """Add a block to the running sums of powers; `tops` are the lanes' maxima. A low cap replaces
    the maxima, since no logit exceeds it."""
    if BOUNDED:
        return sums + exp2(z - 1.4426950408889634 * cap, NATIVE), tops
    higher = tl.maximum(tops, z)
    return sums * exp2(tops - higher, NATIVE) + exp2(z - higher, NATIVE), higher


@triton.jit
def _log_sum(
    line,
    cap,
    log_weights,
    VOCAB: tl.constexpr,
    CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr,
    SAMPLED: tl.constexpr,
    QUICK: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """log2 of the sum of a row's powers, in one pass over it."""
    lanes = tl.arange(0, BLOCK)
    whole: tl.constexpr = VOCAB // BLOCK * BLOCK
    # A finite initial maximum keeps lanes without a column at zero.
    sums, tops = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), -1e30, tl.float32)
    for begin in range(0, whole, BLOCK):
        z = _read(line, begin + lanes, cap, VOCAB, CAPPED, QUICK, END=False)
        z = _weighted(z, begin + lanes, log_weights, VOCAB, SAMPLED)
        sums, tops = _take(sums, tops, z, cap, BOUNDED, NATIVE)
    z = _read(line, whole + lanes, cap, VOCAB, CAPPED, QUICK, END=True)
    z = _weighted(z, whole + lanes, log_weights, VOCAB, SAMPLED)
    sums, tops = _take(sums, tops, z, cap, BOUNDED, NATIVE)
    top = 1.4426950408889634 * cap if BOUNDED else tl.max(tops, 0)
    total = tl.sum(sums, 0) if BOUNDED else tl.sum(sums * exp2(tops - top, NATIVE), 0)
    return top + tl.log2(total)


@triton.jit
def _store(
    line,
    copy,
    at,
    gradient,
    units,
    COLUMNS: tl.constexpr,
    COPY: tl.constexpr,
    NATIVE: tl.constexpr,
    END: tl.constexpr,
):
    """Write the gradient of some columns, and its fp8 copy."""
    inside = at < COLUMNS if END else None
    tl.store(line + at, gradient.to(line.dtype.element_ty), mask=inside)
    if COPY:
        small = fitted(gradient * units, "e5m2", NATIVE).to(copy.dtype.element_ty)
        tl.store(copy + at, small, mask=inside)


@triton.jit
def _cross_entropy_rows(
    logits,
    targets,
    factors,
    second_targets,
    second_factors,
    losses,
    copies,
    scale,
    log_weights,
    stride,
    cap,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr,
    GRADIENT: tl.constexpr,
    COPY: tl.constexpr,
    SAMPLED: tl.constexpr,
    SECOND: tl.constexpr,
    QUICK: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line, copy = logits + row * stride, copies + row * COLUMNS
    lanes = tl.arange(0, BLOCK)
    whole: tl.constexpr = VOCAB // BLOCK * BLOCK
    target = tl.load(targets + row)
    picked = _capped(tl.load(line + target).to(tl.float32), cap, CAPPED, QUICK)
    log_sum = _log_sum(
        line, cap, log_weights, VOCAB, CAPPED, BOUNDED, SAMPLED, QUICK, NATIVE, BLOCK
    )
    tl.store(losses + row, 0.6931471805599453 * (log_sum - picked))

    if GRADIENT:
        factor = tl.load(factors + row)
        share = 1.0
        if SECOND:
            again = tl.load(second_targets + row)
            picked_again = _capped(tl.load(line + again).to(tl.float32), cap, CAPPED, QUICK)
            more = tl.load(second_factors + row)
            factor += more
            share_again = tl.where(factor == 0.0, 0.0, more / factor)
            share = tl.where(again == target, 1.0, 1.0 - share_again)
            share_again = tl.where(again == target, 1.0, share_again)
        units = 1.0 / tl.load(scale) if COPY else 1.0
        for begin in range(0, whole, BLOCK):
            at = begin + lanes
            z = _read(line, at, cap, VOCAB, CAPPED, QUICK, END=False)
            gradient = _gradient(
                z, at, log_sum, factor, cap, 0.0, log_weights, VOCAB, CAPPED, SAMPLED, NATIVE
            )
            _store(line, copy, at, gradient, units, COLUMNS, COPY, NATIVE, END=False)
        for begin in tl.static_range(whole, COLUMNS, BLOCK):
            at = begin + lanes
            z = _read(line, at, cap, VOCAB, CAPPED, QUICK, END=True)
            gradient = _gradient(
                z, at, log_sum, factor, cap, 0.0, log_weights, VOCAB, CAPPED, SAMPLED, NATIVE
            )
            _store(line, copy, at, gradient, units, COLUMNS, COPY, NATIVE, END=True)
        tl.debug_barrier()  # the columns of targets are written last
        gradient = _gradient(
            picked, target, log_sum, factor, cap, share, log_weights, VOCAB, CAPPED, SAMPLED, NATIVE
        )
        _store(line, copy, target, gradient, units, COLUMNS, COPY, NATIVE, END=False)
        if SECOND:
            gradient = _gradient(
                picked_again,
                again,
                log_sum,
                factor,
                cap,
                share_again,
                log_weights,
                VOCAB,
                CAPPED,
                SAMPLED,
                NATIVE,
            )
            _store(line, copy, again, gradient, units, COLUMNS, COPY, NATIVE, END=False)


# ------------------------------------------------------------------ the head in fp8
#
# For training, two of the head's three matrix products are in fp8:
#
#     logits   = s_h s_W  h8 W8^T                 h8, W8: e4m3      logits: bf16
#     d_h      = s_g s_W  g8 W8                   g8: e5m2          d_h: bf16
#     d_W     += g^T h                            bf16              d_W: fp32
#
#     s_h = max|h| / 448   s_W = max|W| / 448     on the device, for each slice and for each call
#     s_g = 2^-13 max|f|                          f: factors of the rows' gradients, in all
#
# The scale s_g adapts to the batch size and the loss weights, so small factors lose no gradients.
# The gradient of the head stays in bf16: fp8 would need both operands transposed, which costs as
# much as it gains. Gradients accumulate in fp32; the logits, sums of a few hundred to a few
# thousand products, accumulate in the tensor cores.
#
# Measured on an H200, GPT-2 124M: 613k instead of 584k tokens/s, 5 % (`docs/log.md`).
#
# Given up: one scale per matrix. A single outlier costs all other numbers their low digits.

SHIFT = 2.0**13
"""The largest scaled gradient of a slice; e5m2 goes up to seven times as much."""


class Fp8Head:
    """The head in fp8, for one call."""

    def __init__(self, head_VD: torch.Tensor, terms: LossTerms, *, vocab: int) -> None:
        assert not any(size % MULTIPLE for size in head_VD.shape), "checked with the settings"
        self.head_VD = quantised(head_VD)
        self.head_DV = Fp8(self.head_VD.values.T.contiguous(), self.head_VD.scale)
        self.terms, self.vocab = terms, vocab
        self.places: slice | torch.Tensor = slice(head_VD.shape[0])
        self.log_weights_R: torch.Tensor | None = None

    def sampled(self, rows_R: torch.Tensor, log_weights_R: torch.Tensor) -> Self:
        self.places, self.log_weights_R = rows_R, log_weights_R
        return self

    def losses(
        self,
        hidden_ND: torch.Tensor,
        tokens: TokenTargets,
        factors_N: torch.Tensor | None,
        d_hidden_ND: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert factors_N is not None and d_hidden_ND is not None, "for training only"
        logits_NV = product(quantised(hidden_ND), self.head_VD, dtype=torch.bfloat16, fast=True)
        more_N = tokens.mtp_factors_N
        all_N = factors_N if more_N is None else factors_N + more_N
        largest = all_N.abs().amax().clamp(min=2.0**-100)  # all factors may be zero
        copy_NV = Fp8(torch.empty_like(logits_NV, dtype=E5M2), largest / SHIFT)
        losses_N = cross_entropy_(
            *(logits_NV, tokens, factors_N, self.terms),
            vocab=self.vocab,
            copy=copy_NV,
            log_weights_V=self.log_weights_R,
        )
        d_hidden_ND.copy_(product(copy_NV, self.head_DV, dtype=torch.bfloat16, fast=False))
        return losses_N, logits_NV
