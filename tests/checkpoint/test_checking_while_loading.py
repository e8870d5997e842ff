"""A single process loads a checkpoint while its bytes are still being verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.base.errors import Problem
from gristmill.checkpoint.layout import CheckpointFolder


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Two checkpoints, the newer of which was damaged later."""
    found = CheckpointFolder(tmp_path)
    for step in (1, 2):
        staging = found.begin(step)
        (staging / "file").write_text(f"content of step {step}")
        found.commit(staging)
    (found.path(2) / "file").write_text("content of step !")
    return found


def test_nothing_that_comes_of_damaged_bytes_is_believed(folder: CheckpointFolder) -> None:
    def check(path: Path) -> list[Problem]:
        if "!" in (path / "file").read_text():
            raise RuntimeError("this is not a number")
        return []

    found = folder.newest_intact(check=check)
    assert found.path == folder.path(1)
    ((path, problems),) = found.damaged
    assert path == folder.path(2) and problems[0].what == "has changed bytes"


def test_what_is_wrong_with_intact_bytes_counts(folder: CheckpointFolder) -> None:
    found = folder.newest_intact(check=lambda path: [Problem("not for this model", str(path))])
    assert found.path is None
    assert [problems[0].what for _, problems in found.damaged] == [
        "has changed bytes",
        "not for this model",
    ]


def test_a_failure_with_intact_bytes_is_raised(folder: CheckpointFolder) -> None:
    def check(path: Path) -> list[Problem]:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        folder.newest_intact(check=check)
