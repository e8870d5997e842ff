"""The loss of a model in JAX, a single operation in torch's graphs.

Shapes: N tokens, P shards of the batch, L tokens of a slice in each, D width, V rows of the head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

SLICE_BYTES = 2**28
"""Memory for the logits of a slice on one device, which have the dtype of the hidden states."""
CPU_SLICE_BYTES = 16 * 2**20
SLICE_TOKENS = 256
"""The minimum number of tokens in a slice."""


def linear_cross_entropy(
    hidden_ND: jax.Array,
    head_VD: jax.Array,
    bias_V: jax.Array | None,
    targets_N: jax.Array,
    weights_N: jax.Array | None,
    *,
    vocab: int,
    cap: float | None,
    shards: int = 1,
    whole_head: bool = True,
) -> jax.Array:
    """The loss of `models/loss.py`, summed over tokens in fp32: the same sum over slices of tokens,
    with its own backward pass, so that the logits of all tokens never exist at once. `whole_head`:
    no two devices share its rows.

    Tokens are in the order of samples, and samples are divided over devices, so a slice has tokens
    of every device. Padding tokens of the last slice have weight 0."""
    assert bias_V is None, "our own models have no bias in the head"
    # A comparison with all columns divides with the rows of the head, and is fused with other work
    # on a TPU. On the CPU it is one more pass over the logits.
    look_up = whole_head and jax.default_backend() == "cpu"
    weights = jnp.ones(targets_N.shape, jnp.float32) if weights_N is None else weights_N
    rows, each = head_VD.shape[0], targets_N.shape[0] // shards
    count = -(-each // _slice_tokens(rows * hidden_ND.dtype.itemsize))
    length = -(-each // count)

    def sliced(x: jax.Array) -> jax.Array:
        """(N, ...) as (slices, P, L, ...)."""
        x = x.reshape(shards, each, *x.shape[1:])
        pads = [(0, 0), (0, count * length - each), *[(0, 0)] * (x.ndim - 2)]
        return jnp.pad(x, pads).reshape(shards, count, length, *x.shape[2:]).swapaxes(0, 1)

    def joined(x: jax.Array) -> jax.Array:
        x = x.swapaxes(0, 1).reshape(shards, count * length, *x.shape[3:])
        return x[:, :each].reshape(shards * each, *x.shape[2:])

    def sweep(
        hidden_ND: Any, head_VD: Any, targets_N: Any, weights_N: Any, *, gradients: bool
    ) -> Any:
        head = head_VD.astype(hidden_ND.dtype)

        def step(carry: Any, piece: Any) -> Any:
            hidden_PLD, targets_PL, weights_PL = piece
            total, d_head_DV = carry
            losses_PL, d_logits = _losses(
                hidden_PLD, head, targets_PL, weights_PL, vocab, cap, look_up, gradients
            )
            total = total + jnp.sum(losses_PL * weights_PL)
            if not gradients:
                return (total, d_head_DV), None
            # Transposed, since the hidden states are smaller to transpose than the logits.
            d_head_DV = d_head_DV + jnp.einsum(
                "pld,plv->dv", hidden_PLD, d_logits, preferred_element_type=jnp.float32
            )
            return (total, d_head_DV), jnp.einsum("plv,vd->pld", d_logits, head)

        shape = head.shape[::-1] if gradients else ()
        start = (jnp.zeros((), jnp.float32), jnp.zeros(shape, jnp.float32))
        pieces = (sliced(hidden_ND), sliced(targets_N), sliced(weights_N))
        (total, d_head_DV), d_hidden = jax.lax.scan(step, start, pieces)
        if not gradients:
            return total, None
        return total, (joined(d_hidden), d_head_DV.T.astype(head_VD.dtype))

    def total(*inputs: Any) -> Any:
        return sweep(*inputs, gradients=False)[0]

    def backward(saved: Any, outer: Any) -> Any:
        d_hidden, d_head = saved
        return d_hidden * outer.astype(d_hidden.dtype), d_head * outer, None, None

    loss = jax.custom_vjp(total)
    loss.defvjp(partial(sweep, gradients=True), backward)
    return loss(hidden_ND, head_VD, targets_N, weights.astype(jnp.float32))


def _slice_tokens(token_bytes: int) -> int:
    allowance = CPU_SLICE_BYTES if jax.default_backend() == "cpu" else SLICE_BYTES
    return max(SLICE_TOKENS, allowance // token_bytes)


def _losses(
    hidden_PLD: jax.Array,
    head_VD: jax.Array,
    targets_PL: jax.Array,
    weights_PL: jax.Array,
    vocab: int,
    cap: float | None,
    look_up: bool,
    gradients: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Losses of a slice, and the gradient of its logits in the dtype of the hidden states."""
    # Sums are fp32 and results are written in the dtype of the hidden states, half the memory to
    # read again. Without the barrier a compiler may join the product and the cast.
    written = jax.lax.optimization_barrier(jnp.einsum("pld,vd->plv", hidden_PLD, head_VD))
    logits = written.astype(jnp.float32)
    slope = None
    if cap is not None:
        tanh = jnp.tanh(logits / cap)
        logits, slope = cap * tanh, 1 - jnp.square(tanh)
    column = jnp.arange(head_VD.shape[0])
    if vocab < head_VD.shape[0]:
        logits = jnp.where(column < vocab, logits, -jnp.inf)
    hit = column == targets_PL[..., None]
    if look_up:
        picked = jnp.take_along_axis(logits, targets_PL[..., None], axis=-1)[..., 0]
    else:
        picked = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    largest = jnp.max(logits, axis=-1)
    powers = jnp.exp(logits - largest[..., None])
    sums = jnp.sum(powers, axis=-1)
    losses = jnp.log(sums) + largest - picked
    if not gradients:
        return losses, None
    d_logits = powers * (weights_PL / sums)[..., None] - jnp.where(hit, weights_PL[..., None], 0.0)
    d_logits = d_logits if slope is None else d_logits * slope
    return losses, d_logits.astype(hidden_PLD.dtype)
