"""A step computed again: the same numbers, or whose fault it is that they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app
from gristmill.config.schema import RunConfig
from gristmill.strategies.spmd import Spmd
from gristmill.train.replay import Replay, replay_step
from gristmill.train.run import Run

MakeRun = Callable[..., RunConfig]


def replayed(config: RunConfig, step: int) -> Replay:
    return replay_step(config, step, progress=lambda number, done, start: None)


def test_a_healthy_machine_repeats_the_records_to_the_bit(
    make_run: MakeRun, tmp_path: Path
) -> None:
    config = make_run("model.dropout=0.1", 'precision.compute="fp16"')
    Run(config).train()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    found = replayed(config, 8)
    assert (found.start, found.step, list(found.first)) == (6, 8, [7, 8])
    assert found.repeats and found.departs_at is None and found.recorded.keys() == {7, 8}
    assert found.differences == found.changed == []
    assert [28 <= one.sample < 32 for one in found.worst] == [True] * 3
    assert found.worst[0].loss >= found.worst[1].loss >= found.worst[2].loss > 0
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_record_that_cannot_be_repeated_is_found(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run()).train()
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["step"] == 11:
            line["loss"] *= 1 + 1e-12
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replayed(make_run(), 12)
    assert found.repeats and found.departs_at == 11
    # Other threads: then it may be rounding.
    found = replayed(make_run("runtime.threads=2"), 12)
    assert found.departs_at is None and "within rounding" in found.differences[0]
    assert found.changed == ["runtime.threads from 1 to 2"]


def test_a_device_that_miscomputes_is_found(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run(make_run()).train()
    real, calls = Spmd.accumulate, 0

    def accumulate(self: Spmd, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        result = real(self, *args)
        if calls == 2:
            gradient = next(iter(self.model.parameters())).grad
            assert gradient is not None
            gradient.view(torch.int32).view(-1)[0] ^= 1 << 20
        return result

    monkeypatch.setattr(Spmd, "accumulate", accumulate)
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "12"])
    assert isinstance(done.exception, UserError) and done.exception.exit is Exit.DEVICE
    assert "two computations of the same steps differ" in str(done.exception)


def test_the_command(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run()).train()
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "12"])
    assert done.exit_code == 0
    assert "steps 10 to 12, computed twice from step 9" in done.output
    assert "the records agree with them to the bit" in done.output
    assert "Samples of step 12 with the highest loss" in done.output
    with pytest.raises(UserError, match="no checkpoint from before step 2"):
        replayed(make_run(), 2)


def test_a_step_without_a_record_agrees_with_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run("track.every=5 steps")).train()
    done = CliRunner().invoke(app, ["replay", str(tmp_path / "run"), "11"])
    assert "The run has no record of step 11 to compare with; the 1 steps before it" in done.output
    assert "agree with them to the bit" not in done.output


def test_steps_of_several_workers_are_not_replayed_by_one(make_run: MakeRun) -> None:
    config = make_run("parallel.gossip.topology=ring")
    with pytest.raises(UserError, match="a replay has one process, and every step of this run"):
        replayed(config, 8)
