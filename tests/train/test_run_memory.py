"""Tests of runs that do not fit into memory: what they say, and what --fit does."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

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

VOCAB = 257
"""Bytes, and the end of a text."""
MORE = ("train.batch=8", "train.micro_batch=8", 'train.until="6 steps"')


@pytest.fixture
def limit_samples(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Batch]]:
    """Let a step run out of memory with more samples than this at once; returns what steps saw."""

    def arrange(most: int, *, after: int = 0, error: Callable[[], Exception]) -> list[Batch]:
        seen: list[Batch] = []
        plain = SequentialMicroBatches.forward_backward

        def limited(self: Any, batches: Any, *args: Any) -> torch.Tensor:
            seen.extend(batches)
            if len(seen) > after and batches[0].samples > most:
                raise error()
            return plain(self, batches, *args)

        monkeypatch.setattr(SequentialMicroBatches, "forward_backward", limited)
        return seen

    return arrange


def on_device() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def on_host() -> Exception:
    """What torch's allocator of the CPU really raises."""
    try:
        torch.empty(2**50, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.fixture
def set_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give devices so many bytes."""

    def arrange(total: int) -> None:
        found = MeasuredMemory(total, peak=total // 2)
        monkeypatch.setattr(Device, "measured_memory", lambda self, processes=1: found)

    return arrange


def planned(config: RunConfig, *, vocab: int) -> int:
    return Situation(config, Mesh(), vocab, "cpu").plan().total


def losses(run: Run) -> list[float]:
    return [record.loss for record in run.records() if isinstance(record, StepRecord)]


@pytest.mark.parametrize(("error", "says"), [(on_device, "2.00 GiB"), (on_host, "1024 TiB more")])
def test_a_run_that_runs_out_says_where_memory_went_and_what_would_fit(
    make_run: Callable[..., RunConfig],
    limit_samples: Callable[..., list[Batch]],
    set_memory: Callable[[int], None],
    error: Callable[[], Exception],
    says: str,
) -> None:
    run = Run(make_run(*MORE))
    set_memory(planned(run.config, vocab=VOCAB))
    limit_samples(4, after=2, error=error)
    with pytest.raises(UserError, match="too little memory") as caught:
        run.train()
    text = str(caught.value)
    assert says in text
    for kind in ("weights", "optimizer", "activations", "logits", "in all", "measured", "peak"):
        assert kind in text
    assert f"gristmill train {run.folder} train.batch=8 train.micro_batch=4" in text
    assert run.status["state"] == "failed"


def test_the_command_that_is_said_trains_on(
    make_run: Callable[..., RunConfig],
    limit_samples: Callable[..., list[Batch]],
    set_memory: Callable[[int], None],
) -> None:
    run = Run(make_run(*MORE))
    set_memory(planned(run.config, vocab=VOCAB))
    limit_samples(4, error=on_device)
    with pytest.raises(UserError) as caught:
        run.train()
    words = str(caught.value).rpartition("gristmill train ")[2].split()
    assert Run.open(words[0], *words[1:]).train().step == 6


def test_fit_begins_again_with_smaller_micro_batches_and_the_same_result(
    make_run: Callable[..., RunConfig],
    limit_samples: Callable[..., list[Batch]],
    set_memory: Callable[[int], None],
) -> None:
    whole = Run(make_run(*MORE, folder="whole"))
    seen_whole = limit_samples(8, error=on_device)
    whole.train()
    expected = torch.cat([batch.tokens_BT for batch in seen_whole])
    config = make_run(*MORE)
    set_memory(planned(config, vocab=VOCAB) * 100)
    seen = limit_samples(2, error=on_device)
    run = Run(config)
    assert run.train(fit=True).step == 6
    settings = tomllib.loads((run.folder / "run.toml").read_text())["train"]
    assert (settings["batch"], settings["micro_batch"]) == (8, 2)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)
    tokens = torch.cat([batch.tokens_BT for batch in seen if batch.samples == 2])
    assert torch.equal(tokens, expected)
    log = (run.folder / "train.log").read_text()
    assert "ran out of memory; to fit into memory: train.micro_batch = 4" in log


def test_fit_chooses_before_the_first_step_what_the_plan_says(
    make_run: Callable[..., RunConfig], set_memory: Callable[[int], None]
) -> None:
    whole = Run(make_run(*MORE, folder="whole"))
    whole.train()
    config = make_run(*MORE)
    half = config.train.model_copy(update={"micro_batch": 4})
    needs = planned(config.model_copy(update={"train": half}), vocab=VOCAB)
    set_memory(needs + 1)
    run = Run(config)
    run.train(fit=True)
    settings = tomllib.loads((run.folder / "run.toml").read_text())["train"]
    assert (settings["batch"], settings["micro_batch"]) == (8, 4)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)
    assert "to fit into memory: train.micro_batch = 4" in (run.folder / "train.log").read_text()


def test_fit_changes_nothing_where_the_run_fits(
    make_run: Callable[..., RunConfig], set_memory: Callable[[int], None]
) -> None:
    config = make_run(*MORE)
    set_memory(2**40)
    run = Run(config)
    run.train(fit=True)
    settings = tomllib.loads((run.folder / "run.toml").read_text())["train"]
    assert settings["micro_batch"] == 8
    assert "--fit" not in (run.folder / "train.log").read_text()


def test_fit_gives_up_with_the_explanation_where_nothing_fits(
    make_run: Callable[..., RunConfig],
    limit_samples: Callable[..., list[Batch]],
    set_memory: Callable[[int], None],
) -> None:
    set_memory(2**40)
    limit_samples(0, error=on_device)
    with pytest.raises(UserError, match="no change of micro-batch"):
        Run(make_run(*MORE)).train(fit=True)
