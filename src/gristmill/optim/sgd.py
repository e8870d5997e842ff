"""Stochastic gradient descent: one fused kernel per parameter group.

For weights x with gradient g, momentum mu and buffer b:

    g <- g + weight_decay x
    b <- mu b + g
    x <- x - lr (g + mu b)      with nesterov; else lr b
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.optim.sgd import sgd

from gristmill.config.model import Role
from gristmill.config.optim import SGDConfig
from gristmill.optim.adamw import decay_groups
from gristmill.optim.spec import ParameterOptimizer, Placement


class SGD(ParameterOptimizer):
    """SGD with momentum and L2; vectors have no L2."""

    placements: ClassVar[Mapping[str, Placement]] = {"momentum_buffer": Placement.SHARDED}

    def __init__(
        self,
        config: SGDConfig,
        parameters: Mapping[str, nn.Parameter],
        *,
        roles: Mapping[str, Role],
    ) -> None:
        super().__init__(parameters, decay_groups(config, parameters, roles=roles))
        self.momentum, self.nesterov = config.momentum, config.nesterov

    # There is nothing to require of a checkpoint: it has no buffers after a run with another
    # `optim.momentum`, which was 0. They start at zero then.

    def expects(self, kind: str, key: str) -> bool:
        return self.momentum > 0 and super().expects(kind, key)

    @torch.no_grad()
    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not updated:
                continue
            sgd(
                updated,
                [parameter.grad for parameter in updated],
                [self._buffer(parameter) for parameter in updated],
                fused=True,
                grad_scale=divisor,
                found_inf=skip,
                weight_decay=group["weight_decay"],
                momentum=self.momentum,
                lr=group["lr"],
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
            )

    def _buffer(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if self.momentum == 0:
            return None
        # Zeros, as torch's own buffers of the first step are not set if that step is skipped.
        if "momentum_buffer" not in self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return self.state[parameter]["momentum_buffer"]
