"""What a process leaves behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.parallel.last_words import print_line, quiet, write_log

SCHEDULES = "torch.distributed.pipelining.schedules"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The logger of torch's schedules, left as it was."""
    one = logging.getLogger(SCHEDULES)
    before = one.propagate, one.handlers[:]
    yield one
    one.propagate, one.handlers[:] = before


def test_the_line_is_in_the_log_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs/rank-00000.log"
    write_log(log, "rank 1 is gone")
    assert log.read_text() == "error: rank 1 is gone\n"
    write_log(log, "rank 1 is gone", threads=True)
    assert "in write_log" in log.read_text() and log.read_text().endswith(
        "\nerror: rank 1 is gone\n"
    )
    write_log(None, "nobody reads this")
    print_line("rank 1 is gone")
    assert capfd.readouterr().err == "error: rank 1 is gone\n"


def test_a_log_that_is_standard_error_gets_it_from_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kept = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        write_log(log, "rank 1 is gone")
        print_line("rank 1 is gone")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert log.read_text().count("rank 1 is gone") == 1


def test_plans_of_torch_go_to_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], logger: logging.Logger
) -> None:
    quiet(tmp_path / "log")
    assert not (tmp_path / "log").exists()
    logger.error("caught exception at step %s.  Full Schedule:", 36)
    assert (tmp_path / "log").read_text() == "caught exception at step 36.  Full Schedule:\n"
    quiet(None)
    logger.error("Step 01: 2UNSHARD")
    quiet(tmp_path / "missing/log")
    logger.error("Step 02: 0F0")
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "missing").exists()


def test_the_schedules_speak_by_that_name() -> None:
    from torch.distributed.pipelining import schedules

    assert schedules.logger.name == SCHEDULES
