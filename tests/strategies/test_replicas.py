"""Copies of weights are compared to the bit, and the rank that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.strategies.replicas import ReplicaDifference, checksum, find_differences
from gristmill.strategies.spmd import Spmd
from gristmill.track.metrics import read_metrics
from gristmill.train.run import Run

Crowd = Callable[..., list[Any]]
MakeRun = Callable[..., RunConfig]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    values = torch.randn(7, 11).to(dtype)
    before, size = checksum(values).item(), values.element_size()
    assert checksum(values.clone()).item() == before
    raw = values.view(torch.uint8).view(-1)
    for byte in range(0, 77 * size, 5):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert checksum(values).item() != before
            raw[byte] ^= 1 << bit


def test_the_checksum_depends_on_the_order_and_covers_all_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.arange(100.0)
    whole = checksum(values).item()
    assert checksum(values.flip(0)).item() != whole
    monkeypatch.setattr("gristmill.strategies.replicas._CHUNK", 7)
    assert checksum(values).item() == whole
    assert checksum(torch.empty(0)).item() == 0


def test_the_minority_is_named() -> None:
    good = {"weight/a@1": "x", "weight/b@1": "y"}
    bad = {**good, "weight/a@1": "z"}
    assert find_differences([good, good, good]) == []
    assert find_differences([good, good, bad]) == [ReplicaDifference((2,), (0, 1), ("weight/a",))]
    assert find_differences([good, bad]) == [ReplicaDifference((0, 1), (), ("weight/a",))]
    # Other slices of the same parameter are no copies.
    assert find_differences([{"weight/a@1": "x"}, {"weight/a@2": "z"}]) == []


def train_with_a_flip(config: RunConfig, flips: bool, rank: int) -> list[Any]:
    """One process flips the lowest bit of one element after step 5."""
    import torch.distributed as dist

    real, steps = Spmd.update, 0

    def update(self: Spmd, *args: Any, **more: Any) -> Any:
        nonlocal steps
        result, steps = real(self, *args, **more), steps + 1
        if flips and steps == 5 and dist.get_rank() == rank:
            one = next(p for p in self.parameters.values() if p.name.endswith("norm.weight"))
            one.local.detach().view(torch.int32).view(-1)[3] ^= 1
        return result

    Spmd.update = update  # type: ignore[method-assign]
    try:
        return [int(Run(config).train().exit)]
    except UserError as error:
        return [int(error.exit), str(error)]
    finally:
        Spmd.update = real  # type: ignore[method-assign]


@pytest.mark.parametrize("processes", [2, 3])
def test_a_flipped_bit_ends_the_run_before_it_is_saved(
    crowd: Crowd, make_run: MakeRun, tmp_path: Path, processes: int
) -> None:
    config = make_run(
        "train.batch=6",
        'parallel.compare="3 steps"',
        'validate.every="50 steps"',
        # Two are saved since the last comparison, one of them after the fault.
        'checkpoint.every="1 steps"',
        "checkpoint.keep=2",
    )
    answers = crowd(processes, train_with_a_flip, config, True, processes - 1)
    for code, said in answers:
        assert code == Exit.DEVICE
        assert "silent corruption between step 3 and step 6" in said
        assert "norm.weight" in said and "of step 3 or before, when all agreed" in said
        assert "is now doubtful-step-00000004, doubtful-step-00000005" in said
        who = "rank 2 on" if processes == 3 else "rank 0 on"
        assert who in said and ("differs from ranks 0, 1 in" in said) is (processes == 3)
    names = {path.name for path in (tmp_path / "run" / "checkpoints").glob("*step-*")}
    assert {"step-00000003", "doubtful-step-00000005"} < names
    assert not {"step-00000004", "step-00000005", "step-00000006"} & names
    assert crowd(processes, train_with_a_flip, config, False, 0) == [[0]] * processes
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert any("resuming from step-00000003" in getattr(one, "text", "") for one in records)


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, ["parallel.tp=2"]),
        (4, ["parallel.pp=2", "parallel.dp_replicate=2", "model.tie_head=true"]),
        (2, ["parallel.cp=2"]),
        (4, ["parallel.dp_replicate=2", "parallel.dp_shard=2", 'optim.type="muon"']),
    ],
    ids=["tp", "pp", "cp", "hsdp"],
)
def test_no_layout_gives_a_false_alarm(
    crowd: Crowd, make_run: MakeRun, processes: int, layout: list[str]
) -> None:
    own = ["parallel.compare=1 steps", "train.until=4 steps", "train.accumulate=2"]
    config = make_run(*own, *layout, "train.batch=8", "parallel.timeout=60s")
    assert crowd(processes, train_with_a_flip, config, False, 0) == [[0]] * processes


def test_nothing_to_compare_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match=r"parallel\.compare: has no effect"):
        Run(make_run('parallel.compare="3 steps"')).train()
