"""Drawing the next token on a GPU: what `sampling.py` does, in one program for each row.

Nothing is sorted. The k-th largest logit and the smallest one that top-p keeps are found by
bisection, over the order of floating-point numbers as integers, so the thresholds are exact. Mostly
the likeliest few hundred tokens are collected first, and bisection is among them; where that is not
enough, each halving reads the whole row.

Then the program writes down what the next step needs: the token, the new length, and which uniform
number comes next.

Shapes: R rows, S slots, V vocabulary, U uniform numbers, B tokens that are kept for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gristmill.generate.sampling import NOT_FINITE, PROMPT

TILE = 8192
FEW = 1024
"""Tokens among which is drawn without reading the whole row again; twice as many as are usually
needed."""
SETTINGS = 8
"""Numbers for each slot: temperature, top-k, top-p, min-p, the three penalties, and which of
penalties (1) and bias (2) there are."""
_PROMPT = tl.constexpr(PROMPT)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_LEAST = tl.constexpr(-(2**31) + 2**23 - 1)
"""The order of minus infinity."""


@triton.jit
def _ordered(x):
    """Integers in the order of floating-point numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _logits(logits, seen, bias, settings, first, V, TILE: tl.constexpr):
    """A tile of a row with its penalties and bias; minus infinity beyond the vocabulary."""
    v = first + tl.arange(0, TILE)
    inside = v < V
    x = tl.load(logits + v, mask=inside, other=float("-inf"))
    flags = tl.load(settings + 7).to(tl.int32)
    if flags & 1:
        repetition, presence = tl.load(settings + 4), tl.load(settings + 5)
        frequency = tl.load(settings + 6)
        times = tl.load(seen + v, mask=inside, other=0)
        x = tl.where(times > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        count = (times % _PROMPT).to(tl.float32)
        x = x - tl.where(count > 0, presence, 0.0) - count * frequency
    if flags & 2:
        x = x + tl.load(bias + v, mask=inside, other=0.0)
    return x


@triton.jit
def _weights(x, peak, temperature, least, min_p):
    """What each token may be drawn with, in relation to the likeliest one."""
    weight = tl.exp((x - peak) / temperature)
    return tl.where((_ordered(x) >= least) & (weight >= min_p), weight, 0.0)


@triton.jit
def _drawn_from_all(
    logits, seen, bias, settings, V, peak, above, temperature, top_k, top_p, min_p, uniform,
    likeliest, TILE: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """A token drawn where many may be."""
    least = tl.full((), _LEAST, tl.int64)
    if (top_k > 0) & (top_k < V):
        # At least k tokens are at `least` or above, fewer at `high` or above.
        high = above
        while high - least > 1:
            middle = (least + high) >> 1
            count_T = tl.zeros((TILE,), tl.int32)
            for first in tl.range(0, V, TILE, loop_unroll_factor=UNROLLED):
                x = _logits(logits, seen, bias, settings, first, V, TILE)
                v = first + tl.arange(0, TILE)
                count_T += tl.where((_ordered(x) >= middle) & (v < V), 1, 0)
            count = tl.sum(count_T)
            if count >= top_k:
                least = middle
                if count == top_k:
                    high = least + 1
            else:
                high = middle
    if top_p < 1.0:
        sum_T = tl.zeros((TILE,), tl.float32)
        for first in tl.range(0, V, TILE, loop_unroll_factor=UNROLLED):
            x = _logits(logits, seen, bias, settings, first, V, TILE)
            sum_T += _weights(x, peak, temperature, least, 0.0)
        wanted = top_p * tl.sum(sum_T)
        high = above
        while high - least > 1:
            middle = (least + high) >> 1
            sum_T = tl.zeros((TILE,), tl.float32)
            # The tokens next to the middle: there are none between them.
            upper_T = tl.full((TILE,), 2**31 - 1, tl.int32)
            lower_T = tl.full((TILE,), _LEAST, tl.int32)
            for first in tl.range(0, V, TILE, loop_unroll_factor=UNROLLED):
                x = _logits(logits, seen, bias, settings, first, V, TILE)
                sum_T += _weights(x, peak, temperature, middle, 0.0)
                key = _ordered(x)
                upper_T = tl.minimum(upper_T, tl.where(key >= middle, key, 2**31 - 1))
                lower_T = tl.maximum(lower_T, tl.where(key >= middle, _LEAST, key))
            if tl.sum(sum_T) >= wanted:
                least = tl.min(upper_T).to(tl.int64)
            else:
                high = tl.max(lower_T).to(tl.int64) + 1
    sum_T = tl.zeros((TILE,), tl.float32)
    for first in tl.range(0, V, TILE, loop_unroll_factor=UNROLLED):
        x = _logits(logits, seen, bias, settings, first, V, TILE)
        sum_T += _weights(x, peak, temperature, least, min_p)
    mass = tl.sum(sum_T)
    target = uniform * mass
    before = 0.0
    found = -1
    last = likeliest
    for first in range(0, V, TILE):
        if found < 0:
            v = first + tl.arange(0, TILE)
            x = _logits(logits, seen, bias, settings, first, V, TILE)
            weight = _weights(x, peak, temperature, least, min_p)
            inside = tl.sum(weight)
            if before + inside > target:
                sums = before + tl.cumsum(weight, axis=0)
                found = tl.min(tl.where((sums > target) & (weight > 0), v, V)).to(tl.int32)
                if found == V:
                    found = -1
            # Rounding must not lead behind the last token that may be drawn.
            last = tl.maximum(last, tl.max(tl.where(weight > 0, v, -1)).to(tl.int32))
            before += inside
    return tl.where(found >= 0, found, last)


@triton.jit
def _draw(
    logits, settings_S, seen_SV, bias_SV, uniform_SU, slots, tokens, lengths, drawn, ids,
    few_x, few_v, V, logits_stride, capacity, numbers,
    SETTINGS: tl.constexpr, KEPT: tl.constexpr, TILE: tl.constexpr, UNROLLED: tl.constexpr,
    FEW: tl.constexpr, ENOUGH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    logits += row * logits_stride
    seen, bias = seen_SV + slot * V, bias_SV + slot * V
    settings = settings_S + slot * SETTINGS
    temperature = tl.load(settings)
    top_k = tl.load(settings + 1).to(tl.int32)
    top_p, min_p = tl.load(settings + 2), tl.load(settings + 3)
    index = tl.load(drawn + slot)
    # The likeliest token, and whether all logits are numbers.
    bad_T = tl.zeros((TILE,), tl.int32)
    peak_T = tl.full((TILE,), float("-inf"), tl.float32)
    place_T = tl.zeros((TILE,), tl.int32)
    for first in tl.range(0, V, TILE, loop_unroll_factor=UNROLLED):
        v = first + tl.arange(0, TILE)
        raw = tl.load(logits + v, mask=v < V, other=0.0)
        bad_T += tl.where(tl.abs(raw) < float("inf"), 0, 1)
        x = _logits(logits, seen, bias, settings, first, V, TILE)
        # Of several, the first one.
        place_T = tl.where(x > peak_T, v, place_T)
        peak_T = tl.maximum(x, peak_T)
    bad, peak = tl.sum(bad_T), tl.max(peak_T)
    likeliest = tl.min(tl.where(peak_T == peak, place_T, V)).to(tl.int32)
    chosen = likeliest
    if (temperature > 0) & (bad == 0):
        temperature = tl.maximum(temperature, 1.1754943508222875e-38)
        above = tl.max(_ordered(tl.full((1,), 0.0, tl.float32) + peak)).to(tl.int64) + 1
        uniform = tl.load(uniform_SU + slot * numbers + index)
        limited = (top_k > 0) & (top_k < V)
        done = 0
        if limited | (top_p < 1.0):
            # The likeliest tokens are among those that are no less likely than the k-th likeliest
            # of TILE tokens, the best of every column. These are few, and collected.
            wanted_k = tl.where(limited, tl.minimum(top_k, ENOUGH), ENOUGH)
            bound = tl.full((), _LEAST, tl.int64)
            high = above
            best_T = _ordered(peak_T)
            while high - bound > 1:
                middle = (bound + high) >> 1
                count = tl.sum(tl.where(best_T >= middle, 1, 0))
                if count >= wanted_k:
                    bound = middle
                    if count == wanted_k:
                        high = bound + 1
                else:
                    high = middle
            collected = 0
            mass_T = tl.zeros((TILE,), tl.float32)
            for first in range(0, V, TILE):
                v = first + tl.arange(0, TILE)
                x = _logits(logits, seen, bias, settings, first, V, TILE)
                mass_T += tl.exp((x - peak) / temperature)
                few = (_ordered(x) >= bound) & (v < V)
                place = collected + tl.cumsum(few.to(tl.int32), axis=0) - 1
                mask = few & (place < FEW)
                tl.store(few_x + row * FEW + place, x, mask=mask)
                tl.store(few_v + row * FEW + place, v, mask=mask)
                collected += tl.sum(few.to(tl.int32))
            tl.debug_barrier()
            if collected <= FEW:
                number = tl.arange(0, FEW)
                there = number < collected
                x = tl.load(few_x + row * FEW + number, mask=there, other=float("-inf"))
                v = tl.load(few_v + row * FEW + number, mask=there, other=0)
                key = _ordered(x)
                weight = tl.where(there, tl.exp((x - peak) / temperature), 0.0)
                complete = True
                total = tl.sum(mass_T)
                if limited:
                    least = bound
                    high = above
                    while high - least > 1:
                        middle = (least + high) >> 1
                        if tl.sum(tl.where(key >= middle, 1, 0)) >= top_k:
                            least = middle
                        else:
                            high = middle
                    weight = tl.where(key >= least, weight, 0.0)
                    complete = tl.sum(tl.where(key >= least, 1, 0)) >= top_k
                    total = tl.sum(weight)
                if complete & (tl.sum(weight) >= top_p * total):
                    if top_p < 1.0:
                        least = bound
                        high = above
                        while high - least > 1:
                            middle = (least + high) >> 1
                            if tl.sum(tl.where(key >= middle, weight, 0.0)) >= top_p * total:
                                least = middle
                            else:
                                high = middle
                        weight = tl.where(key >= least, weight, 0.0)
                    weight = tl.where(weight >= min_p, weight, 0.0)
                    sums = tl.cumsum(weight, axis=0)
                    reached = (sums > uniform * tl.sum(weight)) & (weight > 0)
                    # Rounding must not lead behind the last token that may be drawn.
                    last = tl.max(tl.where(weight > 0, v, -1)).to(tl.int32)
                    chosen = tl.minimum(tl.min(tl.where(reached, v, V)).to(tl.int32), last)
                    done = 1
        if done == 0:
            chosen = _drawn_from_all(
                logits, seen, bias, settings, V, peak, above, temperature, top_k, top_p, min_p,
                uniform, likeliest, TILE, UNROLLED,
            )  # fmt: skip
    chosen = tl.where(bad > 0, _NOT_FINITE, chosen)
    tl.store(ids + slot * KEPT + index % KEPT, chosen)
    fed = tl.maximum(chosen, 0)
    tl.store(tokens + slot, fed)
    tl.store(lengths + slot, tl.minimum(tl.load(lengths + slot) + 1, capacity))
    tl.store(drawn + slot, index + 1)
    if tl.load(settings + 7).to(tl.int32) & 1:
        tl.store(seen + fed, tl.load(seen + fed) + 1)


def draw_rows(
    logits_RV: torch.Tensor,
    settings: torch.Tensor,
    *,
    seen_SV: torch.Tensor,
    bias_SV: torch.Tensor,
    uniform_SU: torch.Tensor,
    slots_R: torch.Tensor,
    tokens_S: torch.Tensor,
    lengths_S: torch.Tensor,
    drawn_S: torch.Tensor,
    ids_SB: torch.Tensor,
    capacity: int,
) -> None:
    """Draw a token for each of these slots, and note it for the next step and for the host."""
    rows, device = len(slots_R), logits_RV.device
    few_x = torch.empty(rows, FEW, device=device)
    few_v = torch.empty(rows, FEW, dtype=torch.int32, device=device)
    _draw[(rows,)](
        logits_RV,
        settings,
        seen_SV,
        bias_SV,
        uniform_SU,
        slots_R,
        tokens_S,
        lengths_S,
        drawn_S,
        ids_SB,
        few_x,
        few_v,
        seen_SV.shape[1],
        logits_RV.stride(0),
        capacity,
        uniform_SU.shape[1],
        SETTINGS=SETTINGS,
        KEPT=ids_SB.shape[1],
        TILE=min(TILE, triton.next_power_of_2(seen_SV.shape[1])),
        UNROLLED=4,
        FEW=FEW,
        ENOUGH=FEW // 2,
        num_warps=32,
    )
