"""What a run file leaves to the device: what is chosen, and that a run keeps it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable

import pytest
import torch

from gristmill import Run
from gristmill.base.errors import UserError
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.distributed.device import Device
from gristmill.plan.explain import MeasuredMemory, Situation
from gristmill.strategies.spmd import SequentialMicroBatches
from gristmill.track.records import StepRecord

MakeRun = Callable[..., RunConfig]
OPEN = ("train.batch=8", "train.micro_batch=unset", "train.accumulate=unset")
SHORT = 'train.until="3 steps"'


def kept(run: Run, table: str, name: str) -> object:
    return tomllib.loads((run.folder / "run.toml").read_text())[table].get(name)


def first_line(run: Run) -> str:
    return (run.folder / "train.log").read_text().splitlines()[0]


def losses(run: Run) -> list[float]:
    return [record.loss for record in run.records() if isinstance(record, StepRecord)]


@pytest.fixture
def has_bf16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the device compute with bf16, or not."""

    def arrange(yes: bool) -> None:
        monkeypatch.setattr(Device, "has_bf16", property(lambda self: yes))

    return arrange


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunConfig, int], None]:
    """Give the device what a run with a micro-batch needs, and no more."""

    def arrange(config: RunConfig, micro_batch: int) -> None:
        train = config.train.model_copy(update={"micro_batch": micro_batch, "batch": 8})
        part = config.model_copy(update={"train": train})
        needs = Situation(part, Mesh(), 257, "cpu").plan().total
        memory = MeasuredMemory(needs + 1, peak=needs)
        monkeypatch.setattr(Device, "measured_memory", lambda self, processes=1: memory)

    return arrange


# ------------------------------------------------------------------ the number format


def test_on_a_cpu_it_is_fp32(make_run: MakeRun) -> None:
    run = Run(make_run(SHORT))
    assert run.config.precision.compute == "auto"
    run.train()
    assert ", fp32 on " in first_line(run)
    assert kept(run, "precision", "compute") == "fp32"


def test_where_the_device_has_bf16_it_is_that(
    make_run: MakeRun, has_bf16: Callable[[bool], None]
) -> None:
    has_bf16(True)
    chosen, written = (
        Run(make_run(SHORT, *words, folder=folder))
        for words, folder in (((), "chosen"), (('precision.compute="bf16"',), "written"))
    )
    for run in (chosen, written):
        run.train()
        assert ", bf16 on " in first_line(run)
        assert kept(run, "precision", "compute") == "bf16"
    assert losses(chosen) == losses(written)


def test_a_run_keeps_its_format_on_another_device(
    make_run: MakeRun, has_bf16: Callable[[bool], None]
) -> None:
    has_bf16(True)
    whole, parted = Run(make_run(folder="whole")), Run(make_run(folder="parted"))
    whole.train()
    Run(make_run('train.exit_every="2 steps"', folder="parted")).train()
    has_bf16(False)
    parted.train()
    assert losses(parted) == losses(whole)
    log = (parted.folder / "train.log").read_text()
    assert "precision.compute" not in log
    assert parted.replay(12).differences == []


def test_what_is_written_counts_more_than_what_was_kept(
    make_run: MakeRun, has_bf16: Callable[[bool], None]
) -> None:
    has_bf16(True)
    Run(make_run('train.exit_every="2 steps"')).train()
    run = Run(make_run('precision.compute="fp32"'))
    run.train()
    assert kept(run, "precision", "compute") == "fp32"
    log = (run.folder / "train.log").read_text()
    assert "precision.compute from 'bf16' to 'fp32'" in log


def test_a_damaged_run_file_in_the_folder_says_nothing(make_run: MakeRun) -> None:
    run = Run(make_run('train.exit_every="2 steps"'))
    run.train()
    (run.folder / "run.toml").write_text("precision = ")
    assert Run(make_run()).train().step > 2


# ------------------------------------------------------------------ the micro-batch


def test_the_whole_batch_is_one_micro_batch_if_it_fits(make_run: MakeRun) -> None:
    run = Run(make_run(SHORT, *OPEN))
    run.train()
    assert kept(run, "train", "micro_batch") is None
    assert "micro-batches" not in first_line(run)


def test_a_micro_batch_that_is_left_open_fits(
    make_run: MakeRun, with_memory: Callable[[RunConfig, int], None]
) -> None:
    whole = Run(make_run(SHORT, *OPEN, folder="whole"))
    whole.train()
    config = make_run(SHORT, *OPEN)
    with_memory(config, 4)
    run = Run(config)
    run.train()
    assert "batch 8 x 24 tokens in 2 micro-batches" in first_line(run)
    assert kept(run, "train", "micro_batch") == 4
    assert "to fit into memory: train.micro_batch = 4" in (run.folder / "train.log").read_text()
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)


def test_one_that_is_given_stays(
    make_run: MakeRun, with_memory: Callable[[RunConfig, int], None]
) -> None:
    config = make_run(SHORT, "train.batch=8", "train.micro_batch=8")
    with_memory(config, 4)
    run = Run(config)
    run.train()
    assert kept(run, "train", "micro_batch") == 8


def test_a_run_keeps_its_micro_batch_where_there_is_more_memory(
    make_run: MakeRun,
    with_memory: Callable[[RunConfig, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = 'train.exit_every="2 steps"'
    with monkeypatch.context():
        with_memory(make_run(*OPEN), 4)
        Run(make_run(*OPEN, folder="whole")).train()
        Run(make_run(*OPEN, stop, folder="parted")).train()
    with_memory(make_run(*OPEN), 8)
    parted = Run(make_run(*OPEN, folder="parted"))
    parted.train()
    assert kept(parted, "train", "micro_batch") == 4
    assert losses(parted) == losses(Run(make_run(*OPEN, folder="whole")))


def test_a_first_step_that_runs_out_begins_again(
    make_run: MakeRun,
    with_memory: Callable[[RunConfig, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = SequentialMicroBatches.forward_backward

    def limited(self: SequentialMicroBatches, batches: list[Batch], *rest: object) -> torch.Tensor:
        if batches[0].samples > 2:
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return plain(self, batches, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(SequentialMicroBatches, "forward_backward", limited)
    with_memory(make_run(*OPEN), 8)
    run = Run(make_run(SHORT, *OPEN))
    assert run.train().step == 3
    assert kept(run, "train", "micro_batch") == 2
    with pytest.raises(UserError, match="too little memory"):
        Run(make_run(SHORT, "train.batch=8", "train.micro_batch=8", folder="given")).train()
