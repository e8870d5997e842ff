"""Runs that go bad: what is judged, what is kept, what is skipped, and where a run goes back to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.layout import CheckpointFolder, step_of
from gristmill.checkpoint.state_file import read_state
from gristmill.cli.main import app
from gristmill.config.schema import GuardConfig, RunConfig
from gristmill.strategies.strategy import StepLimits
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, StepRecord
from gristmill.train.health import CALM, FEWEST, RobustSpread, RunHealth, StepOutcome
from gristmill.train.replay import replay_step
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]
BATCH = 4


def steps_of(folder: Path) -> list[int]:
    return [step_of(path) for path in CheckpointFolder(folder / "checkpoints").committed()]


def warnings_of(folder: Path) -> list[str]:
    records = read_metrics(folder / "metrics.jsonl")
    return [r.text for r in records if isinstance(r, EventRecord) and r.level == "warning"]


# ------------------------------------------------------------------ judging


def test_the_limit_follows_median_and_spread_and_hardly_a_single_outlier() -> None:
    spread = RobustSpread(window=100, threshold=6.0, fewest=FEWEST, factors=False)
    for number in range(FEWEST - 1):
        spread.add(3.0 + 0.01 * (number % 5 - 2))
    assert spread.limit == math.inf
    for number in range(50):
        spread.add(3.0 + 0.01 * (number % 5 - 2))
    before = spread.limit
    # Deviations are 0, 0.01 or 0.02: their median is 0.01; half a percent of 3 is more than that.
    assert before == pytest.approx(3.0 + 6 * max(1.4826 * 0.01, 0.005 * 3.0))
    spread.add(1e30)
    spread.add(math.nan)
    assert spread.limit == pytest.approx(before, abs=0.01)
    for _ in range(100):
        spread.add(5.0)
    assert spread.limit > 5.0  # a lasting change becomes the new normal


def test_norms_are_compared_by_factors() -> None:
    spread = RobustSpread(window=64, threshold=6.0, fewest=8, factors=True)
    for number in range(64):
        spread.add(2.0 ** (number % 5 - 2))
    # Deviations of 0, 1 or 2 octaves: their median is 1.
    assert spread.limit == pytest.approx(2.0 ** (6 * 1.4826))
    spread.add(0.0)
    assert len(spread.values) == 64 and min(spread.values) == 0.25


def judge(guard: GuardConfig | None = None, said: list[str] | None = None) -> RunHealth:
    return RunHealth(guard, lag=2, warn=[].append if said is None else said.append)


def feed(health: RunHealth, losses: list[float], *, first: int = 1) -> None:
    for step, loss in enumerate(losses, first):
        skipped = not math.isfinite(loss)
        health.observe(StepOutcome(step, (step - 1) * 8, step * 8, loss, 1.0, skipped))


GOOD = [3.0, 3.02, 2.98, 3.01, 2.99] * 8


def test_a_spike_begins_after_several_outliers_and_ends_when_the_loss_is_back() -> None:
    said: list[str] = []
    health = judge(said=said)
    feed(health, [*GOOD, 9.0, 9.0])
    assert health.spike is None
    feed(health, [9.0], first=43)
    assert health.good_before == 41 and "before step 41 are kept" in said[0]
    # Even if it lasts until it seems normal: the old level counts.
    feed(health, [9.0] * 500, first=44)
    assert health.good_before == 41
    feed(health, [3.0] * (CALM - 1), first=544)
    assert health.good_before == 41
    feed(health, [3.0], first=544 + CALM - 1)
    assert health.good_before is None and "recovered" in said[-1] and len(said) == 2


def test_one_outlier_is_not_a_spike_but_one_non_finite_step_is() -> None:
    health = judge()
    feed(health, [*GOOD, 9.0, 3.0, 9.0, 3.0, 9.0])
    assert health.spike is None
    feed(health, [math.nan], first=46)
    assert health.good_before == 45  # with the outlier before it
    assert (health.bad, health.non_finite) == (1, 1)
    feed(health, [3.0], first=47)
    assert (health.bad, health.non_finite) == (0, 0)


def test_an_overflow_of_fp16_is_not_bad() -> None:
    health = judge()
    feed(health, GOOD)
    for step in range(41, 60):
        health.observe(StepOutcome(step, 0, 8, 3.0, math.inf, skipped=True, overflow=True))
    assert (health.bad, health.non_finite, health.spike) == (0, 0, None)


def test_limits_apply_late_and_alike_however_far_results_were_read() -> None:
    """A process that has read more steps uses the same limits for a step."""
    slow, fast, falling = judge(), judge(), [3.0 - 0.02 * step for step in range(33)]
    feed(slow, falling[:30])
    feed(fast, falling[:32])
    assert slow.limits(33) == fast.limits(33) is not None
    feed(slow, falling[30:33], first=31)
    assert slow.limits(34) == fast.limits(34) != fast.limits(35)


def test_the_state_survives_as_json(tmp_path: Path) -> None:
    import json

    health = judge(GuardConfig(action="rollback", window=32))
    feed(health, [*GOOD, 9.0, math.nan, 9.0])
    again = judge(GuardConfig(action="rollback", window=32))
    again.load(json.loads(json.dumps(health.state(), allow_nan=False)))
    assert again.state() == health.state()
    assert again.rollback_at == 45
    for one in (health, again):
        feed(one, [3.0] * 5, first=44)
    assert again.state() == health.state()
    assert again.limits(49) == health.limits(49) != StepLimits(math.inf, math.inf)


def test_trouble_that_lasts_is_passed_over_in_growing_ranges() -> None:
    """Steps of 8 samples; what is passed over is not observed."""
    guard = GuardConfig(action="rollback", window=16)
    then = judge(guard)
    feed(then, [*GOOD, 9.0, 9.0, 9.0, 9.0, 9.0])
    back = then.roll_back(45 * 8)
    assert (back.step, back.begin, back.end, back.rollbacks) == (41, 39 * 8, 45 * 8, 1)
    again = judge(guard)
    feed(again, GOOD[:38])
    again.rolled_back(back, then)
    feed(again, [3.0], first=39)
    assert again.rollbacks == 1  # good steps before the range prove nothing
    feed(again, [9.0] * 5, first=46)
    back = again.roll_back(50 * 8)
    assert (back.step, back.begin, back.end) == (46, 45 * 8, 50 * 8 + 11 * 8)
    assert back.rollbacks == 2
    last = judge(guard)
    last.rolled_back(back, again)
    assert last.skipped_batches == [(39 * 8, 61 * 8)]
    feed(last, [3.0] * CALM, first=62)
    assert last.rollbacks == 0


# ------------------------------------------------------------------ a run that diverges

DIVERGES = ("optim.lr=1e9", 'schedule.type="constant"')


@pytest.mark.parametrize("until", [80, 20], ids=["many steps", "fewer than bad_steps"])
def test_a_diverging_run_keeps_its_good_checkpoints_and_fails(
    make_run: MakeRun, tmp_path: Path, until: int
) -> None:
    plain = ('data.split="100,0"', 'checkpoint.every="2 steps"')
    assert Run(make_run(*plain)).train().exit is Exit.DONE
    assert steps_of(tmp_path / "run") == [8, 10, 12]
    with pytest.raises(UserError, match="diverged since step 14") as caught:
        Run(make_run(*plain, *DIVERGES, f'train.until="{until} steps"')).train()
    assert caught.value.exit is Exit.DATA and "--from STEP" in str(caught.value)
    assert steps_of(tmp_path / "run") == [8, 10, 12]


def test_a_save_that_was_put_off_follows_the_first_good_step(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.strategies.spmd import Spmd

    real, calls = Spmd.accumulate, 0

    def accumulate(self: Spmd, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(self, *args)
        if calls in (3, 4):
            result.loss.fill_(math.nan)
        return result

    monkeypatch.setattr(Spmd, "accumulate", accumulate)
    Run(make_run('checkpoint.every="3 steps"', "checkpoint.keep=9")).train()
    assert steps_of(tmp_path / "run") == [5, 6, 8, 9, 12]
    assert "step 3: loss or gradient is not finite" in warnings_of(tmp_path / "run")[0]


def test_a_run_that_ends_worse_than_guessing_is_not_done(make_run: MakeRun, tmp_path: Path) -> None:
    """Finite all the time: SGD-like steps of a huge, clipped gradient."""
    plain = ('data.split="100,0"', 'checkpoint.every="10 steps"')
    Run(make_run(*plain, 'train.until="40 steps"')).train()
    wild = ("optim.lr=4.0", 'schedule.type="constant"', 'train.until="57 steps"')
    for _ in range(2):  # a run that is complete stays a failure
        with pytest.raises(UserError, match="guessing has"):
            Run(make_run(*plain, *wild)).train()
    assert steps_of(tmp_path / "run") == [20, 30, 40, 50, 57]


def test_a_polite_stop_in_a_bad_stretch_saves_and_counts_on(
    make_run: MakeRun, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    plain = ('data.split="100,0"', 'checkpoint.every="2 steps"', "train.bad_steps=20")
    Run(make_run(*plain)).train()
    wild = make_run(*plain, *DIVERGES, 'train.until="90 steps"')
    stop_after(10)
    assert Run(wild).train().exit is Exit.STOPPED
    assert steps_of(tmp_path / "run") == [8, 10, 12, 22]
    stop_after(10**9)
    with pytest.raises(UserError, match="20 steps in a row, up to step 33, were not finite"):
        Run(wild).train()


# ------------------------------------------------------------------ going back


def test_going_back_sets_aside_what_came_after(
    make_run: MakeRun, tmp_path: Path, runs: Runs
) -> None:
    Run(make_run(folder="whole")).train()
    Run(make_run("checkpoint.keep=9")).train()
    folder, before = tmp_path / "run", (tmp_path / "run" / "metrics.jsonl").read_text()
    for step in ("6", "step-00000003"):
        assert Run(make_run("checkpoint.keep=9")).train(start_from=step).exit is Exit.DONE
        runs.assert_same(tmp_path / "whole", folder)
    aside = folder / "set-aside" / "after-step-00000006"
    assert (aside / "metrics.jsonl").read_text() == before
    assert {path.name for path in aside.iterdir()} >= {"step-00000009", "step-00000012"}
    assert len(list((folder / "set-aside").iterdir())) == 2


def test_going_back_to_the_best(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run("checkpoint.keep=9")).train()
    best = CheckpointFolder(tmp_path / "run" / "checkpoints").best()
    assert best is not None
    Run(make_run("checkpoint.keep=9", 'train.until="14 steps"')).train(start_from="best")
    assert f"resuming from step-{best.step:08d}" in (tmp_path / "run" / "train.log").read_text()


def test_a_checkpoint_that_is_not_there_changes_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run()).train()
    for wrong in ("7", "worst", "-3", ""):
        with pytest.raises(UserError, match="there are checkpoints of steps 8, 9, 12"):
            Run(make_run()).train(start_from=wrong)
    (tmp_path / "run" / "checkpoints" / "step-00000009" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state\.json: has 2 bytes"):
        Run(make_run()).train(start_from="9")
    assert steps_of(tmp_path / "run") == [8, 9, 12]
    assert not (tmp_path / "run" / "set-aside").exists()
    with pytest.raises(UserError, match="there are no checkpoints"):
        Run(make_run(folder="new")).train(start_from="9")
    assert not (tmp_path / "new").exists()


# ------------------------------------------------------------------ poisoned batches


def guarded(make_run: MakeRun, tokens: Path, action: str, *more: str, folder: str) -> RunConfig:
    return make_run(
        f'data.paths="{tokens}"',
        'data.split="100,0"',
        'data.order="sequential"',
        'train.until="90 steps"',
        'checkpoint.every="10 steps"',
        'schedule.type="constant"',
        f'train.guard.action="{action}"',
        "train.guard.window=20",
        *more,
        folder=folder,
    )


def samples_of(*steps: int) -> str:
    return f"samples {(steps[0] - 1) * BATCH} to {steps[-1] * BATCH - 1}"


def state_of(folder: Path) -> dict[str, Any]:
    newest = CheckpointFolder(folder / "checkpoints").newest_intact().path
    assert newest is not None
    state: dict[str, Any] = read_state(newest)["health"]
    return state


def stop_and_go_on(config: RunConfig, stop_after: Callable[[int], None], every: int) -> None:
    """Stop a run after every so many steps until it is done."""
    for _ in range(60):
        stop_after(every)
        if Run(config).train().exit is Exit.DONE:
            return
    raise AssertionError("the run does not end")


def test_the_guard_skips_poisoned_batches(
    make_run: MakeRun,
    poisoned: Path,
    tmp_path: Path,
    runs: Runs,
    stop_after: Callable[[int], None],
) -> None:
    config = guarded(make_run, poisoned, "skip", folder="whole")
    assert Run(config).train().exit is Exit.DONE
    said = [line for line in warnings_of(tmp_path / "whole") if line.startswith("skipped step")]
    assert [line.split(":")[0] for line in said] == [
        f"skipped step {step}" for step in (41, 61, 62, 63, 64)
    ]
    assert samples_of(41) in said[0]
    assert state_of(tmp_path / "whole")["passed_over"] == [[160, 164], [240, 256]]
    records = [
        r for r in read_metrics(tmp_path / "whole/metrics.jsonl") if isinstance(r, StepRecord)
    ]
    assert records[-1].skipped == 5 and records[-1].nan == 0
    stop_and_go_on(guarded(make_run, poisoned, "skip", folder="parted"), stop_after, every=21)
    runs.assert_same(tmp_path / "whole", tmp_path / "parted")
    assert state_of(tmp_path / "whole") == state_of(tmp_path / "parted")


def test_the_guard_goes_back_and_passes_over_poisoned_batches(
    make_run: MakeRun,
    poisoned: Path,
    tmp_path: Path,
    runs: Runs,
    stop_after: Callable[[int], None],
) -> None:
    config = guarded(make_run, poisoned, "rollback", folder="whole")
    assert Run(config).train().exit is Exit.DONE
    folder = tmp_path / "whole"
    # Three in a row, steps 61 to 63, count from two steps later on, with the step before them.
    (said,) = [line for line in warnings_of(folder) if "went back" in line]
    assert "spiked at step 61" in said and samples_of(60, 65) in said
    assert "went back to step 50; what came after it is in set-aside/after-step-00000050" in said
    assert (folder / "set-aside" / "after-step-00000050" / "step-00000060").is_dir()
    assert state_of(folder)["passed_over"] == [[59 * BATCH, 65 * BATCH]]
    taken = [r.step for r in read_metrics(folder / "metrics.jsonl") if isinstance(r, StepRecord)]
    assert taken == [*range(1, 60), *range(66, 91)]
    # Some stops lie between the spike and the way back, and in the repeat.
    stop_and_go_on(guarded(make_run, poisoned, "rollback", folder="parted"), stop_after, every=21)
    runs.assert_same(folder, tmp_path / "parted")


def test_a_replay_passes_over_what_the_run_passed_over(
    make_run: MakeRun, poisoned: Path, tmp_path: Path
) -> None:
    """Which the checkpoint that the run went back to does not know."""
    config = guarded(make_run, poisoned, "rollback", "checkpoint.keep=9", folder="run")
    assert Run(config).train().exit is Exit.DONE
    again = replay_step(config, 68, progress=lambda number, done, start: None)
    assert again.start == 50 and list(again.first) == [*range(51, 60), 66, 67, 68]
    assert again.repeats and again.departs_at is None and 68 in again.recorded
    told = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "62"]).output
    assert "nothing to compare" in told


@pytest.mark.slow
def test_a_spike_before_the_first_checkpoint_and_too_many_rollbacks(
    make_run: MakeRun, poisoned: Path, tmp_path: Path
) -> None:
    late = guarded(make_run, poisoned, "rollback", 'checkpoint.every="80 steps"', folder="late")
    assert Run(late).train().exit is Exit.DONE
    assert any("no checkpoint from before step 60" in one for one in warnings_of(tmp_path / "late"))
    often = guarded(
        make_run,
        poisoned,
        "rollback",
        "train.guard.patience=1",
        "train.guard.rollbacks=1",
        folder="often",
    )
    with pytest.raises(UserError, match="went back 1 times in a row, which did not help"):
        Run(often).train()


def train_here(config: RunConfig) -> int:
    return int(Run(config).train().exit)


@pytest.mark.slow
def test_all_processes_go_back_together(
    crowd: Callable[..., list[Any]], make_run: MakeRun, poisoned: Path, tmp_path: Path
) -> None:
    config = guarded(make_run, poisoned, "rollback", "parallel.dp_shard=2", folder="run")
    assert crowd(2, train_here, config) == [0, 0]
    assert state_of(tmp_path / "run")["passed_over"] == [[236, 260]]
