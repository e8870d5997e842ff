"""Attention in JAX, multi-head or grouped-query, with scores in fp32.

Shapes: B samples, G key and value heads, R query heads that share one of them, T queries, S keys,
K head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attend(
    query_BHTK: jax.Array,
    key_BGSK: jax.Array,
    value_BGSK: jax.Array,
    mask: jax.Array | None,
    dropout: float,
    causal: bool,
    scale: float,
    *,
    key: jax.Array | None,
) -> jax.Array:
    """`mask` is true where a query sees a key. `key`: for dropout, if there is any."""
    samples, _, queries, width = query_BHTK.shape
    groups, keys = key_BGSK.shape[1:3]
    query_BGRTK = query_BHTK.reshape(samples, groups, -1, queries, width)
    scores = jnp.einsum(
        "bgrtk,bgsk->bgrts", query_BGRTK, key_BGSK, preferred_element_type=jnp.float32
    )
    scores = scores * scale
    if causal:
        assert queries == keys, "plain causal attention is over whole sequences"
        scores = jnp.where(jnp.tril(jnp.ones((queries, keys), jnp.bool_)), scores, -jnp.inf)
    if mask is not None:
        assert mask.dtype == jnp.bool_, "masks are of booleans"
        shape = (1,) * (4 - mask.ndim) + mask.shape
        scores = jnp.where(mask.reshape(*shape[:2], 1, *shape[2:]), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    if key is not None:
        kept = jax.random.bernoulli(key, 1 - dropout, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout), 0.0)
    found = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(value_BGSK.dtype), value_BGSK)
    return found.reshape(query_BHTK.shape)
