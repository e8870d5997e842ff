"""Optimizer state in host memory: for models whose moments do not fit the device beside them.

    device    weights, gradients, activations
    host      a copy of this process's weights, and everything that the optimizer keeps

A step sends gradients to the host, moves the copies there, and sends weights back: 8 bytes over the
bus for each parameter held, which many micro-batches in a step hide best. To the optimizer, and to
checkpoints, the copies are the parameters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gristmill.optim.spec import Optimizer
from gristmill.parallel.sharding import ShardedParameters


class Offload:
    """Copies in host memory of what a process holds."""

    def __init__(self, parameters: ShardedParameters) -> None:
        self.on_device = parameters
        self.parameters = {
            name: replace(one, local=_host_copy(one.local)) for name, one in parameters.items()
        }

    def send_weights(self) -> None:
        """Make the device's weights those of the host."""
        for name, one in self.parameters.items():
            self.on_device[name].local.detach().copy_(one.local.detach(), non_blocking=True)

    def step(self, optimizer: Optimizer, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Step the optimizer with the device's gradients."""
        for name, one in self.parameters.items():
            gradient = self.on_device[name].local.grad
            one.local.grad = None if gradient is None else gradient.to("cpu", non_blocking=True)
        # The last copies wait for all before them: after these the host may read.
        optimizer.step(divisor=divisor.cpu(), skip=skip.cpu())
        self.send_weights()
        for one in self.parameters.values():
            one.local.grad = None


def _host_copy(parameter: nn.Parameter) -> nn.Parameter:
    copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
    copy.copy_(parameter.detach())
    return nn.Parameter(copy, parameter.requires_grad)
