"""Drawing the next token on a GPU: what `sampling.py` does.

Nothing is sorted. The k-th largest logit and the smallest one that top-p keeps are found by
bisection, over the order of floating-point numbers as integers, so the thresholds are exact. First
each block of a row is looked at by a program of its own, which keeps its likeliest tokens. Then one
program draws among these; where they are not enough, it reads the whole row for each halving.

Then the program writes down what the next step needs: the token, the new length, and which uniform
number comes next.

Shapes: R rows, S slots, V vocabulary, U uniform numbers, B tokens that are kept for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gristmill.generate.sampling import NOT_FINITE, PROMPT
from gristmill.models.kernels.decoding import launched, wait_for_input

BLOCK = 2048
"""Tokens that one program looks at first."""
KEPT = 64
"""Likeliest tokens of a block among which is drawn; mostly these are enough."""
SETTINGS = 8
"""Numbers for each slot: temperature, top-k, top-p, min-p, the three penalties, and which of
penalties (1) and bias (2) there are."""
_PROMPT = tl.constexpr(PROMPT)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_TINY = tl.constexpr(1.1754943508222875e-38)
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
    likeliest, TILE: tl.constexpr,
):  # fmt: skip
    """A token drawn where many may be."""
    least = tl.full((), _LEAST, tl.int64)
    if (top_k > 0) & (top_k < V):
        # At least k tokens are at `least` or above, fewer at `high` or above.
        high = above
        while high - least > 1:
            middle = (least + high) >> 1
            count_T = tl.zeros((TILE,), tl.int32)
            for first in range(0, V, TILE):
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
        for first in range(0, V, TILE):
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
            for first in range(0, V, TILE):
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
    for first in range(0, V, TILE):
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
def _survey(
    logits, settings_S, seen_SV, bias_SV, slots, peaks, places, masses, bad, bounds, counts,
    few_x, few_v, V, logits_stride,
    SETTINGS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Note the likeliest token, the mass and the KEPT likeliest tokens of a block of a row."""
    row, block = tl.program_id(0), tl.program_id(1)
    wait_for_input(EARLY)
    slot = tl.load(slots + row).to(tl.int64)
    settings = settings_S + slot * SETTINGS
    logits += row * logits_stride
    first = block * BLOCK
    v = first + tl.arange(0, BLOCK)
    raw = tl.load(logits + v, mask=v < V, other=0.0)
    x = _logits(logits, seen_SV + slot * V, bias_SV + slot * V, settings, first, V, BLOCK)
    at = row * tl.num_programs(1) + block
    peak = tl.max(x)
    tl.store(bad + at, tl.sum(tl.where(tl.abs(raw) < float("inf"), 0, 1)))
    tl.store(peaks + at, peak)
    # Of several, the first one.
    tl.store(places + at, tl.min(tl.where(x == peak, v, V)).to(tl.int32))
    temperature = tl.load(settings)
    if temperature > 0:
        temperature = tl.maximum(temperature, _TINY)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(masses + at, tl.sum(tl.exp((x - safe) / temperature)))
        top_k = tl.load(settings + 1).to(tl.int32)
        if (top_k > 0) | (tl.load(settings + 2) < 1.0) | (tl.load(settings + 3) > 0):
            key = _ordered(x)
            wanted = tl.where((top_k > 0) & (top_k < KEPT), top_k, KEPT)
            bound = _least_of(key, v < V, wanted, tl.max(key))
            few = (key >= bound) & (v < V)
            place = tl.cumsum(few.to(tl.int32), axis=0) - 1
            count = tl.sum(few.to(tl.int32))
            mask = few & (place < KEPT)
            tl.store(few_x + at * KEPT + place, x, mask=mask)
            tl.store(few_v + at * KEPT + place, v, mask=mask)
            tl.store(bounds + at, bound.to(tl.int32))
            tl.store(counts + at, count)


@triton.jit
def _least_of(key, there, wanted, highest):
    """The key of the last one of so many largest keys; the smallest there is if there are fewer."""
    least = tl.full((), _LEAST, tl.int64)
    high = highest.to(tl.int64) + 1
    while high - least > 1:
        middle = (least + high) >> 1
        count = tl.sum(tl.where((key >= middle) & there, 1, 0))
        if count >= wanted:
            least = middle
            if count == wanted:
                high = least + 1
        else:
            high = middle
    return least


@triton.jit
def _draw(
    logits, settings_S, seen_SV, bias_SV, uniform_SU, slots, tokens, lengths, drawn, ids,
    peaks, places, masses, bad, bounds, counts, few_x, few_v,
    V, logits_stride, capacity, numbers, blocks,
    SETTINGS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    KEPT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wait_for_input(EARLY)
    slot = tl.load(slots + row).to(tl.int64)
    logits += row * logits_stride
    seen, bias = seen_SV + slot * V, bias_SV + slot * V
    settings = settings_S + slot * SETTINGS
    temperature = tl.load(settings)
    top_k = tl.load(settings + 1).to(tl.int32)
    top_p, min_p = tl.load(settings + 2), tl.load(settings + 3)
    index = tl.load(drawn + slot)
    # The slot that fills up graphs gets no new numbers, ever.
    uniform = tl.load(uniform_SU + slot * numbers + tl.minimum(index, numbers - 1))
    block = tl.arange(0, BLOCKS)
    at = row * blocks + block
    known = block < blocks
    peak_B = tl.load(peaks + at, mask=known, other=float("-inf"))
    peak = tl.max(peak_B)
    place_B = tl.load(places + at, mask=known, other=0)
    likeliest = tl.min(tl.where(peak_B == peak, place_B, V)).to(tl.int32)
    wrong = tl.sum(tl.load(bad + at, mask=known, other=0))
    # Nothing is allowed.
    wrong = tl.where(peak == float("-inf"), 1, wrong)
    chosen = likeliest
    if (temperature > 0) & (wrong == 0):
        temperature = tl.maximum(temperature, _TINY)
        above = tl.max(_ordered(tl.full((1,), 0.0, tl.float32) + peak)).to(tl.int64) + 1
        mass_B = tl.load(masses + at, mask=known, other=0.0) * tl.exp((peak_B - peak) / temperature)
        limited = (top_k > 0) & (top_k < V)
        done = 0
        if limited | (top_p < 1.0) | (min_p > 0):
            count_B = tl.load(counts + at, mask=known, other=0)
            bound_B = tl.load(bounds + at, mask=known, other=_LEAST)
            # All tokens that are at least as likely as this are among those kept.
            limit = tl.max(tl.where(count_B >= KEPT, bound_B, _LEAST))
            number = tl.arange(0, BLOCKS * KEPT)
            own = row * blocks + number // KEPT
            count = tl.load(counts + own, mask=number // KEPT < blocks, other=0)
            there = number % KEPT < count
            x = tl.load(few_x + own * KEPT + number % KEPT, mask=there, other=float("-inf"))
            v = tl.load(few_v + own * KEPT + number % KEPT, mask=there, other=0)
            key = _ordered(x)
            weight = tl.where(there, tl.exp((x - peak) / temperature), 0.0)
            least = tl.full((), _LEAST, tl.int64)
            total = tl.sum(mass_B)
            if limited:
                least = _least_of(key, there, top_k, tl.max(key))
                weight = tl.where(key >= least, weight, 0.0)
                total = tl.sum(weight)
            if top_p < 1.0:
                high = above
                while high - least > 1:
                    middle = (least + high) >> 1
                    if tl.sum(tl.where(key >= middle, weight, 0.0)) >= top_p * total:
                        least = middle
                    else:
                        high = middle
                weight = tl.where(key >= least, weight, 0.0)
            if min_p > 0:
                weight = tl.where(weight >= min_p, weight, 0.0)
            smallest = tl.min(tl.where(weight > 0, key, 2**31 - 1))
            # With top-k, blocks kept at most as many as were asked for: none is missing.
            whole = tl.sum(tl.where(count_B > KEPT, 1, 0)) == 0
            enough = limited & (top_k <= KEPT) & whole
            if (limited == 0) & (top_p < 1.0):
                enough = (tl.sum(weight) > 0) & (least > limit)
            if (limited == 0) & (top_p >= 1.0):
                floor = peak + temperature * tl.log(min_p)
                enough = tl.max(_ordered(tl.full((1,), 0.0, tl.float32) + floor)) > limit + 64
            if enough & (smallest < 2**31 - 1):
                sums = tl.cumsum(weight, axis=0)
                reached = (sums > uniform * tl.sum(weight)) & (weight > 0)
                # Rounding must not lead behind the last token that may be drawn.
                last = tl.max(tl.where(weight > 0, v, -1)).to(tl.int32)
                chosen = tl.minimum(tl.min(tl.where(reached, v, V)).to(tl.int32), last)
                done = 1
        else:
            # The block, and then the token in it. Names of their own: what both branches assign
            # must have one shape.
            sums_B = tl.cumsum(mass_B, axis=0)
            target = uniform * tl.sum(mass_B)
            its = tl.min(tl.where((sums_B > target) & (mass_B > 0), block, BLOCKS))
            its = tl.minimum(its, tl.max(tl.where(mass_B > 0, block, -1)))
            before = tl.sum(tl.where(block < its, mass_B, 0.0))
            x_of = _logits(logits, seen, bias, settings, its * BLOCK, V, BLOCK)
            v_of = its * BLOCK + tl.arange(0, BLOCK)
            weight_of = tl.exp((x_of - peak) / temperature)
            sums_of = before + tl.cumsum(weight_of, axis=0)
            last_of = tl.max(tl.where(weight_of > 0, v_of, -1)).to(tl.int32)
            first_of = tl.min(tl.where((sums_of > target) & (weight_of > 0), v_of, V))
            chosen = tl.minimum(first_of.to(tl.int32), last_of)
            done = 1
        if done == 0:
            chosen = _drawn_from_all(
                logits, seen, bias, settings, V, peak, above, temperature, top_k, top_p, min_p,
                uniform, likeliest, BLOCK,
            )  # fmt: skip
    chosen = tl.where(wrong > 0, _NOT_FINITE, chosen)
    tl.store(ids + slot * HELD + index % HELD, chosen)
    fed = tl.maximum(chosen, 0)
    tl.store(tokens + slot, fed)
    tl.store(lengths + slot, tl.minimum(tl.load(lengths + slot) + 1, capacity))
    tl.store(drawn + slot, tl.minimum(index + 1, numbers))
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
    (rows, vocab), device = (len(slots_R), seen_SV.shape[1]), logits_RV.device
    size = min(BLOCK, triton.next_power_of_2(vocab))
    blocks = triton.cdiv(vocab, size)
    peaks, masses = (torch.empty(rows, blocks, device=device) for _ in range(2))
    places, bad, bounds, counts = (
        torch.empty(rows, blocks, dtype=torch.int32, device=device) for _ in range(4)
    )
    few_x = torch.empty(rows, blocks, KEPT, device=device)
    few_v = torch.empty(rows, blocks, KEPT, dtype=torch.int32, device=device)
    found = peaks, places, masses, bad, bounds, counts, few_x, few_v
    _survey[rows, blocks](
        logits_RV,
        settings,
        seen_SV,
        bias_SV,
        slots_R,
        *found,
        vocab,
        logits_RV.stride(0),
        SETTINGS=SETTINGS,
        BLOCK=size,
        KEPT=KEPT,
        num_warps=8,
        **launched(device),
    )
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
        *found,
        vocab,
        logits_RV.stride(0),
        capacity,
        uniform_SU.shape[1],
        blocks,
        SETTINGS=SETTINGS,
        HELD=ids_SB.shape[1],
        BLOCK=size,
        BLOCKS=triton.next_power_of_2(blocks),
        KEPT=KEPT,
        num_warps=8,
        **launched(device),
    )
