"""Attention in JAX, which torch's graphs hold as one operation: four ways to compute it.

              where    memory                  used by "auto"
    plain     any      grows with T x S        on the CPU
    blocked   any      one block of scores     elsewhere, if no other fits: fp32, masks, dropout
    cudnn     CUDA     inputs and result       fp16 and bf16, without mask or dropout
    splash    TPU      inputs and result       without mask or dropout

All but plain save only their inputs, the result and a number for each query (the logarithm of its
sum of exponentials); the backward pass computes scores again. Scores and sums are fp32 everywhere.

Shapes: B samples, H query heads, G key and value heads, R query heads that share one of them, T
queries, S keys, K head width; Q queries of a block, C keys that the queries of a band see.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from gristmill.base.errors import UserError

SAVED = "attention"
"""The name of what `jax.checkpoint` must keep, so that it does not compute attention again."""
SPLASH_BLOCKS = (512, 384, 256, 128)
"""Queries and keys of a block on a TPU: the largest that divides their number."""


class Places(NamedTuple):
    """How attention is divided over devices."""

    mesh: Mesh | None = None
    data: tuple[str, ...] = ()
    """Axes of the mesh over which samples are divided."""
    heads: str | None = None

    def size(self, *axes: str | None) -> int:
        sizes = self.mesh.shape if self.mesh is not None else {}
        return int(np.prod([sizes[axis] for axis in axes if axis is not None]))


class Call(NamedTuple):
    """What decides how one attention is computed."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: Any
    masked: bool
    dropped: bool
    causal: bool


def attend(
    query_BHTK: jax.Array,
    key_BGSK: jax.Array,
    value_BGSK: jax.Array,
    mask: jax.Array | None,
    dropout: float,
    causal: bool,
    scale: float,
    *,
    key: jax.Array | None = None,
    how: str = "auto",
    places: Places | None = None,
) -> jax.Array:
    """Attention, multi-head or grouped-query. `mask` is true where a query sees a key. `key`: for
    dropout, if there is any. `how`: runtime.xla_attention."""
    assert mask is None or mask.dtype == jnp.bool_, "masks are of booleans"
    assert not causal or query_BHTK.shape[2] == key_BGSK.shape[2], (
        "plain causal attention is over whole sequences"
    )
    places = places or Places()
    call = Call(
        *(query_BHTK.shape, key_BGSK.shape, query_BHTK.dtype),
        *(mask is not None, key is not None, causal),
    )
    inputs = (query_BHTK, key_BGSK, value_BGSK)
    way = choose(how, call, places, backend=jax.default_backend())
    if way == "cudnn":
        return _cudnn(*inputs, scale=scale, causal=causal)
    if way == "splash":
        return splash(*inputs, scale=scale, causal=causal, places=places)
    devices = places.size(*places.data, places.heads)
    way_of = blocked if way == "blocked" else plain
    return way_of(*inputs, mask, dropout, causal, scale, key=key, devices=devices)


def choose(how: str, call: Call, places: Places, *, backend: str) -> str:
    """The way to compute it; an error if the settings ask for one that does not fit."""
    if how == "auto" and backend == "cpu":
        return "plain"
    fastest = {"gpu": "cudnn", "tpu": "splash"}.get(backend, "blocked") if how == "auto" else how
    problem = _REFUSALS[fastest](call, places, backend) if fastest in _REFUSALS else None
    if problem is None:
        return fastest
    if how == "auto":
        return "blocked"
    raise UserError(
        f"attention cannot be computed by {how}: {problem}",
        where="runtime.xla_attention",
        remedy='leave it out, or set it to "blocked"',
    )


# ------------------------------------------------------------------ plain


def plain(
    query_BHTK: jax.Array,
    key_BGSK: jax.Array,
    value_BGSK: jax.Array,
    mask: jax.Array | None,
    dropout: float,
    causal: bool,
    scale: float,
    *,
    key: jax.Array | None = None,
    devices: int = 1,
) -> jax.Array:
    """All scores at once, on any number of devices."""
    query_BGRTK = _grouped(query_BHTK, key_BGSK)
    scores = _scores(query_BGRTK, key_BGSK, _by_group(mask), scale, first=0 if causal else None)
    weights = _dropped(jax.nn.softmax(scores, axis=-1), key, dropout)
    found = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(value_BGSK.dtype), value_BGSK)
    return found.reshape(query_BHTK.shape)


def _grouped(x_BHTK: jax.Array, key_BGSK: jax.Array) -> jax.Array:
    samples, _, queries, width = x_BHTK.shape
    return x_BHTK.reshape(samples, key_BGSK.shape[1], -1, queries, width)


def _by_group(mask: jax.Array | None) -> jax.Array | None:
    """A mask with the dimensions of scores, or 1."""
    if mask is None:
        return None
    shape = (1,) * (4 - mask.ndim) + mask.shape
    return mask.reshape(*shape[:2], 1, *shape[2:])


def _scores(
    query_BGRTK: jax.Array,
    key_BGSK: jax.Array,
    mask: jax.Array | None,
    scale: float,
    first: jax.Array | int | None,
) -> jax.Array:
    """`first`: the position of the first query, if none sees keys after its own."""
    scores = jnp.einsum(
        "bgrtk,bgsk->bgrts", query_BGRTK, key_BGSK, preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if first is not None:
        positions = first + jnp.arange(scores.shape[-2])
        scores = jnp.where(positions[:, None] >= jnp.arange(scores.shape[-1]), scores, -jnp.inf)
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def _dropped(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


# ------------------------------------------------------------------ blocked
#
# A block is as many queries as memory allows. Causal attention goes through the blocks in a few
# bands, and the queries of a band are compared with the keys up to its end only: with four bands
# that is 5/8 of all scores.

BLOCK_BYTES = 2**28
"""Memory for the scores of a block on one device."""
BANDS = 4


class _Blocks(NamedTuple):
    """What is known of blocked attention before it is compiled."""

    rows: int
    """Queries of a block."""
    bands: tuple[tuple[int, int, int], ...]
    """First block, last block + 1, and the keys that are seen."""
    dropout: float
    causal: bool
    scale: float


def blocked(
    query_BHTK: jax.Array,
    key_BGSK: jax.Array,
    value_BGSK: jax.Array,
    mask: jax.Array | None,
    dropout: float,
    causal: bool,
    scale: float,
    *,
    key: jax.Array | None = None,
    devices: int = 1,
) -> jax.Array:
    """The scores of some queries at a time."""
    queries, keys = query_BHTK.shape[2], key_BGSK.shape[2]
    samples, heads = query_BHTK.shape[:2]
    rows = max(1, BLOCK_BYTES * devices // (4 * samples * heads * keys))
    # A power of two, which most sequences are a multiple of.
    count = 2 ** math.ceil(math.log2(max(-(-queries // rows), BANDS if causal else 1)))
    rows = -(-queries // count)
    count = -(-queries // rows)
    blocks = _Blocks(rows, _bands(count, rows, keys, causal), dropout, causal, scale)
    pads = [(0, 0), (0, 0), (0, 0), (0, count * rows - queries), (0, 0)]
    query_BGRTK = jnp.pad(_grouped(query_BHTK, key_BGSK), pads)
    whole = _by_group(mask)
    if whole is not None and whole.shape[-2] > 1:
        whole = jnp.pad(whole, pads, constant_values=True)
    words = None if key is None else jax.random.key_data(key)
    found = _blocked(blocks, query_BGRTK, key_BGSK, value_BGSK, whole, words)
    return found[:, :, :, :queries].reshape(query_BHTK.shape)


def _bands(count: int, rows: int, keys: int, causal: bool) -> tuple[tuple[int, int, int], ...]:
    if not causal:
        return ((0, count, keys),)
    bands = min(BANDS, count)
    ends = [count * (number + 1) // bands for number in range(bands)]
    pairs = zip([0, *ends], ends, strict=False)
    return tuple((first, end, min(end * rows, keys)) for first, end in pairs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(blocks: _Blocks, query: Any, keys: Any, values: Any, mask: Any, words: Any) -> Any:
    return _blocked_forward(blocks, query, keys, values, mask, words)[0]


def _blocked_forward(
    blocks: _Blocks, query: Any, keys: Any, values: Any, mask: Any, words: Any
) -> tuple[jax.Array, Any]:
    results, sums = [], []
    for first, end, seen in blocks.bands:
        keys_C, values_C = keys[:, :, :seen], values[:, :, :seen]

        def step(_: None, number: Any, keys_C: Any = keys_C, values_C: Any = values_C) -> Any:
            scores, key = _block(blocks, number, query, keys_C, mask, words)
            largest = jnp.max(scores, axis=-1, keepdims=True)
            powers = jnp.exp(scores - largest)
            total = jnp.sum(powers, axis=-1, keepdims=True)
            weights = _dropped(powers / total, key, blocks.dropout).astype(values_C.dtype)
            found = jnp.einsum("bgrqc,bgck->bgrqk", weights, values_C)
            return None, (found, (largest + jnp.log(total))[..., 0])

        _, (found, sum_) = jax.lax.scan(step, None, jnp.arange(first, end))
        results.append(found)
        sums.append(sum_)
    result = checkpoint_name(_joined(results), SAVED)
    logsumexp = checkpoint_name(_joined(sums), SAVED)
    return result, (query, keys, values, mask, words, result, logsumexp)


def _blocked_backward(blocks: _Blocks, saved: Any, d: jax.Array) -> tuple[Any, ...]:
    query, keys, values, mask, words, result, logsumexp = saved
    wide = jnp.float32
    delta = jnp.sum(d.astype(wide) * result.astype(wide), axis=-1)
    d_keys, d_values = (jnp.zeros(one.shape, wide) for one in (keys, values))
    d_query = []
    for first, end, seen in blocks.bands:
        keys_C, values_C = keys[:, :, :seen], values[:, :, :seen]

        def step(carry: Any, number: Any, keys_C: Any = keys_C, values_C: Any = values_C) -> Any:
            d_keys, d_values = carry
            scores, key = _block(blocks, number, query, keys_C, mask, words)
            query_Q, d_Q, sums_Q, delta_Q = (
                _rows(one, number, blocks.rows) for one in (query, d, logsumexp, delta)
            )
            weights = jnp.exp(scores - sums_Q[..., None])
            dropped = _dropped(weights, key, blocks.dropout).astype(values_C.dtype)
            sum_in = partial(jnp.einsum, preferred_element_type=wide)
            d_values = d_values + sum_in("bgrqc,bgrqk->bgck", dropped, d_Q)
            d_weights = _dropped(sum_in("bgrqk,bgck->bgrqc", d_Q, values_C), key, blocks.dropout)
            d_scores = weights * (d_weights - delta_Q[..., None]) * blocks.scale
            d_scores = d_scores.astype(query.dtype)
            d_keys = d_keys + sum_in("bgrqc,bgrqk->bgck", d_scores, query_Q)
            return (d_keys, d_values), jnp.einsum("bgrqc,bgck->bgrqk", d_scores, keys_C)

        start = tuple(jnp.zeros(one.shape, wide) for one in (keys_C, values_C))
        (more_keys, more_values), found = jax.lax.scan(step, start, jnp.arange(first, end))
        d_keys = d_keys.at[:, :, :seen].add(more_keys)
        d_values = d_values.at[:, :, :seen].add(more_values)
        d_query.append(found)
    found = (_joined(d_query), d_keys.astype(keys.dtype), d_values.astype(values.dtype))
    return (*found, None, None)


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _block(
    blocks: _Blocks, number: Any, query: Any, keys_C: Any, mask: Any, words: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The scores of a block, and the key of its dropout."""
    rows, seen = blocks.rows, keys_C.shape[2]
    if mask is not None:
        mask = mask if mask.shape[-2] == 1 else _rows(mask, number, rows)
        mask = mask[..., :seen]
    first = number * rows if blocks.causal else None
    scores = _scores(_rows(query, number, rows), keys_C, mask, blocks.scale, first)
    if words is None:
        return scores, None
    return scores, jax.random.fold_in(jax.random.wrap_key_data(words), number)


def _rows(x: jax.Array, number: Any, rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, number * rows, rows, axis=3)


def _joined(bands: list[jax.Array]) -> jax.Array:
    """Blocks by number as one array of all their queries."""
    blocks = jnp.concatenate(bands)
    by_query = jnp.moveaxis(blocks, 0, 3)
    return by_query.reshape(*by_query.shape[:3], -1, *by_query.shape[5:])


# ------------------------------------------------------------------ kernels of others


def _cudnn(query: Any, key: Any, value: Any, *, scale: float, causal: bool) -> jax.Array:
    # It takes heads after positions, as the model has them: both transpositions cancel out.
    by_position = (one.swapaxes(1, 2) for one in (query, key, value))
    found = jax.nn.dot_product_attention(
        *by_position, scale=scale, is_causal=causal, implementation="cudnn"
    )
    return found.swapaxes(1, 2)


def _cudnn_refuses(call: Call, places: Places, backend: str) -> str | None:
    if backend != "gpu":
        return "it needs an NVIDIA GPU"
    if float(getattr(jax.devices()[0], "compute_capability", 0)) < 8:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return "it computes in bf16 only"
    return _no_mask_or_dropout(call) or _refused_shapes(call)


@lru_cache
def _refused_shapes(call: Call) -> str | None:
    """What JAX says about attention of these shapes, forward and backward."""
    query = jax.ShapeDtypeStruct(call.query, call.dtype)
    key = jax.ShapeDtypeStruct(call.key, call.dtype)
    try:
        jax.eval_shape(
            lambda *inputs: jax.vjp(partial(_cudnn, scale=1.0, causal=call.causal), *inputs)[0],
            *(query, key, key),
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return (str(error).splitlines() or ["no reason given"])[0]
    return None


def splash(
    query_BHTK: jax.Array,
    key_BGSK: jax.Array,
    value_BGSK: jax.Array,
    *,
    scale: float,
    causal: bool,
    places: Places,
    interpret: bool = False,
) -> jax.Array:
    """The kernel for TPUs, on each device for its own samples and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    lib: Any = splash_attention
    size = next(n for n in SPLASH_BLOCKS if query_BHTK.shape[2] % n == 0)
    sizes = lib.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), size),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), size),
        **dict.fromkeys(("block_q_dq", "block_kv_dq"), size),
    )

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        form = (query.shape[2], key.shape[2])
        one = lib.CausalMask(form) if causal else lib.FullMask(form)
        kernel = lib.make_splash_mha(
            lib.MultiHeadMask([one] * query.shape[1]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
        return jax.vmap(kernel)(query * jnp.asarray(scale, query.dtype), key, value)

    if places.mesh is None:
        return run(query_BHTK, key_BGSK, value_BGSK)
    # XLA cannot divide a kernel by itself.
    spec = PartitionSpec(places.data or None, places.heads)
    divided = jax.shard_map(
        run, mesh=places.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    return divided(query_BHTK, key_BGSK, value_BGSK)


def _splash_refuses(call: Call, places: Places, backend: str) -> str | None:
    if backend != "tpu":
        return "it needs a TPU"
    if call.query[2] % SPLASH_BLOCKS[-1] or call.key[2] % SPLASH_BLOCKS[-1]:
        return f"data.sequence must be a multiple of {SPLASH_BLOCKS[-1]}"
    if call.query[-1] % 64:
        return "the width of a head must be a multiple of 64"
    if call.query[0] % places.size(*places.data) or call.key[1] % places.size(places.heads):
        return "parallel.tp must divide the key and value heads"
    return _no_mask_or_dropout(call)


def _no_mask_or_dropout(call: Call) -> str | None:
    if call.masked:
        return "it takes no mask, which packed documents and windows need"
    return "it has no dropout of its weights" if call.dropped else None


_REFUSALS = {"cudnn": _cudnn_refuses, "splash": _splash_refuses}
