"""ATen operations in JAX, and graphs of them (`graph.py`) as functions of JAX arrays.

Torch has found the shape and dtype of every result already. Operands of arithmetic are cast to that
dtype first, since the two promote types by different rules, and every result is compared with the
shape. An operation that is missing here is an error when a step is built, never a wrong number.

Integers of 64 bits have 32 here. Random numbers come from a key and the number of their node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from gristmill.base.errors import UserError
from gristmill.models.loss import unpacked
from gristmill.strategies.xla.graph import Traced, attention, block_edge
from gristmill.strategies.xla.loss import attend, linear_cross_entropy

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


# JAX has 64 bits only under a global switch; ids and positions are far below 2^31.


class Result:
    """What torch says about the result of a node."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(value.shape), DTYPES[value.dtype]


@dataclass(frozen=True)
class Context:
    """What a graph needs to know beside its inputs."""

    key: jax.Array | None = None
    """Where random numbers come from; None if there are none."""
    shards: int = 1
    """Shards of the batch, which is the first dimension of whatever has one."""
    tp: int = 1
    """Shards of each layer."""
    recompute: Callable[[int], Any] | None = None
    """What to keep of a block, by number, as a policy of `jax.checkpoint`; None keeps all."""


class Lowered:
    """A traced function of trees of JAX arrays."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.nodes = list(traced.graph.nodes)
        missing = sorted(
            {
                str(node.target)
                for node in self.nodes
                if node.op == "call_function" and node.target not in LOWERINGS
                if node.target not in _SPECIAL
            }
        )
        if missing:
            raise UserError(
                f"this run needs {', '.join(missing)}, which has no translation to XLA",
                where="runtime.device",
                remedy='train on "cuda" or "cpu", or report it',
            )

    def __call__(self, *args: Any, context: Context | None = None) -> Any:
        context = context or Context()
        leaves, spec = jax.tree.flatten(args)
        assert spec == self.traced.inputs, "called as it was traced"
        values: dict[Node, Any] = {}
        inputs = iter(leaves)
        rest = iter(enumerate(self.nodes))
        for number, node in rest:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                (found,) = node.args
                return jax.tree.unflatten(self.traced.outputs, _known(values, found))
            elif policy := self._policy(node, context):
                values.update(self._recomputed(number, rest, values, policy, context))
            else:
                values[node] = _evaluate(node, number, values, context)
        raise AssertionError("a graph ends with its output")

    def _policy(self, node: Node, context: Context) -> Any:
        """How the block that begins with a node is recomputed, if one does and is."""
        if node.target is not _EDGE or node.args[2] or context.recompute is None:
            return None
        block: Any = node.args[1]
        return context.recompute(block)

    def _recomputed(
        self,
        first: int,
        rest: Iterator[tuple[int, Node]],
        values: Mapping[Node, Any],
        policy: Any,
        context: Context,
    ) -> dict[Node, Any]:
        """The result of a block whose activations the backward pass computes again."""
        block = [(first, self.nodes[first])]
        for number, node in rest:
            block.append((number, node))
            if node.target is _EDGE and node.args[2]:
                break
        # What the block reads from outside (its input, weights, masks) is an argument, by name,
        # since nodes cannot be sorted as the keys of a tree; only the edge's result leaves the
        # block. Random numbers follow from the key and a node's number, so the second time they are
        # the same.
        inside = {node for _, node in block}
        last = block[-1][1]
        needed = [
            source for node in inside for source in node.all_input_nodes if source not in inside
        ]
        given = {node.name: values[node] for node in dict.fromkeys(needed)}
        names = {node.name: node for node in needed}

        @partial(jax.checkpoint, policy=None if policy is ALL else policy)
        def run(given: dict[str, Any]) -> Any:
            local = {names[name]: value for name, value in given.items()}
            for number, node in block:
                local[node] = _evaluate(node, number, local, context)
            return local[last]

        return {last: run(given)}


ALL = object()
"""The policy that keeps nothing but the inputs of a block."""
_EDGE = block_edge._opoverload
_ATTENTION = attention._opoverload
_LOSS = torch.ops.gristmill.linear_cross_entropy.default
_RANDOM = {aten.bernoulli.p, aten.native_dropout.default}
_SPECIAL = {_EDGE, _ATTENTION, _LOSS, *_RANDOM, operator.getitem}


def _known(values: Mapping[Node, Any], tree: Any) -> Any:
    return tree_map_only(Node, lambda node: values[node], tree)


def _evaluate(node: Node, number: int, values: Mapping[Node, Any], context: Context) -> Any:
    assert node.op == "call_function", f"{node.op} {node.target} is no operation"
    args, kwargs = _known(values, node.args), _known(values, node.kwargs)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target is _EDGE:
        return args[0]
    if node.target is _LOSS:
        hidden, head, bias, *rest = args
        tokens, options, terms = unpacked(rest)
        total = linear_cross_entropy(
            *(hidden, head, bias, tokens.targets_N, terms.loss_weights_BT),
            vocab=options.vocab,
            cap=terms.cap,
            shards=context.shards,
            whole_head=context.tp == 1,
        )
        return total, None, None, None
    if node.target is _ATTENTION:
        return attend(*args, key=_key(context, number) if args[4] else None)
    if node.target is aten.bernoulli.p:
        x, probability = args
        return jax.random.bernoulli(_key(context, number), probability, x.shape).astype(x.dtype)
    if node.target is aten.native_dropout.default:
        x, rate, training = args
        assert training, "dropout without training is the identity"
        kept = jax.random.bernoulli(_key(context, number), 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype), kept
    found = node.meta["val"]
    if isinstance(found, torch.Tensor):
        result = Result(found)
        value = LOWERINGS[node.target](result, *args, **kwargs)
        value = jnp.asarray(value, result.dtype)
        assert value.shape == result.shape, f"{node.target}: {value.shape}, not {result.shape}"
        return value
    results = [Result(one) for one in found]
    return LOWERINGS[node.target](results, *args, **kwargs)


def _key(context: Context, number: int) -> jax.Array:
    assert context.key is not None, "a graph with random numbers is given a key"
    return jax.random.fold_in(context.key, number)


# ------------------------------------------------------------------ the table


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Operands in the dtype of the result."""

    def lower(result: Result, *args: Any, **kwargs: Any) -> Any:
        # Python's numbers stay: JAX gives them the dtype of the array beside them, as torch does.
        cast = [arg.astype(result.dtype) if isinstance(arg, jax.Array) else arg for arg in args]
        return function(*cast, **kwargs)

    return lower


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Operands as they are."""
    return lambda result, *args, **kwargs: function(*args, **kwargs)


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """From the nearer end, as torch does."""
    away = end - start
    return jnp.where(weight < 0.5, start + weight * away, end - away * (1 - weight))


def _divided(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    assert rounding_mode in (None, "floor")
    return jnp.floor_divide(a, b) if rounding_mode else a / b


def _norm(
    x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    assert order == 2, "no other norm is used"
    axes = None if dim is None else tuple(dim)
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes, keepdims=keepdim))


def _layer_norm(
    results: Sequence[Result], x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    """In fp32, whatever the dtype of the input."""
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=axes, keepdims=True)
    centred = wide - mean
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=axes, keepdims=True) + eps)
    normed = centred * rstd
    normed = normed if weight is None else normed * weight.astype(jnp.float32)
    normed = normed if bias is None else normed + bias.astype(jnp.float32)
    return normed.astype(x.dtype), mean, rstd


def _slices(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    pairs = zip(begins, sizes, strict=True)
    return [jax.lax.slice_in_dim(x, at, at + size, axis=dim % x.ndim) for at, size in pairs]


def _split(x: Any, size: int, dim: int = 0) -> list[Any]:
    whole, left = divmod(x.shape[dim], size)
    return _slices(x, [size] * whole + ([left] if left else []), dim)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _select_scatter(x: Any, part: Any, dim: int, index: int) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(part)


def _slice_scatter(
    x: Any, part: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(part)


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A sum or mean, accumulated in fp32."""

    def lower(
        result: Result, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        axes = tuple(dim) if dim else None
        wide = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return function(wide, axis=axes, keepdims=keepdim)

    return lower


def _addmm(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = jnp.matmul(a, b)
    product = product if alpha == 1 else alpha * product
    return (bias if beta == 1 else beta * bias) + product


def _expanded(result: Result, x: Any, *_: Any, **__: Any) -> Any:
    return jnp.broadcast_to(x, result.shape)


def _rows(table: Any, ids: Any, *_: Any) -> Any:
    # The loader has checked all ids.
    return table.at[ids].get(mode="promise_in_bounds")


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of every tensor in a list, and of the tensor at its place in another list."""

    def lower(results: Sequence[Result], xs: Sequence[Any], *others: Any, **kwargs: Any) -> Any:
        rows = [
            [other[number] if isinstance(other, list | tuple) else other for other in others]
            for number in range(len(xs))
        ]
        return [
            jnp.asarray(function(x, *row, **kwargs), result.dtype)
            for x, row, result in zip(xs, rows, results, strict=True)
        ]

    return lower


def _filled(value: Any) -> Callable[..., Any]:
    return lambda result, *_, **__: jnp.full(result.shape, value, result.dtype)


def _arange(result: Result, *args: Any, **_: Any) -> Any:
    arange: Any = jnp.arange
    return arange(*args, dtype=result.dtype)


def _sum_with(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x + (y if alpha == 1 else alpha * y)


def _less(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return x - (y if alpha == 1 else alpha * y)


# Each takes what torch says about the result, then the operation's own arguments. `_evaluate` casts
# a single result to its dtype and compares its shape, so an entry may compute in a wider one.
LOWERINGS: dict[Any, Callable[..., Any]] = {
    # arithmetic
    aten.add.Tensor: _arithmetic(_sum_with),
    aten.add.Scalar: _arithmetic(_sum_with),
    aten.sub.Tensor: _arithmetic(_less),
    aten.sub.Scalar: _arithmetic(_less),
    aten.rsub.Scalar: _arithmetic(lambda x, y, alpha=1: y - alpha * x),
    aten.mul.Tensor: _arithmetic(jnp.multiply),
    aten.mul.Scalar: _arithmetic(jnp.multiply),
    aten.div.Tensor: _arithmetic(_divided),
    aten.div.Scalar: _arithmetic(_divided),
    aten.div.Tensor_mode: _arithmetic(_divided),
    aten.div.Scalar_mode: _arithmetic(_divided),
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
    aten.tanh.default: _arithmetic(jnp.tanh),
    aten.sigmoid.default: _arithmetic(jax.nn.sigmoid),
    aten.silu.default: _arithmetic(jax.nn.silu),
    aten.relu.default: _arithmetic(jax.nn.relu),
    aten.gelu.default: lambda result, x, *, approximate="none": jax.nn.gelu(
        x, approximate=approximate == "tanh"
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
    aten.zeros.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.ones.default: _filled(1),
    aten.ones_like.default: _filled(1),
    aten.empty.memory_format: _filled(0),
    aten.empty_like.default: _filled(0),
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
    aten.expand.default: _expanded,
    aten.transpose.int: _plain(jnp.swapaxes),
    aten.t.default: _plain(jnp.transpose),
    aten.permute.default: _plain(jnp.transpose),
    aten.slice.Tensor: _plain(_slice),
    aten.select.int: _plain(lambda x, dim, index: jnp.take(x, index, axis=dim)),
    aten.select_scatter.default: _plain(_select_scatter),
    aten.slice_scatter.default: _plain(_slice_scatter),
    aten.split.Tensor: _plain(_split),
    aten.split_with_sizes.default: _plain(_slices),
    aten.unbind.int: _plain(lambda x, dim=0: list(jnp.moveaxis(x, dim, 0))),
    aten.cat.default: _plain(lambda xs, dim=0: jnp.concatenate(xs, axis=dim)),
    aten.stack.default: _plain(lambda xs, dim=0: jnp.stack(xs, axis=dim)),
    aten.tril.default: _plain(lambda x, diagonal=0: jnp.tril(x, diagonal)),
    # looking up
    aten.embedding.default: _plain(_rows),
    aten.index.Tensor: _plain(
        lambda x, where: x[tuple(slice(None) if one is None else one for one in where)]
    ),
    # sums and products
    aten.mean.dim: _reduced(jnp.mean),
    aten.mean.default: _reduced(jnp.mean),
    aten.sum.default: _reduced(jnp.sum),
    aten.sum.dim_IntList: _reduced(jnp.sum),
    aten.linalg_vector_norm.default: _plain(_norm),
    aten.mm.default: _arithmetic(jnp.matmul),
    aten.bmm.default: _arithmetic(jnp.matmul),
    aten.addmm.default: _arithmetic(_addmm),
    aten.baddbmm.default: _arithmetic(_addmm),
    aten.native_layer_norm.default: _layer_norm,
    # lists
    aten._foreach_add.Scalar: _each(_sum_with),
    aten._foreach_add.List: _each(_sum_with),
    aten._foreach_sub.List: _each(_less),
    aten._foreach_mul.Scalar: _each(jnp.multiply),
    aten._foreach_div.Tensor: _each(jnp.divide),
    aten._foreach_norm.Scalar: _each(_norm),
}
