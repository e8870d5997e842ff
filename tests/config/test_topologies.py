"""Topologies: every round keeps the mean, a period brings workers together, sizes are checked."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest

from gristmill.config.resolve import divisors
from gristmill.config.topologies import (
    TOPOLOGIES,
    Group,
    contraction,
    fits,
    fitting_workers,
    groups_of_round,
    misfit,
    mix,
    mixing_matrix,
    period,
)

MOST = 64
SIZES = [(workers, per_node) for workers in range(1, MOST + 1) for per_node in divisors(workers)]
ROUNDS_OF_RANDOM = 4


def sizes_of(topology: str) -> Iterator[tuple[int, int]]:
    for workers, per_node in SIZES:
        if not TOPOLOGIES[topology].knows_nodes and per_node > 1:
            continue
        if fits(topology, workers=workers, per_node=per_node):
            yield workers, per_node


def all_rounds(topology: str, workers: int, per_node: int) -> list[tuple[Group, ...]]:
    """The rounds of a period; of a random topology, the first few."""
    count = period(topology, workers=workers, per_node=per_node) or ROUNDS_OF_RANDOM
    return [
        groups_of_round(topology, workers=workers, per_node=per_node, round=number)
        for number in range(count)
    ]


def members(topology: str, *, workers: int, per_node: int, round: int) -> list[list[int]]:
    made = groups_of_round(topology, workers=workers, per_node=per_node, round=round)
    return [list(group.members) for group in made]


def exact(groups: tuple[Group, ...], values: list[Fraction]) -> list[Fraction]:
    """A round of group means in exact arithmetic."""
    mixed = list(values)
    for group in groups:
        assert group.self_weight == 1 / len(group.members)
        mean = sum((values[one] for one in group.members), Fraction(0)) / len(group.members)
        for one in group.members:
            mixed[one] = mean
    return mixed


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_round_holds_each_worker_once(topology: str) -> None:
    for workers, per_node in sizes_of(topology):
        for groups in all_rounds(topology, workers, per_node):
            held = [worker for group in groups for worker in group.members]
            assert sorted(held) == list(range(workers)), (workers, per_node)
            assert all(list(group.members) == sorted(group.members) for group in groups)


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
            np.array(mixing_matrix(groups, workers))
            for groups in all_rounds(topology, workers, per_node)
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
            problem = misfit(topology, workers=workers, per_node=per_node)
            assert (problem is None) is fits(topology, workers=workers, per_node=per_node)
            if problem is None:
                assert groups_of_round(topology, workers=workers, per_node=per_node, round=5)
                continue
            refused += 1
            named = fitting_workers(topology, workers=workers, per_node=per_node)
            remedy = problem.remedy or ""
            assert named
            assert f"use {' or '.join(map(str, named))} workers" in remedy
            assert misfit(topology, workers=named[0], per_node=per_node) is None
            assert misfit(topology, workers=named[-1], per_node=per_node) is None
            others = remedy.rpartition("one of ")[2].split(", ")
            assert others[0] == "complete"
            for other in others:
                assert misfit(other, workers=workers, per_node=per_node) is None
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
    problem = misfit(topology, workers=workers, per_node=per_node)
    assert problem is not None
    assert (problem.what, problem.remedy) == (what, remedy)


# ------------------------------------------------------------------ one by one


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_worker_is_alone(topology: str) -> None:
    for per_node in (1, 4):
        assert misfit(topology, workers=1, per_node=per_node) is None
        assert period(topology, workers=1, per_node=per_node) == 1
        made = groups_of_round(topology, workers=1, per_node=per_node, round=7)
        assert made == (Group((0,), 1.0),)
        assert mixing_matrix(made, 1) == [[1.0]]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_two_workers_take_their_mean(topology: str) -> None:
    count = period(topology, workers=2, per_node=1)
    assert count is not None
    last = groups_of_round(topology, workers=2, per_node=1, round=count - 1)
    assert last == (Group((0, 1), 0.5),)


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
    assert [[group.members for group in groups] for groups in made] == FIRST_MATCHINGS


FIRST_MATCHINGS = [[(0, 5), (1, 3), (2, 4)], [(0, 4), (1, 5), (2, 3)], [(0, 4), (1, 3), (2, 5)]]


def test_random_matchings_differ_by_round_and_seed() -> None:
    def made(round: int, seed: int) -> tuple[Group, ...]:
        return groups_of_round("random", workers=32, per_node=4, round=round, seed=seed)

    assert len({made(round, seed) for round in range(8) for seed in range(8)}) == 64


def test_every_worker_rests_at_times_in_an_odd_number() -> None:
    resting = []
    for number in range(200):
        groups = groups_of_round("random", workers=5, per_node=1, round=number)
        resting += [group.members[0] for group in groups if len(group.members) == 1]
    assert len(resting) == 200
    assert min(resting.count(worker) for worker in range(5)) > 20


# ------------------------------------------------------------------ mixing


def test_groups_with_another_self_weight() -> None:
    groups = (Group((0, 2, 3), 0.5), Group((1,), 1.0))
    assert [group.is_mean for group in groups] == [False, True]
    matrix = mixing_matrix(groups, 4)
    assert matrix == [
        [0.5, 0, 0.25, 0.25],
        [0, 1, 0, 0],
        [0.25, 0, 0.5, 0.25],
        [0.25, 0, 0.25, 0.5],
    ]
    values = [1.0, 2.0, 3.0, 5.0]
    assert mix(groups, values) == pytest.approx(np.array(matrix) @ values)


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
    matrices = [
        np.array(mixing_matrix(groups, workers))
        for groups in all_rounds(topology, workers, per_node)
    ]
    product = reduce(lambda done, matrix: matrix @ done, matrices)
    expected = np.linalg.svd(product, compute_uv=False)[1]
    found = contraction(topology, workers=workers, per_node=per_node)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("workers", [3, 4, 9, 16])
def test_contraction_of_random_matchings_is_their_mean(workers: int) -> None:
    squares = []
    start = np.arange(workers) - (workers - 1) / 2
    for number in range(3000):
        groups = groups_of_round("random", workers=workers, per_node=1, round=number)
        squares.append(np.square(mix(groups, list(start))).sum() / np.square(start).sum())
    found = contraction("random", workers=workers, per_node=1)
    assert np.sqrt(np.mean(squares)) == pytest.approx(found, rel=0.03)
