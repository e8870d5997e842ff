"""Measuring a run's step: the figures agree with one another, and nothing stays behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.bench.measure import (
    IDLE,
    BenchResult,
    _compiled,
    measure_run,
    step_tables,
    write_random_tokens,
)
from gristmill.bench.trace import OpClass, OpTime, StepPhase, Trace
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.distributed.device import Device
from gristmill.distributed.world import World

RUN = """
name = "small"
folder = "{folder}/run"
[model]
layers = 1
heads = 2
width = 16
context = 16
vocab = 300
[data]
paths = "{folder}/tokens"
[train]
until = "4 steps"
batch = 4
accumulate = 2
[runtime]
device = "cpu"
threads = 1
"""


@pytest.mark.parametrize(
    ("words", "device", "expected"),
    [
        ((), "cpu", (None, False)),
        ((), "cuda", ("blocks", False)),
        (("train.accumulate=1",), "cuda", ("blocks", True)),
        (('train.until="1T tokens"', "train.accumulate=1"), "cuda", ("model", True)),
        (("data.documents=masked", 'train.until="1T tokens"'), "cuda", ("blocks", False)),
        (("runtime.compile=true",), "cpu", ("model", False)),
        (("runtime.compile=blocks",), "cpu", ("blocks", False)),
        (("runtime.compile=false",), "cuda", (None, False)),
    ],
)
def test_what_is_compiled(words: tuple[str, ...], device: str, expected: object) -> None:
    words = (*words, 'precision.compute="fp32"')
    config, chosen = run_at(Path("x"), *words), Device(torch.device(device))
    chosen.__dict__["name"] = "NVIDIA H200"  # no test has one
    assert _compiled(config, World(chosen), resolve(config, vocab=257)) == expected


def run_at(folder: Path, *settings: str) -> RunConfig:
    return load_text(RUN.format(folder=folder), settings, place="test")


def contents(folder: Path) -> dict[Path, int]:
    """Every file with its time of change; torch may make empty folders for its caches."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_real_step_is_measured_and_nothing_stays(tmp_path: Path, temporary: Path) -> None:
    write_random_tokens(tmp_path / "tokens", vocabulary=300, tokens=5000)
    before = contents(tmp_path)
    found = measure_run(run_at(tmp_path), steps=3, warm_up=2)
    assert contents(tmp_path) == before
    assert not list(temporary.glob("gristmill-*"))
    check_agreement(found)
    assert not found.subject.random_tokens
    assert (found.subject.batch, found.subject.micro_batch, found.subject.sequence) == (4, 2, 16)


def check_agreement(found: BenchResult) -> None:
    speed = found.speed
    assert speed.steps == 3
    assert 0 < speed.fastest <= speed.milliseconds <= speed.slowest
    tokens = found.subject.batch * found.subject.sequence
    assert speed.tokens_per_second == pytest.approx(1000 * tokens / speed.milliseconds)
    assert speed.tflops > speed.tflops_causal > 0
    stages = {row.stage: row for row in found.stages}
    assert set(StepPhase) - {StepPhase.OTHER} <= set(stages)
    assert sum(row.milliseconds for row in found.stages) == pytest.approx(speed.milliseconds)
    assert sum(row.share for row in found.stages) == pytest.approx(1)
    for stage in (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.UPDATE):
        inside = sum(row.milliseconds for row in found.parts if row.stage == stage)
        assert inside == pytest.approx(stages[stage].milliseconds, rel=1e-3)
    kinds = {(row.stage, row.part) for row in found.parts}
    assert (StepPhase.FORWARD, OpClass.MATRIX) in kinds
    assert (StepPhase.BACKWARD, OpClass.MATRIX) in kinds
    assert (StepPhase.FORWARD, OpClass.ATTENTION) in kinds
    assert (StepPhase.FORWARD, OpClass.HEAD) in kinds
    assert (StepPhase.UPDATE, OpClass.OPTIMIZER) in kinds
    assert len(found.kernels) == 10


@pytest.mark.parametrize("order", ["shuffled", "megatron"])
def test_random_tokens_stand_in_for_token_files(
    tmp_path: Path, temporary: Path, order: str
) -> None:
    config = run_at(tmp_path, f"data.order={order}", "train.until=1T tokens")
    found = measure_run(config, steps=2, warm_up=1, random_tokens=True)
    assert found.subject.random_tokens
    assert found.subject.vocabulary == 300
    assert not contents(tmp_path)
    assert not list(temporary.glob("gristmill-*"))


def test_a_batch_that_grows_is_measured_at_its_full_size(tmp_path: Path, temporary: Path) -> None:
    ramp = "train.ramp={start = 2, by = 2, over = '2 steps'}"
    found = measure_run(run_at(tmp_path, ramp), steps=2, warm_up=1, random_tokens=True)
    tokens = 4 * 16
    assert found.speed.tokens_per_second == pytest.approx(1000 * tokens / found.speed.milliseconds)


def test_all_missing_token_files_are_named_with_the_way_out(tmp_path: Path) -> None:
    paths = f'data.paths=["{tmp_path}/one", "{tmp_path}/two"]'
    with pytest.raises(UserError) as caught:
        measure_run(run_at(tmp_path, paths))
    assert caught.value.exit is Exit.DATA
    assert [Path(problem.where or "").name for problem in caught.value.problems] == ["one", "two"]
    assert all("--random-tokens" in (one.remedy or "") for one in caught.value.problems)


OPS = (
    OpTime("nvjet", StepPhase.FORWARD, OpClass.MATRIX, 0.010),
    OpTime("nvjet", StepPhase.FORWARD, OpClass.HEAD, 0.004),
    OpTime("nvjet", StepPhase.BACKWARD, OpClass.MATRIX, 0.020),
    OpTime("multi_tensor_apply_kernel", StepPhase.UPDATE, OpClass.OPTIMIZER, 0.006),
)


def test_a_run_that_needs_several_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tp 2 asks for a multiple of 2 processes, and there is 1"):
        measure_run(run_at(tmp_path, "parallel.tp=2"))


def test_what_kernels_leave_of_a_gpus_step_is_idle_time() -> None:
    trace = Trace(OPS, {StepPhase.FORWARD: 0.03, StepPhase.DATA: 0.001}, seconds=0.08)
    tables = step_tables(trace, step=0.025, on_gpu=True, profiled=2)
    assert {row.stage: row.milliseconds for row in tables.stages} == pytest.approx(
        {StepPhase.FORWARD: 7, StepPhase.BACKWARD: 10, StepPhase.UPDATE: 3, IDLE: 5}
    )
    assert sum(row.share for row in tables.stages) == pytest.approx(1)
    assert [(kernel.name, kernel.part) for kernel in tables.kernels] == [
        ("nvjet", OpClass.MATRIX),
        ("multi_tensor_apply_kernel", OpClass.OPTIMIZER),
        ("nvjet", OpClass.HEAD),
    ]
    assert {row.stage: row.milliseconds for row in tables.host} == pytest.approx(
        {StepPhase.FORWARD: 15, StepPhase.DATA: 0.5}
    )


def test_kernels_that_fill_more_than_the_step_leave_no_idle_time() -> None:
    trace = Trace(OPS, {StepPhase.FORWARD: 0.03}, seconds=0.08)
    tables = step_tables(trace, step=0.019, on_gpu=True, profiled=2)
    idle = next(row for row in tables.stages if row.stage == IDLE)
    assert idle.milliseconds == pytest.approx(0)
    assert sum(row.milliseconds for row in tables.stages) == pytest.approx(20)


def test_a_worker_is_measured_without_its_exchanges(tmp_path: Path) -> None:
    """Even if the run file names nodes that one process cannot be."""
    words = ("alternating-exp-ring", "4")
    names = ("parallel.gossip.topology", "parallel.gossip.workers_per_node")
    settings = [f"{name}={word}" for name, word in zip(names, words, strict=True)]
    config = run_at(tmp_path, *settings, "parallel.exchange.send=int8")
    found = measure_run(config, steps=2, warm_up=1, random_tokens=True)
    assert found.speed.tokens_per_second > 0
