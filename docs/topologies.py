"""Drawings and tables of topologies, made from `strategies/decentralized/topologies.py`.

    guides/topologies/NAME.svg   a row of pictures, one for each round of a period
    the tables                   rounds until workers agree, periods and spectral gaps

To write the drawings anew and print the tables: python docs/topologies.py. A test compares the
drawings with what this would write; `hooks.py` puts the tables into pages that ask for them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gristmill.config.parallel import topology_fits
from gristmill.strategies.decentralized.topologies import (
    TOPOLOGIES,
    Members,
    groups_of_round,
    period,
)

FOLDER = Path(__file__).with_name("guides") / "topologies"

WORKERS, PER_NODE = 16, 4
"""What the drawings show."""
MOST_ROUNDS = 4
SIZES = ((4, 4), (8, 4), (12, 4), (16, 4), (32, 8), (64, 8), (96, 8))
"""Workers, and how many of them are on a node, in the tables."""
EXACT = 1e-9
"""What rounding leaves of a distance that is zero."""
AGREED = 0.01
"""What is left of the workers' distance from their mean when they are said to agree."""

CELL, RADIUS, DOT = 214, 78, 9.5
"""Width of a picture, and radii of the circle of workers and of a worker."""
TOP, BOTTOM = 40, 38
SPACING = 19.5
"""Degrees between workers of a node."""

STYLE = """
text { font: 13px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; fill: #3d434e }
.number { font-size: 10px; text-anchor: middle }
.title { font-weight: 600; text-anchor: middle }
.panel { fill: #ffffff }
.node, .hull path { fill: none; stroke-linecap: round }
.node { stroke: #e6e9ee; stroke-width: 34 }
.worker { fill: #ffffff; stroke-width: 2 }
.inside { stroke: #1d8a7c }
.across { stroke: #d1572f }
.alone { stroke: #a4abb7 }
.link { fill: none; stroke-width: 3; stroke-linecap: round }
.hull { stroke-width: 28; opacity: .42 }
.hull .spoke { stroke-width: 12 }
@media (prefers-color-scheme: dark) {
text { fill: #d7dbe2 }
.panel, .worker { fill: #20242c }
.node { stroke: #343a45 }
.inside { stroke: #45bfae }
.across { stroke: #f0855e }
.alone { stroke: #6b7382 }
}
"""


# ------------------------------------------------------------------ drawings


def drawing(topology: str) -> str:
    """The rounds of a topology's period, or its first rounds, side by side."""
    rounds = period(topology, workers=WORKERS, per_node=PER_NODE)
    shown = min(rounds or MOST_ROUNDS, MOST_ROUNDS)
    width, height = CELL * max(shown, 2), TOP + 2 * RADIUS + 56 + BOTTOM
    parts = [_nodes_and_groups(topology, number) for number in range(shown)]
    # A single picture stands in the middle.
    left = (width - CELL * shown) / 2
    pictures = [
        f'<g transform="translate({_n(left + CELL * (number + 0.5))} {TOP + RADIUS + 24})">\n'
        f'<text class="title" y="{-RADIUS - 36}">round {number}</text>\n{part}\n</g>'
        for number, part in enumerate(parts)
    ]
    after = "a new matching in every round" if rounds is None else f"{rounds} rounds, then again"
    after = "every round" if rounds == 1 else after
    title = f"{topology}: {WORKERS} workers on {WORKERS // PER_NODE} nodes, {after}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">\n<title>{title}</title>\n'
        f'<style>{STYLE}</style>\n<rect class="panel" width="{width}" height="{height}" rx="8"/>\n'
        + "\n".join([*pictures, _legend(width, height)])
        + "\n</svg>\n"
    )


def _nodes_and_groups(topology: str, number: int) -> str:
    groups = groups_of_round(topology, workers=WORKERS, per_node=PER_NODE, round=number)
    drawn = [f'<path class="node" d="{_arc(node)}"/>' for node in range(WORKERS // PER_NODE)]
    # Large groups lie below links, and workers above everything.
    for group in sorted(groups, key=lambda group: -len(group)):
        drawn += _joined(group)
    for group in groups:
        drawn += [_worker(member, _kind(group)) for member in group]
    return "\n".join(drawn)


def _place(worker: float) -> tuple[float, float]:
    """Where a worker stands: clockwise, node 0 in the upper right quarter."""
    node, place = divmod(worker, PER_NODE)
    middle = 360 * (node + 0.5) * PER_NODE / WORKERS
    angle = math.radians(middle + SPACING * (place - (PER_NODE - 1) / 2))
    return RADIUS * math.sin(angle), -RADIUS * math.cos(angle)


def _kind(group: Members) -> str:
    if len(group) == 1:
        return "alone"
    return "across" if len({one // PER_NODE for one in group}) > 1 else "inside"


def _arc(node: int) -> str:
    first, last = node * PER_NODE, (node + 1) * PER_NODE - 1
    return f"M{_point(*_place(first))}A{RADIUS} {RADIUS} 0 0 1 {_point(*_place(last))}"


def _joined(group: Members) -> list[str]:
    """What joins the members: a link of two, else a band along their nodes, with spokes between
    these."""
    if len(group) == 1:
        return []
    if len(group) == 2:
        return [f'<path class="link {_kind(group)}" d="{_link(*group)}"/>']
    nodes = sorted({member // PER_NODE for member in group})
    middles = [node * PER_NODE + (PER_NODE - 1) / 2 for node in nodes]
    bands = [f'<path d="{_arc(node)}"/>' for node in nodes]
    if len(nodes) == 2:
        bands.append(f'<path class="spoke" d="{_link(*middles)}"/>')
    elif len(nodes) > 2:
        ends = [_point(*_place(middle)) for middle in middles]
        bands += [f'<path class="spoke" d="M0 0L{end}"/>' for end in ends]
    return [f'<g class="hull {_kind(group)}">{"".join(bands)}</g>']


def _link(one: float, other: float) -> str:
    """A curve that bends inwards, around the workers between."""
    (x1, y1), (x2, y2) = _place(one), _place(other)
    bend = 0.62 if min((other - one) % WORKERS, (one - other) % WORKERS) == 1 else 0.4
    middle = _point(bend * (x1 + x2) / 2, bend * (y1 + y2) / 2)
    return f"M{_point(x1, y1)}Q{middle} {_point(x2, y2)}"


def _point(x: float, y: float) -> str:
    return f"{_n(x)} {_n(y)}"


def _worker(worker: int, kind: str) -> str:
    x, y = _place(worker)
    return (
        f'<circle class="worker {kind}" cx="{_n(x)}" cy="{_n(y)}" r="{DOT}"/>'
        f'<text class="number" x="{_n(x)}" y="{_n(y + 3.6)}">{worker}</text>'
    )


def _legend(width: int, height: int) -> str:
    y, drawn = height - 22, []
    entries = {"node": "a node", "link inside": "inside a node", "link across": "across nodes"}
    for number, (kind, text) in enumerate(entries.items()):
        x = width / 2 - 180 + (0, 98, 240)[number]
        thick = ' style="stroke-width: 14"' if kind == "node" else ""
        line = f"M{_n(x)} {y}h20"
        drawn.append(f'<path class="{kind}" d="{line}"{thick}/>')
        drawn.append(f'<text x="{_n(x + 32)}" y="{y + 4.5}">{text}</text>')
    return "\n".join(drawn)


def _n(number: float) -> str:
    return f"{number:.1f}".replace("-0.0", "0.0").removesuffix(".0")


# ------------------------------------------------------------------ tables


def topology_tables() -> str:
    """Rounds until workers agree, then periods and spectral gaps."""
    return "\n".join(
        [
            "Rounds after which at most a hundredth is left of the distance between the workers' "
            "weights and their mean, if nobody trains meanwhile:",
            "",
            *_table(lambda *sizes: str(rounds_to_agree(*sizes))),
            "",
            "Rounds of a period, and its spectral gap: one minus the second largest singular value "
            "of a period's mixing matrix. With a gap of 1 all workers are equal after a period. "
            "`random` has no period; its gap is that of one round, from the mean square over all "
            "matchings.",
            "",
            *_table(_period_and_gap),
            "",
        ]
    )


def mixing_matrix(groups: Sequence[Members], workers: int) -> np.ndarray:
    """What worker i takes from worker j in a round: row i, column j."""
    matrix = np.zeros((workers, workers))
    for group in groups:
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


def contraction(topology: str, *, workers: int, per_node: int) -> float:
    """The factor by which a period shrinks the workers' distance from their mean, in the worst
    case: the second largest singular value of the product of its matrices. 0 is exact consensus.

    For random topologies the root of the mean square over all matchings, for one round: the same
    for every starting point."""
    rounds = period(topology, workers=workers, per_node=per_node)
    if rounds is None:
        # A matching's matrix W is a projection, so E|Wx|^2 = x E[W] x. E[W] has equal entries on
        # the diagonal and equal ones off it; their difference is what remains of a deviation.
        return math.sqrt(0.5 if workers % 2 else (workers - 2) / (2 * (workers - 1)))
    product = np.eye(workers) - 1 / workers
    for number in range(rounds):
        groups = groups_of_round(topology, workers=workers, per_node=per_node, round=number)
        product = mixing_matrix(groups, workers) @ product
    left = float(np.linalg.norm(product, ord=2))
    return left if left > EXACT else 0.0


def rounds_to_agree(topology: str, workers: int, per_node: int) -> int:
    """After how many rounds workers agree, in whole periods; of random ones in the mean square."""
    rounds = period(topology, workers=workers, per_node=per_node)
    if rounds is None:
        left = contraction(topology, workers=workers, per_node=per_node)
        return math.ceil(math.log(AGREED) / math.log(left))
    product = np.eye(workers) - 1 / workers
    for number in range(rounds):
        groups = groups_of_round(topology, workers=workers, per_node=per_node, round=number)
        product = mixing_matrix(groups, workers) @ product

    def agreed(periods: int) -> bool:
        return bool(np.linalg.norm(np.linalg.matrix_power(product, periods), ord=2) <= AGREED)

    most = next(2**power for power in itertools.count() if agreed(2**power))
    return rounds * (1 + bisect.bisect_left(range(1, most), True, key=agreed))


def _period_and_gap(topology: str, workers: int, per_node: int) -> str:
    rounds = period(topology, workers=workers, per_node=per_node)
    gap = 1 - contraction(topology, workers=workers, per_node=per_node)
    return f"{'no period' if rounds is None else rounds}, gap {gap:.2g}"


def _table(cell: Callable[[str, int, int], str]) -> list[str]:
    heads = [f"{workers} on {workers // per_node}" for workers, per_node in SIZES]
    rows = [f"| workers on nodes | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for topology in TOPOLOGIES:
        cells = [
            cell(topology, workers, per_node)
            if topology_fits(topology, workers=workers, per_node=per_node)
            else "no"
            for workers, per_node in SIZES
        ]
        rows.append(f"| `{topology}` | {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Write the drawings, and print the tables."""
    FOLDER.mkdir(exist_ok=True)
    for topology in TOPOLOGIES:
        (FOLDER / f"{topology}.svg").write_text(drawing(topology), encoding="utf-8")
    sys.stdout.write(topology_tables())


if __name__ == "__main__":
    main()
