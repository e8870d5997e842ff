"""More processes than GPUs: refused with the counts, before NCCL fails over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.cli.train import train
from gristmill.distributed import world
from gristmill.distributed.device import Device
from gristmill.launch import starting

RUN = """
name = "tiny"
preset = "gpt2-nano"
data.paths = "tokens/books"
train.until = "20 steps"
train.batch = 192
runtime.device = "{device}"
parallel = {{ {parallel} }}
"""
ELASTIC = 'elastic = true, local = { every = "4 steps" }'


@pytest.mark.parametrize(
    ("installed", "chosen", "expected"),
    [
        (None, None, None),
        (8, None, 8),
        (8, "0,3", 2),
        (8, "", 0),
        (8, "-1", 0),
        (8, "0,9,1", 1),
        (8, "2, 2", 1),
        (2, "GPU-1af2,GPU-77", 2),
    ],
)
def test_the_gpus_that_a_process_may_use_are_counted(
    installed: int | None,
    chosen: str | None,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "_installed_gpus", lambda: installed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert starting.visible_gpus() == expected


def test_without_the_library_the_count_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "MANAGEMENT", "libnosuch.so.1")
    assert starting._installed_gpus() is None


def run_file(folder: Path, *, device: str, parallel: str = "") -> str:
    file = folder / "run.toml"
    file.write_text(RUN.format(device=device, parallel=parallel))
    return str(file)


@pytest.mark.parametrize(
    ("device", "processes", "gpus", "refused"),
    [("cuda", 2, 1, True), ("auto", 4, 2, True), ("cpu", 2, 1, False), ("cuda", 2, 2, False)],
)
def test_train_with_more_processes_than_gpus_does_not_begin(
    device: str,
    processes: int,
    gpus: int,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "_installed_gpus", lambda: gpus)
    monkeypatch.setattr(starting, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr("gristmill.cli.train.supervise", lambda job: begun.append(job) or 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError if refused else typer.Exit) as raised:
        train(run_file(tmp_path, device=device), processes=processes)
    if refused:
        error = raised.value
        assert isinstance(error, UserError) and error.exit is Exit.CONFIG
        assert f"{processes} processes need a GPU each, and this machine has {gpus}" in str(error)
        assert f"--processes {gpus}" in (error.problems[0].remedy or "")
    assert bool(begun) is not refused
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("built_for_cuda", [True, False])
def test_a_torch_without_cuda_leaves_gpus_alone(
    built_for_cuda: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    if built_for_cuda:
        (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(starting.importlib.util, "find_spec", lambda name: found)
    assert starting._wants_cuda("auto") is built_for_cuda
    assert starting._wants_cuda("cuda") and not starting._wants_cuda("cpu")


def test_workers_of_an_elastic_run_may_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They exchange tensors on the host."""
    begun: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "_installed_gpus", lambda: 1)
    monkeypatch.setattr("gristmill.cli.train.supervise", lambda job: begun.append(job) or 0)
    with pytest.raises(typer.Exit):
        train(run_file(tmp_path, device="cuda", parallel=ELASTIC), processes=2)
    assert begun


@pytest.mark.parametrize("rank", [0, 3])
def test_every_process_of_a_node_with_too_few_gpus_says_so(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    place = ProcessInfo(rank, rank, 4, "node7", local_world=4)
    with pytest.raises(UserError, match="4 processes on node7 need a GPU each, and see 2 GPUs"):
        world._own_gpu(place)
    assert world._own_gpu(ProcessInfo(1, 1, 2, "node7", local_world=2)) == torch.device("cuda", 1)


def compare(gpus: list[str]) -> str:
    """What a process says whose only GPU is the one that this list names for its rank."""
    rank = dist.get_rank()
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=gpus[rank])  # type: ignore[assignment,misc]
    place = ProcessInfo(rank, rank % 2, len(gpus), f"node{rank // 2}", local_world=2)
    try:
        world._refuse_shared_gpus(Device(torch.device("cuda", 0)), place)
    except UserError as error:
        return str(error)
    return "fine"


def test_processes_that_see_one_gpu_each_compare_them(crowd: Callable[..., list[Any]]) -> None:
    assert crowd(4, compare, ["a", "b", "c", "d"]) == ["fine"] * 4
    first, second, third, fourth = crowd(4, compare, ["a", "b", "c", "c"])
    assert "2 processes on node1 need a GPU each, and see 1 GPU" in third
    assert third == fourth and first == second
    assert "processes on another node would have to share a GPU" in first
