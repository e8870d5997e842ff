"""Stopping runs and comparing them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from gristmill.train.stop import StopRequest


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the next run stop politely after so many steps."""

    def arrange(steps: int) -> None:
        seen = 0

        def count(self: StopRequest, *, reserve: float) -> None:
            nonlocal seen
            seen += 1
            if seen == steps:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(StopRequest, "check_time", count)

    return arrange
