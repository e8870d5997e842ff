"""Topologies: which workers exchange weights with which, round after round.

A round divides all workers into groups. In a group of k with self weight w, worker i takes

    x_i <- w x_i + (1 - w) / (k - 1) (sum of the others' x)

which is the group's mean for w = 1/k. All topologies here take means; a worker alone keeps what it
has. Every such round keeps the mean over all workers, and its matrix is symmetric.

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

Workers are numbered node by node. Everything is a pure function of its arguments, so all workers
find the same groups without asking each other.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gristmill.base.errors import Problem

Members = tuple[int, ...]
"""Workers of a group, in order."""

CONVERGED = 1e-12
"""Relative change at which a power iteration ends, and the factor below which it is taken for 0."""


class Group(NamedTuple):
    """Workers that average their weights in a round."""

    members: Members
    self_weight: float
    """What a worker's own weights count; the others share the rest equally."""

    @property
    def other_weight(self) -> float:
        """What the weights of each other member count."""
        size = len(self.members)
        if self.is_mean:
            return self.self_weight
        return (1 - self.self_weight) / (size - 1)

    @property
    def is_mean(self) -> bool:
        """Whether all members count the same."""
        return self.self_weight == 1 / len(self.members)


class Cluster(NamedTuple):
    """What the groups of a round depend on, apart from the round."""

    workers: int
    per_node: int
    seed: int = 0

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node

    def node(self, number: int) -> Members:
        """The workers on a node."""
        return tuple(range(number * self.per_node, (number + 1) * self.per_node))


@dataclass(frozen=True)
class Topology:
    """One kind of topology. Its functions are not asked about a single worker."""

    needs: str
    """The sizes that it fits, in words."""
    fits: Callable[[Cluster], bool]
    period: Callable[[Cluster], int | None]
    """Rounds until groups repeat; None if they do not."""
    groups: Callable[[Cluster, int], list[Members]]
    """The groups of a round, which is below the period if there is one."""
    knows_nodes: bool = False


# ------------------------------------------------------------------ asking


def groups_of_round(
    topology: str, *, workers: int, per_node: int, round: int, seed: int = 0
) -> tuple[Group, ...]:
    """The groups of a round, which together hold every worker once. The seed is that of random
    topologies."""
    if workers == 1:
        return (Group((0,), 1.0),)
    cluster, entry = Cluster(workers, per_node, seed), TOPOLOGIES[topology]
    assert entry.fits(cluster), f"{topology} does not fit {cluster}"
    rounds = entry.period(cluster)
    chosen = entry.groups(cluster, round if rounds is None else round % rounds)
    return tuple(Group(members, 1 / len(members)) for members in sorted(map(_ordered, chosen)))


def _ordered(members: Members) -> Members:
    return tuple(sorted(members))


def period(topology: str, *, workers: int, per_node: int) -> int | None:
    """After how many rounds the groups repeat; None if they never do."""
    return 1 if workers == 1 else TOPOLOGIES[topology].period(Cluster(workers, per_node))


def fits(topology: str, *, workers: int, per_node: int) -> bool:
    """Whether a topology is defined for these sizes."""
    return workers == 1 or TOPOLOGIES[topology].fits(Cluster(workers, per_node))


def misfit(topology: str, *, workers: int, per_node: int) -> Problem | None:
    """What is wrong with a topology for these sizes; None if nothing is."""
    if fits(topology, workers=workers, per_node=per_node):
        return None
    entry = TOPOLOGIES[topology]
    sizes = f"{workers} workers"
    if entry.knows_nodes:
        sizes += f" with {per_node} on each node"
    counts = fitting_workers(topology, workers=workers, per_node=per_node)
    others = [name for name in TOPOLOGIES if fits(name, workers=workers, per_node=per_node)]
    return Problem(
        f'"{topology}" needs {entry.needs}, not {sizes}',
        "parallel.gossip.topology",
        f"use {' or '.join(map(str, counts))} workers, or one of {', '.join(others)}",
    )


def fitting_workers(topology: str, *, workers: int, per_node: int) -> list[int]:
    """The numbers of workers next to this one, below and above, that a topology fits."""
    limit = 2 * max(workers, per_node)
    below, above = range(workers - 1, 1, -1), range(workers + 1, limit + 1)
    found = [
        next((n for n in numbers if fits(topology, workers=n, per_node=per_node)), None)
        for numbers in (below, above)
    ]
    return [number for number in found if number is not None]


# ------------------------------------------------------------------ mixing


def mix(groups: Sequence[Group], values: Sequence[float]) -> list[float]:
    """One number per worker after a round."""
    mixed = list(values)
    for group in groups:
        own, other = group.self_weight, group.other_weight
        total = sum(values[member] for member in group.members)
        for member in group.members:
            mixed[member] = other * total + (own - other) * values[member]
    return mixed


def mixing_matrix(groups: Sequence[Group], workers: int) -> list[list[float]]:
    """What worker i takes from worker j in a round: row i, column j."""
    matrix = [[0.0] * workers for _ in range(workers)]
    for group in groups:
        for i in group.members:
            for j in group.members:
                matrix[i][j] = group.self_weight if i == j else group.other_weight
    return matrix


def contraction(topology: str, *, workers: int, per_node: int) -> float:
    """The factor by which a period shrinks the workers' distance from their mean, in the worst
    case: the second largest singular value of the product of its matrices. 0 is exact consensus.

    For random topologies the root of the mean square over all matchings, for one round: the same
    for every starting point.
    """
    rounds = period(topology, workers=workers, per_node=per_node)
    if rounds is None:
        # A matching's matrix W is a projection, so E|Wx|^2 = x E[W] x. E[W] has equal entries on
        # the diagonal and equal ones off it; their difference is what remains of a deviation.
        return math.sqrt(0.5 if workers % 2 else (workers - 2) / (2 * (workers - 1)))
    made = [
        groups_of_round(topology, workers=workers, per_node=per_node, round=number)
        for number in range(rounds)
    ]
    # Matrices are symmetric, so a period's transpose is its rounds backwards.
    there_and_back = [*made, *reversed(made)]
    generator = random.Random(0)
    vector, norm = _unit([generator.random() for _ in range(workers)])
    square = math.inf
    while norm > CONVERGED:
        for groups in there_and_back:
            vector = mix(groups, vector)
        vector, norm = _unit(vector)
        if abs(norm - square) <= CONVERGED * norm:
            return math.sqrt(norm)
        square = norm
    return 0.0


def _unit(vector: list[float]) -> tuple[list[float], float]:
    """A vector's deviation from its mean, made one long, and how long it was."""
    mean = sum(vector) / len(vector)
    deviation = [value - mean for value in vector]
    norm = math.hypot(*deviation)
    return [value / (norm or 1.0) for value in deviation], norm


# ------------------------------------------------------------------ the topologies


def _power_of_two(number: int) -> bool:
    return number >= 1 and number & (number - 1) == 0


def _log2(number: int) -> int:
    return number.bit_length() - 1


def _equal_nodes(cluster: Cluster) -> bool:
    return cluster.workers % cluster.per_node == 0


def _partners(count: int, bit: int) -> list[tuple[int, int]]:
    """Pairs of numbers that differ in one bit."""
    return [(one, one ^ 1 << bit) for one in range(count) if not one & 1 << bit]


def _around(count: int, slot: int) -> list[tuple[int, int]]:
    """Neighbours on a ring, beginning at a place; of an odd number the first is left alone."""
    return [
        ((slot + one) % count, (slot + one + 1) % count) for one in range(count % 2, count - 1, 2)
    ]


def _complete(cluster: Cluster, slot: int) -> list[Members]:
    return [tuple(range(cluster.workers))]


def _ring(cluster: Cluster, slot: int) -> list[Members]:
    return list(_around(cluster.workers, slot))


def _exp(cluster: Cluster, slot: int) -> list[Members]:
    return list(_partners(cluster.workers, slot))


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
    # Of all methods, only random() is promised to be the same in every version of Python.
    order = sorted(range(cluster.workers), key=lambda worker: generator.random())
    return [tuple(order[begin : begin + 2]) for begin in range(0, cluster.workers, 2)]


def _node_rounds(nodes: int) -> int:
    """After how many exchanges between nodes the same pairs come again."""
    if _power_of_two(nodes):
        return _log2(nodes)
    return nodes if nodes % 2 else 2


def _hierarchical(cluster: Cluster, slot: int) -> list[Members]:
    nodes, per_node = cluster.nodes, cluster.per_node
    exchange, across = (slot, True) if per_node == 1 else divmod(slot, 2)
    if nodes == 1 or not across:
        return [cluster.node(number) for number in range(nodes)]
    pairs = (_partners if _power_of_two(nodes) else _around)(nodes, exchange)
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
    # A worker alone on its node has nobody to meet inside.
    return _node_rounds(cluster.nodes) * (1 if cluster.per_node == 1 else 2)


TOPOLOGIES: dict[str, Topology] = {
    "complete": Topology(
        needs="any number of workers",
        fits=lambda cluster: True,
        period=lambda cluster: 1,
        groups=_complete,
    ),
    "ring": Topology(
        needs="an even number of workers",
        fits=lambda cluster: cluster.workers % 2 == 0,
        period=lambda cluster: 1 if cluster.workers == 2 else 2,
        groups=_ring,
    ),
    "exp": Topology(
        needs="a number of workers that is a power of two",
        fits=lambda cluster: _power_of_two(cluster.workers),
        period=lambda cluster: _log2(cluster.workers),
        groups=_exp,
    ),
    "alternating-exp-ring": Topology(
        needs="nodes with equally many workers, and 2, 4, 8, … of them",
        fits=lambda cluster: (
            _equal_nodes(cluster) and cluster.nodes > 1 and _power_of_two(cluster.nodes)
        ),
        period=lambda cluster: 2 * _log2(cluster.nodes),
        groups=_alternating_exp_ring,
        knows_nodes=True,
    ),
    "random": Topology(
        needs="any number of workers",
        fits=lambda cluster: True,
        period=lambda cluster: 1 if cluster.workers == 2 else None,
        groups=_random,
    ),
    "hierarchical": Topology(
        needs="nodes with equally many workers",
        fits=_equal_nodes,
        period=_hierarchical_period,
        groups=_hierarchical,
        knows_nodes=True,
    ),
}
"""Every topology by its name in a run file."""
