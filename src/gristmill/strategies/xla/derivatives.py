"""Functions whose backward pass needs less memory than what JAX derives.

JAX saves every intermediate result that a derivative uses, in the dtype in which it was computed:
for a norm in bf16 that is the input three times in fp32. Here the backward pass computes them again
from the input, which a compiler fuses into the operations around.

    activation functions   save their input, in its own dtype
    norms                  save their input and one or two numbers for each row
    a bias                 saves nothing; its gradient is a sum in fp32

All compute in fp32, whatever the dtype of their input. D is the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def _from_input(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function of single numbers, for whose derivative only its input is saved."""

    def run(x: jax.Array) -> jax.Array:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    def backward(x: jax.Array, d: jax.Array) -> tuple[jax.Array]:
        _, pull = jax.vjp(function, x.astype(jnp.float32))
        return (pull(d.astype(jnp.float32))[0].astype(x.dtype),)

    found = jax.custom_vjp(run)
    found.defvjp(lambda x: (run(x), x), backward)
    return found


gelu = _from_input(partial(jax.nn.gelu, approximate=False))
gelu_tanh = _from_input(partial(jax.nn.gelu, approximate=True))
silu = _from_input(jax.nn.silu)
sigmoid = _from_input(jax.nn.sigmoid)
tanh = _from_input(jnp.tanh)


@partial(jax.custom_vjp, nondiff_argnums=())
def biased(x: jax.Array, bias_D: jax.Array) -> jax.Array:
    """The sum of both."""
    return x + bias_D


def _biased_backward(saved: None, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    d_bias_D = jnp.sum(d, axis=tuple(range(d.ndim - 1)), dtype=jnp.float32)
    return d, d_bias_D.astype(d.dtype)


biased.defvjp(lambda x, bias_D: (x + bias_D, None), _biased_backward)


def layer_norm(x: jax.Array, gain_D: Any, bias_D: Any, eps: float) -> jax.Array:
    """LayerNorm over the last dimension; gain and bias may be None."""
    return _norm(True, eps, x, gain_D, bias_D)


def rms_norm(x: jax.Array, gain_D: Any, eps: float) -> jax.Array:
    """RMSNorm over the last dimension; the gain may be None."""
    return _norm(False, eps, x, gain_D, None)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(centred: bool, eps: float, x: jax.Array, gain_D: Any, bias_D: Any) -> jax.Array:
    return _norm_forward(centred, eps, x, gain_D, bias_D)[0]


def _norm_forward(
    centred: bool, eps: float, x: jax.Array, gain_D: Any, bias_D: Any
) -> tuple[jax.Array, Any]:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True) if centred else None
    away = wide if mean is None else wide - mean
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(away), axis=-1, keepdims=True) + eps)
    y = away * scale
    y = y if gain_D is None else y * gain_D.astype(jnp.float32)
    y = y if bias_D is None else y + bias_D.astype(jnp.float32)
    return y.astype(x.dtype), (x, mean, scale, gain_D, bias_D)


def _norm_backward(centred: bool, eps: float, saved: Any, d: jax.Array) -> tuple[Any, Any, Any]:
    x, mean, scale, gain_D, bias_D = saved
    rows = tuple(range(x.ndim - 1))
    wide, wide_d = x.astype(jnp.float32), d.astype(jnp.float32)
    normed = (wide if mean is None else wide - mean) * scale
    d_normed = wide_d if gain_D is None else wide_d * gain_D.astype(jnp.float32)
    d_x = d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True)
    if centred:
        d_x = d_x - jnp.mean(d_normed, axis=-1, keepdims=True)
    d_gain = None if gain_D is None else jnp.sum(wide_d * normed, axis=rows).astype(gain_D.dtype)
    d_bias = None if bias_D is None else jnp.sum(wide_d, axis=rows).astype(bias_D.dtype)
    return (d_x * scale).astype(x.dtype), d_gain, d_bias


_norm.defvjp(_norm_forward, _norm_backward)
