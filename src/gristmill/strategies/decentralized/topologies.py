"""Topologies: which workers exchange weights with which, round after round.

A round divides all workers into groups, and the workers of a group take its mean; a worker on its
own keeps its weights. So every round preserves the mean over all workers, and its mixing matrix is
symmetric.

    name                   workers N, nodes M           rounds of a period
    complete               any                          1: everybody
    ring                   N even                       2: (0 1)(2 3)…, then (1 2)(3 4)…(N-1 0)
    exp                    N a power of two             log2 N: i with i xor 1, 2, 4, …
    alternating-exp-ring   M >= 2, a power of two       2 log2 M: nodes j and j xor 1, 2, 4, …, each
                                                        pair once inside nodes and once across; in
                                                        any round about half of the pairs go across
    random                 any                          none: a new matching in every round
    hierarchical           any number of equal nodes    inside nodes, then worker p of a node with
                                                        worker p of another, in turns; nodes are
                                                        matched as in exp if M is a power of two,
                                                        else around a ring

The sizes that a topology supports are in `config/parallel.py`, so that a run file is refused early.
Workers are numbered node by node. Everything is a pure function of its arguments, so all workers
compute the same groups without communication.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import NamedTuple

from gristmill.config.parallel import is_power_of_two, topology_fits

Members = tuple[int, ...]
"""Workers of a group, in order."""


class Cluster(NamedTuple):
    """The inputs of the groups of a round, apart from its number."""

    workers: int
    per_node: int
    seed: int = 0

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node

    def node(self, number: int) -> Members:
        """The workers on a node."""
        return tuple(range(number * self.per_node, (number + 1) * self.per_node))


class Topology(NamedTuple):
    """A topology. Its functions are not called for a single worker."""

    period: Callable[[Cluster], int | None]
    """Rounds until groups repeat; None if they do not."""
    groups: Callable[[Cluster, int], list[Members]]
    """The groups of a round, which is below the period if there is one."""


def groups_of_round(
    topology: str, *, workers: int, per_node: int, round: int, seed: int = 0
) -> tuple[Members, ...]:
    """The groups of a round, which together hold every worker once. The seed is that of random
    topologies."""
    if workers == 1:
        return ((0,),)
    assert topology_fits(topology, workers=workers, per_node=per_node)
    cluster, kind = Cluster(workers, per_node, seed), TOPOLOGIES[topology]
    rounds = kind.period(cluster)
    groups = kind.groups(cluster, round if rounds is None else round % rounds)
    return tuple(sorted(tuple(sorted(members)) for members in groups))


def period(topology: str, *, workers: int, per_node: int) -> int | None:
    """After how many rounds the groups repeat; None if they never do."""
    return 1 if workers == 1 else TOPOLOGIES[topology].period(Cluster(workers, per_node))


def _log2(number: int) -> int:
    return number.bit_length() - 1


def _partners(count: int, bit: int) -> list[Members]:
    """Pairs of numbers that differ in one bit."""
    return [(one, one ^ 1 << bit) for one in range(count) if not one & 1 << bit]


def _around(count: int, slot: int) -> list[Members]:
    """Pairs of neighbours on a ring, starting at a position; with an odd number the first is left
    alone."""
    return [
        ((slot + one) % count, (slot + one + 1) % count) for one in range(count % 2, count - 1, 2)
    ]


def _alternating_exp_ring(cluster: Cluster, slot: int) -> list[Members]:
    bit, second = divmod(slot, 2)
    pairs = _partners(cluster.nodes, bit)
    groups: list[Members] = []
    # Pairs are numbered through all rounds: even ones begin inside, odd ones across nodes.
    for number, (one, other) in enumerate(pairs, start=bit * len(pairs)):
        nodes = cluster.node(one), cluster.node(other)
        across = number % 2 != second
        groups += [nodes[0] + nodes[1]] if across else nodes
    return groups


def _random(cluster: Cluster, round: int) -> list[Members]:
    text = f"gossip {cluster.seed} {round}".encode()
    generator = random.Random(int.from_bytes(hashlib.sha256(text).digest()))
    # Only random() is guaranteed to give the same numbers in every version of Python.
    order = sorted(range(cluster.workers), key=lambda worker: generator.random())
    return [tuple(order[begin : begin + 2]) for begin in range(0, cluster.workers, 2)]


def _node_rounds(nodes: int) -> int:
    """After how many exchanges between nodes the pairs repeat."""
    if is_power_of_two(nodes):
        return _log2(nodes)
    return nodes if nodes % 2 else 2


def _hierarchical(cluster: Cluster, slot: int) -> list[Members]:
    nodes, per_node = cluster.nodes, cluster.per_node
    exchange, across = (slot, True) if per_node == 1 else divmod(slot, 2)
    if nodes == 1 or not across:
        return [cluster.node(number) for number in range(nodes)]
    pairs = (_partners if is_power_of_two(nodes) else _around)(nodes, exchange)
    places = range(per_node)
    groups: list[Members] = [
        (one * per_node + place, other * per_node + place)
        for one, other in pairs
        for place in places
    ]
    busy = {node for pair in pairs for node in pair}
    idle = [node for node in range(nodes) if node not in busy]
    return groups + [(worker,) for node in idle for worker in cluster.node(node)]


def _hierarchical_period(cluster: Cluster) -> int:
    if cluster.nodes == 1:
        return 1
    # A worker alone on its node has no partner inside.
    return _node_rounds(cluster.nodes) * (1 if cluster.per_node == 1 else 2)


TOPOLOGIES: dict[str, Topology] = {
    "complete": Topology(lambda cluster: 1, lambda cluster, slot: [tuple(range(cluster.workers))]),
    "ring": Topology(
        lambda cluster: 1 if cluster.workers == 2 else 2,
        lambda cluster, slot: _around(cluster.workers, slot),
    ),
    "exp": Topology(
        lambda cluster: _log2(cluster.workers),
        lambda cluster, slot: _partners(cluster.workers, slot),
    ),
    "alternating-exp-ring": Topology(
        lambda cluster: 2 * _log2(cluster.nodes), _alternating_exp_ring
    ),
    "random": Topology(lambda cluster: 1 if cluster.workers == 2 else None, _random),
    "hierarchical": Topology(_hierarchical_period, _hierarchical),
}
