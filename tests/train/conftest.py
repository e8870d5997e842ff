"""Stopping runs and comparing them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.tensorfile import open_tensors
from gristmill.train.stop import StopRequest

TIMED = {"time", "tokens_per_second", "step_seconds", "tflops", "tflops_causal", "memory_bytes"}
TIMED |= {"data_wait", "sync_wait", "seconds"}


class Runs:
    """What two runs must have in common to count as the same."""

    def history(self, folder: Path) -> list[dict[str, Any]]:
        """All numbers of a run that must not depend on when it was interrupted."""
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [
            {key: value for key, value in line.items() if key not in TIMED}
            for line in lines
            # What a host was busy with, and when, is another matter.
            if line["kind"] not in ("event", "system", "straggler")
        ]

    def tensors(self, folder: Path) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of the newest checkpoint, and what its strategy keeps."""
        newest = CheckpointFolder(folder / "checkpoints").newest_intact().path
        assert newest is not None
        stored = {kind: open_tensors(newest, kind) for kind in ("model", "optimizer", "strategy")}
        return {
            f"{kind}:{name}": one.read_exact(name)
            for kind, one in stored.items()
            for name in one.shapes
        }

    def assert_same(self, one: Path, two: Path) -> None:
        """Equal numbers at every step, equal bits at the end."""
        assert self.history(one) == self.history(two)
        left, right = self.tensors(one), self.tensors(two)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def runs() -> Runs:
    return Runs()


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
