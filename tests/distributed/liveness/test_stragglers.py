"""Which process holds the others up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gristmill.distributed.liveness.stragglers import (
    COMPARED,
    KEPT,
    MOST,
    STRETCH,
    Pace,
    ProcessPace,
    Straggler,
    StragglerDetector,
)

Cost = Callable[[int, int], tuple[float, float, float]]
"""Seconds of data, compute and optimizer of a rank in a step."""


class Processes:
    """Some processes that train together, and rank 0, which compares them."""

    def __init__(self, count: int, *, stages: int = 1) -> None:
        self.paces = [Pace(stage=rank % stages) for rank in range(count)]
        self.links: list[float | None] = [None] * count
        self.detector = StragglerDetector()
        self.step = 0

    def train(self, steps: int, cost: Cost, *, every: int = 10) -> list[Straggler]:
        """Take steps; heartbeats are compared after every so many of them."""
        changes = list[Straggler]()
        for _ in range(steps):
            self.step += 1
            costs = [cost(rank, self.step) for rank in range(len(self.paces))]
            # All wait for the slowest.
            whole = max(sum(one) for one in costs) + 0.01
            for pace, (data, compute, optimizer) in zip(self.paces, costs, strict=True):
                pace.add(self.step, seconds=whole, data=data, compute=compute, optimizer=optimizer)
            if self.step % every == 0:
                changes += self.detector.compare(self.heard())
        return changes

    def heard(self) -> list[ProcessPace]:
        return [
            ProcessPace(rank, f"n{rank}", pace.stage, pace.notes, self.links[rank])
            for rank, pace in enumerate(self.paces)
        ]


def even(rank: int, step: int) -> tuple[float, float, float]:
    return (0.001, 0.1, 0.02)


@pytest.mark.parametrize(
    ("part", "extra"),
    [("data", (0.05, 0, 0)), ("compute", (0, 0.05, 0)), ("optimizer", (0, 0, 0.05))],
)
def test_a_slow_process_is_named_within_fifty_steps(
    part: str, extra: tuple[float, float, float]
) -> None:
    processes = Processes(4)
    assert processes.train(100, even) == []

    def slow(rank: int, step: int) -> tuple[float, float, float]:
        data, compute, optimizer = even(rank, step)
        if rank != 2:
            return (data, compute, optimizer)
        return (data + extra[0], compute + extra[1], optimizer + extra[2])

    (named,) = processes.train(50, slow)
    assert (named.rank, named.host, named.part, named.over) == (2, "n2", part, False)
    # Of the 30 steps that it is judged by, 10 may have been as before.
    assert 1.27 < named.ratio <= 0.1711 / 0.121
    assert 0.033 < named.seconds <= 0.0501
    assert processes.train(500, slow) == [], "it is told once"
    (over,) = processes.train(100, even)
    assert (over.rank, over.part, over.over) == (2, part, True)
    assert not processes.detector.slow


def test_fifteen_percent_are_not_enough() -> None:
    def slow(rank: int, step: int) -> tuple[float, float, float]:
        return (0.0, 0.1 + 0.015 * (rank == 1), 0.0)

    assert Processes(4).train(300, slow) == []


def test_a_part_that_hardly_matters_is_no_reason() -> None:
    """Twice the time of a loader that takes a thousandth of the step."""

    def slow(rank: int, step: int) -> tuple[float, float, float]:
        return (0.0002 * (1 + rank), 0.0005, 0.0)

    processes = Processes(3)
    assert processes.train(300, slow) == []


def test_noise_is_no_alarm() -> None:
    """Steps that vary by 30 %, and now and then one that takes ten times as long, on any rank."""
    rng = random.Random(0)

    def noisy(rank: int, step: int) -> tuple[float, float, float]:
        burst = 10 if rng.random() < 0.01 else 1
        return (0.001, 0.1 * rng.uniform(0.85, 1.15) * burst, 0.02)

    assert Processes(4).train(3000, noisy) == []


def test_a_short_disturbance_is_no_alarm() -> None:
    def disturbed(rank: int, step: int) -> tuple[float, float, float]:
        slow = rank == 1 and 100 < step <= 100 + STRETCH * (MOST - 1)
        return (0.001, 0.2 if slow else 0.1, 0.02)

    assert Processes(4).train(300, disturbed) == []


def test_two_processes() -> None:
    """The faster one tells what is normal."""

    def slow(rank: int, step: int) -> tuple[float, float, float]:
        return (0.0, 0.1 + 0.05 * (rank == 1), 0.0)

    (named,) = Processes(2).train(100, slow)
    assert named.rank == 1


def test_stages_are_compared_among_themselves() -> None:
    """The last stage has the head of the model, and takes longer."""

    def by_stage(rank: int, step: int) -> tuple[float, float, float]:
        return (0.0, 0.1 + 0.08 * (rank % 2), 0.0)

    processes = Processes(6, stages=2)
    assert processes.train(100, by_stage) == []

    def slow(rank: int, step: int) -> tuple[float, float, float]:
        data, compute, optimizer = by_stage(rank, step)
        return (data, compute + 0.06 * (rank == 3), optimizer)

    (named,) = processes.train(50, slow)
    assert named.rank == 3


def test_fast_steps_and_rare_heartbeats() -> None:
    """More steps between two heartbeats than they tell of: what they tell is enough."""

    def slow(rank: int, step: int) -> tuple[float, float, float]:
        return (0.0, 0.001 + 0.001 * (rank == 1), 0.0)

    assert KEPT > COMPARED + 1
    (named,) = Processes(3).train(700, slow, every=350)
    assert named.rank == 1


def test_a_slow_link() -> None:
    """All wait for each other equally; only the store answers one of them late."""
    processes = Processes(4)
    processes.links = [None, 0.0003, 0.0004, 0.03]

    def train(wait: float) -> list[Straggler]:
        changes = []
        for _ in range(50):
            processes.step += 1
            for pace in processes.paces:
                pace.add(processes.step, seconds=0.1 + wait, data=0.0, compute=0.1, optimizer=0.0)
            if processes.step % 10 == 0:
                changes += processes.detector.compare(processes.heard())
        return changes

    assert train(0.001) == [], "nobody waits for it"
    (named,) = train(0.2)
    assert (named.rank, named.part) == (3, "link")


def test_going_back_begins_anew() -> None:
    processes = Processes(3)
    processes.train(200, even)
    processes.step = 95

    def slow(rank: int, step: int) -> tuple[float, float, float]:
        return (0.0, 0.1 + 0.1 * (rank == 1), 0.0)

    (named,) = processes.train(60, slow)
    assert named.rank == 1 and named.step < 200


def test_one_process_has_nobody_to_be_compared_with() -> None:
    assert Processes(1).train(100, even) == []
    assert StragglerDetector().compare([]) == []


def test_processes_that_have_not_said_anything_yet() -> None:
    processes = Processes(3)
    for step in range(1, 101):
        for pace in processes.paces[:2]:
            pace.add(step, seconds=0.1, data=0.0, compute=0.1, optimizer=0.0)
    assert processes.detector.compare(processes.heard()) == []
