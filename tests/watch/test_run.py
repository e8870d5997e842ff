"""The row of a run: what it is doing, as far as its files tell."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.locks import FolderLock
from gristmill.watch.folders import FoundRun
from gristmill.watch.run import LIMITS, SILENT_SECONDS, WatchedRun, limits_for
from gristmill.watch.watcher import Watcher


def watched(made: Any) -> WatchedRun:
    path = made.folder.path
    run = WatchedRun(FoundRun("0123456789ab", path, path.name))
    while run.look() and run.read():
        pass
    run.update_row()
    return run


def age(made: Any, seconds: float) -> None:
    """Let all files of a run be older."""
    then = time.time() - seconds
    for file in made.folder.path.iterdir():
        if file.is_file():
            os.utime(file, (then, then))


def test_a_run_that_writes_nothing_any_more_is_silent(made: Callable[..., Any]) -> None:
    run = made(steps=3)
    assert watched(run).row["state"] == "running"
    age(run, SILENT_SECONDS + 60)
    assert watched(run).row["state"] == "silent"
    run.folder.write_status("failed", step=3, error="the disk is full")
    row = watched(run).row
    assert (row["state"], row["reason"]) == ("failed", "the disk is full")


def test_a_run_that_holds_its_lock_is_not_silent(made: Callable[..., Any]) -> None:
    run = made(steps=3)
    with FolderLock(run.folder.path):
        age(run, 10 * SILENT_SECONDS)
        locks = Path("/proc/locks")
        told = locks.read_text() if locks.is_file() else ""
        if f":{run.folder.lock.stat().st_ino} " not in told:
            pytest.skip("this system does not tell which files are locked")
        assert watched(run).row["state"] == "running"
    assert watched(run).row["state"] == "silent"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_run_whose_process_has_ended_is_silent_sooner(made: Callable[..., Any]) -> None:
    run = made(steps=3)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run.folder.lock.write_text(f"process {ended.pid} on {socket.gethostname()}\n")
    assert watched(run).row["state"] == "running"
    age(run, 60)
    assert watched(run).row["state"] == "silent"
    run.folder.lock.write_text(f"process {ended.pid} on another-host\n")
    age(run, 60)
    assert watched(run).row["state"] == "running"


@pytest.mark.parametrize(
    ("until", "steps"),
    [("500 steps", 500), ("6.4k tokens", 100), ("3 weeks", None), ("1k samples", None)],
)
def test_the_horizon_comes_from_the_settings(
    made: Callable[..., Any], until: str, steps: int | None
) -> None:
    assert watched(made(steps=3, until=until)).row["steps"] == steps


def test_rows_have_a_new_revision_only_if_something_is_new(made: Callable[..., Any]) -> None:
    made_run = made(steps=3)
    run = watched(made_run)
    revision = run.revision
    assert not run.update_row()
    made_run.steps(4, 4)
    assert run.look() and run.read() and run.update_row()
    assert run.row["revision"] > revision


def test_many_runs_take_less_each() -> None:
    assert limits_for(1) == limits_for(150) == LIMITS
    kept = [limits_for(count).steps for count in (150, 151, 400, 1000, 100_000)]
    assert kept == sorted(kept, reverse=True) and kept[-1] == 192
    assert 1000 * limits_for(1000).steps * 20 * 16 < 100 * 2**20


def test_one_strange_run_does_not_hide_the_others(
    made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = made("runs/good", steps=3), made("runs/bad", steps=3)
    read = WatchedRun.read

    def fails(run: WatchedRun) -> bool:
        if run.name == "bad":
            raise RuntimeError("nobody thought of this")
        return read(run)

    monkeypatch.setattr(WatchedRun, "read", fails)
    told: list[str] = []
    watcher = Watcher([good.folder.path.parent], warn=told.append)
    for _ in range(3):
        watcher.look()
    rows = {row["name"]: row for row in watcher.rows()[1]}
    assert rows["good"]["step"] == 3
    assert len(told) == 1 and str(bad.folder.path) in told[0]


def test_runs_that_come_and_go_while_others_are_read(
    made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SEARCH_SECONDS", "_SEARCH_SHARE", "_ROUND_SECONDS"):
        monkeypatch.setattr(f"gristmill.watch.watcher.{name}", 0)
    long = made("runs/long", steps=3000)
    watcher = Watcher([long.folder.path.parent], interval=0.0)
    read, seen = WatchedRun.read, list[set[str]]()

    def comes(run: WatchedRun) -> bool:
        if not seen:
            made("runs/new", steps=2)
        seen.append({row["name"] for row in watcher.rows()[1]})
        return read(run)

    monkeypatch.setattr(WatchedRun, "read", comes)
    watcher.look()
    assert any("new" in names for names in seen), "told before all was read"
