"""The line with which a process says why it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gristmill.base.exits import (
    print_exit_report,
    read_exit_report,
    read_remedy,
    write_exit_report,
)


def test_the_line_is_in_the_log_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs/rank-00000.log"
    write_exit_report(log, "rank 1 is gone")
    assert log.read_text() == "error: rank 1 is gone\n"
    write_exit_report(log, "rank 1 is gone", stacks=True)
    assert "in write_exit_report" in log.read_text() and log.read_text().endswith(
        "\nerror: rank 1 is gone\n"
    )
    write_exit_report(None, "nobody reads this")
    print_exit_report("rank 1 is gone")
    assert capfd.readouterr().err == "error: rank 1 is gone\n"


def test_a_log_that_is_standard_error_gets_it_from_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    kept = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        write_exit_report(log, "rank 1 is gone")
        print_exit_report("rank 1 is gone")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert log.read_text().count("rank 1 is gone") == 1


def test_the_report_is_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_exit_report(log, errors_only=False) is None
    log.write_text("--- start\nerror: of an earlier start\n--- start\n")
    assert read_exit_report(log, errors_only=False) is None
    with log.open("a") as file:
        file.write("Traceback\n  frame\nValueError: boom\n\n")
    assert read_exit_report(log, errors_only=False) == "ValueError: boom"
    assert read_exit_report(log, errors_only=True) is None
    write_exit_report(log, "rank 1 is gone" + "!" * 1000)
    with log.open("a") as file:
        file.write("    and what to do\nlast line\n")
    for errors_only in (False, True):
        report = read_exit_report(log, errors_only=errors_only)
        assert report is not None and report.startswith("rank 1 is gone!") and len(report) == 400


def test_the_remedy_of_the_last_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_remedy(log) is None
    log.write_text("error: one\n    mend one\nerror: two\n")
    assert read_remedy(log) is None
    log.write_text("error: one\nerror: two\n    mend two\n    again\n")
    assert read_remedy(log) == "mend two"
    log.write_text("error: two\n    mend two\n--- a new start\n    indented\n")
    assert read_remedy(log) is None
