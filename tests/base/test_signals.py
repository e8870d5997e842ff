"""Which signals ask a run to stop, and what they do before it has begun."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gristmill.base.exits import stop_signals

ALL = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP}


@pytest.fixture
def ignored(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    before = signal.signal(request.param, signal.SIG_IGN)
    yield request.param
    signal.signal(request.param, before)


def test_a_closed_terminal_asks_to_stop_too() -> None:
    assert {*stop_signals()} == ALL


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGHUP], indirect=True)
def test_what_was_ignored_from_the_start_stays_ignored(ignored: signal.Signals) -> None:
    assert {*stop_signals()} == ALL - {ignored}


@pytest.mark.parametrize("ignored", [signal.SIGTERM, signal.SIGUSR1], indirect=True)
def test_there_is_always_a_way_to_stop_a_run(ignored: signal.Signals) -> None:
    assert {*stop_signals()} == ALL


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGTERM, 75, "stopped by SIGTERM before the run began; run the same command again"),
        (signal.SIGHUP, 75, "stopped by SIGHUP before the run began; run the same command again"),
        (signal.SIGINT, 130, ""),
    ],
)
def test_before_the_run_begins_a_signal_exits_at_once(
    number: signal.Signals, status: int, said: str
) -> None:
    script = (
        "import os, signal\n"
        "from gristmill.base.exits import exit_on_stop_signals\n"
        "exit_on_stop_signals()\n"
        "try:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    signal.pause()\n"
        "finally:\n"
        "    print('an exception can be caught')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (status, said, "")
