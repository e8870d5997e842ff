"""A run whose batch grows: stopped and resumed, its records, and what is kept of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gristmill.base.errors import Exit
from gristmill.checkpoint.layout import CheckpointFolder, step_of
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StepRecord
from gristmill.train.run import Run
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker, build_tracker

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]

RAMP = ("train.batch=6", "train.ramp.start=2", "train.ramp.by=2", "train.ramp.over=14 samples")
"""Stages begin at samples 0, 7 and 14: the first edge lies inside the fourth step."""

BATCHES = [2, 2, 2, 2, 4, 4, 6, 6, 6, 6, 6, 6]


@pytest.fixture
def reserves(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that was asked to be left after each step."""
    asked: list[float] = []
    monkeypatch.setattr(StopRequest, "check_time", lambda self, *, reserve: asked.append(reserve))
    return asked


def steps_of(folder: Path) -> list[StepRecord]:
    return [r for r in read_metrics(folder / "metrics.jsonl") if isinstance(r, StepRecord)]


def words_of(folder: Path) -> str:
    records = read_metrics(folder / "metrics.jsonl")
    return "\n".join(record.text for record in records if isinstance(record, EventRecord))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["train.ramp.lr_power=0.5", "train.ramp.over=7 steps", "model.dropout=0.2"],
        ["train.until=1.2k tokens", 'data.order="megatron"', "train.micro_batch=1"],
        pytest.param(
            [
                'schedule.type="warmup-stable-decay"',
                "schedule.decay=8 steps",
                "train.ramp.over=0.3",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["samples", "steps", "tokens", "fraction"],
)
def test_stopped_and_resumed_around_the_edge_of_a_stage(
    make_run: MakeRun,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    settings: list[str],
    runs: Runs,
) -> None:
    words = [*RAMP, *settings]
    whole, parted = make_run(*words, folder="whole"), make_run(*words, folder="parted")
    assert Run(whole).train().exit is Exit.DONE
    for steps in (3, 1, 1, 2):
        stop_after(steps)
        assert Run(parted).train().exit is Exit.STOPPED
    stop_after(10**9)
    assert Run(parted).train().exit is Exit.DONE
    runs.assert_same(tmp_path / "whole", tmp_path / "parted")
    assert len({record.samples for record in steps_of(tmp_path / "whole")}) > 7


def test_the_records_count_growing_steps(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run(*RAMP)).train()
    steps = steps_of(tmp_path / "run")
    ends = [sum(BATCHES[: number + 1]) for number in range(12)]
    assert [record.samples for record in steps] == ends
    assert [record.tokens for record in steps] == [24 * end for end in ends]
    for record, batch in zip(steps, BATCHES, strict=True):
        assert record.tokens_per_second * record.step_seconds == pytest.approx(24 * batch)
    assert "batch 2 to 6 x 24 tokens in 1 to 3 micro-batches" in words_of(tmp_path / "run")


def test_a_batch_that_does_not_grow_is_told_as_before(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run("train.until=1 steps")).train()
    assert "batch 4 x 24 tokens, fp32" in words_of(tmp_path / "run")
    Run(make_run("train.until=1 steps", "train.accumulate=2", folder="two")).train()
    assert "batch 4 x 24 tokens in 2 micro-batches, fp32" in words_of(tmp_path / "two")


def test_another_micro_batch_goes_on_with_the_same_samples(
    make_run: MakeRun, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    Run(make_run(*RAMP, folder="whole")).train()
    stop_after(5)
    Run(make_run(*RAMP, folder="parted")).train()
    stop_after(10**9)
    Run(make_run(*RAMP, "train.micro_batch=1", folder="parted")).train()
    whole, parted = steps_of(tmp_path / "whole"), steps_of(tmp_path / "parted")
    assert [(r.step, r.samples, r.lr) for r in parted] == [(r.step, r.samples, r.lr) for r in whole]
    assert [r.loss for r in parted[:5]] == [r.loss for r in whole[:5]]
    assert [r.loss for r in parted] == pytest.approx([r.loss for r in whole], rel=1e-5)


def trained(config: RunConfig) -> None:
    Run(config).train()


@pytest.mark.slow
def test_two_processes_ramp_as_one_does(
    crowd: Callable[..., list[Any]], make_run: MakeRun, tmp_path: Path
) -> None:
    settings = (*RAMP, "train.micro_batch=1", "optim.eps=1e-4")
    Run(make_run(*settings, folder="one")).train()
    crowd(2, trained, make_run(*settings, "parallel.dp_shard=2", folder="two"))
    one, two = steps_of(tmp_path / "one"), steps_of(tmp_path / "two")
    assert [(r.step, r.samples, r.lr) for r in two] == [(r.step, r.samples, r.lr) for r in one]
    assert [later.samples - r.samples for r, later in itertools.pairwise(two)] == BATCHES[1:]
    assert [r.loss for r in two] == pytest.approx([r.loss for r in one], abs=2e-5)


@pytest.mark.parametrize(
    ("until", "steps"),
    [("12 steps", 12), ("52 samples", 12), ("47 samples", 12), ("46 samples", 11)],
)
def test_a_run_ends_at_its_horizon(
    make_run: MakeRun, tmp_path: Path, until: str, steps: int
) -> None:
    outcome = Run(make_run(*RAMP, f"train.until={until}")).train()
    assert outcome.step == steps
    assert f"step {steps}/{steps} |" in (tmp_path / "run" / "train.log").read_text()


def test_checkpoints_at_multiples_of_samples_are_kept(make_run: MakeRun, tmp_path: Path) -> None:
    Run(
        make_run(
            *RAMP,
            "checkpoint.every=1 steps",
            "checkpoint.keep=2",
            "checkpoint.keep_every=10 samples",
            "checkpoint.keep_best=false",
        )
    ).train()
    ends = [sum(BATCHES[:number]) for number in range(13)]
    expected = [step for step in range(1, 13) if ends[step] // 10 > ends[step - 1] // 10]
    kept = [step_of(path) for path in CheckpointFolder(tmp_path / "run/checkpoints").committed()]
    assert kept == sorted({*expected, 11, 12})


def test_time_is_left_for_the_larger_step_that_comes_next(
    make_run: MakeRun, tmp_path: Path, reserves: list[float]
) -> None:
    words = ("train.batch=40", "train.ramp.start=2", "train.ramp.by=38", "train.ramp.over=3 steps")
    Run(make_run(*words, "train.until=5 steps", "checkpoint.every=1k steps")).train()
    steps = steps_of(tmp_path / "run")
    assert reserves[1] == pytest.approx(2 * steps[1].step_seconds)
    assert reserves[2] == pytest.approx(2 * 20 * steps[2].step_seconds)
    assert reserves[3] == pytest.approx(2 * steps[3].step_seconds)


def test_the_time_left_is_counted_to_the_last_sample(
    make_run: MakeRun, stop_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from where the run goes on, if it had another batch before."""
    ends: list[int] = []

    def noted(*args: Any, samples: int, **settings: Any) -> Tracker:
        ends.append(samples)
        return build_tracker(*args, samples=samples, **settings)

    monkeypatch.setattr("gristmill.train.training.build_tracker", noted)
    stop_after(5)
    Run(make_run(*RAMP)).train()
    stop_after(2)
    Run(make_run(*RAMP)).train()
    Run(make_run("train.batch=3")).train()
    assert ends == [sum(BATCHES), sum(BATCHES), sum(BATCHES[:7]) + 5 * 3]
