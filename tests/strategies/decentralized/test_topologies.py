"""Topologies: every round keeps the mean, a period brings workers together, sizes are checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest

from gristmill.config.parallel import TOPOLOGY_SIZES, topology_fits, topology_misfit
from gristmill.config.resolve import divisors
from gristmill.strategies.decentralized.topologies import (
    TOPOLOGIES,
    Members,
    groups_of_round,
    period,
)

MOST = 64
SIZES = [(workers, per_node) for workers in range(1, MOST + 1) for per_node in divisors(workers)]
ROUNDS_OF_RANDOM = 4


def sizes_of(topology: str) -> Iterator[tuple[int, int]]:
    for workers, per_node in SIZES:
        if not TOPOLOGY_SIZES[topology].knows_nodes and per_node > 1:
            continue
        if topology_fits(topology, workers=workers, per_node=per_node):
            yield workers, per_node


def all_rounds(topology: str, workers: int, per_node: int) -> list[tuple[Members, ...]]:
    """The rounds of a period; of a random topology, the first few."""
    count = period(topology, workers=workers, per_node=per_node) or ROUNDS_OF_RANDOM
    return [
        groups_of_round(topology, workers=workers, per_node=per_node, round=number)
        for number in range(count)
    ]


def members(topology: str, *, workers: int, per_node: int, round: int) -> list[list[int]]:
    made = groups_of_round(topology, workers=workers, per_node=per_node, round=round)
    return [list(group) for group in made]


def matrix_of(groups: tuple[Members, ...], workers: int) -> np.ndarray:
    """What worker i takes from worker j in a round: row i, column j."""
    matrix = np.zeros((workers, workers))
    for group in groups:
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


def exact(groups: tuple[Members, ...], values: list[Fraction]) -> list[Fraction]:
    """A round of group means in exact arithmetic."""
    mixed = list(values)
    for group in groups:
        mean = sum((values[one] for one in group), Fraction(0)) / len(group)
        for one in group:
            mixed[one] = mean
    return mixed


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_round_holds_each_worker_once(topology: str) -> None:
    for workers, per_node in sizes_of(topology):
        for groups in all_rounds(topology, workers, per_node):
            held = [worker for group in groups for worker in group]
            assert sorted(held) == list(range(workers)), (workers, per_node)
            assert all(list(group) == sorted(group) for group in groups)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_mean_is_kept_exactly(topology: str) -> None:
    for workers, per_node in sizes_of(topology):
        values = [Fraction(worker * worker) for worker in range(workers)]
        mean = sum(values, Fraction(0))
        for groups in all_rounds(topology, workers, per_node):
            values = exact(groups, values)
            assert sum(values, Fraction(0)) == mean, (workers, per_node)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_matrices_are_doubly_stochastic_and_a_period_contracts(topology: str) -> None:
    for workers, per_node in sizes_of(topology):
        matrices = [
            matrix_of(groups, workers) for groups in all_rounds(topology, workers, per_node)
        ]
        for matrix in matrices:
            assert (matrix >= 0).all()
            np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-12)
            np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-12)
        if topology == "random" and workers > 2:
            continue
        product = reduce(lambda done, matrix: matrix @ done, matrices)
        rest = np.linalg.norm(product - 1 / workers, ord=2)
        assert rest < 1 - 1e-4, (workers, per_node)
        assert rest < 1e-12 or not exact_after_a_period(topology, workers // per_node)


def exact_after_a_period(topology: str, nodes: int) -> bool:
    if topology == "hierarchical":
        return nodes & (nodes - 1) == 0
    return topology in ("complete", "exp", "alternating-exp-ring")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_period_is_the_first_repetition(topology: str) -> None:
    for workers, per_node in sizes_of(topology):
        count = period(topology, workers=workers, per_node=per_node)
        if count is None:
            continue
        made = [
            groups_of_round(topology, workers=workers, per_node=per_node, round=number)
            for number in range(2 * count)
        ]
        assert made[:count] == made[count:], (workers, per_node)
        repeats = [n for n in range(1, count) if made[n:] == made[:-n]]
        assert repeats == [], (workers, per_node)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_misfits_name_sizes_that_fit(topology: str) -> None:
    refused = 0
    for workers in range(1, MOST + 1):
        for per_node in (1, 2, 3, 4, 8, 9):
            problem = topology_misfit(topology, workers=workers, per_node=per_node)
            assert (problem is None) is topology_fits(topology, workers=workers, per_node=per_node)
            if problem is None:
                assert groups_of_round(topology, workers=workers, per_node=per_node, round=5)
                continue
            refused += 1
            remedy = problem.remedy or ""
            asked = re.match(r"use ([\d or]+) workers", remedy)
            assert asked is not None
            named = list(map(int, asked[1].split(" or ")))
            assert topology_misfit(topology, workers=named[0], per_node=per_node) is None
            assert topology_misfit(topology, workers=named[-1], per_node=per_node) is None
            others = remedy.rpartition("one of ")[2].split(", ")
            assert others[0] == "complete"
            for other in others:
                assert topology_misfit(other, workers=workers, per_node=per_node) is None
    assert bool(refused) is (topology not in ("complete", "random"))


@pytest.mark.parametrize(
    ("topology", "workers", "per_node", "what", "remedy"),
    [
        (
            *("ring", 15, 4),
            '"ring" needs an even number of workers, not 15 workers',
            "use 14 or 16 workers, or one of complete, random",
        ),
        (
            *("exp", 12, 4),
            '"exp" needs a number of workers that is a power of two, not 12 workers',
            "use 8 or 16 workers, or one of complete, ring, random, hierarchical",
        ),
        (
            *("alternating-exp-ring", 4, 4),
            '"alternating-exp-ring" needs nodes with equally many workers, and 2, 4, 8, … of them, '
            "not 4 workers with 4 on each node",
            "use 8 workers, or one of complete, ring, exp, random, hierarchical",
        ),
        (
            *("hierarchical", 18, 4),
            '"hierarchical" needs nodes with equally many workers, not 18 workers with 4 on each '
            "node",
            "use 16 or 20 workers, or one of complete, ring, random",
        ),
    ],
)
def test_what_a_misfit_says(
    topology: str, workers: int, per_node: int, what: str, remedy: str
) -> None:
    problem = topology_misfit(topology, workers=workers, per_node=per_node)
    assert problem is not None
    assert (problem.what, problem.remedy) == (what, remedy)


# ------------------------------------------------------------------ one by one


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_worker_is_alone(topology: str) -> None:
    for per_node in (1, 4):
        assert topology_misfit(topology, workers=1, per_node=per_node) is None
        assert period(topology, workers=1, per_node=per_node) == 1
        made = groups_of_round(topology, workers=1, per_node=per_node, round=7)
        assert made == ((0,),)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_two_workers_take_their_mean(topology: str) -> None:
    count = period(topology, workers=2, per_node=1)
    assert count is not None
    last = groups_of_round(topology, workers=2, per_node=1, round=count - 1)
    assert last == ((0, 1),)


def test_ring_of_six() -> None:
    first, second = (members("ring", workers=6, per_node=1, round=number) for number in (0, 1))
    assert first == [[0, 1], [2, 3], [4, 5]]
    assert second == [[0, 5], [1, 2], [3, 4]]


def test_exp_of_eight() -> None:
    made = [members("exp", workers=8, per_node=1, round=number) for number in range(3)]
    assert made == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    ]


def nodes(*numbers: int) -> list[int]:
    """The workers of nodes of four."""
    return [4 * node + place for node in numbers for place in range(4)]


def test_alternating_exp_ring_of_four_nodes() -> None:
    made = [
        members("alternating-exp-ring", workers=16, per_node=4, round=number) for number in range(4)
    ]
    assert made == [
        [nodes(0), nodes(1), nodes(2, 3)],
        [nodes(0, 1), nodes(2), nodes(3)],
        [nodes(0), nodes(1, 3), nodes(2)],
        [nodes(0, 2), nodes(1), nodes(3)],
    ]


def test_alternating_exp_ring_of_two_nodes() -> None:
    made = [
        members("alternating-exp-ring", workers=8, per_node=4, round=number) for number in (0, 1)
    ]
    assert made == [[nodes(0), nodes(1)], [nodes(0, 1)]]


def test_alternating_exp_ring_with_one_worker_on_each_node() -> None:
    made = [
        members("alternating-exp-ring", workers=4, per_node=1, round=number) for number in range(4)
    ]
    assert made == [
        [[0], [1], [2, 3]],
        [[0, 1], [2], [3]],
        [[0], [1, 3], [2]],
        [[0, 2], [1], [3]],
    ]


def test_hierarchical_alternates_inside_and_across() -> None:
    made = [members("hierarchical", workers=6, per_node=2, round=number) for number in range(6)]
    inside = [[0, 1], [2, 3], [4, 5]]
    assert made[::2] == [inside] * 3
    # Three nodes around a ring: each rests once.
    assert made[1::2] == [
        [[0], [1], [2, 4], [3, 5]],
        [[0, 4], [1, 5], [2], [3]],
        [[0, 2], [1, 3], [4], [5]],
    ]


def test_hierarchical_with_one_worker_on_each_node_always_exchanges() -> None:
    for number in range(3):
        made = members("hierarchical", workers=8, per_node=1, round=number)
        assert made == members("exp", workers=8, per_node=1, round=number)


def test_random_matchings_are_the_same_everywhere() -> None:
    """Written down: another machine or version of Python must find the same."""
    made = [
        groups_of_round("random", workers=6, per_node=1, round=number, seed=7)
        for number in range(3)
    ]
    assert [list(groups) for groups in made] == FIRST_MATCHINGS


FIRST_MATCHINGS = [[(0, 5), (1, 3), (2, 4)], [(0, 4), (1, 5), (2, 3)], [(0, 4), (1, 3), (2, 5)]]


def test_random_matchings_differ_by_round_and_seed() -> None:
    def made(round: int, seed: int) -> tuple[Members, ...]:
        return groups_of_round("random", workers=32, per_node=4, round=round, seed=seed)

    assert len({made(round, seed) for round in range(8) for seed in range(8)}) == 64


def test_every_worker_rests_at_times_in_an_odd_number() -> None:
    resting = []
    for number in range(200):
        groups = groups_of_round("random", workers=5, per_node=1, round=number)
        resting += [group[0] for group in groups if len(group) == 1]
    assert len(resting) == 200
    assert min(resting.count(worker) for worker in range(5)) > 20
