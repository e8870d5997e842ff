"""The blocks of a model within a graph: which of them compute the same.

    x -> edge -> block 0 -> edge -> edge -> block 1 -> edge -> ...

Blocks whose operations have the same form are one function of their inputs: the residual stream,
weights, and whatever all blocks share, such as masks. Where such blocks follow one another they are
a run, which may be one loop; what lies between two of them, such as rows of a table that only the
second reads, moves before the run.

Between the edges nothing but the residual stream leaves a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch.fx import Node
from torch.utils._pytree import tree_map_only

from gristmill.strategies.xla.graph import block_edge

EDGE = block_edge._opoverload


class Block(NamedTuple):
    """From one edge to the other."""

    number: int
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    """What it reads from outside; the residual stream is the first."""
    form: str
    """Equal for blocks that compute the same."""

    @property
    def result(self) -> Node:
        return self.nodes[-1]


Part = Node | tuple[Block, ...]
"""A node outside of blocks, or a run of blocks of one form."""


def parts_of(nodes: Sequence[Node]) -> list[Part]:
    """A whole graph, in an order in which it can be computed."""
    parts: list[Part] = []
    run: list[Block] = []
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


def _continues(run: Sequence[Block], between: Sequence[Node], block: Block) -> bool:
    """Whether a block belongs to a run, and what lies between does not need the run's results."""
    results = {one.result for one in run}
    free = results.isdisjoint(source for node in between for source in node.all_input_nodes)
    return free and block.form == run[-1].form and block.inputs[0] is run[-1].result


def _items(nodes: Sequence[Node]) -> Iterable[Node | Block]:
    rest = iter(nodes)
    for node in rest:
        if node.target is not EDGE:
            yield node
            continue
        inside = [node]
        for other in rest:
            inside.append(other)
            if other.target is EDGE:
                break
        yield _block(inside)


def _block(nodes: Sequence[Node]) -> Block:
    number = nodes[0].args[1]
    assert isinstance(number, int)
    places = {node: f"node {at}" for at, node in enumerate(nodes)}
    inputs = [
        source
        for source in dict.fromkeys(one for node in nodes for one in node.all_input_nodes)
        if source not in places
    ]
    outside = {node: f"input {at} {_value(node)}" for at, node in enumerate(inputs)}
    names = {**places, **outside}
    form = [
        (
            str(node.target),
            # An edge has the number of its block.
            tree_map_only(Node, names.get, node.args[:1] if node.target is EDGE else node.args),
            tree_map_only(Node, names.get, node.kwargs),
            _value(node),
        )
        for node in nodes
    ]
    return Block(number, tuple(nodes), tuple(inputs), repr(form))


def _value(node: Node) -> str:
    """Shape and dtype of a result."""
    value = node.meta["val"]
    several = value if isinstance(value, list | tuple) else [value]
    return repr([(tuple(one.shape), one.dtype) for one in several if one is not None])
