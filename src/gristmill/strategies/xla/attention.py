"""Four implementations of attention in JAX, a single operation in the traced torch graph.

              where    memory                  used by "auto"
    plain     any      grows with T x S        on the CPU
    blocked   any      one block of scores     elsewhere as a fallback: fp32, masks, dropout
    cudnn     CUDA     inputs and output       fp16 and bf16, without mask or dropout
    splash    TPU      inputs and output       without mask or dropout

All but plain save only their inputs, the output and the logsumexp of each query; the backward pass
recomputes the scores. Scores and sums are in fp32 everywhere.

Shapes: B samples, H query heads, G key and value heads, R query heads per key head, T queries, S
keys, K head width; Q queries of a block, C keys visible to a band of blocks.
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
"""Checkpoint name of the tensors that `jax.checkpoint` saves, to avoid recomputing attention."""
SPLASH_BLOCKS = (512, 384, 256, 128)
"""Block sizes of the TPU kernel; the largest that divides the sequence is used."""


class AttentionSharding(NamedTuple):
    """How attention is sharded over devices."""

    mesh: Mesh | None = None
    data: tuple[str, ...] = ()
    """Mesh axes that shard the samples."""
    heads: str | None = None
    """The mesh axis that shards the heads."""

    def size(self, *axes: str | None) -> int:
        sizes = self.mesh.shape if self.mesh is not None else {}
        return int(np.prod([sizes[axis] for axis in axes if axis is not None]))


class AttentionCall(NamedTuple):
    """The properties of a call that decide which implementation fits."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: Any
    has_mask: bool
    has_dropout: bool
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
    implementation: str = "auto",
    sharding: AttentionSharding | None = None,
) -> jax.Array:
    """Multi-head or grouped-query attention. `mask` is true where a query may attend to a key.
    `key` is the random key of the dropout, if any; `implementation` is runtime.xla_attention."""
    assert mask is None or mask.dtype == jnp.bool_, "masks are boolean"
    assert not causal or query_BHTK.shape[2] == key_BGSK.shape[2], (
        "causal attention needs as many queries as keys"
    )
    sharding = sharding or AttentionSharding()
    call = AttentionCall(
        *(query_BHTK.shape, key_BGSK.shape, query_BHTK.dtype),
        *(mask is not None, key is not None, causal),
    )
    inputs = (query_BHTK, key_BGSK, value_BGSK)
    backend = jax.default_backend()
    implementation = choose_implementation(implementation, call, sharding, backend=backend)
    if implementation == "cudnn":
        return _cudnn(*inputs, scale=scale, causal=causal)
    if implementation == "splash":
        return splash(*inputs, scale=scale, causal=causal, sharding=sharding)
    devices = sharding.size(*sharding.data, sharding.heads)
    compute = blocked if implementation == "blocked" else plain
    return compute(*inputs, mask, dropout, causal, scale, key=key, devices=devices)


def choose_implementation(
    setting: str, call: AttentionCall, sharding: AttentionSharding, *, backend: str
) -> str:
    """The implementation to use; an error if the setting names one that does not fit."""
    if setting == "auto" and backend == "cpu":
        return "plain"
    fastest = {"gpu": "cudnn", "tpu": "splash"}.get(backend, "blocked")
    wanted = fastest if setting == "auto" else setting
    problem = _CHECKS[wanted](call, sharding, backend) if wanted in _CHECKS else None
    if problem is None:
        return wanted
    if setting == "auto":
        return "blocked"
    raise UserError(
        f"attention cannot use {setting}: {problem}",
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
    """Computes all scores at once, on any index of devices."""
    query_BGRTK = _group_heads(query_BHTK, key_BGSK)
    scores = _scores(
        query_BGRTK, key_BGSK, _expand_mask(mask), scale, first_query=0 if causal else None
    )
    weights = _dropout(jax.nn.softmax(scores, axis=-1), key, dropout)
    output = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(value_BGSK.dtype), value_BGSK)
    return output.reshape(query_BHTK.shape)


def _group_heads(x_BHTK: jax.Array, key_BGSK: jax.Array) -> jax.Array:
    samples, _, queries, width = x_BHTK.shape
    return x_BHTK.reshape(samples, key_BGSK.shape[1], -1, queries, width)


def _expand_mask(mask: jax.Array | None) -> jax.Array | None:
    """A mask that broadcasts to the scores, BGRTS."""
    if mask is None:
        return None
    shape = (1,) * (4 - mask.ndim) + mask.shape
    return mask.reshape(*shape[:2], 1, *shape[2:])


def _scores(
    query_BGRTK: jax.Array,
    key_BGSK: jax.Array,
    mask: jax.Array | None,
    scale: float,
    first_query: jax.Array | int | None,
) -> jax.Array:
    """`first_query`: the position of the first query in causal attention, else None."""
    scores = jnp.einsum(
        "bgrtk,bgsk->bgrts", query_BGRTK, key_BGSK, preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if first_query is not None:
        positions = first_query + jnp.arange(scores.shape[-2])
        scores = jnp.where(positions[:, None] >= jnp.arange(scores.shape[-1]), scores, -jnp.inf)
    return scores if mask is None else jnp.where(mask, scores, -jnp.inf)


def _dropout(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


# ------------------------------------------------------------------ blocked
#
# A block has as many queries as memory allows. Causal attention processes the blocks in a few
# bands, and compares the queries of a band with the keys up to the end of the band only: with four
# bands, these are 5/8 of all scores.

BLOCK_BYTES = 2**28
"""Memory for the scores of a block on one device."""
BANDS = 4


class _Blocks(NamedTuple):
    """The static parameters of blocked attention."""

    rows: int
    """Queries of a block."""
    bands: tuple[tuple[int, int, int], ...]
    """First block, last block + 1, and the index of visible keys."""
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
    """Computes the scores of one block of queries at a time."""
    queries, keys = query_BHTK.shape[2], key_BGSK.shape[2]
    samples, heads = query_BHTK.shape[:2]
    rows = max(1, BLOCK_BYTES * devices // (4 * samples * heads * keys))
    # A power of two, of which most sequences are a multiple.
    count = 2 ** math.ceil(math.log2(max(-(-queries // rows), BANDS if causal else 1)))
    rows = -(-queries // count)
    count = -(-queries // rows)
    blocks = _Blocks(rows, _bands(count, rows, keys, causal), dropout, causal, scale)
    pads = [(0, 0), (0, 0), (0, 0), (0, count * rows - queries), (0, 0)]
    query_BGRTK = jnp.pad(_group_heads(query_BHTK, key_BGSK), pads)
    mask = _expand_mask(mask)
    if mask is not None and mask.shape[-2] > 1:
        mask = jnp.pad(mask, pads, constant_values=True)
    key_data = None if key is None else jax.random.key_data(key)
    output = _blocked(blocks, query_BGRTK, key_BGSK, value_BGSK, mask, key_data)
    return output[:, :, :, :queries].reshape(query_BHTK.shape)


def _bands(count: int, rows: int, keys: int, causal: bool) -> tuple[tuple[int, int, int], ...]:
    if not causal:
        return ((0, count, keys),)
    bands = min(BANDS, count)
    ends = [count * (band + 1) // bands for band in range(bands)]
    pairs = zip([0, *ends], ends, strict=False)
    return tuple((first, end, min(end * rows, keys)) for first, end in pairs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(blocks: _Blocks, query: Any, keys: Any, values: Any, mask: Any, key_data: Any) -> Any:
    return _blocked_forward(blocks, query, keys, values, mask, key_data)[0]


def _blocked_forward(
    blocks: _Blocks, query: Any, keys: Any, values: Any, mask: Any, key_data: Any
) -> tuple[jax.Array, Any]:
    outputs, logsumexps = [], []
    for first, end, visible in blocks.bands:
        keys_C, values_C = keys[:, :, :visible], values[:, :, :visible]

        def step(_: None, index: Any, keys_C: Any = keys_C, values_C: Any = values_C) -> Any:
            scores, key = _block(blocks, index, query, keys_C, mask, key_data)
            row_max = jnp.max(scores, axis=-1, keepdims=True)
            exps = jnp.exp(scores - row_max)
            row_sum = jnp.sum(exps, axis=-1, keepdims=True)
            weights = _dropout(exps / row_sum, key, blocks.dropout).astype(values_C.dtype)
            output_Q = jnp.einsum("bgrqc,bgck->bgrqk", weights, values_C)
            return None, (output_Q, (row_max + jnp.log(row_sum))[..., 0])

        _, (output, logsumexp) = jax.lax.scan(step, None, jnp.arange(first, end))
        outputs.append(output)
        logsumexps.append(logsumexp)
    output = checkpoint_name(_join_bands(outputs), SAVED)
    logsumexp = checkpoint_name(_join_bands(logsumexps), SAVED)
    return output, (query, keys, values, mask, key_data, output, logsumexp)


def _blocked_backward(blocks: _Blocks, saved: Any, d_output: jax.Array) -> tuple[Any, ...]:
    query, keys, values, mask, key_data, output, logsumexp = saved
    fp32 = jnp.float32
    delta = jnp.sum(d_output.astype(fp32) * output.astype(fp32), axis=-1)
    d_keys, d_values = (jnp.zeros(x.shape, fp32) for x in (keys, values))
    d_query = []
    for first, end, visible in blocks.bands:
        keys_C, values_C = keys[:, :, :visible], values[:, :, :visible]

        def step(carry: Any, index: Any, keys_C: Any = keys_C, values_C: Any = values_C) -> Any:
            d_keys, d_values = carry
            scores, key = _block(blocks, index, query, keys_C, mask, key_data)
            query_Q, d_output_Q, logsumexp_Q, delta_Q = (
                _rows(x, index, blocks.rows) for x in (query, d_output, logsumexp, delta)
            )
            weights = jnp.exp(scores - logsumexp_Q[..., None])
            dropped = _dropout(weights, key, blocks.dropout).astype(values_C.dtype)
            einsum = partial(jnp.einsum, preferred_element_type=fp32)
            d_values = d_values + einsum("bgrqc,bgrqk->bgck", dropped, d_output_Q)
            d_dropped = einsum("bgrqk,bgck->bgrqc", d_output_Q, values_C)
            d_weights = _dropout(d_dropped, key, blocks.dropout)
            d_scores = weights * (d_weights - delta_Q[..., None]) * blocks.scale
            d_scores = d_scores.astype(query.dtype)
            d_keys = d_keys + einsum("bgrqc,bgrqk->bgck", d_scores, query_Q)
            return (d_keys, d_values), jnp.einsum("bgrqc,bgck->bgrqk", d_scores, keys_C)

        start = tuple(jnp.zeros(x.shape, fp32) for x in (keys_C, values_C))
        (d_keys_C, d_values_C), d_query_band = jax.lax.scan(step, start, jnp.arange(first, end))
        d_keys = d_keys.at[:, :, :visible].add(d_keys_C)
        d_values = d_values.at[:, :, :visible].add(d_values_C)
        d_query.append(d_query_band)
    d_inputs = (_join_bands(d_query), d_keys.astype(keys.dtype), d_values.astype(values.dtype))
    return (*d_inputs, None, None)


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _block(
    blocks: _Blocks, index: Any, query: Any, keys_C: Any, mask: Any, key_data: Any
) -> tuple[jax.Array, jax.Array | None]:
    """The scores of a block, and the random key of its dropout."""
    rows, visible = blocks.rows, keys_C.shape[2]
    if mask is not None:
        mask = mask if mask.shape[-2] == 1 else _rows(mask, index, rows)
        mask = mask[..., :visible]
    first_query = index * rows if blocks.causal else None
    scores = _scores(_rows(query, index, rows), keys_C, mask, blocks.scale, first_query)
    if key_data is None:
        return scores, None
    return scores, jax.random.fold_in(jax.random.wrap_key_data(key_data), index)


def _rows(x: jax.Array, index: Any, rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * rows, rows, axis=3)


def _join_bands(bands: list[jax.Array]) -> jax.Array:
    """Concatenate the blocks of all bands along the queries."""
    blocks = jnp.concatenate(bands)
    by_query = jnp.moveaxis(blocks, 0, 3)
    return by_query.reshape(*by_query.shape[:3], -1, *by_query.shape[5:])


# ------------------------------------------------------------------ external kernels


def _cudnn(query: Any, key: Any, value: Any, *, scale: float, causal: bool) -> jax.Array:
    # cuDNN takes positions before heads, as the model has them, so both transposes cancel out.
    inputs_BTHK = (x.swapaxes(1, 2) for x in (query, key, value))
    output_BTHK = jax.nn.dot_product_attention(
        *inputs_BTHK, scale=scale, is_causal=causal, implementation="cudnn"
    )
    return output_BTHK.swapaxes(1, 2)


def _check_cudnn(call: AttentionCall, sharding: AttentionSharding, backend: str) -> str | None:
    if backend != "gpu":
        return "it needs an NVIDIA GPU"
    if float(getattr(jax.devices()[0], "compute_capability", 0)) < 8:
        return "it needs an NVIDIA GPU of compute capability 8.0 or later"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return "it supports only bf16"
    return _check_mask_and_dropout(call) or _check_shapes(call)


@lru_cache
def _check_shapes(call: AttentionCall) -> str | None:
    """The error of JAX for attention of these shapes, forward and backward."""
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
    sharding: AttentionSharding,
    interpret: bool = False,
) -> jax.Array:
    """The kernel for TPUs; each device computes its own samples and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    lib: Any = splash_attention
    size = next(n for n in SPLASH_BLOCKS if query_BHTK.shape[2] % n == 0)
    sizes = lib.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), size),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), size),
        **dict.fromkeys(("block_q_dq", "block_kv_dq"), size),
    )

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        shape = (query.shape[2], key.shape[2])
        mask = lib.CausalMask(shape) if causal else lib.FullMask(shape)
        kernel = lib.make_splash_mha(
            lib.MultiHeadMask([mask] * query.shape[1]),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
        return jax.vmap(kernel)(query * jnp.asarray(scale, query.dtype), key, value)

    if sharding.mesh is None:
        return run(query_BHTK, key_BGSK, value_BGSK)
    # XLA cannot shard a custom kernel by itself.
    spec = PartitionSpec(sharding.data or None, sharding.heads)
    sharded = jax.shard_map(
        run, mesh=sharding.mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
    )
    return sharded(query_BHTK, key_BGSK, value_BGSK)


def _check_splash(call: AttentionCall, sharding: AttentionSharding, backend: str) -> str | None:
    if backend != "tpu":
        return "it needs a TPU"
    if call.query[2] % SPLASH_BLOCKS[-1] or call.key[2] % SPLASH_BLOCKS[-1]:
        return f"data.sequence must be a multiple of {SPLASH_BLOCKS[-1]}"
    if call.query[-1] % 64:
        return "the head width must be a multiple of 64"
    if call.query[0] % sharding.size(*sharding.data) or call.key[1] % sharding.size(sharding.heads):
        return "parallel.tp must divide the key and value heads"
    return _check_mask_and_dropout(call)


def _check_mask_and_dropout(call: AttentionCall) -> str | None:
    if call.has_mask:
        return "it supports no mask, which packed documents and windows need"
    return "it supports no dropout of attention weights" if call.has_dropout else None


_CHECKS = {"cudnn": _check_cudnn, "splash": _check_splash}
