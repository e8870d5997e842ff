"""What asks a run to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from gristmill.base.process import JOB_BEGAN
from gristmill.train.stop import StopRequest


@pytest.fixture
def hangups_ignored() -> Iterator[None]:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_noted_and_its_handler_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert callable(signal.getsignal(number))
        assert signal.getsignal(number) is not before
        os.kill(os.getpid(), number)
        assert stop.reason == f"signal {number.name}"
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("hangups_ignored")
def test_a_run_that_ignores_hangups_outlives_its_terminal() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.reason is None


@pytest.mark.parametrize(
    ("before", "over"), [(None, False), ("4000", True), ("1000", False), ("-4000", False)]
)
def test_the_time_limit_is_that_of_the_job(
    before: str | None, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a job restarts has only the time that is left to the job."""
    if before is not None:
        monkeypatch.setenv(JOB_BEGAN, str(int(time.time()) - int(before)))
    stop = StopRequest()
    stop.time_limit = 3600.0
    stop.check_time(reserve=1.0)
    assert (stop.reason == "the time limit") is over
