"""Kernels for decoding: attention of single positions to what a slot holds.

    append    stores the keys and values of positions that others of the same pass attend to
    attend    normalises and rotates query and key, appends key and value, attends

A long sequence is read by several programs, of which the last one adds up what they found. Their
spans have a fixed length and are added in their order, so a row is computed in the same way
whatever other rows there are. The kernels are launched as those of `decoding.py` are.

Shapes: R rows, H query heads, G key and value heads, D head width, S slots, C capacity of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gristmill.models.decoding import AttentionShape
from gristmill.models.kernels.decoding import launched, wait_for_input

READ = {"alone": 8 * 1024, "grouped": 16 * 1024}
"""Bytes of keys that a program reads at once, for one query head of each key head and for several.
"""


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
    qkv, keys, values, slots, places, cosine, sine, query_gain, key_gain, out, totals, peaks,
    weights, arrived,
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
    if last <= tl.maximum(first, start):
        return
    known = tl.minimum(last, position)
    begin = tl.maximum(first, start // TILE * TILE)
    head = group * EACH + tl.arange(0, QUERIES)[:, None]
    query_in = (tl.arange(0, QUERIES) < EACH)[:, None]
    feature = tl.arange(0, WIDE)[None, :]
    lane = tl.arange(0, TILE)[:, None]
    inside = feature < D
    cache = slot * slot_stride + group * group_stride
    if not APPEND:
        wait_for_input(EARLY)
    at = cache + (begin + lane) * D + feature
    there = (begin + lane < known) & inside
    key = tl.load(keys + at, mask=there, other=0.0)
    value = tl.load(values + at, mask=there, other=0.0)
    if APPEND:
        wait_for_input(EARLY)
    here = qkv + row * qkv_stride
    query = _rotated(
        here, head * D, feature, query_gain, cosine, sine, position, eps,
        D, ROTATED, NORM, GAIN, query_in & inside,
    )  # fmt: skip
    at_position = position + 0 * feature
    mine = inside & (at_position >= first) & (at_position < last)
    at_new = cache + at_position * D + feature
    if APPEND:
        own_key = _rotated(
            here, HEADS * D + group * D, feature, key_gain, cosine, sine, position, eps,
            D, ROTATED, NORM, GAIN, inside,
        )  # fmt: skip
        own_value = tl.load(
            here + (HEADS + GROUPS) * D + group * D + feature, mask=inside, other=0.0
        )
        tl.store(keys + at_new, own_key, mask=mine)
        tl.store(values + at_new, own_value, mask=mine)
    else:
        own_key = tl.load(keys + at_new, mask=mine, other=0.0)
        own_value = tl.load(values + at_new, mask=mine, other=0.0)
    # The row's own position is taken by itself.
    asked = query.to(tl.float32) * scale
    own = tl.sum(own_key.to(tl.float32) * asked, axis=1, keep_dims=True)
    own = tl.where((position >= first) & (position < last), own, float("-inf"))
    if EACH == 1:
        # One query for each key: every lane has positions of its own, with their own peak and
        # sums, and all come together at the end. A product by tensor cores would be 15 parts of 16
        # for nothing, and each tile would wait for the one before it.
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
        peak = tl.maximum(tl.max(peaks_of, axis=0, keep_dims=True), own)
        shrinks = tl.exp(peaks_of - peak)
        total = tl.sum(sums * shrinks, axis=0, keep_dims=True)
        total += tl.exp(own - peak) * own_value.to(tl.float32)
        weight = tl.sum(weights_of * shrinks, axis=0, keep_dims=True) + tl.exp(own - peak)
    else:
        peak = own
        weight = tl.where(own == float("-inf"), 0.0, 1.0)
        total = weight * own_value.to(tl.float32)
        for tile in range(begin, known, TILE):
            # The next tile is read while this one is computed.
            at = cache + (tile + TILE + lane) * D + feature
            there = (tile + TILE + lane < known) & inside
            next_key = tl.load(keys + at, mask=there, other=0.0)
            next_value = tl.load(values + at, mask=there, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            place = tile + tl.arange(0, TILE)[None, :]
            scores = tl.where((place < known) & (place >= start), scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, axis=1, keep_dims=True))
            # A tile may hold nothing that is seen.
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            chances, shrink = tl.exp(scores - safe), tl.exp(peak - safe)
            total = total * shrink + tl.dot(chances.to(value.dtype), value, input_precision="ieee")
            weight = weight * shrink + tl.sum(chances, axis=1, keep_dims=True)
            peak, key, value = new_peak, next_key, next_value
    at_head = row * HEADS + head
    if SPANS > 1:
        first_span = start // SPAN
        last_span = tl.minimum(position, capacity - 1) // SPAN
        if first_span < last_span:
            # Whoever comes last adds up the spans, in their order.
            at_span = at_head * SPANS + span
            tl.store(totals + at_span * D + feature, total, mask=query_in & inside)
            tl.store(peaks + at_span, peak, mask=query_in)
            tl.store(weights + at_span, weight, mask=query_in)
            tl.debug_barrier()  # all of it is there before this program is counted
            counted = arrived + row * GROUPS + group
            if tl.atomic_add(counted, 1, sem="acq_rel") < last_span - first_span:
                return
            tl.store(counted, 0)
            total = tl.zeros((QUERIES, WIDE), tl.float32)
            peak = tl.full((QUERIES, 1), float("-inf"), tl.float32)
            weight = tl.zeros((QUERIES, 1), tl.float32)
            # Unrolled, so that all of them are read at once.
            for number in tl.static_range(SPANS):
                other = number + 0 * head
                at_span = at_head * SPANS + other
                used = query_in & (other >= first_span) & (other <= last_span)
                # Not from a cache that others do not write to.
                its_total = tl.load(
                    totals + at_span * D + feature, mask=used & inside, other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                its_peak = tl.load(
                    peaks + at_span, mask=used, other=float("-inf"), cache_modifier=".cg"
                )
                its_weight = tl.load(weights + at_span, mask=used, other=0.0, cache_modifier=".cg")
                new_peak = tl.maximum(peak, its_peak)
                safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
                old, new = tl.exp(peak - safe), tl.exp(its_peak - safe)
                total = total * old + its_total * new
                weight = weight * old + its_weight * new
                peak = new_peak
    y = total / weight
    tl.store(out + at_head * D + feature, y.to(out.dtype.element_ty), mask=query_in & inside)


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


def attend(
    qkv_RN: torch.Tensor,
    keys_SGCD: torch.Tensor,
    values_SGCD: torch.Tensor,
    slots_R: torch.Tensor,
    places_R: torch.Tensor,
    shape: AttentionShape,
    *,
    span: int,
    arrived: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    together: bool = False,
) -> torch.Tensor:
    """Append these positions of these slots, and let each attend to all before it and itself: (R,
    heads x width). `span`: positions that one program reads. `arrived`: a zero for each row and key
    head, and zeros again afterwards. `together`: several rows may be of one slot, so all are
    appended before any attends."""
    _, heads, scale, window, norm = shape
    rows, (_, groups, capacity, width) = len(slots_R), keys_SGCD.shape
    assert len(arrived) >= rows * groups
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
    alone, size = heads == groups, qkv_RN.element_size()
    each = max(16, triton.next_power_of_2(width)) * size
    tile = min(128, max(16, READ["alone" if alone else "grouped"] // each))
    _attend[rows, groups, spans](
        qkv_RN,
        *where,
        query_gain,
        key_gain,
        out_RN,
        totals,
        peaks,
        weights,
        arrived,
        *strides,
        scale,
        window or 0,
        eps,
        **kind,
        WINDOW=window is not None,
        SPANS=spans,
        SPAN=span,
        TILE=tile,
        QUERIES=1 if alone else max(16, triton.next_power_of_2(heads // groups)),
        APPEND=not apart,
        num_warps=8 if alone else 4,
        # Three programs at once on a multiprocessor, so that 32 sequences are one wave.
        maxnreg=80 if alone and width <= 64 and size == 2 else None,
    )
    return out_RN
