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
from gristmill.config.parallel import Mesh, ParallelConfig
from gristmill.config.schema import RuntimeConfig
from gristmill.distributed import world
from gristmill.distributed.device import Device
from gristmill.launch import starting
from gristmill.plan.explain import available

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
        remedy = error.problems[0].remedy or ""
        for way in (f"--processes {gpus}", "parallel.share_gpu=true", "runtime.device=cpu"):
            assert way in remedy
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


@pytest.mark.parametrize("parallel", [ELASTIC, "share_gpu = true"])
def test_processes_that_exchange_tensors_on_the_host_may_share_a_gpu(
    parallel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of an elastic run always do."""
    begun: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "_installed_gpus", lambda: 1)
    monkeypatch.setattr("gristmill.cli.train.supervise", lambda job: begun.append(job) or 0)
    with pytest.raises(typer.Exit):
        train(run_file(tmp_path, device="cuda", parallel=parallel), processes=2)
    assert begun


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let torch see so many GPUs."""

    def choose(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return choose


def places(count: int) -> list[ProcessInfo]:
    return [ProcessInfo(rank, rank, count, "node7", local_world=count) for rank in range(count)]


@pytest.mark.parametrize("rank", [0, 3])
def test_every_process_of_a_node_with_too_few_gpus_says_so(
    rank: int, visible: Callable[[int], None]
) -> None:
    visible(2)
    with pytest.raises(UserError, match="4 processes on node7 need a GPU each") as raised:
        world._choose_gpu(places(4)[rank])
    assert raised.value.exit is Exit.CONFIG
    said = str(raised.value)
    assert "see 2 GPUs" in said and "start at most 2 per node" in said
    assert "parallel.share_gpu = true" in said and 'runtime.device = "cpu"' in said
    assert world._choose_gpu(places(2)[1]) == Device(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, [(0, 5)] * 5),
        (2, [(0, 3), (1, 2), (0, 3), (1, 2), (0, 3)]),
        (8, [(rank, 1) for rank in range(5)]),
    ],
)
def test_processes_that_share_gpus_are_spread_over_them(
    gpus: int, expected: list[tuple[int, int]], visible: Callable[[int], None]
) -> None:
    visible(gpus)
    devices = [world._choose_gpu(place, share=True) for place in places(5)]
    assert [(device.torch_device.index, device.sharers) for device in devices] == expected
    assert {device.backend for device in devices} == {"staged"}
    # Those of an elastic run too, of which nobody said that they share it.
    spread = [world._choose_gpu(place, spread=True) for place in places(5)]
    assert [device.torch_device for device in spread] == [one.torch_device for one in devices]
    assert {(device.sharers, device.backend) for device in spread} == {(None, "cpu:gloo,cuda:nccl")}


def test_a_gpu_that_is_shared_is_shared_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gib, gpu = 2**30, torch.device("cuda", 0)
    free, own = 20 * gib, 5 * gib
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * gib))
    for name, value in (("reserved", own), ("allocated", own), ("max_memory_allocated", own)):
        name = name if name.startswith("max") else f"memory_{name}"
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    alone, third = Device(gpu), Device(gpu, sharers=3)
    assert (alone.free_memory(), alone.total_memory()) == (free, 80 * gib)
    assert Device(gpu, sharers=1).total_memory() == 80 * gib
    assert third.total_memory() == 80 * gib // 3
    # No more than is left, however much the others have taken.
    assert third.free_memory() == free
    free = 70 * gib
    assert third.free_memory() == 80 * gib // 3 - own
    measured = third.measured_memory()
    assert measured is not None and available(measured) == 80 * gib // 3


def test_gpus_without_a_name_of_their_own_are_told_apart_by_their_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, place = Device(torch.device("cuda", 0)), ProcessInfo(3, 1, 4, "node7", local_world=2)
    for gpu, name in (
        (SimpleNamespace(uuid="GPU-1", pci_bus_id=4), "GPU-1"),
        (SimpleNamespace(pci_domain_id=0, pci_bus_id=4, pci_device_id=1), "node7 [0, 4, 1]"),
        (SimpleNamespace(), "node7 3"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        assert world._gpu_name(device, place) == name


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


def counted(gpus: list[str]) -> int | None:
    """How many share the GPU of a process, as the processes find together."""
    rank = dist.get_rank()
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=gpus[rank])  # type: ignore[assignment,misc]
    device = Device(torch.device("cuda", 0), sharers=9)
    place = ProcessInfo(rank, 0, len(gpus), f"node{rank}", local_world=None)
    return world.open_world(
        RuntimeConfig(),
        mesh=Mesh(dp_replicate=len(gpus)),
        parallel=ParallelConfig(share_gpu=True),
        place=place,
        device=device,
    ).device.sharers


def test_processes_that_share_gpus_count_who_does(crowd: Callable[..., list[Any]]) -> None:
    """Whatever the launcher lets each of them see."""
    assert crowd(4, counted, ["a", "b", "a", "a"]) == [3, 1, 3, 3]
