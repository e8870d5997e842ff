"""Statements of the pages that no other test covers, checked against the program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.cli import doctor
from gristmill.cli.progress import ProgressLine
from gristmill.config.load import dump_run
from gristmill.config.schema import RunConfig
from gristmill.track.folder import RunFolder


@pytest.mark.slow
def test_a_closed_terminal_does_not_end_a_run(
    make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_run('train.until="60 steps"')
    file = tmp_path / "run.toml"
    file.write_text(dump_run(config))
    command = [sys.executable, "-m", "gristmill", "train", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        status = process.wait(timeout=120)
    assert status == 0
    assert RunFolder(Path(config.folder or "")).read_status()["state"] == "done"


def test_doctor_works_where_cores_cannot_be_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    findings = [finding for finding in doctor.examine() if finding.name == "threads"]
    assert len(findings) == 1


def test_progress_is_silent_where_nothing_can_be_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("working") as line:
        line.update(1, 2, "half")
    assert capfd.readouterr().err == ""
