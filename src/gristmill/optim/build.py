"""From settings to an optimizer over a model's parameters.

Optimizers here are stepped without a decision of the host: before `step` the strategy sets two
attributes, `grad_scale` (gradients are divided by it) and `found_inf` (1 leaves everything as it
is), both tensors on the device, which the fused kernels read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, cast

import torch
from torch import nn

from gristmill.config.optim import AdamWConfig, MuonConfig, OptimConfig
from gristmill.config.roles import Role
from gristmill.optim.muon import Exchange, Muon


class Explained(Protocol):
    """What an optimizer may ask a model about its parameters, by name."""

    def roles(self) -> dict[str, Role]:
        """What each parameter is for."""

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Rows of each matrix in parameters that are several matrices, one below the other."""


def build_optimizer(
    config: OptimConfig,
    model: nn.Module,
    *,
    parameters: Mapping[str, nn.Parameter] | None = None,
    compiled: bool | None = None,
    exchange: Exchange | None = None,
) -> torch.optim.Optimizer:
    """The optimizer a run asks for. `parameters` are what is moved where that is not the model's
    own: the shares of its parameters that this process keeps, by name, and `exchange` is the way to
    the others. A step of its own is `compiled` on CUDA only if that is not said."""
    if parameters is None:
        parameters = dict(model.named_parameters())
    moving = {name: p for name, p in parameters.items() if p.requires_grad}
    if isinstance(config, MuonConfig):
        explained = cast(Explained, model)
        return Muon(
            config,
            moving,
            roles=explained.roles(),
            parts=explained.parts(),
            compiled=compiled,
            exchange=exchange,
        )
    return _adamw(config, moving)


def decide_step(
    optimizer: torch.optim.Optimizer, *, divisor: torch.Tensor, skip: torch.Tensor
) -> None:
    """Tell the next `step` what to divide gradients by, and whether (1) to leave all as it is."""
    vars(optimizer).update(grad_scale=divisor, found_inf=skip)


def decay_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[dict[str, object]]:
    """Matrices and embeddings, which decay, and vectors, which do not."""
    several = list(parameters)
    return [
        {"params": [p for p in several if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in several if p.dim() < 2], "weight_decay": 0.0},
    ]


def _adamw(config: AdamWConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        decay_groups(parameters.values(), config.weight_decay),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
