"""The time that compiling takes."""

from __future__ import annotations

import time

import torch

from gristmill.parallel.compiling import CompileClock


def test_compiling_is_timed_and_announced() -> None:
    begun = []
    with CompileClock(begins=lambda: begun.append(time.monotonic())) as clock:
        compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
        compiled(torch.ones(3))
        first = clock.seconds
        assert first > 0 and len(begun) == 1
        compiled(torch.ones(3))
        assert clock.seconds == first
        compiled(torch.ones(4))
        assert clock.seconds > first and len(begun) == 2
    after = clock.seconds
    compiled(torch.ones(5))
    assert clock.seconds == after
