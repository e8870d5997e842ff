"""Graphs of torch operations (`graph.py`) as functions of JAX arrays.

Each operation is looked up in `operations.py`, and every result is compared with the shape that
torch inferred. A missing operation is an error when a step is built, never a wrong number. Random
numbers depend on a key, the number of the block and that of the node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from gristmill.base.errors import UserError
from gristmill.models.loss import unpacked
from gristmill.strategies.xla.attention import AttentionSharding, attend
from gristmill.strategies.xla.blocks import EDGE, TracedBlock, split_graph
from gristmill.strategies.xla.graph import Traced, attention
from gristmill.strategies.xla.loss import linear_cross_entropy
from gristmill.strategies.xla.operations import DTYPES, LOWERINGS, ResultSpec, aten


@dataclass(frozen=True)
class Context:
    """The options of a graph, apart from its inputs."""

    key: jax.Array | None = None
    """The key of random numbers; None if there are none."""
    shards: int = 1
    """Shards of the batch dimension, which is always the first."""
    tp: int = 1
    """Shards of each layer."""
    attention: str = "auto"
    """runtime.xla_attention."""
    attention_sharding: AttentionSharding | None = None
    """How attention is sharded over devices."""
    scan: bool = False
    """Whether a run of blocks with one signature becomes a loop."""
    recompute: Callable[[int], Any] | None = None
    """The results of a block to save, by its number, as a policy of `jax.checkpoint`; None saves
    all."""


class Lowered:
    """A traced function of trees of JAX arrays."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.nodes = list(traced.graph.nodes)
        self.numbers = {node: number for number, node in enumerate(self.nodes)}
        self.parts = split_graph(self.nodes)
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
        functions = _BlockFunctions(context)
        for part in self.parts:
            if isinstance(part, tuple):
                for blocks in functions.loops(part):
                    values[blocks[-1].result] = functions.run(blocks, values)
            elif part.op == "placeholder":
                values[part] = next(inputs)
            elif part.op == "output":
                (found,) = part.args
                return jax.tree.unflatten(self.traced.outputs, _known(values, found))
            else:
                values[part] = _evaluate(part, self.numbers[part], values, context)
        raise AssertionError("a graph ends with its output")

    def casts(self) -> list[Any]:
        """For each input, the only dtype in which it is used, if that is not its own."""
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


class _BlockFunctions:
    """One function for all blocks of a signature, which JAX traces once."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.known: dict[Any, Callable[..., Any]] = {}

    def loops(self, run: Sequence[TracedBlock]) -> list[tuple[TracedBlock, ...]]:
        """A run of blocks in groups that become one loop each: blocks with the same recomputation,
        or single ones."""
        if not self.context.scan:
            return [(block,) for block in run]
        return [tuple(blocks) for _, blocks in groupby(run, key=self._policy)]

    def run(self, blocks: Sequence[TracedBlock], values: Mapping[Node, Any]) -> Any:
        """The residual stream after consecutive blocks of one signature."""
        first, *others = blocks
        key, stream = self.context.key, values[first.inputs[0]]
        function = self._function(first)
        rows = [[values[node] for node in block.inputs[1:]] for block in blocks]
        if not others:
            return function(_folded(key, first.number), stream, *rows[0])
        columns = list(zip(*(block.inputs[1:] for block in blocks), strict=True))
        own = [at for at, column in enumerate(columns) if len(set(column)) > 1]
        stacked = [jnp.stack([row[at] for row in rows]) for at in own]

        def step(stream: Any, piece: Any) -> Any:
            number, given = piece
            inputs = list(rows[0])
            for at, value in zip(own, given, strict=True):
                inputs[at] = value
            return function(_folded(key, number), stream, *inputs), None

        numbers = jnp.array([block.number for block in blocks])
        return jax.lax.scan(step, stream, (numbers, stacked))[0]

    def _policy(self, block: TracedBlock) -> Any:
        return self.context.recompute(block.number) if self.context.recompute else None

    def _function(self, block: TracedBlock) -> Callable[..., Any]:
        """The compiled function of a block. Random numbers depend on a key and the position of a
        node in its block, so that recomputation draws the same."""
        policy = self._policy(block)
        found = self.known.get((block.signature, policy))
        if found is not None:
            return found

        def run(key: Any, *inputs: Any) -> Any:
            context = replace(self.context, key=key)
            local = dict(zip(block.inputs, inputs, strict=True))
            for number, node in enumerate(block.nodes):
                local[node] = _evaluate(node, number, local, context)
            return local[block.result]

        if policy is not None:
            # In a loop nothing can be computed once for both passes.
            options: Any = {} if policy is ALL else {"policy": policy}
            run = jax.checkpoint(run, prevent_cse=not self.context.scan, **options)
        self.known[block.signature, policy] = jax.jit(run)
        return self.known[block.signature, policy]


ALL = object()
"""The policy that saves only the inputs of a block."""
_ATTENTION = attention._opoverload
_LOSS = torch.ops.gristmill.linear_cross_entropy.default
_RANDOM = {aten.bernoulli.p, aten.native_dropout.default}
_SPECIAL = {EDGE, _ATTENTION, _LOSS, *_RANDOM, operator.getitem}


def _known(values: Mapping[Node, Any], tree: Any) -> Any:
    return tree_map_only(Node, lambda node: values[node], tree)


def _evaluate(node: Node, number: int, values: Mapping[Node, Any], context: Context) -> Any:
    assert node.op == "call_function", f"{node.op} {node.target} is no operation"
    args, kwargs = _known(values, node.args), _known(values, node.kwargs)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target is EDGE:
        return args[0]
    if node.target is _LOSS:
        hidden, head, bias, *rest = args
        tokens, options, terms = unpacked(rest)
        inputs: Any = (hidden, head, bias, tokens.targets_N, terms.loss_weights_BT)
        total = linear_cross_entropy(
            *inputs,
            vocab=options.vocab,
            cap=terms.cap,
            shards=context.shards,
            whole_head=context.tp == 1,
        )
        return total, None, None, None
    if node.target is _ATTENTION:
        key = _key(context, number) if args[4] else None
        sharding = context.attention_sharding
        return attend(*args, key=key, implementation=context.attention, sharding=sharding)
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
        result = ResultSpec(found)
        value = LOWERINGS[node.target](result, *args, **kwargs)
        value = jnp.asarray(value, result.dtype)
        assert value.shape == result.shape, f"{node.target}: {value.shape}, not {result.shape}"
        return value
    results = [ResultSpec(value) for value in found]
    return LOWERINGS[node.target](results, *args, **kwargs)


def _key(context: Context, number: int) -> jax.Array:
    assert context.key is not None, "a graph with random numbers is given a key"
    return jax.random.fold_in(context.key, number)


def _folded(key: jax.Array | None, block: Any) -> jax.Array | None:
    """The key of a block."""
    # Node 0 is an input, which draws no random numbers.
    return None if key is None else jax.random.fold_in(jax.random.fold_in(key, 0), block)
