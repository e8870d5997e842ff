"""Mixed precision, and the loss scale for fp16.

Weights, gradients and optimizer state are in fp32; a model computes in the dtype of its activations
(see `models/layers.py`), and parts of it in fp8 if the settings say so.

The dynamic loss scale follows Megatron: an overflow uses up one unit of hysteresis; once that is
spent, each overflow halves the scale (not below the minimum); `window` consecutive steps without
overflow double it and refill the hysteresis. All of this is computed on the device, without a sync.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.base.errors import UserError
from gristmill.config.schema import LossScaleConfig, PrecisionConfig
from gristmill.distributed.device import Device, has_bf16
from gristmill.models.spec import Kernels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def generation_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The number format to generate in: auto is bf16 on a GPU that computes with it, else fp32."""
    if precision == "auto":
        return torch.bfloat16 if has_bf16(device) else torch.float32
    if precision not in DTYPES:
        what, known = f"{precision!r} is no number format", ", ".join(("auto", *DTYPES))
        raise UserError(what, where="precision", remedy=f"one of {known}")
    return DTYPES[precision]


@dataclass
class LossScale:
    """The current scale and its counters, as tensors on the device."""

    config: LossScaleConfig
    scale: torch.Tensor
    clean: torch.Tensor
    """Steps without overflow since the scale last grew."""
    patience: torch.Tensor
    """Overflows still tolerated before the scale is halved."""

    @classmethod
    def start(cls, config: LossScaleConfig, device: torch.device) -> LossScale:
        return cls(
            config,
            torch.tensor(config.initial, dtype=torch.float32, device=device),
            torch.tensor(0, dtype=torch.int32, device=device),
            torch.tensor(config.hysteresis, dtype=torch.int32, device=device),
        )

    def update(self, overflow: torch.Tensor) -> None:
        """Update after a step; `overflow` is a boolean on the device."""
        patience = self.patience - overflow.int()
        halved = (self.scale * 0.5).clamp(min=self.config.minimum)
        clean = torch.where(overflow, 0, self.clean + 1)
        grow = clean >= self.config.window
        scale = torch.where(overflow & (patience <= 0), halved, self.scale)
        self.scale = torch.where(grow, scale * 2.0, scale)
        self.patience = torch.where(grow, self.config.hysteresis, patience).int()
        self.clean = torch.where(grow, 0, clean).int()

    def state(self) -> dict[str, float]:
        return {
            "scale": self.scale.item(),
            "clean": self.clean.item(),
            "patience": self.patience.item(),
        }

    def load(self, state: Any) -> None:
        """Load what `state` returned; a `ValueError` says that this is something else."""
        try:
            scale, clean, patience = (float(state[name]) for name in self.state())
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the state of a loss scale: {type(error).__name__}") from error
        limit = 2.0**31
        if not 0 < scale < math.inf or not 0 <= clean < limit or not -limit < patience < limit:
            raise ValueError(f"a loss scale of {scale} after {clean} steps, patience {patience}")
        self.scale.fill_(scale)
        self.clean.fill_(int(clean))
        self.patience.fill_(int(patience))


@dataclass(frozen=True)
class Precision:
    """The number formats and kernels of a run."""

    config: PrecisionConfig
    device: Device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's activations."""
        return DTYPES[self.config.compute]

    @property
    def reduce(self) -> torch.dtype:
        """The dtype in which gradients are reduced over processes."""
        return DTYPES[self.config.reduce or "fp32"]

    def loss_scale(self) -> LossScale | None:
        """The loss scale, for fp16 only."""
        if self.config.compute != "fp16":
            return None
        return LossScale.start(
            self.config.loss_scale or LossScaleConfig(), self.device.torch_device
        )

    def kernels(self, *, wanted: bool) -> Kernels:
        """The kernels of a run on its device. fp8 has no fallback, so the run is refused without
        its kernels; but on the CPU torch computes blocks in fp8."""
        usable = Kernels.on(self.device.torch_device) if wanted else Kernels()
        needed = "head" in self.config.fp8 or self.device.kind != "cpu"
        if self.config.fp8 and needed and not usable.head_fp8:
            raise UserError(
                f"fp8 is not available: {self._fp8_obstacle(wanted)}",
                where="precision.fp8",
                remedy="remove it, or train on an NVIDIA GPU (Ada, Hopper or newer) with kernels",
            )
        return usable._replace(head_fp8="head" in self.config.fp8)

    def _fp8_obstacle(self, wanted: bool) -> str:
        """Why there is no fp8 kernel."""
        if self.device.kind != "cuda":
            return f"the run is on {self.device.kind}"
        if not wanted:
            return "runtime.kernels is false"
        if not Kernels.on(self.device.torch_device).loss:
            return "Triton is not installed"
        major, minor = torch.cuda.get_device_capability(self.device.torch_device)
        return f"the GPU has compute capability {major}.{minor}, and fp8 needs 8.9"
