"""What the start of a run leaves behind, says and asks for."""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.cli.train import _garbage_kept
from gristmill.config.parallel import Mesh
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.distributed.device import Device
from gristmill.distributed.world import World
from gristmill.plan.arithmetic import ModelSize, gpt_size
from gristmill.train import assemble as assemble_module
from gristmill.train.announce import describe_device
from gristmill.train.assemble import require_memory
from gristmill.train.run import Run

MakeRun = Callable[..., RunConfig]


def refuse(config: RunConfig, *, fresh: bool = False) -> None:
    with pytest.raises(UserError, match="nowhere"):
        Run(config).train(fresh=fresh)


def test_a_refused_run_leaves_no_folder(make_run: MakeRun, tmp_path: Path) -> None:
    refuse(make_run("data.paths=nowhere"))
    assert not (tmp_path / "run").exists()


def test_what_was_there_before_a_refused_run_stays(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    refuse(make_run("data.paths=nowhere"))
    assert folder.is_dir()
    shutil.rmtree(folder)
    Run(make_run('train.until="3 steps"')).train()
    before = sorted(folder.rglob("*"))
    refuse(make_run("data.paths=nowhere"))
    assert sorted(folder.rglob("*")) == before


def test_a_refused_fresh_start_keeps_only_the_old_run(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="3 steps"')).train()
    refuse(make_run("data.paths=nowhere"), fresh=True)
    (old,) = tmp_path.glob("run.old-*")
    assert (old / "run.toml").is_file() and not (tmp_path / "run").exists()


def test_garbage_is_collected_again_after_the_first_step(make_run: MakeRun) -> None:
    with _garbage_kept():
        refuse(make_run("data.paths=nowhere"))
        assert not gc.isenabled()
        Run(make_run('train.until="1 steps"')).train()
        assert gc.isenabled()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "accum-adamw"])
def test_a_checkpoint_is_as_large_as_announced(
    make_run: MakeRun, tmp_path: Path, optimizer: str
) -> None:
    config = make_run('train.until="3 steps"', f"optim.type={optimizer}", "model.width=64")
    Run(config).train()
    taken = sum(
        (tmp_path / f"run/checkpoints/step-00000003/{name}.safetensors").stat().st_size
        for name in ("model", "optimizer")
    )
    announced = gpt_size(config, rows=resolve(config, vocab=257).padded_vocab).checkpoint
    assert announced <= taken < 1.03 * announced


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.gossip.topology=ring"],
        ["parallel.exchange.send=int8", 'parallel.local.every="3 steps"'],
    ],
)
def test_a_checkpoint_of_workers_is_as_large_as_announced(
    make_run: MakeRun, tmp_path: Path, words: list[str]
) -> None:
    config = make_run('train.until="3 steps"', "model.width=64", *words)
    Run(config).train()
    taken = sum(
        file.stat().st_size
        for file in (tmp_path / "run/checkpoints/step-00000003").glob("*.safetensors")
    )
    announced = gpt_size(config, rows=resolve(config, vocab=257).padded_vocab).checkpoint
    assert announced <= taken < 1.05 * announced
    # Each further worker adds its own weights, its optimizer state and what it exchanges.
    four = gpt_size(config, rows=resolve(config, vocab=257).padded_vocab, workers=4)
    assert four.checkpoint - four.weights == 4 * (announced - four.weights)


def test_momentum_that_rises_longer_than_the_run_is_said(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="3 steps"', "optim.type=muon")).train()
    lines = (tmp_path / "run/train.log").read_text().splitlines()
    warnings = [line for line in lines if "optim.momentum_warmup, 300 steps, is longer" in line]
    assert len(warnings) == 1 and "warning" in warnings[0]
    Run(make_run('train.until="3 steps"', folder="other")).train()
    assert "momentum" not in (tmp_path / "other/train.log").read_text()


# ------------------------------------------------------------------ what does not fit


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: object, **more: object) -> None:
        raise AssertionError("this would have taken minutes")

    monkeypatch.setattr(assemble_module, "build_strategy", fail)
    monkeypatch.setattr(assemble_module, "build_meta_model", fail)


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(
    "size",
    [pytest.param("model.layers=100000000", marks=pytest.mark.slow), "model.width=2000000"],
)
def test_a_model_that_memory_cannot_hold_is_refused_first(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setattr(assemble_module, "memory_limit", lambda processes: 2**36)
    with pytest.raises(UserError, match="parameters do not fit: weights, gradients and") as caught:
        Run(make_run(size)).train()
    assert caught.value.exit is Exit.CONFIG
    assert "this process can have at most 64 GiB" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("nothing_is_built")
def test_a_checkpoint_that_the_disk_cannot_hold_is_refused_first(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble_module, "memory_limit", lambda processes: None)
    with pytest.raises(UserError, match=r"a checkpoint needs .* TiB, and the disk has") as caught:
        Run(make_run("model.layers=100000000")).train()
    assert caught.value.exit is Exit.STORAGE
    assert not (tmp_path / "run").exists()


def test_a_model_that_just_fits_is_not_refused(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run('train.until="1 steps"')
    needed = gpt_size(config, rows=resolve(config, vocab=257).padded_vocab).training
    monkeypatch.setattr(assemble_module, "memory_limit", lambda processes: needed)
    assert Run(config).train().exit is Exit.DONE
    monkeypatch.setattr(assemble_module, "memory_limit", lambda processes: needed - 1)
    with pytest.raises(UserError, match="do not fit"):
        Run(config).train()


@dataclass(frozen=True)
class FakeGPU(Device):
    total: int = 0

    def total_memory(self) -> int:
        return self.total


@pytest.mark.parametrize(
    ("mesh", "offload", "least"),
    [
        (Mesh(), False, 16_000),
        (Mesh(dp_replicate=4), False, 16_000),
        (Mesh(dp_shard=4), False, 4000),
        (Mesh(dp_replicate=2, dp_shard=4, tp=2, pp=2), False, 1000),
        (Mesh(cp=4), False, 16_000),
        (Mesh(dp_shard=2, cp=4), False, 2000),
        (Mesh(), True, 8000),
    ],
)
def test_the_memory_of_a_gpu_holds_its_shard(
    make_run: MakeRun, mesh: Mesh, offload: bool, least: int
) -> None:
    config = make_run(*(['runtime.offload="optimizer"', "runtime.device=cuda"] * offload))
    for total in (least, least - 1):
        world = World(FakeGPU(torch.device("cpu"), total), mesh=mesh)
        refused = pytest.raises(UserError, match=r"and the GPU has \S+ (B|KiB)")
        with refused if total < least else contextlib.nullcontext():
            require_memory(config, ModelSize(1000, 8000), world)


def test_the_memory_of_a_shared_gpu_is_that_of_each(make_run: MakeRun) -> None:
    world = World(FakeGPU(torch.device("cpu"), 3999, sharers=4))
    said = "the GPU has 3.91 KiB for each of the 4 processes that share it"
    with pytest.raises(UserError, match=said):
        require_memory(make_run(), ModelSize(1000, 8000), world)


def test_the_log_says_that_a_gpu_is_shared() -> None:
    shared, own = Device(torch.device("cuda"), sharers=3), Device(torch.device("cuda"), sharers=1)
    for device in (shared, own):
        device.__dict__["name"] = "NVIDIA X"
    assert describe_device(own) == "NVIDIA X"
    assert describe_device(shared) == (
        "NVIDIA X, which 3 processes share, exchanging through host memory"
    )


def test_what_workers_exchange_needs_memory_too(make_run: MakeRun) -> None:
    config, size = make_run("parallel.gossip.topology=ring"), ModelSize(1000, 8000, 2, 4)
    for total in (24_000, 23_999):
        world = World(FakeGPU(torch.device("cpu"), total), mesh=Mesh(dp_replicate=4))
        refused = pytest.raises(UserError, match="optimizer state and what workers exchange alone")
        with refused if total < 24_000 else contextlib.nullcontext():
            require_memory(config, size, world)
