"""Which processes compute what for K-FAC, on KAISA's grid (arXiv 2107.01739).

W processes form a grid of m rows and W / m columns, where m / W is the fraction of the processes
that precondition the gradient of a layer. Each layer belongs to one column:

    one process of the column   keeps the layer's factors and inverts them
    all m of them               keep the inverses and precondition the layer's gradient
    all others                  get the preconditioned gradient from the one in their row

With m = 1 nothing is kept twice; with m = W no gradient is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerWork:
    """The processes that work on one layer."""

    inverts: int
    preconditions: tuple[int, ...]
    """By row."""


def rows_of_grid(fraction: float, processes: int) -> int:
    """The number of rows: the divisor of the number of processes nearest to the fraction of it."""
    divisors = [n for n in range(1, processes + 1) if processes % n == 0]
    return min(divisors, key=lambda n: (abs(n - fraction * processes), n))


def assign_layers(
    costs: Mapping[str, float], ranks: Sequence[int], *, fraction: float
) -> dict[str, LayerWork]:
    """Divide layers, with the cost of inverting each, evenly over columns and their processes."""
    rows = rows_of_grid(fraction, len(ranks))
    width = len(ranks) // rows
    columns = [tuple(ranks[column::width]) for column in range(width)]
    load = dict.fromkeys(ranks, 0.0)
    work = {}
    for name, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        column = min(columns, key=lambda column: (sum(load[rank] for rank in column), column))
        least = min(column, key=lambda rank: (load[rank], rank))
        load[least] += cost
        work[name] = LayerWork(least, column)
    return work
