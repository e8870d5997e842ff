"""Runs of three processes, one of which is killed at a chosen moment: the others end by themselves
and say who is missing, and the same command goes on to the same bits. With two processes, sums in
another order would not show.

    a life   all train; at its moment the victim waits until the others know what it is doing, and
             is killed; the others have to end
    the last all train to the end

All runs that are asked for are under way at the same time, a few at once, since they mostly wait.
"""

from __future__ import annotations

import multiprocessing
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import permutations
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.checkpoint.layout import CheckpointFolder

if TYPE_CHECKING:
    from conftest import Runs

CONTEXT = multiprocessing.get_context("forkserver")
LIMIT = 60
"""Seconds that a process may take to end."""
RANKS = range(3)
ONE_AT_A_TIME = threading.Lock()
"""For threads that start processes, which asks after all others that were started, or ask after
one: of two that ask at the same moment, one would be told 255."""

RUN = """
name = "tiny"
folder = "{folder}"
model = {{ layers = 2, heads = 2, width = 16, context = 16, dropout = 0.1 }}
data = {{ paths = "{tokens}", split = "90,10" }}
train = {{ until = "6 steps", batch = 6, accumulate = 2 }}
optim.lr = 1e-2
validate = {{ every = "2 steps", windows = 6 }}
checkpoint = {{ every = "2 steps", keep = 2, background = {background} }}
parallel = {{ dp_shard = 3, timeout = "{limit}s", start_timeout = "{limit}s" }}
runtime = {{ device = "cpu", threads = 1 }}
"""

MEMBER = """
import os, signal, sys, time
from dataclasses import replace

os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(os.open(folder / f"errors-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
os.environ.update(
    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3",
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
)
import torch
from gristmill.checkpoint import state, writer
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.state import Snapshot
from gristmill.models.gpt import GPT
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.liveness.heartbeat import Roster
from gristmill.distributed.liveness.monitor import Monitor
from gristmill.distributed.liveness.verdict import Limits
from gristmill.strategies.spmd import Spmd
from gristmill.train import run
from gristmill.train.meter import Meter

doing = "start 0"

def on(owner, name, number, act, *, late=False):
    # Do something before or after the n-th call of a function.
    real, seen = getattr(owner, name), 0

    def instead(*args, **kwargs):
        nonlocal seen
        seen += 1
        now = seen == number
        if now and not late:
            act()
        result = real(*args, **kwargs)
        if now and late:
            act()
        return result

    setattr(owner, name, instead)

def before(owner, name, number=1):
    on(owner, name, number, die)

def after(owner, name, number=1):
    on(owner, name, number, die, late=True)

def die():
    # The others have to have heard what this process is doing, or they could not tell.
    for other in {0, 1, 2} - {rank}:
        while (folder / f"heard-by-{other}-of-{rank}").read_text() != doing:
            time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)

def half_a_file():
    real = state.write_tensors

    def cut(path, *args, **kwargs):
        written = real(path, *args, **kwargs)
        os.truncate(path, written.size // 2)
        die()

    state.write_tensors = cut

def fail():
    raise ValueError("no such grain")

def ask_to_stop():
    os.kill(os.getpid(), signal.SIGTERM)

def note(self, heartbeat, *, now, real=Roster.note):
    real(self, heartbeat, now=now)
    if heartbeat.rank != rank:
        heard = folder / f"heard-by-{rank}-of-{heartbeat.rank}"
        heard.write_text(f"{heartbeat.phase} {heartbeat.step}")

def phase(self, name, step=0, *, real=Monitor.phase):
    global doing
    doing = f"{name} {step}"
    real(self, name, step)

def fast(config, *, save, real=Limits.of):
    return replace(real(config), beat=0.1, read=0.1)

Roster.note, Monitor.phase, Limits.of = note, phase, fast
exec(moment)
sys.argv = ["gristmill", "train", str(folder / "run.toml")]
from gristmill.cli.main import main
main()
"""


UNDER_TORCHRUN = """
import os, signal
from pathlib import Path

folder, rank, port = Path({folder!r}), int(os.environ["RANK"]), os.environ["MASTER_PORT"]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
found = " ".join(path.name for path in folder.glob("run/checkpoints/step*"))
(folder / f"found-{{rank}}").write_text(found)
moment = 'before(torch.Tensor, "backward", 6)' if first and rank == 1 else ""
"""


@dataclass(frozen=True)
class Killed:
    """A process that is killed at some moment, and what it was then doing."""

    rank: int
    moment: str
    where: str
    """As the others have to say it; a pattern."""
    saved: int | None
    """The newest checkpoint that the kill leaves, None if there is none."""
    background: bool = True
    """Whether training goes on while it saves; if not, it is sure what was saved before."""
    then: Killed | None = None
    """How the next life ends, if not with the run."""
    slow: bool = False
    """Whether another case, which is not, goes much the same way."""

    @property
    def lives(self) -> list[Killed | None]:
        return [self, *(self.then.lives if self.then is not None else [None])]


SAVING = r"in phase (save|step|validation) at step \d"
"""A save goes on in the background, while training does."""
CASES = {
    "when all have met": Killed(
        1, 'after(run, "open_run_world")', "in phase start at step 0", None
    ),
    "in the first forward pass": Killed(
        0,
        'on(Spmd, "accumulate", 1, lambda: before(GPT, "forward"))',
        "in phase start at step 0",
        None,
        slow=True,
    ),
    "in a backward pass, twice": Killed(
        1,
        'before(torch.Tensor, "backward", 6)',
        "in phase step at step 2",
        2,
        background=False,
        then=Killed(0, 'before(torch.Tensor, "backward", 2)', "in phase start at step 2", 2),
    ),
    "before a record": Killed(
        0, 'before(Meter, "add", 3)', "in phase step at step 2", 2, background=False, slow=True
    ),
    "after a step": Killed(
        1, 'after(Spmd, "update", 5)', "in phase step at step 4", 4, background=False, slow=True
    ),
    "in validation": Killed(
        1,
        'on(Spmd, "evaluate", 3, lambda: before(GPT, "forward"))',
        "in phase validation at step 4",
        2,
        background=False,
    ),
    "in its first file": Killed(0, "half_a_file()", SAVING, None, slow=True),
    "in a file": Killed(1, 'on(Snapshot, "write", 2, half_a_file)', SAVING, 2),
    "in a file, and training waits": Killed(
        1,
        'on(Snapshot, "write", 2, half_a_file)',
        "in phase save at step 4",
        2,
        background=False,
        slow=True,
    ),
    "with its files written": Killed(1, 'after(Snapshot, "write", 2)', SAVING, 2, slow=True),
    "with all files written": Killed(0, 'before(writer, "commit_pieces", 2)', SAVING, 2, slow=True),
    "before the rename": Killed(
        0, 'on(CheckpointFolder, "commit", 2, lambda: before(os, "rename"))', SAVING, 2
    ),
    "while another commits": Killed(
        1, 'on(Snapshot, "write", 2, lambda: before(ControlGroup, "on_rank0"))', SAVING, 4
    ),
    "before the best is marked": Killed(
        0, 'before(CheckpointFolder, "mark_best", 2)', SAVING, 4, slow=True
    ),
    "in the middle of deleting": Killed(
        0, 'on(CheckpointFolder, "thin_out", 3, lambda: before(os, "unlink", 2))', SAVING, 6
    ),
    "in the last save of a stop": Killed(
        1,
        'on(Meter, "add", 2, ask_to_stop); on(Snapshot, "write", 2, half_a_file)',
        "in phase save at step 3",
        2,
    ),
    "in the last commit of a stop": Killed(
        0,
        'on(Meter, "add", 2, ask_to_stop); '
        'on(CheckpointFolder, "commit", 2, lambda: before(os, "rename"))',
        "in phase save at step 3",
        2,
        slow=True,
    ),
}


@dataclass(frozen=True)
class Life:
    """How all processes ended, by rank."""

    codes: list[int | None]
    last: list[str]
    """Their last lines."""
    saved: list[int]


class Party:
    """The processes of a run."""

    def __init__(self, folder: Path, tokens: Path, *, background: bool = True) -> None:
        folder.mkdir()
        self.folder = folder
        values = {"folder": folder / "run", "tokens": tokens, "limit": LIMIT}
        text = RUN.format(**values, background=str(background).lower())
        (folder / "run.toml").write_text(text)

    def live(self, killed: Killed | None = None) -> Life:
        """Train until all have ended."""
        port = self._begin()
        members = []
        for rank in RANKS:
            moment = killed.moment if killed is not None and killed.rank == rank else ""
            names = {"folder": self.folder, "rank": rank, "port": port, "moment": moment}
            members.append(CONTEXT.Process(target=exec, args=(MEMBER, names), daemon=True))
            with ONE_AT_A_TIME:
                members[-1].start()
        return self._life(_codes(members))

    def live_under_torchrun(self) -> Life:
        """Train until torchrun ends, which starts all again when one was killed."""
        port = self._begin()
        member = self.folder / "member.py"
        member.write_text(UNDER_TORCHRUN.format(folder=str(self.folder)) + MEMBER)
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={len(RANKS)}"]
        options = ["--max-restarts=1", "--monitor-interval=0.1", "--master-addr=127.0.0.1"]
        done = subprocess.run(
            [*torchrun, *options, f"--master-port={port}", str(member)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=2 * LIMIT,
            check=False,
        )
        return self._life([done.returncode])

    def _begin(self) -> int:
        """A port to meet at."""
        for by, of in permutations(RANKS, 2):
            (self.folder / f"heard-by-{by}-of-{of}").touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        return port

    def _life(self, codes: list[int | None]) -> Life:
        errors = [(self.folder / f"errors-{rank}.txt").read_text() for rank in RANKS]
        committed = CheckpointFolder(self.folder / "run/checkpoints").committed()
        return Life(
            codes,
            [(text.splitlines() or [""])[-1] for text in errors],
            [int(path.name[5:]) for path in committed],
        )


def _codes(members: list[BaseProcess]) -> list[int | None]:
    deadline = time.monotonic() + 2 * LIMIT
    while True:
        with ONE_AT_A_TIME:
            codes = [member.exitcode for member in members]
        if None not in codes or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    with ONE_AT_A_TIME:
        for member in members:
            member.kill()
    return codes


@dataclass(frozen=True)
class Story:
    """All lives of a run."""

    folder: Path
    lives: list[Life]


@pytest.fixture(scope="module")
def new_party(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Callable[..., Party]:
    """Make the processes of a new run."""
    folder = tmp_path_factory.mktemp("killed")
    return lambda name, **settings: Party(folder / name.replace(" ", "-"), tokens, **settings)


@pytest.fixture(scope="module")
def stories(
    new_party: Callable[..., Party], request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Story]]]:
    """All runs that are asked for, each to be waited for."""
    tests = {item.name for item in request.session.items}
    asked = ["whole", *(case for case in CASES if f"test_a_process_is_killed[{case}]" in tests)]

    def tell(name: str, killed: Killed | None) -> Story:
        party = new_party(name, background=killed is None or killed.background)
        lives = [None] if killed is None else killed.lives
        return Story(party.folder / "run", [party.live(one) for one in lives])

    def tell_of_torchrun() -> Story:
        party = new_party("torchrun", background=False)
        return Story(party.folder / "run", [party.live_under_torchrun()])

    with ThreadPoolExecutor(3) as pool:
        told = {name: pool.submit(tell, name, CASES.get(name)) for name in asked}
        if test_torchrun_starts_all_again.__name__ in tests:
            told["torchrun"] = pool.submit(tell_of_torchrun)
        yield told


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.slow] * one.slow) for name, one in CASES.items()],
)
def test_a_process_is_killed(stories: dict[str, Future[Story]], runs: Runs, case: str) -> None:
    whole, story = stories["whole"].result(), stories[case].result()
    assert whole.lives[0].codes == [0, 0, 0], whole.lives[0].last
    for killed, life in zip(CASES[case].lives[:-1], story.lives[:-1], strict=True):
        assert killed is not None
        assert_named(killed, life)
        assert max(life.saved, default=None) == killed.saved
    assert story.lives[-1].codes == [0, 0, 0], story.lives[-1].last
    runs.assert_same(whole.folder, story.folder)
    assert story.lives[-1].saved == whole.lives[0].saved
    left = [path.name for path in (story.folder / "checkpoints").iterdir() if path.name[0] == "."]
    assert left == []


@pytest.mark.slow
def test_torchrun_starts_all_again(stories: dict[str, Future[Story]], runs: Runs) -> None:
    """From the newest checkpoint, with no cleaning."""
    whole, story = stories["whole"].result(), stories["torchrun"].result()
    assert story.lives[0].codes == [0], story.lives[0].last
    runs.assert_same(whole.folder, story.folder)
    for rank in RANKS:
        assert (story.folder.parent / f"found-{rank}").read_text() == "step-00000002"


def test_a_defect_of_one_process_is_told_by_all(new_party: Callable[[str], Party]) -> None:
    """The one that failed says what to report; the others name it, and what it was doing."""
    party = new_party("defect")
    life = party.live(Killed(1, 'on(Spmd, "update", 3, fail)', "", None))
    who, log = f"rank 1 on {socket.gethostname()}", party.folder / "run/logs/rank-00001.log"
    assert life.codes == [76, 70, 76]
    for rank in (0, 2):
        assert life.last[rank] == (
            f"error: {who} failed in phase step at step 2: ValueError: no such grain"
        )
    assert life.last[1].startswith("error: a defect of gristmill ")
    assert (
        f": ValueError: no such grain ({who} in phase step at step 2; the log is {log}); "
        "please report it" in life.last[1]
    )
    assert "Traceback" in (party.folder / "errors-1.txt").read_text()


def assert_named(killed: Killed, life: Life) -> None:
    """The last line of each other process says who was killed, and where it stood."""
    host = re.escape(socket.gethostname())
    lost = {
        0: rf"rank 0 on {host}, which hosts the store at 127\.0\.0\.1:\d+, is gone",
        1: rf"rank 1 on {host} died without reporting an error",
    }[killed.rank]
    assert life.codes[killed.rank] == -signal.SIGKILL, life.last
    for other in {*RANKS} - {killed.rank}:
        line = life.last[other]
        assert re.fullmatch(f"error: {lost}; last seen {killed.where}", line), line
        assert life.codes[other] == 76
