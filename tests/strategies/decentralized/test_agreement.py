"""Workers at different steps agree on the last one, whoever is asked to stop and whenever."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from gristmill.distributed.control import ControlGroup
from gristmill.strategies.decentralized.workers import StopAgreement

LIMIT = 60
"""Seconds after which a test is taken to hang."""


class Meeting:
    """What a control group does, between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT)
        self.values: list[Any] = [None] * size

    def member(self, rank: int) -> ControlGroup:
        group = ControlGroup()
        group.rank, group.size = rank, self.size
        group.all_gather = lambda value: self.all_gather(rank, value)  # type: ignore[method-assign]
        return group

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


class WorkerSet:
    """Threads that take steps of random length, and exchange something with all others after every
    so many: none gets further ahead than that."""

    def __init__(self, size: int, *, seed: int, steps: int, every: int, asked: dict[int, int]):
        self.steps, self.every, self.asked, self.seed = steps, every, asked, seed
        self.meeting = Meeting(size)
        self.exchange = threading.Barrier(size, timeout=LIMIT)
        self.first: list[int] = []
        """Steps at whose end somebody was asked."""
        self.last = [0] * size
        self.errors: list[BaseException] = []

    def run(self) -> list[int]:
        """The last step of every worker."""
        threads = [
            threading.Thread(target=self._guarded, args=(rank,), daemon=True)
            for rank in range(self.meeting.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"
        return self.last

    def _guarded(self, rank: int) -> None:
        try:
            self._train(rank)
        except BaseException as error:
            self.errors.append(error)

    def _train(self, rank: int) -> None:
        clock = random.Random(f"{self.seed} {rank}")
        agreement = StopAgreement(self.meeting.member(rank), interval=0.002)
        agreement.start(1)
        slow = clock.choice([0.0, 0.001, 0.005])
        for step in range(1, self.steps + 1):
            time.sleep(clock.random() * slow)
            if step % self.every == 0:
                self.exchange.wait()
            asked = self.asked.get(rank) == step
            if asked:
                self.first.append(step)
            self.last[rank] = step
            stop = agreement.after_step(step, asked=asked)
            if stop is not None and step >= stop:
                assert step == stop, "this worker is past the step that all agreed on"
                break
        agreement.close()


@pytest.mark.parametrize("seed", range(12))
def test_all_stop_after_the_same_step(seed: int) -> None:
    chance = random.Random(seed)
    size, every = chance.randint(2, 5), chance.choice([1, 2, 7])
    askers = chance.sample(range(size), k=chance.randint(1, size))
    asked = {rank: chance.randint(1, 20) for rank in askers}
    workers = WorkerSet(size, seed=seed, steps=100_000, every=every, asked=asked)
    last = workers.run()
    assert len(set(last)) == 1, f"{asked} led to {last}"
    assert last[0] >= min(workers.first)


def test_nobody_is_asked_and_all_finish() -> None:
    assert WorkerSet(3, seed=1, steps=40, every=3, asked={}).run() == [40, 40, 40]


def test_a_request_at_the_very_end_stops_nobody_early() -> None:
    """The run may be over before the others hear of it, and then it is simply done."""
    last = WorkerSet(3, seed=1, steps=20, every=1, asked={1: 20}).run()
    assert last == [20, 20, 20]


def test_one_process_stops_at_once() -> None:
    agreement = StopAgreement(ControlGroup())
    agreement.start(1)
    assert agreement.after_step(1, asked=False) is None
    assert agreement.after_step(2, asked=True) == 2
    agreement.close()


def test_a_lost_process_is_an_error_of_the_step() -> None:
    """Not of a thread that nobody looks at."""
    group = ControlGroup()
    group.size = 2

    def lost(value: Any) -> list[Any]:
        raise RuntimeError("connection closed by peer")

    group.all_gather = lost  # type: ignore[method-assign]
    agreement = StopAgreement(group, interval=0.001)
    agreement.start(1)
    agreement._thread.join(LIMIT)
    with pytest.raises(RuntimeError, match="closed by peer"):
        agreement.after_step(1, asked=False)
    agreement.close()
