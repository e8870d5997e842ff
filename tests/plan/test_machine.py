"""What a machine trains on, found without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.plan.calibration import Calibration, nvidia_devices, write_calibration
from gristmill.plan.hardware import open_hardware
from gristmill.plan.machine import _half_features, find_machine


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports of a known time, as timing them takes seconds."""
    monkeypatch.setattr("gristmill.plan.machine.time_imports", lambda: 2.0)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs, of which `nvidia-smi` tells; the file with its answer."""
    answer, program = tmp_path / "gpus.txt", tmp_path / "nvidia-smi"
    answer.write_text("NVIDIA H100 80GB HBM3, 81559\n" * 2 + "NVIDIA H200, 143771\n")
    program.write_text(f"#!/bin/sh\ncat {answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answer


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gristmill.plan.calibration.shutil.which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_gpus_that_the_table_knows(gpus: Path) -> None:
    machine = find_machine()
    assert (machine.hardware.name, machine.count, machine.is_gpu) == ("h100-80gb", 3, True)
    assert machine.described == "3 x NVIDIA H100 80GB HBM3"
    assert machine.source == "The speed is planned from the published figures of h100-80gb."


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2", ["NVIDIA H200"]),
        ("1, 2", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["NVIDIA H100 80GB HBM3"]),
        ("GPU-8932f937,GPU-a4e4d4f9", ["NVIDIA H100 80GB HBM3"] * 2),
    ],
)
def test_only_visible_gpus_count(
    visible: str, names: list[str], gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [name for name, _ in nvidia_devices()] == names


def test_an_unknown_gpu_is_not_taken_for_a_cpu(gpus: Path) -> None:
    gpus.write_text("NVIDIA GeForce RTX 3060, 12288\n")
    machine = find_machine()
    assert machine.is_gpu and machine.hardware.memory == 12288 * 2**20
    assert machine.described == "one NVIDIA GeForce RTX 3060" and "l4" in machine.source


def test_a_cpu_is_timed(no_gpu: None) -> None:
    machine = find_machine()
    assert machine.hardware.name == "cpu" and not machine.is_gpu
    assert 0 < machine.hardware.rates.product_share != open_hardware("cpu").rates.product_share
    assert machine.hardware.memory_bandwidth > 0 and "numpy" in machine.source


@pytest.mark.parametrize("half", [0.0, 16.0, 300.0])
def test_the_size_at_which_a_product_takes_twice_its_time(half: float) -> None:
    slower = (1 + half / 128) * (1 + half / 512)
    assert _half_features(slower) == pytest.approx(half)
    assert _half_features(0.5) == 0.0  # measured while something else slowed the large one


def test_what_was_calibrated_is_not_timed_again(no_gpu: None) -> None:
    write_calibration(Calibration("cpu", "mine", "2026-11-19T05:00:00", {"product_share": 0.125}))
    machine = find_machine()
    assert machine.hardware.rates.product_share == 0.125 and "2026-11-19" in machine.source


def test_a_machine_that_is_elsewhere(no_gpu: None) -> None:
    machine = find_machine(gpu="h200", gpus=8)
    assert (machine.hardware.name, machine.count, machine.described) == ("h200", 8, "8 x h200")
    with pytest.raises(UserError, match="give --gpu"):
        find_machine(gpus=8)
    with pytest.raises(UserError, match="did you mean"):
        find_machine(gpu="h20")


def test_torch_is_not_needed(tmp_path: Path) -> None:
    code = (
        "import sys; from gristmill.plan.machine import find_machine; find_machine(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
