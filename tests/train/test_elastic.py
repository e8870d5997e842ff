"""Elastic runs through the command line: workers are killed and frozen, and the run goes on.

Those marked slow do so over and over, with all kinds of exchanges.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.track.folder import run_folder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import StepRecord, ValidationRecord
from gristmill.train.elastic import ElasticRun

if TYPE_CHECKING:
    from conftest import Runs

LIMIT = 900.0
"""Seconds that anything may take on a machine that is busy; pytest has a limit of its own."""

RUN = """
name = "tiny"
folder = "{folder}"
model = {{ layers = 2, heads = 2, width = 16, context = 24 }}
data = {{ paths = "{tokens}", split = "90,10" }}
train = {{ until = "{steps} steps", batch = {batch} }}
optim.lr = 1e-2
validate = {{ every = "10 steps", windows = 8 }}
checkpoint = {{ every = "10 steps" }}
parallel = {{ timeout = "60s", start_timeout = "{limit}s", elastic = {elastic} }}
runtime = {{ device = "cpu", threads = 1 }}
"""


def recorded(run: Path) -> str:
    """The metrics so far."""
    try:
        return (run / "metrics.jsonl").read_text()
    except OSError:
        return ""


def events_of(run: Path) -> str:
    """What the run has said so far."""
    values = [json.loads(line) for line in recorded(run).splitlines() if line.endswith("}")]
    return "\n".join(one["text"] for one in values if one["kind"] == "event")


class ElasticProcess:
    """A supervisor with its workers."""

    def __init__(
        self,
        folder: Path,
        tokens: Path,
        *settings: str,
        workers: int,
        steps: int,
        restarts: int = 0,
        elastic: bool = True,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run, self.file, self.output = (
            folder / "run",
            folder / "run.toml",
            folder / "output.txt",
        )
        values = {"folder": self.run, "tokens": tokens, "steps": steps, "batch": 2 * workers}
        text = RUN.format(**values, limit=int(LIMIT), elastic=str(elastic).lower())
        self.file.write_text(text)
        options = [f"--processes={workers}", f"--restarts={restarts}"]
        if not any("topology" in one or "local" in one for one in settings):
            settings = (*settings, "parallel.gossip.topology=complete")
        command = [sys.executable, "-m", "gristmill", "train", *options, str(self.file), *settings]
        self.steps = steps
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def workers(self) -> dict[int, int]:
        """The process ids of the workers that run, by rank."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                if int(path.read_text().rpartition(")")[2].split()[1]) != self.process.pid:
                    continue
                values = (path.parent / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {int(one[5:]): int(path.parent.name) for one in values if one[:5] == b"RANK="}
        return found

    def step(self) -> int:
        """The last step that is recorded."""
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        return max((json.loads(one)["step"] for one in lines if one.endswith("}")), default=0)

    def reach(self, step: int) -> None:
        """Wait until a step is recorded."""
        self.wait_for(lambda: self.step() >= step)

    def wait_for(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def send(self, number: signal.Signals, *ranks: int) -> None:
        pids = self.workers()
        for rank in ranks:
            if rank in pids:
                os.kill(pids[rank], number)

    def end(self) -> int:
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {self.said()}")

    def said(self) -> str:
        return self.output.read_text()

    def events(self) -> str:
        return events_of(self.run)

    def paused(self, *ranks: int) -> bool:
        """Freeze some workers for a moment, so that they are slow while this is called."""
        self.send(signal.SIGSTOP, *ranks)
        time.sleep(0.6)
        self.send(signal.SIGCONT, *ranks)
        time.sleep(0.3)
        return True

    def all_present(self, workers: int) -> bool:
        """Whether all workers are there: the last one came, or all of them began anew."""
        changes = re.findall(r"with (\d+) of \d+ workers|(resuming from)", self.events())
        return bool(changes) and (changes[-1][1] != "" or int(changes[-1][0]) == workers)

    def assert_complete(self, *, workers: Sequence[int], state: str = "done") -> None:
        """Every step is recorded once and in order, the loss falls, the checkpoint is whole."""
        records = read_metrics(self.run / "metrics.jsonl")
        newest = CheckpointFolder(self.run / "checkpoints").newest_intact().path
        assert newest is not None
        saved = json.loads((newest / "state.json").read_text())
        assert saved["workers"] == list(workers)
        last = saved["progress"]["steps"]
        assert last == self.steps or state == "stopped"
        steps = [one.step for one in records if isinstance(one, StepRecord)]
        assert steps == list(range(1, last + 1))
        losses = [one.loss for one in records if isinstance(one, ValidationRecord)]
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0]
        left = [one.name for one in (self.run / "checkpoints").iterdir() if one.name[0] == "."]
        assert left == []
        assert json.loads((self.run / "status.json").read_text())["state"] == state


Start = Callable[..., ElasticProcess]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Iterator[Start]:
    made: list[ElasticProcess] = []

    def begin(*settings: str, folder: Path | None = None, **options: Any) -> ElasticProcess:
        folder = folder or tmp_path_factory.mktemp("elastic")
        made.append(ElasticProcess(folder, tokens, *settings, **options))
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            # Its workers end with it.
            one.process.kill()
            one.process.wait()


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_the_run_ends_well(start: Start) -> None:
    """Through the command line: the first worker, which writes the records, is killed."""
    often = ("validate.every=50 steps", "checkpoint.every=100 steps")
    one = start(*often, workers=3, steps=300, restarts=2)
    one.reach(10)
    one.send(signal.SIGKILL, 0)
    # The others are slow until it is back, whatever this machine is busy with.
    one.wait_for(lambda: one.paused(1, 2) and "worker 0 joined" in one.events())
    assert one.end() == Exit.DONE, one.said()
    one.assert_complete(workers=[0, 1, 2])
    said = one.said()
    assert re.search(r"rank 0 of 3 ended by signal SIGKILL.*; restarting it \(1 of 2\)", said)
    gone = r"worker 0 is gone; continuing from step \d+ with 2 of 3 workers: 1, 2"
    assert re.search(gone, one.events())


# ------------------------------------------------------------------ workers started by hand

CONTEXT = multiprocessing.get_context("forkserver")

MEMBER = """
import os, signal, sys
os.dup2(os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
os.dup2(1, 2)
os.environ.update(
    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_WORLD_SIZE=str(workers),
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
)
from gristmill.strategies.spmd import Spmd

def fail_at(step, *, real=Spmd.update):
    seen = 0

    def update(*args, **kwargs):
        nonlocal seen
        seen += 1
        if seen == step:
            raise ValueError("no such grain")
        return real(*args, **kwargs)

    Spmd.update = update

exec(moment)
sys.argv = ["gristmill", "train", str(folder / "run.toml"), *settings]
from gristmill.cli.main import main
main()
"""


class Party:
    """Workers that are started one by one."""

    def __init__(self, folder: Path, tokens: Path, *, workers: int, steps: int) -> None:
        self.folder, self.workers, self.run = folder, workers, folder / "run"
        folder.mkdir(exist_ok=True)
        values = {"folder": self.run, "tokens": tokens, "steps": steps, "batch": 2 * workers}
        text = RUN.format(**values, limit=int(LIMIT), elastic="true")
        (folder / "run.toml").write_text(text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.members: list[Any] = []

    def start(self, rank: int, *settings: str, moment: str = "") -> Any:
        names = {"folder": self.folder, "rank": rank, "port": self.port, "moment": moment}
        names |= {"workers": self.workers}
        names |= {"settings": ["parallel.gossip.topology=complete", *settings]}
        member = CONTEXT.Process(target=exec, args=(MEMBER, names), daemon=True)
        member.start()
        self.members.append(member)
        return member

    def said(self, rank: int) -> str:
        return (self.folder / f"output-{rank}.txt").read_text()

    def events(self) -> str:
        return events_of(self.run)


def ended(member: Any) -> int | None:
    member.join(LIMIT)
    code: int | None = member.exitcode
    return code


@pytest.fixture
def party(tmp_path: Path, tokens: Path) -> Iterator[Callable[..., Party]]:
    made: list[Party] = []

    def make(name: str, **options: int) -> Party:
        made.append(Party(tmp_path / name, tokens, **options))
        return made[-1]

    yield make
    for one in made:
        for member in one.members:
            member.kill()


def wait_until(true: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)


def test_a_worker_fails_a_stranger_is_refused_and_a_new_one_joins(
    party: Callable[..., Party],
) -> None:
    """None of which costs the others anything, until one is asked to stop."""
    one = party("run", workers=3, steps=1_000_000)
    workers = [one.start(rank, moment="fail_at(5)" if rank == 1 else "") for rank in range(3)]
    assert ended(workers[1]) == Exit.INTERNAL
    assert "ValueError: no such grain" in one.said(1)
    wait_until(lambda: "worker 1 is gone" in one.events(), lambda: one.said(0))
    stranger = one.start(1, "model.width=32")
    assert ended(stranger) == Exit.REFUSED
    last = [line for line in one.said(1).splitlines() if line.startswith("error: ")][-1]
    assert re.search(r"worker 1 on .* does not fit the run at .*: model.width is 32 here", last)
    assert "stranger" not in one.events() and workers[0].is_alive() and workers[2].is_alive()
    workers[1] = one.start(1)
    wait_until(lambda: "worker 1 joined" in one.events(), lambda: one.said(0))
    os.kill(workers[2].pid, signal.SIGTERM)
    assert [ended(member) for member in workers] == [Exit.STOPPED] * 3, one.said(0)
    newest = CheckpointFolder(one.run / "checkpoints").newest_intact().path
    assert newest is not None
    state = json.loads((newest / "state.json").read_text())
    assert state["workers"] == [0, 1, 2]
    records = read_metrics(one.run / "metrics.jsonl")
    steps = [record.step for record in records if isinstance(record, StepRecord)]
    assert steps == list(range(1, state["progress"]["steps"] + 1))


def contents(run: Path) -> dict[str, bytes]:
    """All that a run has left, but who holds the lock, and what workers printed."""
    files = (path for path in run.rglob("*") if path.is_file() and path.parent.name != "logs")
    return {str(one.relative_to(run)): one.read_bytes() for one in files if one.name != ".lock"}


@pytest.mark.parametrize(
    ("frozen", "end"),
    [(0, Exit.DONE), pytest.param(1, Exit.STOPPED, marks=pytest.mark.slow)],
    ids=["complete", "stopped"],
)
def test_a_worker_that_wakes_after_the_end_leaves_the_run_as_it_is(
    party: Callable[..., Party], frozen: int, end: Exit
) -> None:
    steps = 150 if end is Exit.DONE else 1_000_000
    one = party("run", workers=3, steps=steps)
    # Half of this is how long a worker may be silent.
    settings = ("parallel.timeout=6s", "validate.every=100 steps", "checkpoint.every=50 steps")
    workers = [one.start(rank, *settings) for rank in range(3)]
    others = [worker for rank, worker in enumerate(workers) if rank != frozen]
    wait_until(lambda: '"kind": "step"' in recorded(one.run), one.events)
    os.kill(workers[frozen].pid, signal.SIGSTOP)
    try:
        if end is Exit.STOPPED:
            wait_until(lambda: f"worker {frozen} is gone" in one.events(), lambda: one.said(2))
            os.kill(others[0].pid, signal.SIGTERM)
        assert [ended(member) for member in others] == [end] * 2, one.said(2)
        before = contents(one.run)
    finally:
        os.kill(workers[frozen].pid, signal.SIGCONT)
    assert ended(workers[frozen]) == end, one.said(frozen)
    assert "leaves, and nothing was changed" in one.said(frozen)
    assert contents(one.run) == before


def test_a_run_that_nobody_disturbs_equals_one_that_is_not_elastic(
    party: Callable[..., Party], runs: Runs
) -> None:
    pair = [party(name, workers=3, steps=12) for name in ("elastic", "plain")]
    plain = ("parallel.elastic=false",)
    members = [
        one.start(rank, *settings)
        for one, settings in zip(pair, ((), plain), strict=True)
        for rank in range(3)
    ]
    assert [ended(member) for member in members] == [Exit.DONE] * 6, pair[0].said(0)
    runs.assert_same(pair[0].run, pair[1].run)


def test_a_worker_without_an_address_is_refused(make_run: Callable[..., RunConfig]) -> None:
    config = make_run("parallel.elastic=true", "parallel.gossip.topology=complete")
    with pytest.raises(UserError, match="without a rendezvous address") as caught:
        ElasticRun(config, run_folder(config), ProcessInfo(rank=1, world=2), Mesh(dp_replicate=2))
    assert caught.value.exit is Exit.CONFIG


def test_a_worker_that_finds_no_store_says_where_it_looked(
    make_run: Callable[..., RunConfig],
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1])
    settings = ("parallel.elastic=true", "parallel.gossip.topology=complete")
    config = make_run(*settings, "parallel.start_timeout=5s")
    place = ProcessInfo(rank=1, world=2, local_world=2, host="here", address=address)
    with pytest.raises(UserError, match=f"did not reach the store of the run at {address}"):
        ElasticRun(config, run_folder(config), place, Mesh(dp_replicate=2))


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["parallel.gossip.topology=ring", "parallel.dp_shard=2"], "one process each"),
        ([], "when all processes have the same weights"),
    ],
)
def test_layouts_that_cannot_be_elastic(
    make_run: Callable[..., RunConfig], settings: list[str], what: str
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        make_run("parallel.elastic=true", *settings)
    assert "parallel.elastic" in str(caught.value)


# ------------------------------------------------------------------ over and over

SLOW_LIMIT = 1800
"""Seconds that a test which kills over and over may take: 8 workers share the cores."""

KINDS = {
    "gossip on a ring with accum-adamw": (
        "parallel.gossip.topology=ring",
        "optim.type=accum-adamw",
        "optim.accum=4",
    ),
    "gossip on a ring with muon": ("parallel.gossip.topology=ring", "optim.type=muon"),
    "DiLoCo in int8 with a delay": (
        "parallel.local.every=10 steps",
        "parallel.exchange.send=int8",
        "parallel.exchange.delay=3",
    ),
    "complete with top-k": (
        "parallel.gossip.topology=complete",
        "parallel.exchange.send=top-k",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(SLOW_LIMIT)
@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_kills_over_and_over(start: Start, kind: str, workers: int) -> None:
    """At random moments, those of validation and saving among them: one, two, all but one."""
    rng = random.Random(f"{kind} {workers}")
    settings = ("parallel.timeout=20s", "validate.every=25 steps", "checkpoint.every=25 steps")
    # It ends when it is told to, since nobody knows how long workers take to come back.
    one = start(*KINDS[kind], *settings, workers=workers, steps=1_000_000, restarts=200)
    one.reach(5)
    everyone = range(workers)
    for victim in everyone:
        one.send(signal.SIGKILL, victim)
        gone = f"worker {victim} is gone"
        one.wait_for(lambda gone=gone: gone in one.events() and one.paused(*everyone))
        one.wait_for(lambda: one.paused(*everyone) and one.all_present(workers))
    for _ in everyone:
        # Faster than they come back, so all of them may be gone.
        count = rng.choice((1, 1, 1, 2, workers - 1))
        one.send(signal.SIGKILL, *rng.sample(everyone, count))
        pause = time.monotonic() + rng.uniform(0.1, 6)
        one.wait_for(lambda until=pause: one.paused(*everyone) and time.monotonic() > until)
    one.wait_for(lambda: one.paused(*everyone) and one.all_present(workers))
    one.reach(one.step() + 30)
    one.process.terminate()
    assert one.end() == Exit.STOPPED, one.said()
    one.assert_complete(workers=everyone, state="stopped")


@pytest.mark.slow
@pytest.mark.timeout(SLOW_LIMIT)
def test_when_all_are_killed_the_run_resumes_from_its_checkpoint(start: Start) -> None:
    one = start(workers=4, steps=600, restarts=8)
    one.reach(25)
    one.send(signal.SIGKILL, 0, 1, 2, 3)
    assert one.end() == Exit.DONE, one.said()
    one.assert_complete(workers=range(4))
    assert "resuming from step-000000" in one.events()


@pytest.mark.slow
@pytest.mark.timeout(SLOW_LIMIT)
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_frozen_worker_is_left_out_and_rejoins(start: Start, frozen: int) -> None:
    settings = ("parallel.timeout=10s", "parallel.local.every=5 steps", "validate.every=50 steps")
    one = start(*settings, "checkpoint.every=50 steps", workers=3, steps=3000)
    one.reach(10)
    one.send(signal.SIGSTOP, frozen)
    one.wait_for(lambda: f"worker {frozen} is gone" in one.events())
    one.send(signal.SIGCONT, frozen)
    others = [rank for rank in range(3) if rank != frozen]
    one.wait_for(lambda: one.paused(*others) and f"worker {frozen} joined" in one.events())
    assert one.end() == Exit.DONE, one.said()
    one.assert_complete(workers=range(3))


@pytest.mark.slow
@pytest.mark.timeout(SLOW_LIMIT)
def test_without_restarts_the_others_finish(start: Start) -> None:
    one = start(workers=3, steps=200)
    one.reach(10)
    one.send(signal.SIGKILL, 1)
    assert one.end() == Exit.DONE, one.said()
    assert "2 others continue" in one.said()
    one.assert_complete(workers=[0, 2])


@pytest.mark.slow
@pytest.mark.timeout(SLOW_LIMIT)
def test_a_stop_saves_and_the_same_command_resumes_also_with_fewer(start: Start) -> None:
    one = start(workers=4, steps=400, restarts=3)
    one.reach(15)
    one.send(signal.SIGKILL, 3)
    one.process.terminate()
    assert one.end() == Exit.STOPPED, one.said()
    saved = CheckpointFolder(one.run / "checkpoints").newest_intact().path
    assert saved is not None
    again = start("train.batch=8", folder=one.file.parent, workers=2, steps=400)
    assert again.end() == Exit.DONE, again.said()
    again.assert_complete(workers=[0, 1])
    assert f"resuming from {saved.name}" in again.events()
