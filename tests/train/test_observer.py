"""What is known of a run while it trains: slow processes, its account of time, requests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gristmill.base.process import JOB_BEGAN, ProcessInfo
from gristmill.base.units import Progress
from gristmill.config.schema import RunConfig
from gristmill.data import loader
from gristmill.data.loader import Batch, Loader, LoaderEffort
from gristmill.launch.jobs.batch import JobRecord, write_record
from gristmill.strategies.spmd import Spmd
from gristmill.strategies.strategy import StepResult
from gristmill.track.account import PARTS, WallAccount, read_run_time
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StragglerRecord, SystemRecord
from gristmill.track.requests import RunRequest
from gristmill.track.system import SystemSample
from gristmill.train import observer
from gristmill.train.checkpoints import Checkpoint
from gristmill.train.compare import CompareReplicas
from gristmill.train.hooks import Hooks, StopOnDamage
from gristmill.train.observer import RunObserver, cause_of
from gristmill.train.run import Run
from gristmill.train.samples import Sample
from gristmill.train.task_evaluation import EvaluateTasks
from gristmill.train.tracker import Tracker
from gristmill.train.validation import Validate

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]
Crowd = Callable[..., list[Any]]

SLOW_PROCESS = """
import os, sys, time
from pathlib import Path
from dataclasses import replace
from gristmill.distributed.liveness.verdict import Limits
from gristmill.train import observer

rank = int(os.environ["RANK"])

def slow_forward(self, *args, **kwargs):
    # Until a test has seen that the process was named.
    if rank == 2 and not Path({seen!r}).exists():
        time.sleep(0.1)
    return forward(self, *args, **kwargs)

from gristmill.models.gpt import GPT
forward, GPT.forward = GPT.forward, slow_forward
limits = Limits.of
Limits.of = lambda config, *, save: replace(limits(config, save=save), beat=0.1, read=0.1)
observer.EVERY = observer.FILES_EVERY = 0.05
sys.argv = ["gristmill", "train", {run!r}]
from gristmill.cli.main import main
main()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until(holds: Callable[[], Any], processes: list[subprocess.Popen[str]]) -> None:
    while not holds():
        assert all(process.poll() is None for process in processes), "a process has ended"
        time.sleep(0.05)


def test_a_slow_process_is_named_while_the_run_goes_on(
    run_text: Callable[..., str], tmp_path: Path
) -> None:
    run, seen = tmp_path / "run.toml", tmp_path / "seen"
    run.write_text(
        run_text()
        .replace('until = "12 steps"', 'until = "100k steps"')
        .replace('every = "3 steps"', 'every = "50k steps"')
        .replace('every = "4 steps"', 'every = "50k steps"')
        .replace("batch = 4", "batch = 6")
    )
    port, folder = free_port(), tmp_path / "run"
    program = SLOW_PROCESS.format(seen=str(seen), run=str(run))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]

    def records(kind: type) -> list[Any]:
        metrics = folder / "metrics.jsonl"
        found = read_metrics(metrics, damaged=lambda *line: None) if metrics.is_file() else []
        return [record for record in found if isinstance(record, kind)]

    def slow_ones() -> list[Any]:
        # A busy machine may make others slow for a while, once this one no longer is.
        return [record for record in records(StragglerRecord) if record.rank == 2]

    try:
        wait_until(slow_ones, processes)
        (named,) = slow_ones()
        assert (named.rank, named.phase, named.over, named.cause) == (2, "compute", False, None)
        assert named.ratio >= 1.2
        known = json.loads((folder / "processes.json").read_text())["processes"]
        assert [one["rank"] for one in known] == [0, 1, 2]
        assert {one["state"] for one in known} == {"running"}
        assert known[2]["parts"]["compute"] > known[0]["parts"]["compute"]
        assert known[0]["parts"]["wait"] > known[2]["parts"]["wait"]
        seen.touch()
        wait_until(lambda: slow_ones()[1:], processes)
        assert [record.over for record in slow_ones()][:2] == [False, True]
        wait_until(lambda: records(SystemRecord), processes)
        (folder / "requests").mkdir()
        (folder / "requests" / "1.json").write_text('{"action": "stop", "by": "the test"}')
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [75, 75, 75], outputs
    assert "stopping after the test asked to stop" in outputs[0]
    assert "warning: rank 2" in outputs[0]


def ask(config: RunConfig, requests: dict[int, tuple[str, str | None]]) -> int:
    """Train while rank 0 is asked for something before some steps."""
    real = Hooks.signals

    def signals(self: Hooks) -> int:
        step = self._progress.steps + 1
        if self.control.is_rank0 and step in requests:
            action, until = requests[step]
            assert self.requests.put(RunRequest(action, until, "the test"))  # type: ignore[arg-type]
        return real(self)

    Hooks.signals = signals  # type: ignore[method-assign]
    try:
        return int(Run(config).train().exit)
    finally:
        Hooks.signals = real  # type: ignore[method-assign]


def texts(folder: Path) -> list[str]:
    records = read_metrics(folder / "metrics.jsonl")
    return [record.text for record in records if isinstance(record, EventRecord)]


@pytest.mark.parametrize("processes", [1, 3])
def test_all_processes_do_what_one_is_asked_for(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, processes: int
) -> None:
    often = ('validate.every="100 steps"', 'checkpoint.every="100 steps"', "train.batch=6")
    config = make_run(*often)
    requests = {2: ("validate", None), 5: ("save", None), 7: ("until", "3 steps")}
    arguments = (config, {**requests, 9: ("stop", None)})
    found = crowd(processes, ask, *arguments) if processes > 1 else [ask(*arguments)]
    assert found == [75] * processes
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    validated = [record.step for record in records if record.kind == "validation"]
    assert validated == [0, 3], "the step after all know"
    told = texts(tmp_path / "run")
    saved = [text.split()[2] for text in told if text.startswith("saved checkpoint")]
    assert saved == ["step-00000003", "step-00000006", "step-00000009"], "3 was the best so far"
    refused = "the test asked to train until 3 steps: the run is past that, at step 7"
    assert refused in told
    assert "stopping after the test asked to stop" in told


def stop(config: RunConfig, at: int) -> int:
    return ask(config, {at: ("stop", None)})


@pytest.mark.parametrize("processes", [1, 3])
def test_another_horizon_is_that_of_a_run_that_was_stopped_and_resumed_with_it(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs, processes: int
) -> None:
    def train(function: Callable[..., int], *arguments: Any) -> set[int]:
        if processes == 1:
            return {function(*arguments)}
        return set(crowd(processes, function, *arguments))

    common = ("train.batch=6", 'schedule.type="cosine"')
    asked = make_run(*common, folder="asked")
    assert train(ask, asked, {5: ("until", "9 steps")}) == {0}
    assert train(stop, make_run(*common, folder="stopped"), 5) == {75}
    resumed = make_run(*common, 'train.until="9 steps"', folder="stopped")
    assert train(stop, resumed, 0) == {0}
    runs.assert_same(tmp_path / "asked", tmp_path / "stopped")
    assert 'until = "9 steps"' in (tmp_path / "asked" / "run.toml").read_text()
    assert Run.open(tmp_path / "asked").status["steps"] == 9


def test_a_horizon_that_the_settings_forbid(make_run: MakeRun, tmp_path: Path) -> None:
    """It is refused before anything stops."""
    warm = make_run(
        'schedule.type="warmup-stable-decay"',
        'schedule.warmup="6 steps"',
        'schedule.decay="4 steps"',
    )
    assert ask(warm, {2: ("until", "7 steps")}) == 0
    (refused,) = [text for text in texts(tmp_path / "run") if "until 7 steps" in text]
    assert "schedule" in refused
    assert Run(warm).status["step"] == 12


def test_the_account_of_a_run_that_was_killed(make_run: MakeRun, tmp_path: Path) -> None:
    """The same process here: it fails at step 8, and goes on from step 6."""
    config, real = make_run(), Spmd.update

    def fail(self: Spmd, result: StepResult, **options: Any) -> StepResult:
        if fail.steps == 7:
            raise RuntimeError("a fault")
        fail.steps += 1
        return real(self, result, **options)

    fail.steps = 0  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spmd, "update", fail)
        with pytest.raises(RuntimeError, match="a fault"):
            Run(config).train()
    time_file = tmp_path / "run" / "time.jsonl"
    before = read_run_time(time_file)
    assert before is not None and "lost" not in before.parts
    Run(config).train()
    found = read_run_time(time_file)
    assert found is not None
    assert found.attempts == 2
    assert found.parts["lost"] > 0 and found.parts["restart"] > 0
    assert {"compute", "optimizer", "validation", "save"} < found.parts.keys()
    assert sum(found.parts.values()) == pytest.approx(found.wall)
    assert found.goodput is not None and 0 < found.goodput < 1
    lines = [json.loads(line) for line in time_file.read_text().splitlines()]
    assert [line["end"] for line in lines if line["end"]] == ["failed", "done"]
    assert "goodput" in texts(tmp_path / "run")[-1]
    attempts = len(lines)
    Run(config).train()
    assert len(time_file.read_text().splitlines()) == attempts, "there was nothing to do"


@pytest.mark.parametrize(
    ("part", "system", "loader", "cause"),
    [
        ("compute", {}, {}, None),
        ("compute", {"gpu_throttled": "thermal"}, {}, "a GPU of its host is throttled by heat"),
        ("optimizer", {"gpu_throttled": "power"}, {}, "a GPU of its host is throttled (power)"),
        ("data", {}, {"computing": 3.0, "queued": 0.1, "blocked": 0.2}, "its loader computes"),
        ("data", {}, {"computing": 0.1, "queued": 3.0, "blocked": 0.2}, "its loader lacks a core"),
        ("data", {}, {"computing": 0.1, "queued": 0.1, "blocked": 0.2}, "its storage is slow"),
        ("data", {}, {"computing": 0.0, "queued": 0.0, "blocked": 0.0}, None),
        ("link", {}, {}, "its network link is slow"),
    ],
)
def test_causes_are_told_apart(
    part: str, system: dict[str, Any], loader: dict[str, float], cause: str | None
) -> None:
    found = cause_of(part, loader=loader, system=system)
    assert found == cause or (cause and found and found.startswith(cause))


def test_training_that_waits_for_data_says_why(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that waits for longer than a step takes."""
    real = Loader.step_batches

    def slow(self: Loader, first_sample: int) -> list[Batch]:
        time.sleep(0.1)
        return real(self, first_sample)

    monkeypatch.setattr(Loader, "step_batches", slow)
    monkeypatch.setattr(observer, "EVERY", 0.05)
    monkeypatch.setattr(observer, "STARVATION_EVERY", 1.0)
    Run(make_run('train.until="30 steps"', 'validate.every="100 steps"')).train()
    told = [text for text in texts(tmp_path / "run") if "training waits for data" in text]
    assert told and told[0].endswith("its storage is slow")


def test_a_loader_tells_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"monotonic": 100.0, "thread_time": 5.0, "queued": 1.0}
    fake = SimpleNamespace(
        monotonic=lambda: clock["monotonic"], thread_time=lambda: clock["thread_time"]
    )
    monkeypatch.setattr(loader, "time", fake)
    monkeypatch.setattr(loader, "_queued_seconds", lambda: clock["queued"])
    effort = LoaderEffort()
    for wall, computing, queued in ((10.0, 6.0, 3.0), (2.0, 1.5, 0.75)):
        with effort.measured():
            clock["monotonic"] += wall
            clock["thread_time"] += computing
            clock["queued"] += queued
    # Clocks that do not quite agree make nothing negative.
    assert effort.as_dict() == {"computing": 7.5, "queued": 3.75, "blocked": 1.0}


def test_heat_is_told_once(make_run: MakeRun, tmp_path: Path) -> None:
    config, told = make_run(), list[str]()
    folder = RunFolder(tmp_path / "hot")
    watching = RunObserver(config, folder, ProcessInfo(), gpus=1, stage=0, leads=True)
    tracker = Tracker([], clock=Progress)
    tracker.say = lambda text, *, level="info": told.append(f"{level}: {text}")  # type: ignore[method-assign]
    for celsius, throttled in ((70.0, None), (91.0, "thermal, power"), (92.0, "thermal")):
        sample = SystemSample(
            host="n1", gpus=1, gpu_celsius=celsius, gpu_mhz=1200.0, gpu_throttled=throttled
        )
        watching._record_systems([sample.as_dict()], tracker)
    assert told == ["warning: a GPU of n1 is throttled by heat: 91 °C, 1200 MHz"]


@pytest.mark.parametrize("variable", [JOB_BEGAN, "SLURM_JOB_START_TIME"])
def test_a_job_counts_from_its_submission(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """`gristmill launch` notes when it submitted a job, and the job when it began."""
    began = int(time.time()) - 30
    submitted = datetime.fromtimestamp(began - 600).astimezone().isoformat(timespec="seconds")
    monkeypatch.setenv(variable, str(began))
    config = make_run('train.until="2 steps"')
    RunFolder(tmp_path / "run").create()
    (tmp_path / "run" / "job").mkdir()
    write_record(tmp_path / "run" / "job", JobRecord("slurm", "17", [], submitted))
    Run(config).train()
    found = read_run_time(tmp_path / "run" / "time.jsonl")
    assert found is not None
    assert found.parts["queue"] == pytest.approx(600)
    assert found.parts["start"] > 29
    assert found.wall > 630


@pytest.mark.parametrize(
    "hook", [StopOnDamage, Validate, Sample, EvaluateTasks, CompareReplicas, Checkpoint]
)
def test_the_time_of_every_hook_has_a_name(hook: Any) -> None:
    """Else it would be counted as something that reports do not know."""
    account = WallAccount(None, began=time.time())
    account.phase(hook.phase)
    time.sleep(0.01)
    parts = account.parts()
    assert parts.keys() <= PARTS.keys() and len(parts.keys() - {"start", "compute"}) == 1
