"""Graphs of torch operations (`graph.py`) as functions of JAX arrays.

Each operation is looked up in `operations.py`, and every result is compared with the shape that
torch found. An operation that is missing there is an error when a step is built, never a wrong
number. Random numbers come from a key and the number of their node.
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
from gristmill.strategies.xla.attention import Places, attend
from gristmill.strategies.xla.graph import Traced, attention, block_edge
from gristmill.strategies.xla.loss import linear_cross_entropy
from gristmill.strategies.xla.operations import DTYPES, LOWERINGS, Result, aten


@dataclass(frozen=True)
class Context:
    """What a graph needs to know beside its inputs."""

    key: jax.Array | None = None
    """Where random numbers come from; None if there are none."""
    shards: int = 1
    """Shards of the batch, which is the first dimension of whatever has one."""
    tp: int = 1
    """Shards of each layer."""
    attention: str = "auto"
    """runtime.xla_attention."""
    places: Places | None = None
    """How attention is divided over devices."""
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

    def casts(self) -> list[Any]:
        """For each input, the dtype in which alone it is used, if that is not its own."""
        found = []
        for node in self.nodes:
            if node.op != "placeholder":
                break
            targets = {
                user.meta["val"].dtype if user.target is aten._to_copy.default else None
                for user in node.users
            }
            only = targets.pop() if len(targets) == 1 else None
            found.append(None if only is None else DTYPES[only])
        return found

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
        key = _key(context, number) if args[4] else None
        return attend(*args, key=key, how=context.attention, places=context.places)
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
