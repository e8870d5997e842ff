"""Kernels for decoding: products with few rows, and attention of single positions.

At a few rows a product does nothing but read its weights, and a launch takes as long as reading a
few megabytes. So a block is seven kernels, in which activations, rotation and residual connections
are part of the products next to them:

    embed     rows of the tables of tokens and positions
    norm      adds a product to the residual stream, and normalises it
    linear    f(x W^T + bias)
    attend    normalises and rotates query and key, appends key and value, attends
    combine   the sum over the spans of a long sequence

A kernel starts while the one before it still runs (programmatic dependent launch, from Hopper on):
it asks for its weights to be brought into the cache, and only then waits for its input.

Every row is computed in the same way whatever other rows there are and however many. Sums over the
inputs are cut into the same parts and taken by the same instructions for any number of rows, and
spans of a sequence have a fixed length.

Shapes: R rows, K inputs, N outputs of a layer; H query heads, G key and value heads, D head width,
S slots, C capacity of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gristmill.models.decoding import AttentionShape, Norm

WIDE_OUTPUTS = 16384
"""With more outputs than this, such as a head has, there is enough to do for a whole GPU."""
FETCHED = 16 * 2**20
"""Bytes of a matrix up to which it is brought into the cache while the kernel before it still runs.
Of a larger one, programs would drive out what others have fetched."""
ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "swiglu": 5}


def launched(device: torch.device) -> dict[str, Any]:
    """How kernels are started, one while the one before it runs."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait_for_input(EARLY: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start: one, not all of them."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# ------------------------------------------------------------------ embeddings


@triton.jit
def _embed(
    tokens, places, slots, table, positions, x, token_of, place_of, last,
    D: tl.constexpr, SLOTS: tl.constexpr, POSITIONS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = triton.next_power_of_2(D)
    row = tl.program_id(0).to(tl.int64)
    wait_for_input(EARLY)
    at = row
    if SLOTS:
        at = tl.load(slots + row).to(tl.int64)
    token = tl.load(tokens + at)
    place = tl.minimum(tl.load(places + at), last)
    tl.store(token_of + row, token)
    tl.store(place_of + row, place)
    d = tl.arange(0, WIDE)
    y = tl.load(table + token.to(tl.int64) * D + d, mask=d < D)
    if POSITIONS:
        where = positions + place.to(tl.int64) * D + d
        added = y.to(tl.float32) + tl.load(where, mask=d < D).to(tl.float32)
        y = added.to(y.dtype)
    tl.store(x + row * D + d, y, mask=d < D)


class Embedded(NamedTuple):
    """Rows that are about to be computed."""

    x_RD: torch.Tensor
    tokens_R: torch.Tensor
    places_R: torch.Tensor
    """The positions in their slots."""


def embedded(
    tokens: torch.Tensor,
    places: torch.Tensor,
    table_VD: torch.Tensor,
    positions_TD: torch.Tensor | None = None,
    *,
    slots_R: torch.Tensor | None = None,
    context: int,
) -> Embedded:
    """Tokens and their places: one of each for each row, or for each slot if rows have slots."""
    rows, width = len(tokens if slots_R is None else slots_R), table_VD.shape[1]
    device = table_VD.device
    x_RD = torch.empty(rows, width, dtype=table_VD.dtype, device=device)
    tokens_R, places_R = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    _embed[(rows,)](
        tokens,
        places,
        slots_R,
        table_VD,
        positions_TD,
        x_RD,
        tokens_R,
        places_R,
        context - 1,  # rows that nobody reads may be beyond the context
        D=width,
        SLOTS=slots_R is not None,
        POSITIONS=positions_TD is not None,
        num_warps=4,
        **launched(device),
    )
    return Embedded(x_RD, tokens_R, places_R)


# ------------------------------------------------------------------ norms


@triton.jit
def _norm(
    x, first, first_bias, second, second_bias, gain, shift, stream, out, eps, R,
    K: tl.constexpr, CENTRED: tl.constexpr, GAIN: tl.constexpr, SHIFT: tl.constexpr,
    FIRST: tl.constexpr, FIRST_BIAS: tl.constexpr, SECOND: tl.constexpr,
    SECOND_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = triton.next_power_of_2(K)
    k = tl.arange(0, WIDE)
    inside = k < K
    row = tl.program_id(0).to(tl.int64)
    # Parameters are not in the cache: they are asked for first.
    factor = tl.full((WIDE,), 1.0, tl.float32)
    if GAIN:
        factor = tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros((WIDE,), tl.float32)
    if SHIFT:
        added = tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)
    first_sum = tl.zeros((WIDE,), tl.float32)
    if FIRST_BIAS:
        first_sum = tl.load(first_bias + k, mask=inside, other=0.0).to(tl.float32)
    second_sum = tl.zeros((WIDE,), tl.float32)
    if SECOND_BIAS:
        second_sum = tl.load(second_bias + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_input(EARLY)
    y = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    if FIRST:
        for part in tl.static_range(FIRST):
            first_sum += tl.load(first + (part * R + row) * K + k, mask=inside, other=0.0)
        y += first_sum.to(kind).to(tl.float32)
        if SECOND:
            for part in tl.static_range(SECOND):
                second_sum += tl.load(second + (part * R + row) * K + k, mask=inside, other=0.0)
            y += second_sum.to(kind).to(tl.float32)
        y = y.to(kind)
        tl.store(stream + row * K + k, y, mask=inside)
        y = y.to(tl.float32)
    if CENTRED:
        y = tl.where(inside, y - tl.sum(y) / K, 0.0)
    y = y / tl.sqrt_rn(tl.sum(y * y) / K + eps) * factor + added
    tl.store(out + row * K + k, y.to(kind), mask=inside)


class Product(NamedTuple):
    """A product with a layer's weights that is not added up yet."""

    parts_PRN: torch.Tensor
    """Sums over parts of the inputs, in fp32."""
    bias_N: torch.Tensor | None


def normalised(
    x_RK: torch.Tensor, norm: Norm, added: Sequence[Product] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream with up to two products added to it, and that with, in every row, a mean
    of zero, if centred, and a variance of one."""
    assert x_RK.is_contiguous()
    out_RK = torch.empty_like(x_RK)
    stream_RK = torch.empty_like(x_RK) if added else x_RK
    first, second = [*added, None, None][:2]
    _norm[(len(x_RK),)](
        x_RK,
        first and first.parts_PRN,
        first and first.bias_N,
        second and second.parts_PRN,
        second and second.bias_N,
        norm.gain_K,
        norm.shift_K,
        stream_RK,
        out_RK,
        norm.eps,
        len(x_RK),
        K=x_RK.shape[1],
        CENTRED=norm.centred,
        GAIN=norm.gain_K is not None,
        SHIFT=norm.shift_K is not None,
        FIRST=0 if first is None else len(first.parts_PRN),
        FIRST_BIAS=first is not None and first.bias_N is not None,
        SECOND=0 if second is None else len(second.parts_PRN),
        SECOND_BIAS=second is not None and second.bias_N is not None,
        num_warps=4,
        **launched(x_RK.device),
    )
    return stream_RK, out_RK


# ------------------------------------------------------------------ products


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == 3:
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == 4:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def _fetch(
    w, first, N: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Bring the beginning of some rows of a matrix into the cache."""
    EACH: tl.constexpr = 128 // SIZE  # numbers of a cache line
    LINES: tl.constexpr = (LENGTH + EACH - 1) // EACH
    number = tl.arange(0, triton.next_power_of_2(COLUMNS * LINES))
    number = tl.minimum(number, COLUMNS * LINES - 1)
    at = w + tl.minimum(first + number // LINES, N - 1).to(tl.int64) * K + number % LINES * EACH
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _weights(
    w, column, part, first, N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """(parts, depth, columns) of the weights."""
    depth = first + tl.arange(0, DEPTH)[None, :, None]
    k = part[:, None, None] * PART + depth
    return tl.load(
        w + column[None, None, :].to(tl.int64) * K + k,
        mask=(k < K) & (depth < PART) & (column < N)[None, None, :],
        other=0.0,
    )


@triton.jit
def _linear(
    x, w, bias, out, R, x_stride,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    CUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, SIZE: tl.constexpr, FETCH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The inputs are cut into CUT pieces, of which a program sums one, in PARTS."""
    PART: tl.constexpr = (K + CUT * PARTS - 1) // (CUT * PARTS)
    GATED: tl.constexpr = ACTIVATION == 5
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    piece = tl.program_id(2)
    part = piece * PARTS + tl.arange(0, PARTS)
    if EARLY and FETCH:
        begin = w + piece * PARTS * PART
        _fetch(begin, tl.program_id(0) * COLUMNS, N, COLUMNS, K, K // CUT, SIZE)
        if GATED:
            _fetch(begin + N * K, tl.program_id(0) * COLUMNS, N, COLUMNS, K, K // CUT, SIZE)
    bias_y = tl.zeros((COLUMNS,), tl.float32)
    bias_up = tl.zeros((COLUMNS,), tl.float32)
    if BIAS:
        bias_y = tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
        if GATED:
            bias_up = tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)
    wait_for_input(EARLY)
    sums = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    gates = tl.zeros((PARTS, ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, PART, DEPTH, num_stages=STAGES):
        depth = first + tl.arange(0, DEPTH)[None, None, :]
        k = part[:, None, None] * PART + depth
        x_tile = tl.load(
            x + row[None, :, None] * x_stride + k,
            mask=(k < K) & (depth < PART) & (row < R)[None, :, None],
            other=0.0,
        )
        w_tile = _weights(w, column, part, first, N, K, PART, DEPTH)
        sums = tl.dot(x_tile, w_tile, sums, input_precision="ieee")
        if GATED:
            up_tile = _weights(w + N * K, column, part, first, N, K, PART, DEPTH)
            gates = tl.dot(x_tile, up_tile, gates, input_precision="ieee")
    y = tl.sum(sums, axis=0) + bias_y[None, :]
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(gates, axis=0) + bias_up[None, :])
    else:
        y = _activated(y, ACTIVATION)
    inside = (row < R)[:, None] & (column < N)[None, :]
    at = (piece * R + row)[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """How a product is computed."""

    parts: int
    """Of the inputs, which are summed by themselves; the same for any number of rows, since it
    decides the order of sums. All else may depend on them: tensor cores sum in the same order
    whatever the tile is; other units do not."""
    rows: int
    columns: int
    depth: int
    """Inputs of a part that are read at once."""
    stages: int
    """Loads that are under way at a time."""
    warps: int


def tiles(rows: int, outputs: int, dtype: torch.dtype, *, pieces: int) -> Tiles:
    """Small ones, to occupy the GPU, and larger ones where there are many rows or outputs."""
    if dtype == torch.float32:
        return Tiles(4, 16, 32, 32, 2, 4)
    parts = 1 if pieces > 1 or outputs > WIDE_OUTPUTS else 2
    if rows > 32:
        return Tiles(parts, 64, 64, 64, 3, 4)
    few = 16 if rows <= 16 else 32
    if outputs > WIDE_OUTPUTS:
        return Tiles(parts, few, 128, 64, 3, 4)
    return Tiles(parts, few, 16, 64, 3, 2)


def linear(
    x_RK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """f(x W^T + bias); with swiglu, W is the gate above the rest. `dtype`: of the result, if not
    that of x."""
    outputs = weight_NK.shape[0] // (2 if activation == "swiglu" else 1)
    kind = dtype or x_RK.dtype
    out_RN = torch.empty(len(x_RK), outputs, dtype=kind, device=x_RK.device)
    return _multiplied(x_RK, weight_NK, bias_N, out_RN[None], activation)[0]


CUT = 4
"""Pieces of the inputs of a product that is added to the residual stream. It has few outputs, which
would leave most of a GPU idle."""


def product(x_RK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Product:
    """x W^T + bias, for `normalised` to add to the residual stream."""
    shape = CUT, len(x_RK), len(weight_NK)
    out_PRN = torch.empty(shape, dtype=torch.float32, device=x_RK.device)
    return Product(_multiplied(x_RK, weight_NK, None, out_PRN, None), bias_N)


def _multiplied(
    x_RK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_PRN: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    (rows, inputs), (pieces, _, outputs) = x_RK.shape, out_PRN.shape
    chosen = tiles(rows, outputs, x_RK.dtype, pieces=pieces)
    assert x_RK.stride(1) == 1 and weight_NK.is_contiguous()
    _linear[triton.cdiv(outputs, chosen.columns), triton.cdiv(rows, chosen.rows), pieces](
        x_RK,
        weight_NK,
        bias_N,
        out_PRN,
        rows,
        x_RK.stride(0),
        N=outputs,
        K=inputs,
        ACTIVATION=ACTIVATIONS[activation],
        BIAS=bias_N is not None,
        CUT=pieces,
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        PARTS=chosen.parts,
        DEPTH=chosen.depth,
        STAGES=chosen.stages,
        SIZE=x_RK.element_size(),
        FETCH=weight_NK.nbytes <= FETCHED,
        num_warps=chosen.warps,
        **launched(x_RK.device),
    )
    return out_PRN


# ------------------------------------------------------------------ attention

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
