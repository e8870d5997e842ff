"""What a GPU needs before its first kernel, with a driver of ours in place of CUDA's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.launch import gpus


class Driver:
    """Counts GPUs, and notes those that get a context."""

    def __init__(self, gpus: int, *, broken: bool = False) -> None:
        self.gpus, self.broken, self.started = gpus, broken, list[int]()

    def cuInit(self, flags: int) -> int:
        return 100 if self.broken else 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 7 + number
        return 0 if number < self.gpus else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.started.append(device.value - 7)
        return 0


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is hashed of a Triton of ours."""
    found = list[str]()
    cache = SimpleNamespace(triton_key=lambda: found.append("triton"))
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", cache)
    return found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    def install(driver: Driver) -> Driver:
        monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: driver)
        return driver

    return install


def start(device: str = "cuda", local_rank: int = 0) -> None:
    for thread in gpus.start_cuda(device, local_rank=local_rank):
        thread.join()


@pytest.mark.parametrize(
    ("gpus", "local_rank", "started"),
    [(1, 0, [0]), (8, 3, [3]), (1, 3, [0]), (2, 3, [])],  # one each, or fewer than processes
)
def test_each_process_starts_its_own(
    installed: Callable[[Driver], Driver], gpus: int, local_rank: int, started: list[int]
) -> None:
    driver = installed(Driver(gpus))
    start(local_rank=local_rank)
    assert driver.started == started


def test_nothing_happens_without_a_driver_that_works(
    installed: Callable[[Driver], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = installed(Driver(1, broken=True))
    start()
    assert driver.started == []

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    start()


def test_a_triton_of_another_version_or_none_is_left_alone(
    installed: Callable[[Driver], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in (SimpleNamespace(), None):
        monkeypatch.setitem(sys.modules, "triton.runtime.cache", other)
        driver = installed(Driver(1))
        start()
        assert driver.started == [0]


@pytest.mark.parametrize(("built_for_cuda", "started"), [(True, [0]), (False, [])])
def test_a_torch_without_cuda_leaves_gpus_alone(
    installed: Callable[[Driver], Driver],
    hashed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    built_for_cuda: bool,
    started: list[int],
) -> None:
    (tmp_path / "lib").mkdir()
    if built_for_cuda:
        (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: found)
    driver = installed(Driver(1))
    start("cpu")
    assert driver.started == hashed == []
    start("auto")
    assert driver.started == started
    assert len(hashed) == len(started)
