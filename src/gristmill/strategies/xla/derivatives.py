"""Functions with custom gradients that save less memory than JAX's automatic derivatives.

JAX saves every intermediate result that a derivative uses, in the dtype of the computation: for a
norm in bf16, three copies of the input in fp32. Here the backward pass recomputes them from the
input, which the compiler fuses with the operations around it.

    activation functions   save their input, in its own dtype
    norms                  save their input and one or two values for each row
    adding a bias          saves nothing; the gradient of the bias is a sum in fp32

All compute in fp32, for any dtype of the input. D is the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def _from_input(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """An elementwise function whose derivative saves only its input."""

    def run(x: jax.Array) -> jax.Array:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    def backward(x: jax.Array, d_y: jax.Array) -> tuple[jax.Array]:
        _, vjp = jax.vjp(function, x.astype(jnp.float32))
        return (vjp(d_y.astype(jnp.float32))[0].astype(x.dtype),)

    elementwise = jax.custom_vjp(run)
    elementwise.defvjp(lambda x: (run(x), x), backward)
    return elementwise


gelu = _from_input(partial(jax.nn.gelu, approximate=False))
gelu_tanh = _from_input(partial(jax.nn.gelu, approximate=True))
silu = _from_input(jax.nn.silu)
sigmoid = _from_input(jax.nn.sigmoid)
tanh = _from_input(jnp.tanh)


@partial(jax.custom_vjp, nondiff_argnums=())
def add_bias(x: jax.Array, bias_D: jax.Array) -> jax.Array:
    """The sum of x and the bias."""
    return x + bias_D


def _add_bias_backward(saved: None, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    d_bias_D = jnp.sum(d_y, axis=tuple(range(d_y.ndim - 1)), dtype=jnp.float32)
    return d_y, d_bias_D.astype(d_y.dtype)


add_bias.defvjp(lambda x, bias_D: (x + bias_D, None), _add_bias_backward)


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
    x_fp32 = x.astype(jnp.float32)
    mean = jnp.mean(x_fp32, axis=-1, keepdims=True) if centred else None
    deviation = x_fp32 if mean is None else x_fp32 - mean
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(deviation), axis=-1, keepdims=True) + eps)
    y = deviation * scale
    y = y if gain_D is None else y * gain_D.astype(jnp.float32)
    y = y if bias_D is None else y + bias_D.astype(jnp.float32)
    return y.astype(x.dtype), (x, mean, scale, gain_D, bias_D)


def _norm_backward(centred: bool, eps: float, saved: Any, d_y: jax.Array) -> tuple[Any, Any, Any]:
    x, mean, scale, gain_D, bias_D = saved
    rows = tuple(range(x.ndim - 1))
    x_fp32, d_y_fp32 = x.astype(jnp.float32), d_y.astype(jnp.float32)
    normed = (x_fp32 if mean is None else x_fp32 - mean) * scale
    d_normed = d_y_fp32 if gain_D is None else d_y_fp32 * gain_D.astype(jnp.float32)
    d_x = d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True)
    if centred:
        d_x = d_x - jnp.mean(d_normed, axis=-1, keepdims=True)
    d_gain_D = d_bias_D = None
    if gain_D is not None:
        d_gain_D = jnp.sum(d_y_fp32 * normed, axis=rows).astype(gain_D.dtype)
    if bias_D is not None:
        d_bias_D = jnp.sum(d_y_fp32, axis=rows).astype(bias_D.dtype)
    return (d_x * scale).astype(x.dtype), d_gain_D, d_bias_D


_norm.defvjp(_norm_forward, _norm_backward)
