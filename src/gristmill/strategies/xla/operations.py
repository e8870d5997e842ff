"""ATen operations in JAX.

Torch has already inferred the shape and dtype of every result. Operands of arithmetic are cast to
that dtype first, since torch and JAX promote types by different rules. Operations with a custom
gradient are in `derivatives.py`.

64-bit integers become 32-bit integers: JAX has 64 bits only under a global switch, and ids and
positions are far below 2^31.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from gristmill.strategies.xla import derivatives
from gristmill.strategies.xla.graph import adamw, rms_norm

aten = torch.ops.aten

DTYPES = {
    torch.float32: jnp.float32,
    torch.float64: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.int64: jnp.int32,
    torch.int32: jnp.int32,
    torch.uint8: jnp.uint8,
    torch.int8: jnp.int8,
    torch.bool: jnp.bool_,
}


class ResultSpec:
    """Shape and dtype of the result of a node, as torch inferred them."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(value.shape), DTYPES[value.dtype]


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Casts array operands to the dtype of the result."""

    def lower(result: ResultSpec, *args: Any, **kwargs: Any) -> Any:
        # Python scalars are not cast: JAX gives them the dtype of the array operand, as torch does.
        cast = [arg.astype(result.dtype) if isinstance(arg, jax.Array) else arg for arg in args]
        return function(*cast, **kwargs)

    return lower


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes operands unchanged."""
    return lambda result, *args, **kwargs: function(*args, **kwargs)


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """Interpolates from the nearer end, as torch does."""
    difference = end - start
    from_end = end - difference * (1 - weight)
    return jnp.where(weight < 0.5, start + weight * difference, from_end)


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    assert rounding_mode in (None, "floor")
    return jnp.floor_divide(a, b) if rounding_mode else a / b


def _norm(
    x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    assert order == 2, "only the 2-norm is supported"
    axes = None if dim is None else tuple(dim)
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=keepdim))


def _layer_norm(
    results: Sequence[ResultSpec], x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    """Torch also returns the statistics, for its own backward pass; nothing reads them here."""
    assert len(shape) == 1, "norms are over the last dimension"
    return derivatives.layer_norm(x, weight, bias, eps), None, None


def _adamw(
    results: Sequence[ResultSpec],
    parameter: Any,
    gradient: Any,
    average: Any,
    square: Any,
    step: Any,
    lr: Any,
    divisor: Any,
    skip: Any,
    settings: Sequence[float],
    decoupled: bool,
) -> list[Any]:
    """A step of AdamW or, if not `decoupled`, of Adam."""
    beta1, beta2, eps, decay = settings
    g = gradient if divisor is None else gradient / divisor
    decayed = parameter * (1 - lr * decay) if decoupled else parameter
    g = g if decoupled else g + decay * parameter
    m, v = _lerp(g, average, beta1), _lerp(g * g, square, beta2)
    root = jnp.sqrt(v) / jnp.sqrt(_correction(beta2, step)) + eps
    moved = decayed - lr / _correction(beta1, step) * m / root
    pairs = ((parameter, moved), (average, m), (square, v))
    return [new if skip is None else jnp.where(skip > 0, old, new) for old, new in pairs]


def _correction(beta: float, step: Any) -> Any:
    """1 - beta^step, without the rounding error of a power that is close to 1."""
    return -jnp.expm1(step * math.log(beta)) if beta else jnp.ones_like(step)


def _slices(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pairs = zip(starts, sizes, strict=True)
    return [
        jax.lax.slice_in_dim(x, start, start + size, axis=dim % x.ndim) for start, size in pairs
    ]


def _split(x: Any, size: int, dim: int = 0) -> list[Any]:
    full, remainder = divmod(x.shape[dim], size)
    return _slices(x, [size] * full + ([remainder] if remainder else []), dim)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _select_scatter(x: Any, part: Any, dim: int, index: int) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(part)


def _slice_scatter(
    x: Any, part: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(part)


def _diagonal_scatter(x: Any, part: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    matrices = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    row, column = jnp.indices(matrices.shape[-2:])
    first = jnp.maximum(0, -offset)
    values = jnp.take(part, row - first, axis=-1, mode="clip")
    replaced = jnp.where(column - row == offset, values, matrices)
    return jnp.moveaxis(replaced, (-2, -1), (dim1, dim2))


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    """A sum or mean, accumulated in fp32."""

    def lower(
        result: ResultSpec, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        axes = tuple(dim) if dim else None
        x = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return function(x, axis=axes, keepdims=keepdim)

    return lower


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = jnp.matmul(a, b)
    if beta == alpha == 1 and bias.ndim == 1:
        return derivatives.add_bias(product, bias)
    product = product if alpha == 1 else alpha * product
    return (bias if beta == 1 else beta * bias) + product


def _expand(result: ResultSpec, x: Any, *_: Any, **__: Any) -> Any:
    return jnp.broadcast_to(x, result.shape)


def _embedding(table: Any, ids: Any, *_: Any) -> Any:
    # The data loader checks the range of all ids.
    return table.at[ids].get(mode="promise_in_bounds")


def _foreach(function: Callable[..., Any]) -> Callable[..., Any]:
    """Applies a function to every tensor of a list; other lists give one argument per tensor."""

    def lower(results: Sequence[ResultSpec], xs: Sequence[Any], *others: Any, **kwargs: Any) -> Any:
        rows = [
            [other[index] if isinstance(other, list | tuple) else other for other in others]
            for index in range(len(xs))
        ]
        return [
            jnp.asarray(function(x, *row, **kwargs), result.dtype)
            for x, row, result in zip(xs, rows, results, strict=True)
        ]

    return lower


def _full(value: Any) -> Callable[..., Any]:
    return lambda result, *_, **__: jnp.full(result.shape, value, result.dtype)


def _arange(result: ResultSpec, *args: Any, **_: Any) -> Any:
    arange: Any = jnp.arange
    return arange(*args, dtype=result.dtype)


def _add(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x + (y if alpha == 1 else alpha * y)


def _subtract(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x - (y if alpha == 1 else alpha * y)


# Each function takes the spec of the result, then the arguments of the operation. `_evaluate` casts
# a single result to its dtype and checks its shape, so an entry may compute in a wider dtype.
LOWERINGS: dict[Any, Callable[..., Any]] = {
    # arithmetic
    aten.add.Tensor: _arithmetic(_add),
    aten.add.Scalar: _arithmetic(_add),
    aten.sub.Tensor: _arithmetic(_subtract),
    aten.sub.Scalar: _arithmetic(_subtract),
    aten.rsub.Scalar: _arithmetic(lambda x, y, alpha=1: y - alpha * x),
    aten.mul.Tensor: _arithmetic(jnp.multiply),
    aten.mul.Scalar: _arithmetic(jnp.multiply),
    aten.div.Tensor: _arithmetic(_divide),
    aten.div.Scalar: _arithmetic(_divide),
    aten.div.Tensor_mode: _arithmetic(_divide),
    aten.div.Scalar_mode: _arithmetic(_divide),
    aten.remainder.Scalar: _arithmetic(jnp.remainder),
    aten.pow.Tensor_Scalar: _arithmetic(jnp.power),
    aten.maximum.default: _arithmetic(jnp.maximum),
    aten.minimum.default: _arithmetic(jnp.minimum),
    aten.neg.default: _arithmetic(jnp.negative),
    aten.abs.default: _arithmetic(jnp.abs),
    aten.sqrt.default: _arithmetic(jnp.sqrt),
    aten.rsqrt.default: _arithmetic(jax.lax.rsqrt),
    aten.reciprocal.default: _arithmetic(lambda x: 1 / x),
    aten.exp.default: _arithmetic(jnp.exp),
    aten.expm1.default: _arithmetic(jnp.expm1),
    aten.log.default: _arithmetic(jnp.log),
    aten.tanh.default: _plain(derivatives.tanh),
    aten.sigmoid.default: _plain(derivatives.sigmoid),
    aten.silu.default: _plain(derivatives.silu),
    aten.relu.default: _arithmetic(jax.nn.relu),
    aten.gelu.default: _plain(
        lambda x, *, approximate="none": (
            derivatives.gelu_tanh(x) if approximate == "tanh" else derivatives.gelu(x)
        )
    ),
    aten.clamp.default: _arithmetic(lambda x, low=None, high=None: jnp.clip(x, low, high)),
    aten.lerp.Scalar: _arithmetic(_lerp),
    aten.lerp.Tensor: _arithmetic(_lerp),
    # comparisons
    aten.gt.Scalar: _plain(jnp.greater),
    aten.gt.Tensor: _plain(jnp.greater),
    aten.ge.Scalar: _plain(jnp.greater_equal),
    aten.ge.Tensor: _plain(jnp.greater_equal),
    aten.lt.Scalar: _plain(jnp.less),
    aten.lt.Tensor: _plain(jnp.less),
    aten.le.Scalar: _plain(jnp.less_equal),
    aten.le.Tensor: _plain(jnp.less_equal),
    aten.eq.Scalar: _plain(jnp.equal),
    aten.eq.Tensor: _plain(jnp.equal),
    aten.ne.Scalar: _plain(jnp.not_equal),
    aten.ne.Tensor: _plain(jnp.not_equal),
    aten.bitwise_and.Tensor: _plain(jnp.bitwise_and),
    aten.bitwise_or.Tensor: _plain(jnp.bitwise_or),
    aten.bitwise_not.default: _plain(jnp.bitwise_not),
    aten.logical_and.default: _plain(jnp.logical_and),
    aten.logical_not.default: _plain(jnp.logical_not),
    aten.where.self: lambda result, condition, a, b: jnp.where(
        condition, jnp.asarray(a, result.dtype), jnp.asarray(b, result.dtype)
    ),
    # new tensors
    aten.zeros.default: _full(0),
    aten.zeros_like.default: _full(0),
    aten.ones.default: _full(1),
    aten.ones_like.default: _full(1),
    aten.empty.memory_format: _full(0),
    aten.empty_like.default: _full(0),
    aten.full.default: lambda result, size, value, **_: jnp.full(result.shape, value, result.dtype),
    aten.full_like.default: lambda result, x, value, **_: jnp.full(
        result.shape, value, result.dtype
    ),
    aten.scalar_tensor.default: lambda result, value, **_: jnp.asarray(value, result.dtype),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    # copies; the result is cast in any case
    aten._to_copy.default: lambda result, x, **_: x,
    aten.clone.default: lambda result, x, **_: x,
    aten.detach.default: _plain(lambda x: x),
    aten.alias.default: _plain(lambda x: x),
    aten.lift_fresh_copy.default: _plain(lambda x: x),
    aten.copy.default: lambda result, x, source, *_: jnp.broadcast_to(source, result.shape),
    aten.fill.Scalar: lambda result, x, value: jnp.full(result.shape, value, result.dtype),
    aten.fill.Tensor: lambda result, x, value: jnp.broadcast_to(value, result.shape),
    # shapes
    aten.view.default: lambda result, x, *_: jnp.reshape(x, result.shape),
    aten._unsafe_view.default: lambda result, x, *_: jnp.reshape(x, result.shape),
    aten.reshape.default: lambda result, x, *_: jnp.reshape(x, result.shape),
    aten.unsqueeze.default: lambda result, x, *_: jnp.reshape(x, result.shape),
    aten.squeeze.dim: lambda result, x, *_: jnp.reshape(x, result.shape),
    aten.squeeze.dims: lambda result, x, *_: jnp.reshape(x, result.shape),
    aten.expand.default: _expand,
    aten.transpose.int: _plain(jnp.swapaxes),
    aten.t.default: _plain(jnp.transpose),
    aten.permute.default: _plain(jnp.transpose),
    aten.slice.Tensor: _plain(_slice),
    aten.select.int: _plain(lambda x, dim, index: jnp.take(x, index, axis=dim)),
    aten.select_scatter.default: _plain(_select_scatter),
    aten.slice_scatter.default: _plain(_slice_scatter),
    aten.diagonal.default: _plain(
        lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2)
    ),
    aten.diagonal_scatter.default: _plain(_diagonal_scatter),
    aten.split.Tensor: _plain(_split),
    aten.split_with_sizes.default: _plain(_slices),
    aten.unbind.int: _plain(lambda x, dim=0: list(jnp.moveaxis(x, dim, 0))),
    aten.cat.default: _plain(lambda xs, dim=0: jnp.concatenate(xs, axis=dim)),
    aten.stack.default: _plain(lambda xs, dim=0: jnp.stack(xs, axis=dim)),
    aten.tril.default: _plain(lambda x, diagonal=0: jnp.tril(x, diagonal)),
    # lookups
    aten.embedding.default: _plain(_embedding),
    aten.index.Tensor: _plain(
        lambda x, indices: x[tuple(slice(None) if index is None else index for index in indices)]
    ),
    # sums and products
    aten.mean.dim: _reduction(jnp.mean),
    aten.mean.default: _reduction(jnp.mean),
    aten.sum.default: _reduction(jnp.sum),
    aten.sum.dim_IntList: _reduction(jnp.sum),
    aten.linalg_vector_norm.default: _plain(_norm),
    aten.mm.default: _arithmetic(jnp.matmul),
    aten.bmm.default: _arithmetic(jnp.matmul),
    aten.addmm.default: _arithmetic(_addmm),
    aten.baddbmm.default: _arithmetic(_addmm),
    aten.native_layer_norm.default: _layer_norm,
    rms_norm._opoverload: _plain(derivatives.rms_norm),
    # the optimizer
    adamw._opoverload: _adamw,
    # lists
    aten._foreach_add.Scalar: _foreach(_add),
    aten._foreach_add.List: _foreach(_add),
    aten._foreach_sub.List: _foreach(_subtract),
    aten._foreach_mul.Scalar: _foreach(jnp.multiply),
    aten._foreach_div.Tensor: _foreach(jnp.divide),
    aten._foreach_norm.Scalar: _foreach(_norm),
}
