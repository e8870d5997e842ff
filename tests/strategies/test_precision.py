"""Which kernels a run gets, and what it is told where fp8 cannot be."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import PrecisionConfig
from gristmill.distributed.device import Device
from gristmill.models.spec import Kernels
from gristmill.strategies.precision import Precision

CPU, CUDA = Device(torch.device("cpu")), Device(torch.device("cuda", 0))
FP8 = PrecisionConfig(compute="bf16", fp8=("head",))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Hopper with Triton, as far as anyone asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return monkeypatch


def complaint(device: Device, *, wanted: bool = True) -> str:
    with pytest.raises(UserError) as caught:
        Precision(FP8, device).kernels(wanted=wanted)
    error = caught.value
    assert error.exit is Exit.CONFIG
    assert [problem.where for problem in error.problems] == ["precision.fp8"]
    assert error.problems[0].remedy
    return error.problems[0].what


def test_fp8_is_used_only_where_it_was_asked_for(pretend: pytest.MonkeyPatch) -> None:
    asked, not_asked = Precision(FP8, CUDA), Precision(PrecisionConfig(compute="bf16"), CUDA)
    everywhere = Kernels(loss=True, adamw=True, decoding=True)
    assert asked.kernels(wanted=True) == everywhere._replace(products=True, head_fp8=True)
    assert not_asked.kernels(wanted=True) == everywhere._replace(products=True)
    assert not_asked.kernels(wanted=False) == Kernels()
    pretend.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert asked.kernels(wanted=True) == everywhere._replace(head_fp8=True)


def test_fp8_needs_a_device_that_has_it(pretend: pytest.MonkeyPatch) -> None:
    assert complaint(CPU) == "fp8 is not available: the run is on cpu"
    assert complaint(CUDA, wanted=False) == "fp8 is not available: runtime.kernels is false"
    pretend.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert complaint(CUDA) == (
        "fp8 is not available: the GPU has compute capability 8.6, and fp8 needs 8.9"
    )
    pretend.setattr(importlib.util, "find_spec", lambda name: None)
    assert complaint(CUDA) == "fp8 is not available: Triton is not installed"


def test_without_fp8_every_device_will_do() -> None:
    assert Precision(PrecisionConfig(), CPU).kernels(wanted=True) == Kernels()
