"""Kernels for decoding: embeddings, norms, and products with few rows.

At a few rows a product does nothing but read its weights, and a launch takes as long as reading a
few megabytes. So a block is seven kernels, in which activations, rotation and residual connections
are part of the products next to them:

    embed     rows of the tables of tokens and positions
    norm      adds a product to the residual stream, and normalises it
    linear    f(x W^T + bias)

Between them is attention (`decoding_attention.py`).

A kernel starts while the one before it still runs (programmatic dependent launch, from Hopper on):
it asks for its weights to be brought into the cache, and only then waits for its input.

Every row is computed in the same way whatever other rows there are and however many. Sums over the
inputs are cut into the same parts and taken by the same instructions for any number of rows.

Shapes: R rows, K inputs, N outputs of a layer, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gristmill.models.decoding import Norm

WIDE_OUTPUTS = 16384
"""With more outputs than this, such as a head has, there is enough to do for a whole GPU."""
FEW_ROWS = 32
"""With more rows than this, products take longer than reading weights."""
MANY_OUTPUTS = 4096
"""With more outputs than this, wider tiles occupy it just as well."""
FETCHED = 6 * 2**20
"""Bytes of a matrix that are brought into the cache while the kernel before it still runs: with
more, reading the rest waits behind them."""
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
    DEPTH: tl.constexpr, STAGES: tl.constexpr, SIZE: tl.constexpr, FETCHED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The inputs are cut into CUT pieces, of which a program sums one, in PARTS. FETCHED of them
    are fetched ahead."""
    PART: tl.constexpr = (K + CUT * PARTS - 1) // (CUT * PARTS)
    GATED: tl.constexpr = ACTIVATION == 5
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    piece = tl.program_id(2)
    part = piece * PARTS + tl.arange(0, PARTS)
    if EARLY and FETCHED:
        begin = w + piece * PARTS * PART
        _fetch(begin, tl.program_id(0) * COLUMNS, N, COLUMNS, K, FETCHED, SIZE)
        if GATED:
            _fetch(begin + N * K, tl.program_id(0) * COLUMNS, N, COLUMNS, K, FETCHED, SIZE)
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
    up = tl.sum(gates, axis=0) + bias_up[None, :]
    _finish(y, up, out, piece, row, column, R, N, ACTIVATION)


@triton.jit
def _linear_of_many(
    x, w, bias, out, R, x_stride,
    N: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    CUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`_linear` for so many rows that products take the time: one part after the other, each by
    the largest instructions that tensor cores have."""
    PART: tl.constexpr = (K + CUT * PARTS - 1) // (CUT * PARTS)
    GATED: tl.constexpr = ACTIVATION == 5
    # Programs next to each other have the same weights.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    piece = tl.program_id(2)
    wait_for_input(EARLY)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.static_range(PARTS):
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        gates = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.range(0, PART, DEPTH, num_stages=STAGES):
            depth = first + tl.arange(0, DEPTH)
            k = (piece * PARTS + part) * PART + depth
            there = (k < K) & (depth < PART)
            x_tile = tl.load(
                x + row[:, None].to(tl.int64) * x_stride + k[None, :],
                mask=there[None, :] & (row < R)[:, None],
                other=0.0,
            )
            at = w + column[None, :].to(tl.int64) * K + k[:, None]
            mask = there[:, None] & (column < N)[None, :]
            sums = tl.dot(x_tile, tl.load(at, mask=mask, other=0.0), sums)
            if GATED:
                gates = tl.dot(x_tile, tl.load(at + N * K, mask=mask, other=0.0), gates)
        y += sums
        up += gates
    if BIAS:
        y += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + N + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    _finish(y, up, out, piece, row, column, R, N, ACTIVATION)


@triton.jit
def _finish(
    y, up, out, piece, row, column, R, N: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store what a product gives."""
    y = y / (1.0 + tl.exp(-y)) * up if ACTIVATION == 5 else _activated(y, ACTIVATION)
    inside = (row < R)[:, None] & (column < N)[None, :]
    at = (piece * R + row)[:, None].to(tl.int64) * N + column[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


class DecodingTiles(NamedTuple):
    """How a matrix product of decoding is divided into tiles."""

    parts: int
    """Parts of the inputs, summed by themselves; the same for any number of rows, since it
    decides the order of sums. All else may depend on them: tensor cores sum in the same order
    whatever the tile and the instruction are; other units do not."""
    rows: int
    columns: int
    depth: int
    """Inputs of a part that are read at once."""
    stages: int
    """Loads that are under way at a time."""
    warps: int


def tiles(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, pieces: int
) -> DecodingTiles:
    """Small ones, to occupy the GPU, and larger ones where there are many rows or outputs."""
    if dtype == torch.float32:
        return DecodingTiles(4, 16, 32, 32, 2, 4)
    many = outputs > MANY_OUTPUTS
    parts = 2 if not many and (pieces == 1 or inputs // pieces > 1024) else 1
    if rows > FEW_ROWS:
        if rows <= 64:
            return DecodingTiles(parts, 64, 64, 64, 4, 4)
        if inputs <= 1024:
            return DecodingTiles(parts, 64, 128, 64, 3, 4)
        return DecodingTiles(parts, 128, 128, 64, 3, 8)
    few = 16 if rows <= 16 else 32
    if outputs > WIDE_OUTPUTS:
        return DecodingTiles(parts, few, 128, 64 if inputs <= 1024 else 128, 3, 4)
    if many:
        return DecodingTiles(parts, few, 32, 128, 3 if few == 16 else 5, 2)
    return DecodingTiles(parts, few, 16, 128 if inputs // (pieces * parts) >= 1024 else 64, 3, 2)


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
    chosen = tiles(rows, outputs, inputs, x_RK.dtype, pieces=pieces)
    assert x_RK.stride(1) == 1 and weight_NK.is_contiguous()
    columns_and_rows = triton.cdiv(outputs, chosen.columns), triton.cdiv(rows, chosen.rows)
    given = x_RK, weight_NK, bias_N, out_PRN, rows, x_RK.stride(0)
    kind = {
        "N": outputs,
        "K": inputs,
        "ACTIVATION": ACTIVATIONS[activation],
        "BIAS": bias_N is not None,
        "CUT": pieces,
        "ROWS": chosen.rows,
        "COLUMNS": chosen.columns,
        "PARTS": chosen.parts,
        "DEPTH": chosen.depth,
        "STAGES": chosen.stages,
        "num_warps": chosen.warps,
        **launched(x_RK.device),
    }
    if rows > FEW_ROWS and x_RK.dtype != torch.float32:
        _linear_of_many[(*columns_and_rows[::-1], pieces)](*given, **kind)
    else:
        fetched = min(inputs // pieces, FETCHED // weight_NK[:, :pieces].nbytes)
        _linear[(*columns_and_rows, pieces)](
            *given, **kind, SIZE=x_RK.element_size(), FETCHED=fetched
        )
    return out_PRN
