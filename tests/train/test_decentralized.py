"""Whole runs of workers with weights of their own: they stop together, resume to the bit, and go on
from their average with other workers."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gristmill.base.errors import Exit
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.model import open_model, open_stored
from gristmill.checkpoint.state_file import read_state
from gristmill.checkpoint.tensorfile import open_tensors
from gristmill.config.schema import RunConfig
from gristmill.evaluate.loss import evaluate_loss, evaluation_ids
from gristmill.export.folder import export
from gristmill.generate.sampling import Sampling
from gristmill.generate.text import TextGenerator
from gristmill.strategies.decentralized.outer import Exchange
from gristmill.strategies.decentralized.workers import StopAgreement
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StepRecord, ValidationRecord
from gristmill.train.run import Run
from gristmill.train.stop import StopRequest
from gristmill.train.training import Outcome

if TYPE_CHECKING:
    from conftest import Runs

Crowd = Callable[..., list[Any]]
MakeRun = Callable[..., RunConfig]

SETTINGS = (
    'train.until="14 steps"',
    "train.batch=4",
    "model.context=16",
    "optim.lr=1e-3",
    'validate.every="4 steps"',
    'checkpoint.every="100 steps"',
    "checkpoint.keep_best=false",
    'parallel.timeout="60s"',
)
ASKED, LATEST = 4, 13
"""The step in which one process is asked to stop, and the last one that may then be taken."""


def train_all(runs: list[tuple[RunConfig, int | None]]) -> list[tuple[int, int]]:
    """One run after the other in the same processes, and how each ended; in some of them one
    process is asked to stop."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gristmill.train.run.close_run_world", lambda world: None)
        outcomes = [train_one(config, asked) for config, asked in runs]
    return [(int(outcome.exit), outcome.step) for outcome in outcomes]


def train_one(config: RunConfig, asked: int | None) -> Outcome:
    rank, step, agreements = int(os.environ.get("RANK", 0)), 0, list[StopAgreement]()
    begin = StopAgreement.start

    def start(self: StopAgreement, step: int) -> None:
        self.interval = 0.01
        agreements.append(self)
        begin(self, step)

    def check(self: StopRequest, *, reserve: float) -> None:
        nonlocal step
        step += 1
        if asked != rank:
            return
        if step == ASKED:
            self.reason = "the test"
        # Steps are so quick that the run would be over before the others have heard.
        while step == ASKED + 1 and not agreements[-1]._holding:
            time.sleep(0.005)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StopAgreement, "start", start)
        patched.setattr(StopRequest, "check_time", check)
        return Run(config).train()


CASES = {
    "ring, accumulated moments": (
        4,
        'gossip.topology="ring" /optim.type="accum-adamw" /optim.accum=3',
    ),
    "DiLoCo, int8, used later": (
        3,
        'local.every="4 steps" exchange.send="int8" exchange.delay=3 /train.batch=6 '
        '/validate.every="7 steps"',
    ),
    "top-k between sharded workers": (
        4,
        'local.every="2 steps" exchange.send="top-k" exchange.density=0.1 dp_shard=2 '
        "/model.dropout=0.2",
    ),
    "evaluation keeps the average": (4, 'local.every="3 steps" exchange.average="keep"'),
    "float16": (4, 'gossip.topology="random" /precision.compute="fp16"'),
}


def words(text: str) -> list[str]:
    """Settings; those that begin with a slash are not in [parallel]."""
    text = text.replace(" steps", "_steps")
    return [
        (word[1:] if word[0] == "/" else f"parallel.{word}").replace("_steps", " steps")
        for word in text.split()
    ]


SLOW = ("evaluation keeps the average", "float16")
"""Without instructions for it, a CPU computes in fp16 very slowly."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
)
def test_one_is_asked_and_all_stop_and_resume_to_the_bit(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs, case: str
) -> None:
    workers, text = CASES[case]
    whole, halves = (
        make_run(*SETTINGS, *words(text), folder=folder) for folder in ("whole", "halves")
    )
    plan = [(whole, None), (halves, workers - 1), (halves, None)]
    answers = crowd(workers, train_all, plan)
    assert answers == [answers[0]] * workers
    done = (int(Exit.DONE), 14)
    assert [answers[0][0], answers[0][2]] == [done, done]
    exit, step = answers[0][1]
    assert exit == Exit.STOPPED and ASKED < step <= LATEST
    runs.assert_same(tmp_path / "whole", tmp_path / "halves")
    assert any(name.startswith("strategy:worker-1/") for name in runs.tensors(tmp_path / "whole"))


# ------------------------------------------------------------------ a worker is killed


def train_until_killed(config: RunConfig, victim: int, step: int) -> str:
    """Train; one process is killed after a step."""
    seen, rank = 0, int(os.environ["RANK"])

    def check(self: StopRequest, *, reserve: float) -> None:
        nonlocal seen
        seen += 1
        if (rank, seen) == (victim, step):
            os.kill(os.getpid(), signal.SIGKILL)

    StopRequest.check_time = check  # type: ignore[method-assign]
    Run(config).train()
    return "done"


def test_a_worker_is_killed_and_the_same_command_resumes_to_the_bit(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    settings = (
        *SETTINGS,
        'parallel.local.every="3 steps"',
        "parallel.exchange.delay=2",
        'checkpoint.every="4 steps"',
        "checkpoint.background=false",
        'parallel.timeout="20s"',
        "train.batch=6",
    )
    whole, killed = (make_run(*settings, folder=folder) for folder in ("whole", "killed"))
    with pytest.raises(AssertionError, match="rank 1: ended without a word"):
        crowd(3, train_until_killed, killed, 1, 6)
    assert stored_steps(tmp_path / "killed") == [4]
    crowd(3, train_all, [(whole, None), (killed, None)])
    runs.assert_same(tmp_path / "whole", tmp_path / "killed")


def stored_steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in CheckpointFolder(folder / "checkpoints").committed()]


def warnings_of(folder: Path) -> list[str]:
    records = read_metrics(folder / "metrics.jsonl")
    return [r.text for r in records if isinstance(r, EventRecord) and r.level == "warning"]


# ------------------------------------------------------------------ the average of all


def newest(folder: Path) -> Path:
    path = CheckpointFolder(folder / "checkpoints").newest_intact().path
    assert path is not None
    return path


def losses(folder: Path, kind: type[StepRecord] | type[ValidationRecord]) -> dict[int, float]:
    records = read_metrics(folder / "metrics.jsonl")
    return {one.step: one.loss for one in records if isinstance(one, kind)}


def count_averages(configs: list[RunConfig]) -> list[int]:
    """One run after the other, and how often each averaged its workers."""
    real, counts = Exchange.average, list[int]()

    def average(self: Exchange, weights: Any, **options: Any) -> Any:
        counts[-1] += 1
        return real(self, weights, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Exchange, "average", average)
        patched.setattr("gristmill.train.run.close_run_world", lambda world: None)
        for config in configs:
            counts.append(0)
            Run(config).train()
    return counts


@pytest.mark.slow
def test_a_train_loss_changes_nothing(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    """The average that is kept is not averaged again, which would round it."""
    settings = (
        *SETTINGS,
        'train.until="6 steps"',
        "train.batch=6",
        'validate.every="3 steps"',
        "parallel.gossip.topology=complete",
        "parallel.exchange.average=keep",
    )
    plain = make_run(*settings, folder="plain")
    both = make_run(*settings, "validate.train_windows=5", folder="both")
    for counts in crowd(3, count_averages, [plain, both]):
        assert counts[0] == counts[1] > 0
    left, right = runs.tensors(tmp_path / "plain"), runs.tensors(tmp_path / "both")
    assert all(torch.equal(left[name], right[name]) for name in left)
    records = [
        [one for one in read_metrics(tmp_path / name / "metrics.jsonl")
         if isinstance(one, ValidationRecord)]
        for name in ("plain", "both")
    ]  # fmt: skip
    for one, other in zip(*records, strict=True):
        assert one.train_loss is None and other.train_loss is not None
        assert one.consensus_distance == other.consensus_distance
        assert one.loss == other.loss != other.train_loss


def test_the_model_of_a_run_is_the_average_of_its_workers(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, rewrite_bytes: Callable[[Path], None]
) -> None:
    """What is saved, and what other workers, or none, go on from."""
    gossip = ("parallel.gossip.topology=ring", "optim.type=accum-adamw", "optim.accum=2")
    settings = (*SETTINGS, 'checkpoint.every="2 steps"', 'validate.every="3 steps"')
    short = make_run(*settings, *gossip, 'train.until="6 steps"')
    assert crowd(4, train_all, [(short, None)]) == [[(Exit.DONE, 6)]] * 4
    folder = tmp_path / "run"
    path = newest(folder)
    model, own = open_tensors(path), open_tensors(path, "strategy")
    for name in model.shapes:
        weights = [own.read_exact(f"worker-{worker}/weights/{name}") for worker in range(4)]
        mean = torch.stack(weights).double().mean(0)
        torch.testing.assert_close(model.read_exact(name).double(), mean, rtol=0, atol=3e-7)
        assert not torch.equal(weights[0], weights[3])
    # What reads a checkpoint takes the average, and measures what the run measured on it.
    loaded = open_model(str(folder), device=torch.device("cpu"))
    for name, value in loaded.model.named_parameters():
        assert torch.equal(value[: len(model.read_exact(name))], model.read_exact(name))
    ids = evaluation_ids(loaded, data=None, text=None).ids
    measured = losses(folder, ValidationRecord)[6]
    assert evaluate_loss(loaded, ids).loss == pytest.approx(measured, abs=0.05)
    generator = TextGenerator(loaded.model, loaded.tokenizer)
    assert any(generator.texts("the ", tokens=9, sampling=Sampling(seed=1), samples=8))
    assert export(open_stored(str(folder)), tmp_path / "hf").agreement is not None
    # Damage of one worker's own state makes the whole checkpoint unusable, not the run.
    rewrite_bytes(path / "strategy-00003-of-00004.safetensors")
    for other in ("two", "alone"):
        shutil.copytree(folder, tmp_path / other)
    two = make_run(*settings, *gossip, 'train.until="8 steps"', folder="two")
    assert crowd(2, train_all, [(two, None)]) == [[(Exit.DONE, 8)]] * 2
    plain = make_run(*settings, *gossip[1:], 'train.until="8 steps"', folder="alone")
    assert Run(plain).train().exit is Exit.DONE
    for other in ("two", "alone"):
        told = warnings_of(tmp_path / other)
        assert any(one.startswith("skipped damaged checkpoint step-00000006") for one in told)
        assert not any("within rounding" in one for one in told)
        # Validation does not depend on how many share it; at step 0 all have the same weights.
        assert losses(tmp_path / other, ValidationRecord)[0] == losses(folder, ValidationRecord)[0]
    kept = "the checkpoint holds 4 workers with weights of their own"
    start = "all start from the average, each with the optimizer state of one of the old workers"
    assert f"{kept}, and now there are 2; {start}" in warnings_of(tmp_path / "two")
    then = "the run goes on from their average, with the optimizer state of worker 0"
    assert f"{kept}; {then}" in warnings_of(tmp_path / "alone")
    again = make_run(*settings, *gossip, 'train.until="10 steps"', folder="alone")
    assert crowd(2, train_all, [(again, None)]) == [[(Exit.DONE, 10)]] * 2
    same = "the checkpoint is of a run whose processes had the same weights; all 2 workers start"
    assert f"{same} from them" in warnings_of(tmp_path / "alone")
    assert losses(tmp_path / "alone", StepRecord).keys() == set(range(1, 11))


@pytest.fixture
def rewrite_bytes() -> Callable[[Path], None]:
    """Damage a file: another byte at its end."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    return damage


# ------------------------------------------------------------------ every worker judges its steps


@pytest.mark.slow
def test_workers_skip_after_a_resume_what_they_would_have_skipped(
    crowd: Crowd, make_run: MakeRun, poisoned: Path, tmp_path: Path, runs: Runs
) -> None:
    settings = (
        f'data.paths="{poisoned}"',
        'data.split="100,0"',
        'data.order="sequential"',
        'train.until="66 steps"',
        'checkpoint.every="1000 steps"',
        'schedule.type="constant"',
        "schedule.warmup=0",
        'train.guard.action="skip"',
        "train.guard.window=20",
        "parallel.gossip.topology=ring",
    )
    whole = make_run(*settings, folder="whole")
    halves = make_run(*settings, folder="halves")
    until = make_run(*settings, 'train.until="50 steps"', folder="halves")
    crowd(4, train_all, [(whole, None), (until, None), (halves, None)])
    runs.assert_same(tmp_path / "whole", tmp_path / "halves")
    kept, other = (read_state(newest(tmp_path / name))["health"] for name in ("whole", "halves"))
    assert kept == other and kept.keys() == {"0", "1", "2", "3"}
    assert kept["0"]["losses"] != kept["1"]["losses"]
    for one in kept.values():
        assert {160, 240} <= {begin for begin, _ in one["passed_over"]}, "steps 41 and 61 are noise"
