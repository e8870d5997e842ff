"""Runs of several processes that stop and go on: on the same layout to the bit, on any other within
rounding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from layout_cases import (
    EXACT,
    KFAC,
    RESUMED,
    SOAP,
    all_go_on,
    exact_pairs,
    go_on,
    parallel_words,
    wholes_and_halves,
)

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.config.schema import RunConfig
from gristmill.strategies.spmd import Spmd
from gristmill.strategies.strategy import StepResult
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

Crowd = Callable[..., list[Any]]
MakeRun = Callable[..., RunConfig]

LAYOUTS = [
    (1, ""),
    (2, "dp_shard=2"),
    (2, "tp=2"),
    (4, "pp=2 dp_replicate=2"),
    (2, "cp=2"),
    (4, "dp_shard=2 tp=2"),
    (1, ""),
    (2, 'pp=2 schedule="interleaved"'),
    (2, ""),
    (1, ""),
]


def settings_with(optimizer: str, *, steps: int) -> list[str]:
    own = {
        "adamw": ("model.tie_head=true",),
        "muon": ('optim.type="muon"', 'optim.normalise="neurons"', "model.tie_head=false"),
        "accum": ('optim.type="accum-adamw"', "optim.accum=2", "optim.eps=1e-4"),
        "soap": SOAP,
        "kfac": (*KFAC, "optim.preconditioner.damping=0.1", "optim.eps=1e-4"),
    }[optimizer]
    usual = [word for word in RESUMED if optimizer == "adamw" or "eps" not in word]
    return [*usual, *own, f'train.until="{steps} steps"', 'validate.every="1 steps"']


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("muon", "accum", "kfac", "soap")),
    ],
)
def test_a_run_moves_from_layout_to_layout(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs, optimizer: str
) -> None:
    """Each layout makes one step more; Muon's moments are whole where its matrices are divided."""
    settings = settings_with(optimizer, steps=10)
    Run(make_run(*settings, folder="whole")).train()
    known = {"adamw": LAYOUTS, "muon": LAYOUTS[1:6], "accum": LAYOUTS[1:4]}
    chosen = known.get(optimizer, LAYOUTS[:6])
    for processes, layout in chosen:
        config = make_run(*settings, *parallel_words(layout), folder="moving")
        if processes == 1:
            go_on(config, 1)
        else:
            answers = crowd(processes, go_on, config, 1)
            assert set(answers) <= {int(Exit.STOPPED), int(Exit.DONE)}
    whole, moving = (
        [line for line in runs.history(tmp_path / name) if line["kind"] in ("step", "validation")]
        for name in ("whole", "moving")
    )
    done = len(moving)
    assert done >= 2 * len(chosen)
    for one, other in zip(whole[:done], moving, strict=True):
        assert one["step"] == other["step"] and one["samples"] == other["samples"]
        assert other["loss"] == pytest.approx(one["loss"], abs=2e-5)


MATRIX = {
    "alone": (1, ""),
    "copies": (2, ""),
    "shares": (2, "dp_shard=2"),
    "shares, gradients whole": (2, 'dp_shard=2 keep="gradients"'),
    "tensor": (2, "tp=2"),
    "ring": (2, "cp=2"),
    "heads": (2, 'cp=2 attention="heads"'),
    "gpipe": (2, 'pp=2 schedule="gpipe"'),
    "interleaved": (2, 'pp=2 schedule="interleaved"'),
    "zero-bubble": (2, 'pp=2 schedule="zero-bubble"'),
    "copies of shares": (4, "dp_replicate=2 dp_shard=2"),
    "pipeline and tensor": (4, "pp=2 tp=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_written_under_any_layout_and_read_under_any(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs, optimizer: str
) -> None:
    """Two steps and a checkpoint under each layout, or three where all have to hear of the stop
    first; from each of these, the rest of four under each."""
    settings = settings_with(optimizer, steps=4)

    def train(layout: str, folders: list[str], stop_at: int | None, exit: Exit) -> None:
        processes, text = MATRIX[layout]
        configs = [make_run(*settings, *parallel_words(text), folder=folder) for folder in folders]
        if processes == 1:
            answers = [all_go_on(configs, stop_at)]
        else:
            answers = crowd(processes, all_go_on, configs, stop_at)
        assert answers == [[int(exit)] * len(folders)] * processes

    train("alone", ["whole"], None, Exit.DONE)
    for one in MATRIX:
        train(one, [f"from {one}"], 2, Exit.STOPPED)
    for other in MATRIX:
        folders = [f"from {one} to {other}" for one in MATRIX]
        for one, folder in zip(MATRIX, folders, strict=True):
            shutil.copytree(tmp_path / f"from {one}", tmp_path / folder)
        train(other, folders, None, Exit.DONE)
        for folder in folders:
            for expected, found in zip(
                runs.history(tmp_path / "whole"), runs.history(tmp_path / folder), strict=True
            ):
                assert found["kind"] == expected["kind"] and found["step"] == expected["step"]
                if "loss" in expected:
                    assert found["loss"] == pytest.approx(expected["loss"], abs=2e-5), folder
            shutil.rmtree(tmp_path / folder)


@pytest.mark.parametrize(
    "group",
    [pytest.param(one, marks=[pytest.mark.slow] if "other" in one else []) for one in EXACT],
)
def test_the_same_layout_goes_on_to_the_bit(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, runs: Runs, group: str
) -> None:
    layouts, processes = EXACT[group], int(group[0])
    pairs = exact_pairs(make_run, layouts)
    answers = crowd(processes, wholes_and_halves, pairs)
    stopped = [int(Exit.STOPPED)] * len(layouts)
    assert answers == [stopped] * processes, "one process was asked, and all stopped"
    crowd(processes, all_go_on, [half for _, half in pairs], None)
    for name in layouts:
        halves = tmp_path / f"{name}, halves"
        assert stored_steps(halves) == [3, 5], name
        runs.assert_same(tmp_path / f"{name}, whole", halves)


def stored_steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in CheckpointFolder(folder / "checkpoints").committed()]


def refused(config: RunConfig) -> str:
    try:
        Run(config).train()
    except UserError as error:
        return str(error)
    return "nothing"


def test_what_one_process_cannot_have_is_refused_by_all(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path
) -> None:
    config = make_run(*RESUMED)
    from gristmill.base.locks import FolderLock

    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    answers = crowd(2, refused, config)
    lock.release()
    assert answers[0] == answers[1]
    assert "rank 0" in answers[0] and "in use by process" in answers[0]


def test_a_mesh_that_does_not_fit_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match="tp 2 asks for a multiple of 2 processes, and there is 1"):
        Run(make_run("parallel.tp=2")).train()


def test_another_layout_of_as_many_processes_is_said_to_round_otherwise(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path
) -> None:
    settings = (*RESUMED, "model.layers=2", 'validate.every="6 steps"')
    for layout in ("tp=2", "tp=2", "pp=2"):
        config = make_run(*settings, *parallel_words(layout))
        crowd(2, go_on, config, 1)
    said = warnings_of(tmp_path / "run")
    assert [one for one in said if one.endswith("within rounding")] == [
        "layout was tp 2 and is now pp 2: losses agree only within rounding"
    ]
    assert "changed: parallel.tp from 2 to 1" in said


def warnings_of(folder: Path) -> list[str]:
    records = read_metrics(folder / "metrics.jsonl")
    return [r.text for r in records if isinstance(r, EventRecord) and r.level == "warning"]


def stop_without_a_collective(config: RunConfig) -> list[int]:
    """A strategy whose processes agree on the last step in a way of their own."""
    real = Spmd.update

    def update(self: Spmd, result: StepResult, **unused: Any) -> StepResult:
        return replace(real(self, result), signals=None, stop_step=5)

    Spmd.update = update  # type: ignore[method-assign]
    try:
        outcome = Run(config).train()
        return [int(outcome.exit), outcome.step]
    finally:
        Spmd.update = real  # type: ignore[method-assign]


def test_a_strategy_may_agree_on_a_stop_in_its_own_way(crowd: Crowd, make_run: MakeRun) -> None:
    config = make_run(*RESUMED)
    assert crowd(2, stop_without_a_collective, config) == [[Exit.STOPPED, 5]] * 2
