"""Runs under a real Open MPI: ranks from its variables, and what its mpiexec does at an end.

What mpiexec 4.1 does, as observed:

    USR1 to mpiexec     passed on; all ranks save; exit status 75
    TERM to mpiexec     CONT to all ranks, one second, TERM, one second, KILL; exit status 1. A save
                        that takes longer than a second is lost, and `odls_base_sigkill_timeout`
                        does not help: mpiexec reads no output in that time, so rank 0 blocks.
    a rank is killed    the same for the others, who have no time to report; exit status 137
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.base.errors import Exit

if TYPE_CHECKING:
    from conftest import ClusterRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

MakeClusterRun = Callable[..., "ClusterRun"]
LIMIT = 300


@contextlib.contextmanager
def started(mpiexec: list[str], run: ClusterRun) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run with four ranks; nothing of it is left at the end."""
    with (run.file.parent / "output").open("wb") as output:
        process = subprocess.Popen(
            [*mpiexec, "-n", "4", *run.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in ranks(run).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ranks(run: ClusterRun) -> dict[int, int]:
    """The processes of a run, by rank."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if str(run.file).encode() in words:
                values = (folder / "environ").read_bytes().split(b"\0")
                numbers = [v for v in values if v.startswith(b"OMPI_COMM_WORLD_RANK=")]
                found |= {int(number.partition(b"=")[2]): int(folder.name) for number in numbers}
    return found


def assert_nothing_is_left(run: ClusterRun) -> None:
    deadline = time.monotonic() + LIMIT
    while left := ranks(run):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def test_ranks_train_as_one_process(mpiexec: list[str], cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=12)
    with started(mpiexec, run) as process:
        assert process.wait(LIMIT) == Exit.DONE, (run.file.parent / "output").read_text()
    assert "4 processes" in (run.folder / "train.log").read_text()
    run.assert_as_alone()


@pytest.mark.slow
def test_all_ranks_save_when_asked_to_stop(mpiexec: list[str], cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5000)
    with started(mpiexec, run) as process:
        run.wait_for_step(5, lambda: process.poll() is None)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT) == Exit.STOPPED
    assert_nothing_is_left(run)
    last = max(run.losses())
    assert (run.folder / f"checkpoints/step-{last:08d}").is_dir()


@pytest.mark.slow
def test_a_run_resumes_after_mpiexec_was_terminated(
    mpiexec: list[str], cluster_run: MakeClusterRun
) -> None:
    run = cluster_run(steps=5000)
    with started(mpiexec, run) as process:
        run.wait_for_step(12, lambda: process.poll() is None)
        process.terminate()
        assert process.wait(LIMIT) == 1
    assert_nothing_is_left(run)
    last = max(run.losses())
    assert last < run.steps, "the run was over before mpiexec was terminated"
    with started(mpiexec, run) as process:
        run.wait_for_step(last + 1, lambda: process.poll() is None)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT) == Exit.STOPPED
    assert list(run.losses()) == list(range(1, max(run.losses()) + 1))
    assert "resuming from step-" in (run.folder / "train.log").read_text()


@pytest.mark.slow
def test_all_ranks_end_when_one_is_killed(mpiexec: list[str], cluster_run: MakeClusterRun) -> None:
    run = cluster_run(steps=5000)
    with started(mpiexec, run) as process:
        run.wait_for_step(5, lambda: process.poll() is None)
        os.kill(ranks(run)[2], signal.SIGKILL)
        # Which ending mpiexec hears of first, that of rank 2 or of one that lost it, is chance.
        assert process.wait(LIMIT) in (128 + signal.SIGKILL, Exit.PEER)
    assert_nothing_is_left(run)
    assert "mpiexec" in (run.file.parent / "output").read_text().splitlines()[-2]
