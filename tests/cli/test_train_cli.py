"""`train` with processes of its own: what they are told, what is refused, and a real crash."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app
from gristmill.launch.processes import Job

RUN = """
name = "corn"
folder = "{folder}/run"
[model]
layers = 2
heads = 2
width = 16
context = 16
[data]
paths = "{tokens}"
split = "9,1"
[train]
until = "6 steps"
batch = 6
[checkpoint]
every = "2 steps"
[runtime]
device = "cpu"
threads = 1
"""


@pytest.fixture
def file(tokens: Path, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path, tokens=tokens))
    return path


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that are not run, but noted."""
    noted: list[Job] = []

    def note(job: Job) -> int:
        noted.append(job)
        return 75

    monkeypatch.setattr("gristmill.cli.train.supervise", note)
    return noted


def train(*words: object) -> int:
    result = CliRunner().invoke(app, ["train", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


def test_processes_get_the_same_words(file: Path, jobs: list[Job], tmp_path: Path) -> None:
    assert train(file, "optim.lr=1e-2", "--processes", 3, "--restarts", 2) == 75
    (job,) = jobs
    assert list(job.command[:4]) == [sys.executable, "-m", "gristmill", "train"]
    assert list(job.command[-3:]) == ["--", str(file), "optim.lr=1e-2"]
    assert (job.processes, job.restarts) == (3, 2)
    assert job.folder.path == tmp_path / "run"


def test_the_supervisor_moves_the_old_run_aside_once(
    file: Path, jobs: list[Job], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.toml").touch()
    train(file, "--fresh", "--processes", 2)
    assert "--fresh" not in jobs[0].command
    assert [path.name[:8] for path in tmp_path.glob("run.old-*")] == ["run.old-"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optim.rl=1",), "there is no such setting"),
        (("parallel.tp=2",), "asks for a multiple of 2 processes, and there are 3"),
    ],
)
def test_mistakes_are_found_before_anything_is_started(
    file: Path, jobs: list[Job], tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(file, *words, "--processes", 3)
    assert caught.value.exit is Exit.CONFIG
    assert jobs == [] and not (tmp_path / "run").exists()


def test_a_process_of_a_launcher_starts_no_others(
    file: Path, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="one of 2 processes of a launcher"):
        train(file, "--processes", 2)
    assert jobs == []


def test_numbers_below_one_are_wrong_command_lines(file: Path) -> None:
    assert train(file, "--processes", 0) == 2
    assert train(file, "--restarts", -1) == 2


def test_nothing_of_this_loads_torch(file: Path) -> None:
    script = (
        "import sys; sys.argv = ['gristmill', 'train', sys.argv[1], '--processes', '2']\n"
        "import gristmill.launch.processes as processes\n"
        "processes.supervise = lambda job: 'torch' in sys.modules\n"
        "from gristmill.cli.main import app\n"
        "app()"
    )
    subprocess.run([sys.executable, "-c", script, str(file)], check=True)


# ------------------------------------------------------------------ real runs


def start(file: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gristmill", "train", str(file), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes of a supervisor, by rank."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def records(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


INTERRUPTED = """
import os, signal, sys

class WhenImported:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, WhenImported())
"""


def train_with(hook: str, file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train in a process that runs some code as soon as Python has started."""
    (folder / "sitecustomize.py").write_text(hook)
    environment = {name: text for name, text in os.environ.items() if name[:8] != "MIMALLOC"}
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "gristmill", "train", str(file)],
        env=environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_signal_before_torch_is_there_stops_with_a_save(file: Path, tmp_path: Path) -> None:
    done = train_with(INTERRUPTED, file, tmp_path)
    assert done.returncode == Exit.STOPPED, done.stderr
    assert "stopped and saved" in done.stdout


def test_a_signal_before_anything_has_begun_has_the_same_status(file: Path, tmp_path: Path) -> None:
    done = train_with(INTERRUPTED.replace("torch", "typer"), file, tmp_path)
    assert done.returncode == Exit.STOPPED, done.stderr
    assert done.stderr.startswith("stopped by SIGTERM before the run began")
    assert not (tmp_path / "run").exists()


def test_the_allocator_is_told_before_torch_is_there(file: Path, tmp_path: Path) -> None:
    shown = "sys.exit(os.environ.get('MIMALLOC_PURGE_DELAY', 'not set'))"
    hook = INTERRUPTED.replace("os.kill(os.getpid(), signal.SIGTERM)", shown)
    assert train_with(hook, file, tmp_path).stderr.splitlines()[-1] == "1000"


ON_TERMINAL = """
import fcntl, os, sys, termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_closed_terminal_stops_with_a_save(file: Path, tmp_path: Path, processes: int) -> None:
    """As when the connection to a machine is lost: HUP, and nothing can be printed any more."""
    folder = tmp_path / "run"
    words = [str(file), "train.until=100k steps", "--processes", str(processes)]
    terminal, its_end = os.openpty()
    command = [sys.executable, "-c", ON_TERMINAL, "-m", "gristmill", "train", *words]
    streams = {"stdin": its_end, "stdout": its_end, "stderr": its_end}
    process = subprocess.Popen(command, start_new_session=True, **streams)
    os.close(its_end)
    while records(folder) < 5:
        assert process.poll() is None
        # A process waits while nobody reads what it prints.
        if select.select([terminal], [], [], 0.02)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.wait(120) == Exit.STOPPED
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert "stopping after signal SIGHUP" in (folder / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes where Linux shows them")
def test_a_killed_run_is_started_again_and_a_stopped_one_is_not(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(file, "train.until=100k steps", "--processes", "2", "--restarts", "1")
    until(lambda: any((folder / "checkpoints").glob("step-*")), process)
    before = children(process)
    os.kill(before[1], signal.SIGKILL)
    until(lambda: len(children(process)) == 2 and not {*before} & {*children(process)}, process)
    done = records(folder)
    until(lambda: records(folder) > done + 5, process)
    os.kill(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert "rank 1 of 2 ended first, by signal SIGKILL" in errors
    assert "restarting all processes from step" in errors and "(1 of 1)" in errors
    assert "resuming from step-" in output
    assert "stopped and saved at step" in output
    assert "; run the same command again to resume" in output
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert "train --processes=2 --restarts=1 -- " in (folder / "origin.txt").read_text()
