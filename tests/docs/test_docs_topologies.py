"""Drawings of topologies are those that the program's own groups give, and so are the tables."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from gristmill.strategies.decentralized.topologies import TOPOLOGIES, groups_of_round, period

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("docs_topologies", DOCS / "topologies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAWINGS = load()


def mixed(groups: Any, values: list[float]) -> list[float]:
    """One number per worker after a round of means."""
    means = {
        worker: np.mean([values[one] for one in group]) for group in groups for worker in group
    }
    return [float(means[worker]) for worker in range(len(values))]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_drawings_are_the_current_ones(topology: str) -> None:
    """If not: python docs/topologies.py."""
    kept = (DRAWINGS.FOLDER / f"{topology}.svg").read_text(encoding="utf-8")
    assert kept == DRAWINGS.drawing(topology)
    root = ElementTree.fromstring(kept)
    numbers = [one.text for one in root.iter() if one.get("class") == "number"]
    rounds = len(re.findall(">round [0-9]<", kept))
    assert numbers and sorted(map(int, filter(None, numbers))) == sorted([*range(16)] * rounds)


def test_there_is_no_drawing_of_anything_else() -> None:
    assert {file.stem for file in DRAWINGS.FOLDER.iterdir()} == set(TOPOLOGIES)


@pytest.mark.parametrize(
    ("topology", "workers", "per_node"),
    [("ring", 8, 4), ("hierarchical", 12, 4), ("exp", 16, 4), ("complete", 4, 4)],
)
def test_workers_agree_after_as_many_rounds_as_the_table_says(
    topology: str, workers: int, per_node: int
) -> None:
    """From every start, and not from every start a period earlier."""
    rounds = DRAWINGS.rounds_to_agree(topology, workers, per_node)
    length = DRAWINGS.period(topology, workers=workers, per_node=per_node)
    left = []
    columns = np.eye(workers).tolist()
    for number in range(rounds):
        if number % length == 0:
            left.append(np.linalg.norm(np.array(columns) - 1 / workers, ord=2))
        groups = groups_of_round(topology, workers=workers, per_node=per_node, round=number)
        columns = [mixed(groups, column) for column in columns]
    assert np.linalg.norm(np.array(columns) - 1 / workers, ord=2) <= DRAWINGS.AGREED
    assert min(left) > DRAWINGS.AGREED


def test_tables_have_a_row_for_each_topology() -> None:
    text = DRAWINGS.topology_tables()
    for topology in TOPOLOGIES:
        assert text.count(f"| `{topology}` |") == 2
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


@pytest.mark.parametrize(
    ("topology", "workers", "per_node"),
    [
        ("ring", 4, 1),
        ("ring", 16, 4),
        ("ring", 30, 1),
        ("exp", 16, 1),
        ("hierarchical", 12, 4),
        ("hierarchical", 20, 2),
        ("hierarchical", 7, 1),
        ("alternating-exp-ring", 16, 4),
    ],
)
def test_contraction_is_the_second_singular_value(
    topology: str, workers: int, per_node: int
) -> None:
    columns = np.eye(workers).tolist()
    for number in range(period(topology, workers=workers, per_node=per_node) or 0):
        groups = groups_of_round(topology, workers=workers, per_node=per_node, round=number)
        columns = [mixed(groups, column) for column in columns]
    expected = np.linalg.svd(np.array(columns), compute_uv=False)[1]
    contraction = DRAWINGS.contraction(topology, workers=workers, per_node=per_node)
    assert contraction == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("workers", [3, 4, 9, 16])
def test_contraction_of_random_matchings_is_their_mean(workers: int) -> None:
    squares = []
    start = np.arange(workers) - (workers - 1) / 2
    for number in range(3000):
        groups = groups_of_round("random", workers=workers, per_node=1, round=number)
        squares.append(np.square(mixed(groups, list(start))).sum() / np.square(start).sum())
    contraction = DRAWINGS.contraction("random", workers=workers, per_node=1)
    assert np.sqrt(np.mean(squares)) == pytest.approx(contraction, rel=0.03)
