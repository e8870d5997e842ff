"""Supervising processes: real ones, which end in every way that processes end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.locks import FolderLock
from gristmill.base.process import ProcessInfo
from gristmill.launch.processes import Ending, Job, supervise
from gristmill.launch.starting import process_environment
from gristmill.track.folder import RunFolder

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
starts = folder / f"starts-{rank}"
with starts.open("a") as file:
    file.write(f"{os.getpid()}\\n")
start = len(starts.read_text().split())

def ready():
    (folder / f"ready-{rank}").touch()

def wait():
    ready()
    while True:
        time.sleep(0.02)

def others_ready():
    while len(list(folder.glob("ready-*"))) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.01)

def save(step):
    (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(script: str, *, processes: int = 3, restarts: int = 0) -> Job:
        text = PRELUDE + textwrap.dedent(script)
        # Without the site packages, Python starts in a blink.
        command = (sys.executable, "-S", "-c", text, str(tmp_path))
        return Job(command, processes, RunFolder(tmp_path), restarts)

    return make


def pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("starts-*") for pid in file.read_text().split()]


def starts(folder: Path, rank: int = 0) -> int:
    return len((folder / f"starts-{rank}").read_text().split())


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still wait for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.01)


# ------------------------------------------------------------------ how runs end


def test_every_process_knows_its_place_and_has_its_log(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    script = """
        (folder / f"{rank}.json").write_text(json.dumps(dict(os.environ)))
        print("printed by", rank)
        print("complained by", rank, file=sys.stderr)
    """
    assert supervise(job(script)) == 0
    places = [
        ProcessInfo.current(json.loads((tmp_path / f"{n}.json").read_text())) for n in range(3)
    ]
    assert [(place.rank, place.local_rank, place.world) for place in places] == [
        (0, 0, 3),
        (1, 1, 3),
        (2, 2, 3),
    ]
    assert len({place.address for place in places}) == 1
    assert places[0].address is not None and places[0].address.host == "127.0.0.1"
    assert not places[0].agent and places[0].local_world == 3
    assert json.loads((tmp_path / "1.json").read_text())["OMP_NUM_THREADS"] == "7"
    log = (tmp_path / "logs/rank-00001.log").read_text().splitlines()
    assert log[0].startswith("--- ") and " rank 1 of 3: " in log[0]
    assert "printed by 1" in log and "complained by 1" in log
    assert supervise(job(script)) == 0
    assert (tmp_path / "logs/rank-00001.log").read_text().count("printed by 1") == 2
    assert "printed by 0" not in (tmp_path / "logs/rank-00000.log").read_text()


def test_threads_are_divided_among_processes() -> None:
    threads = [
        int(process_environment(0, processes=n, port=1, around={})["OMP_NUM_THREADS"])
        for n in (2, 10_000)
    ]
    assert threads == [max(1, len(os.sched_getaffinity(0)) // 2), 1]
    assert "OMP_NUM_THREADS" not in process_environment(0, processes=1, port=1, around={})


def test_all_stopped_is_stopped(job: Callable[..., Job]) -> None:
    assert supervise(job("sys.exit(75)")) == 75


def test_a_failure_ends_the_others_and_is_named_last(
    job: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
        if rank == 1:
            others_ready()
            print("error: tokens: is missing\\n    look for it", file=sys.stderr)
            sys.exit(65)
        wait()
    """
    assert supervise(job(script), grace=1.0) == 65
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: rank 1 of 3 ended first, with exit status 65 (bad data): tokens: is missing; "
        f"its log is {tmp_path / 'logs/rank-00001.log'}"
    )
    assert not any(map(alive, pids(tmp_path)))


def test_a_process_that_is_killed_is_a_lost_peer(
    job: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
        if rank == 0:
            others_ready()
            os.kill(os.getpid(), signal.SIGKILL)
        wait()
    """
    assert supervise(job(script), grace=1.0) == 76
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: rank 0 of 3 ended first, by signal SIGKILL")
    assert last.endswith("; its output is above")
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize("killed", [0, 1])
def test_what_the_others_know_of_a_killed_process_is_in_the_last_line(
    job: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str], killed: int
) -> None:
    """They find it out after a while, and before they get TERM."""
    script = f"""
        if rank == {killed}:
            others_ready()
            (folder / "dying").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ready()
        while not (folder / "dying").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        cause = "rank {killed} on n7 is gone; it was last seen in phase save at step 80"
        words = cause if rank == 2 else "rank 2 on n7 has waited"
        with (folder / f"logs/rank-{{rank:05d}}.log").open("a") as log:
            log.write(f"error: {{words}}\\n")
        sys.exit(76)
    """
    RunFolder(tmp_path).write_status("running", step=0, steps=100)
    (tmp_path / "metrics.jsonl").write_text('{"step": 84}\n{"st')
    assert supervise(job(script)) == 76
    said = (
        f"; rank 2 says: rank {killed} on n7 is gone; it was last seen in phase save at step 80; "
    )
    assert said in capfd.readouterr().err.splitlines()[-1]
    noted = RunFolder(tmp_path).read_status()
    assert (noted["state"], noted["step"], noted["steps"]) == ("failed", 84, 100)
    assert said in noted["error"]


@pytest.mark.parametrize(("status", "state"), [(76, "failed"), (77, "running")])
def test_the_status_of_a_run_that_could_not_say_it_failed(
    job: Callable[..., Job], tmp_path: Path, status: int, state: str
) -> None:
    RunFolder(tmp_path).write_status("running", step=7)
    assert supervise(job(f"sys.exit({status})", processes=1)) == status
    noted = RunFolder(tmp_path).read_status()
    assert (noted["state"], noted["step"]) == (state, 7)
    assert ("error" in noted) == (state == "failed")


def test_the_last_line_of_a_traceback_is_repeated(
    job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervise(job("assert rank < 2, 'two is too many'")) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert "rank 2 of 3 ended first, with exit status 1: AssertionError: two is too many" in last


def test_those_who_do_not_hear_are_killed(job: Callable[..., Job], tmp_path: Path) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 2:
            others_ready()
            sys.exit(78)
        if os.fork() == 0:
            (folder / f"starts-{rank}-child").write_text(str(os.getpid()))
        wait()
    """
    assert supervise(job(script), grace=0.3) == 78
    assert len(pids(tmp_path)) == 5 and not any(map(alive, pids(tmp_path)))


def test_who_lost_a_peer_is_not_blamed_for_it(
    job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
        if rank == 1:
            others_ready()
            sys.exit(76)
        if rank == 2:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(70))
        wait()
    """
    assert supervise(job(script), grace=1.0) == 70
    last = capfd.readouterr().err.splitlines()[-1]
    assert "rank 2 of 3 ended first, with exit status 70 (a defect)" in last
    assert supervise(job("sys.exit(76) if rank == 1 else wait()"), grace=1.0) == 76


def test_who_lost_a_peer_has_waited_long_enough() -> None:
    """A frozen process hears no TERM; the limit of the run is over when the others give it up."""
    patience = [Ending(1, code).patience for code in (76, 70, -signal.SIGKILL)]
    assert patience == sorted(patience) and patience[0] < 0.5
    assert Ending(1, -signal.SIGTERM, wanted=True).patience == 1


def test_what_the_first_process_has_said_is_not_repeated(
    job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    """All processes are refused alike; the first of them to end need not be the first in rank."""
    script = """
        time.sleep(0.2 * (rank == 0))
        print("error: runs/a: this folder is in use", file=sys.stderr)
        sys.exit(77)
    """
    assert supervise(job(script)) == 77
    assert capfd.readouterr().err == "error: runs/a: this folder is in use\n"


def test_a_folder_in_use_is_not_touched(job: Callable[..., Job], tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}") as caught:
        supervise(job("ready()"))
    assert caught.value.exit is Exit.REFUSED
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    lock.release()
    assert supervise(job("ready()")) == 0


# ------------------------------------------------------------------ starting again


def test_all_start_again_while_there_is_progress(
    job: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
        if rank == 1:
            save(10 * start)
            if start < 3:
                os.kill(os.getpid(), signal.SIGSEGV)
    """
    assert supervise(job(script, processes=2, restarts=5)) == 0
    assert starts(tmp_path, 1) == 3
    lines = capfd.readouterr().err.splitlines()
    assert "by signal SIGSEGV" in lines[0] and lines[0].endswith("from step 10 (1 of 5)")
    assert lines[1].endswith("restarting all processes from step 20 (2 of 5)")


def test_no_other_start_without_a_new_checkpoint(
    job: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
        if start == 1 and rank == 0:
            save(10)
        sys.exit(70)
    """
    assert supervise(job(script, processes=1, restarts=5)) == 70
    assert starts(tmp_path) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.endswith("no checkpoint since the last restart, so another would not help")


def test_no_more_starts_than_allowed(job: Callable[..., Job], tmp_path: Path) -> None:
    assert supervise(job("save(start); sys.exit(70)", processes=1, restarts=2)) == 70
    assert starts(tmp_path) == 3


@pytest.mark.parametrize("status", [2, 65, 74, 77, 78])
def test_what_would_fail_again_is_not_tried(
    job: Callable[..., Job], tmp_path: Path, status: int
) -> None:
    assert supervise(job(f"save(start); sys.exit({status})", processes=1, restarts=2)) == status
    assert starts(tmp_path) == 1


# ------------------------------------------------------------------ signals

SUPERVISOR = """
import sys
from pathlib import Path
from gristmill.launch.processes import Job, supervise
from gristmill.track.folder import RunFolder

command, processes, folder, restarts = eval(sys.argv[1])
sys.exit(supervise(Job(command, processes, RunFolder(Path(folder)), restarts), grace=0.5))
"""


@pytest.fixture
def supervisor(job: Callable[..., Job], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Supervise in a process of its own, and wait until all of its children are ready."""

    def start(script: str, *, processes: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
        made = job(script, processes=processes, restarts=restarts)
        words = repr((tuple(made.command), processes, str(tmp_path), restarts))
        command = [sys.executable, "-c", SUPERVISOR, words]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        until(lambda: len(list(tmp_path.glob("ready-*"))) == processes)
        return process

    return start


POLITE = """
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, frame: heard.append(number))
    ready()
    while not heard:
        time.sleep(0.01)
    time.sleep(0.5)
    (folder / f"heard-{rank}").write_text(json.dumps(heard))
    sys.exit(75)
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP],
    ids=lambda one: one.name,
)
def test_signals_are_forwarded_once(
    supervisor: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process = supervisor(POLITE, restarts=1)
    process.send_signal(number)
    if number != signal.SIGINT:
        time.sleep(0.15)
        process.send_signal(number)
    assert process.wait(60) == 75
    assert [json.loads((tmp_path / f"heard-{n}").read_text()) for n in (0, 1)] == [[number]] * 2
    assert starts(tmp_path) == 1


def test_processes_that_have_not_begun_are_stopped_too(
    supervisor: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = supervisor("""
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
    """)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert not any(map(alive, pids(tmp_path)))


def test_a_second_interrupt_kills(
    supervisor: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = supervisor("""
        signal.signal(signal.SIGINT, lambda *_: (folder / f"heard-{rank}").touch())
        wait()
    """)
    process.send_signal(signal.SIGINT)
    until(lambda: len(list(tmp_path.glob("heard-*"))) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize("thread", [False, True])
def test_nobody_outlives_a_killed_supervisor(
    supervisor: Callable[..., subprocess.Popen[str]], tmp_path: Path, thread: bool
) -> None:
    source = Path(__file__).parents[2] / "src"
    process = supervisor(f"""
        sys.path.insert(0, {str(source)!r})
        from gristmill.base import exits
        if {thread}:
            exits.sys.platform = "without prctl"
        exits.follow_supervisor()
        assert exits.SUPERVISOR not in os.environ
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
    """)
    children = pids(tmp_path)
    assert len(children) == 2 and all(map(alive, children))
    process.kill()
    until(lambda: not any(map(alive, children)))
    process.wait(60)


def test_without_a_supervisor_there_is_nobody_to_follow() -> None:
    script = "from gristmill.base.exits import follow_supervisor; follow_supervisor()"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_elastic_a_process_is_restarted_by_itself(
    job: Callable[..., Job], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others go on meanwhile, and when no restart is left, without it."""
    made = job(
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        others = folder / "starts-1"
        while not others.exists() or len(others.read_text().split()) < 3:
            time.sleep(0.01)
        time.sleep(0.5)
        """,
        restarts=2,
    )
    assert supervise(replace(made, elastic=True), grace=0.2) == Exit.DONE
    lines = capfd.readouterr().err.splitlines()
    killed = "rank 1 of 3 ended by signal SIGKILL, as the system does when memory runs out"
    assert lines == [
        f"{killed}; restarting it (1 of 2)",
        f"{killed}; restarting it (2 of 2)",
        f"{killed}; 2 others continue",
    ]
    assert len((tmp_path / "starts-0").read_text().split()) == 1


def test_elastic_a_failure_that_a_restart_would_meet_again(
    job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    """If the others go on, the user hears of it; if all fail alike, only from rank 0 itself."""
    fails = "if rank != {but}: print('error: no such token file', file=sys.stderr); sys.exit(65)\n"
    one = job(fails.format(but=0) + "time.sleep(2)", restarts=2)
    assert supervise(replace(one, elastic=True), grace=0.2) == Exit.DONE
    lines = capfd.readouterr().err.splitlines()
    ended = "ended with exit status 65 (bad data): no such token file; 1 other continues"
    assert sorted(lines) == [f"rank {rank} of 3 {ended}" for rank in (1, 2)]
    every = job(fails.format(but=-1), restarts=2)
    assert supervise(replace(every, elastic=True), grace=60) == Exit.DATA
    assert capfd.readouterr().err.splitlines() == ["error: no such token file"]


def test_elastic_when_no_worker_is_left(
    job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    made = job("os.kill(os.getpid(), signal.SIGKILL)", restarts=1)
    assert supervise(replace(made, elastic=True), grace=0.2) == Exit.PEER
    assert capfd.readouterr().err.splitlines()[-1].endswith("; no worker is left")
