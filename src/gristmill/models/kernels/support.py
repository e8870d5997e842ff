"""Which kernels a device can run. Asked once, outside of all that is compiled."""

from __future__ import annotations

import importlib.util

import torch

from gristmill.models.spec import Kernels

COPY_ENGINE = (9, 0)
"""The first compute capability that copies whole tiles: Hopper's."""
FP8 = (8, 9)
"""The first that multiplies in fp8: Ada's."""


def kernels_for(device: torch.device) -> Kernels:
    """All kernels that run on a device; none where Triton is not installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return Kernels()
    capability = torch.cuda.get_device_capability(device)
    return Kernels(loss=True, mlp=capability >= COPY_ENGINE, head_fp8=capability >= FP8)
