"""Finds the blocks of a model in a traced graph, and which of them compute the same function.

    x -> edge -> block 0 -> edge -> edge -> block 1 -> edge -> ...

Blocks whose operations have the same signature are one function of their inputs: the residual
stream, their weights, and shared inputs such as masks. Consecutive blocks of one signature form a
run, which may become a loop. Nodes between two blocks of a run, such as an embedding lookup that
only the second block reads, move before the run.

A block has one output, the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.fx import Node
from torch.utils._pytree import tree_map_only

from gristmill.strategies.xla.graph import block_edge

EDGE = block_edge._opoverload


class TracedBlock(NamedTuple):
    """The nodes of a block, from one edge to the other."""

    number: int
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    """The nodes outside of the block that it reads; the residual stream comes first."""
    signature: str
    """Equal for blocks that compute the same function."""

    @property
    def result(self) -> Node:
        return self.nodes[-1]


GraphPart = Node | tuple[TracedBlock, ...]
"""A node outside of blocks, or a run of blocks of one signature."""


def split_graph(nodes: Sequence[Node]) -> list[GraphPart]:
    """The parts of a graph, in an order in which they can be computed."""
    parts: list[GraphPart] = []
    run: list[TracedBlock] = []
    between: list[Node] = []
    for item in _items(nodes):
        if isinstance(item, Node):
            (between if run else parts).append(item)
        elif run and _continues(run, between, item):
            parts.extend(between)
            between.clear()
            run.append(item)
        else:
            parts.extend([tuple(run), *between] if run else [])
            run, between = [item], []
    return [*parts, tuple(run), *between] if run else parts


def _continues(run: Sequence[TracedBlock], between: Sequence[Node], block: TracedBlock) -> bool:
    """Whether a block continues a run, and the nodes in between do not need the run's results."""
    results = {member.result for member in run}
    movable = results.isdisjoint(source for node in between for source in node.all_input_nodes)
    return movable and block.signature == run[-1].signature and block.inputs[0] is run[-1].result


def _items(nodes: Sequence[Node]) -> Iterable[Node | TracedBlock]:
    rest = iter(nodes)
    for node in rest:
        if node.target is not EDGE:
            yield node
            continue
        block = [node]
        for inner in rest:
            block.append(inner)
            if inner.target is EDGE:
                break
        yield _block(block)


def _block(nodes: Sequence[Node]) -> TracedBlock:
    number = nodes[0].args[1]
    assert isinstance(number, int)
    inner_names = {node: f"node {index}" for index, node in enumerate(nodes)}
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    inputs = [source for source in sources if source not in inner_names]
    input_names = {
        node: f"input {index} {_shape_and_dtype(node)}" for index, node in enumerate(inputs)
    }
    names = {**inner_names, **input_names}
    signature = [
        (
            str(node.target),
            # The second argument of an edge is the number of its block.
            tree_map_only(Node, names.get, node.args[:1] if node.target is EDGE else node.args),
            tree_map_only(Node, names.get, node.kwargs),
            _shape_and_dtype(node),
        )
        for node in nodes
    ]
    return TracedBlock(number, tuple(nodes), tuple(inputs), repr(signature))


def _shape_and_dtype(node: Node) -> str:
    """Shapes and dtypes of the results of a node."""
    value = node.meta["val"]
    tensors = value if isinstance(value, list | tuple) else [value]
    return repr([(tuple(x.shape), x.dtype) for x in tensors if x is not None])
