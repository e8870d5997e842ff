"""Kernels for decoding: attention of single positions to what a slot holds.

    append    stores the keys and values of positions that others of the same pass attend to
    attend    normalises and rotates query and key, appends key and value, attends
    combine   the sum over the spans of a long sequence

Spans of a sequence have a fixed length, so a row is computed in the same way whatever other rows
there are. The kernels are launched as those of `decoding.py` are.

Shapes: R rows, H query heads, G key and value heads, D head width, S slots, C capacity of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gristmill.models.decoding import AttentionShape
from gristmill.models.kernels.decoding import launched, wait_for_input

TILE = 128
"""Positions whose keys and values are read at once."""


@triton.jit
def _rotated(
    at, offset, feature, gain, cosine, sine, position, eps,
    D: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr, mask,
):  # fmt: skip
    """Queries or a key, normalised and rotated: features `feature` at `at + offset`."""
    HALF: tl.constexpr = ROTATED // 2
    x = tl.load(at + offset + feature, mask=mask, other=0.0)
    kind = x.dtype
    x = x.to(tl.float32)
    scale = tl.sum(x * x, axis=1)
    scale = 1.0 / tl.sqrt_rn(scale / D + eps)
    if NORM:
        x = x * scale[:, None]
        if GAIN:
            x = x * tl.load(gain + feature, mask=feature < D, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
    if ROTATED:
        turned = feature < ROTATED
        left = feature < HALF
        partner = tl.where(left, feature + HALF, feature - HALF)
        y = tl.load(at + offset + partner, mask=mask & turned, other=0.0).to(tl.float32)
        if NORM:
            y = y * scale[:, None]
            if GAIN:
                y = y * tl.load(gain + partner, mask=turned, other=0.0).to(tl.float32)
            y = y.to(kind).to(tl.float32)
        pair = position * HALF + tl.where(left, feature, feature - HALF)
        c = tl.load(cosine + pair, mask=turned, other=1.0)
        s = tl.load(sine + pair, mask=turned, other=0.0)
        x = tl.where(turned, x * c + tl.where(left, -y, y) * s, x)
    return x.to(kind)


@triton.jit
def _attended(asked, key, value, place, start, known, sums, peaks, weights):
    """What each lane has seen, one more position included."""
    score = tl.sum(key.to(tl.float32) * asked, axis=1, keep_dims=True)
    score = tl.where((place < known) & (place >= start), score, float("-inf"))
    new_peaks = tl.maximum(peaks, score)
    # A lane may have seen nothing yet.
    safe = tl.where(new_peaks == float("-inf"), 0.0, new_peaks)
    chance, shrink = tl.exp(score - safe), tl.exp(peaks - safe)
    return (
        sums * shrink + chance * value.to(tl.float32),
        new_peaks,
        weights * shrink + chance,
    )


@triton.jit
def _attend(
    qkv, keys, values, slots, places, cosine, sine, query_gain, key_gain, out, peaks, weights,
    qkv_stride, slot_stride, group_stride, capacity, scale, window, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr,
    NORM: tl.constexpr, GAIN: tl.constexpr, WINDOW: tl.constexpr, SPANS: tl.constexpr,
    SPAN: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, APPEND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """With APPEND, key and value of the position are new, and stored; else they are there."""
    EACH: tl.constexpr = HEADS // GROUPS
    # Tensor cores take 16 at least.
    WIDE: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    row, group, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # These are older than the kernel before this one, and so are the keys and values of positions
    # that were computed in other steps: they can be read before waiting for it.
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(places + row)
    start = 0
    if WINDOW:
        start = tl.maximum(0, position + 1 - window)
    first = span * SPAN
    last = tl.minimum(first + SPAN, tl.minimum(position + 1, capacity))
    known = tl.minimum(last, position)
    begin = tl.maximum(first, start // TILE * TILE)
    head = group * EACH + tl.arange(0, QUERIES)[:, None]
    query_in = (tl.arange(0, QUERIES) < EACH)[:, None]
    feature = tl.arange(0, WIDE)[None, :]
    lane = tl.arange(0, TILE)[:, None]
    inside = feature < D
    cache = slot * slot_stride + group * group_stride
    if EACH == 1:
        if not APPEND:
            wait_for_input(EARLY)
        at = cache + (begin + lane) * D + feature
        there = (begin + lane < known) & inside
        key = tl.load(keys + at, mask=there, other=0.0)
        value = tl.load(values + at, mask=there, other=0.0)
        if APPEND:
            wait_for_input(EARLY)
    else:
        wait_for_input(EARLY)
    total = tl.zeros((QUERIES, WIDE), tl.float32)
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    if last > tl.maximum(first, start):
        here = qkv + row * qkv_stride
        query = _rotated(
            here, head * D, feature, query_gain, cosine, sine, position, eps,
            D, ROTATED, NORM, GAIN, query_in & inside,
        )  # fmt: skip
        at_position = position + 0 * feature
        mine = inside & (at_position >= first) & (at_position < last)
        at_new = cache + at_position * D + feature
        if APPEND:
            new_key = _rotated(
                here, HEADS * D + group * D, feature, key_gain, cosine, sine, position, eps,
                D, ROTATED, NORM, GAIN, inside,
            )  # fmt: skip
            new_value = tl.load(
                here + (HEADS + GROUPS) * D + group * D + feature, mask=inside, other=0.0
            )
            tl.store(keys + at_new, new_key, mask=mine)
            tl.store(values + at_new, new_value, mask=mine)
        if EACH == 1:
            # One query for each key: every lane has positions of its own, with their own peak and
            # sums, and all come together at the end, with the row's own position. A product by
            # tensor cores would be 15 parts of 16 for nothing, and each tile would wait for the
            # one before it.
            asked = query.to(tl.float32) * scale
            if APPEND:
                own_key, own_value = new_key, new_value
            else:
                own_key = tl.load(keys + at_new, mask=mine, other=0.0)
                own_value = tl.load(values + at_new, mask=mine, other=0.0)
            sums = tl.zeros((TILE, WIDE), tl.float32)
            peaks_of = tl.full((TILE, 1), float("-inf"), tl.float32)
            weights_of = tl.zeros((TILE, 1), tl.float32)
            sums, peaks_of, weights_of = _attended(
                asked, key, value, begin + lane, start, known, sums, peaks_of, weights_of
            )
            for tile in range(begin + TILE, known, TILE):
                at = cache + (tile + lane) * D + feature
                there = (tile + lane < known) & inside
                key = tl.load(keys + at, mask=there, other=0.0)
                value = tl.load(values + at, mask=there, other=0.0)
                sums, peaks_of, weights_of = _attended(
                    asked, key, value, tile + lane, start, known, sums, peaks_of, weights_of
                )
            own = tl.sum(own_key.to(tl.float32) * asked, axis=1, keep_dims=True)
            own = tl.where((position >= first) & (position < last), own, float("-inf"))
            highest = tl.maximum(tl.max(peaks_of, axis=0, keep_dims=True), own)
            shrinks = tl.exp(peaks_of - highest)
            chance_of_own = tl.exp(own - highest)
            total = tl.sum(sums * shrinks, axis=0, keep_dims=True)
            total += chance_of_own * own_value.to(tl.float32)
            weight_of_all = tl.sum(weights_of * shrinks, axis=0, keep_dims=True) + chance_of_own
            weight = tl.reshape(weight_of_all, (1,))
            peak = tl.reshape(highest, (1,))
        else:
            if not APPEND:
                known = last
            for tile in range(begin, last, TILE):
                place = tile + lane
                there = (place < known) & inside
                at = cache + place * D + feature
                key = tl.load(keys + at, mask=there, other=0.0)
                value = tl.load(values + at, mask=there, other=0.0)
                if APPEND:
                    key = tl.where(place == position, new_key, key)
                    value = tl.where(place == position, new_value, value)
                scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
                seen = tile + tl.arange(0, TILE)[None, :]
                scores = tl.where((seen < last) & (seen >= start), scores, float("-inf"))
                new_peak = tl.maximum(peak, tl.max(scores, axis=1))
                # A tile may hold nothing that is seen.
                safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                chances = tl.exp(scores - safe[:, None])
                shrink = tl.exp(peak - safe)
                total = total * shrink[:, None] + tl.dot(
                    chances.to(value.dtype), value, input_precision="ieee"
                )
                weight = weight * shrink + tl.sum(chances, axis=1)
                peak = new_peak
    at_head = row * HEADS + head
    if SPANS == 1:
        y = total / weight[:, None]
        tl.store(out + at_head * D + feature, y.to(out.dtype.element_ty), mask=query_in & inside)
    else:
        at_span = at_head * SPANS + span
        tl.store(out + at_span * D + feature, total, mask=query_in & inside)
        tl.store(peaks + at_span, peak[:, None], mask=query_in)
        tl.store(weights + at_span, weight[:, None], mask=query_in)


@triton.jit
def _append(
    qkv, keys, values, slots, places, cosine, sine, key_gain,
    qkv_stride, slot_stride, group_stride, capacity, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr,
    NORM: tl.constexpr, GAIN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Store the keys and values of positions that the others of them attend to."""
    WIDE: tl.constexpr = triton.next_power_of_2(D)
    row, group = tl.program_id(0), tl.program_id(1)
    wait_for_input(EARLY)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(places + row)
    feature = tl.arange(0, WIDE)[None, :]
    inside = feature < D
    here = qkv + row * qkv_stride
    key = _rotated(
        here, HEADS * D + group * D, feature, key_gain, cosine, sine, position, eps,
        D, ROTATED, NORM, GAIN, inside,
    )  # fmt: skip
    value = tl.load(here + (HEADS + GROUPS) * D + group * D + feature, mask=inside, other=0.0)
    at = slot * slot_stride + group * group_stride + position * D + feature
    tl.store(keys + at, key, mask=inside & (position + 0 * feature < capacity))
    tl.store(values + at, value, mask=inside & (position + 0 * feature < capacity))


@triton.jit
def _combine(
    totals, peaks, weights, places, out,
    HEADS: tl.constexpr, D: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = triton.next_power_of_2(D)
    row, head = tl.program_id(0), tl.program_id(1)
    wait_for_input(EARLY)
    position = tl.load(places + row)
    used = tl.minimum(position // SPAN + 1, SPANS)
    feature = tl.arange(0, WIDE)
    inside = feature < D
    at_head = row * HEADS + head
    total = tl.zeros((WIDE,), tl.float32)
    peak = float("-inf")
    weight = 0.0
    for span in range(used):
        at = at_head * SPANS + span
        its_weight = tl.load(weights + at)
        its_peak = tl.load(peaks + at)
        new_peak = tl.maximum(peak, its_peak)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        mine, other = tl.exp(peak - safe), tl.exp(its_peak - safe)
        its_total = tl.load(totals + at * D + feature, mask=inside, other=0.0)
        total = total * mine + its_total * other
        weight = weight * mine + its_weight * other
        peak = new_peak
    y = total / weight
    tl.store(out + at_head * D + feature, y.to(out.dtype.element_ty), mask=inside)


def attend(
    qkv_RN: torch.Tensor,
    keys_SGCD: torch.Tensor,
    values_SGCD: torch.Tensor,
    slots_R: torch.Tensor,
    places_R: torch.Tensor,
    shape: AttentionShape,
    *,
    span: int,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    together: bool = False,
) -> torch.Tensor:
    """Append these positions of these slots, and let each attend to all before it and itself: (R,
    heads x width). `span`: positions that one program reads. `together`: several rows may be of one
    slot, so all are appended before any attends."""
    _, heads, scale, window, norm = shape
    rows, (_, groups, capacity, width) = len(slots_R), keys_SGCD.shape
    assert keys_SGCD.stride(2) == width and keys_SGCD.stride() == values_SGCD.stride()
    device, spans = qkv_RN.device, triton.cdiv(capacity, span)
    out_RN = torch.empty(rows, heads * width, dtype=qkv_RN.dtype, device=device)
    totals, peaks, weights = out_RN, out_RN, out_RN
    if spans > 1:
        totals = torch.empty(rows, heads, spans, width, device=device)
        peaks, weights = (torch.empty(rows, heads, spans, device=device) for _ in range(2))
    cosine, sine = (places_R, places_R) if rotary is None else rotary
    query_gain, key_gain = (None, None) if norm is None else (norm.query_gain_D, norm.key_gain_D)
    start = launched(device)
    # The sum of squares of a key has other bits in another kernel, so keys that are normalised come
    # from the same one, whether they are of a prompt or generated.
    apart = together or norm is not None
    strides = qkv_RN.stride(0), keys_SGCD.stride(0), keys_SGCD.stride(1), capacity
    eps = 0.0 if norm is None else norm.eps
    kind = {
        "HEADS": heads,
        "GROUPS": groups,
        "D": width,
        "ROTATED": 0 if rotary is None else 2 * cosine.shape[1],
        "NORM": norm is not None,
        "GAIN": query_gain is not None,
        **start,
    }
    where = keys_SGCD, values_SGCD, slots_R, places_R, cosine, sine
    if apart:
        _append[rows, groups](qkv_RN, *where, key_gain, *strides, eps, **kind, num_warps=1)
    _attend[rows, groups, spans](
        qkv_RN,
        *where,
        query_gain,
        key_gain,
        totals,
        peaks,
        weights,
        *strides,
        scale,
        window or 0,
        eps,
        **kind,
        WINDOW=window is not None,
        SPANS=spans,
        SPAN=span,
        TILE=TILE,
        QUERIES=1 if heads == groups else max(16, triton.next_power_of_2(heads // groups)),
        APPEND=not apart,
        num_warps=8,
        num_stages=2,
        # Three programs at once on a multiprocessor, so that 32 sequences are one wave.
        maxnreg=80 if heads == groups and width <= 64 and qkv_RN.element_size() == 2 else None,
    )
    if spans > 1:
        _combine[rows, heads](
            totals,
            peaks,
            weights,
            places_R,
            out_RN,
            HEADS=heads,
            D=width,
            SPANS=spans,
            SPAN=span,
            num_warps=1,
            **start,
        )
    return out_RN
