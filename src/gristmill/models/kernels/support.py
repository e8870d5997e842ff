"""Which kernels a device can run. Checked once, outside compiled code."""

from __future__ import annotations

import importlib.util

import torch

from gristmill.models.spec import Kernels

COPY_ENGINE = (9, 0)
"""First compute capability with a tensor memory accelerator: Hopper."""
FP8 = (8, 9)
"""First compute capability with fp8 products: Ada."""


def kernels_for(device: torch.device) -> Kernels:
    """All kernels that run on a device; none where Triton is not installed."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return Kernels()
    capability = torch.cuda.get_device_capability(device)
    return Kernels(
        loss=True, products=capability >= COPY_ENGINE, adamw=True, head_fp8=capability >= FP8
    )
