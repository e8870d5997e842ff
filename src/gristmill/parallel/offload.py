"""Optimizer offload: optimizer state in host memory, for models too large for the device.

    device    weights, gradients, activations
    host      a copy of this process's weights, and all optimizer state

A step copies gradients to the host, updates the weights there, and copies them back: 8 bytes over
the bus per parameter, amortised over the micro-batches of a step. To the optimizer and to
checkpoints, the host copies are the parameters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gristmill.optim.spec import Optimizer
from gristmill.parallel.sharding import ShardedParameters


class Offload:
    """Host copies of a process's parameters."""

    def __init__(self, parameters: ShardedParameters) -> None:
        self.on_device, self.parameters = parameters, {}
        for name, one in parameters.items():
            copy = torch.empty_like(one.local, device="cpu", pin_memory=one.local.is_cuda)
            copy.copy_(one.local.detach())
            local = nn.Parameter(copy, one.local.requires_grad)
            self.parameters[name] = replace(one, local=local)

    def send_weights(self) -> None:
        """Copy the host's weights to the device."""
        for name, one in self.parameters.items():
            self.on_device[name].local.detach().copy_(one.local.detach(), non_blocking=True)

    def step(self, optimizer: Optimizer, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Step the optimizer with the device's gradients."""
        for name, one in self.parameters.items():
            gradient = self.on_device[name].local.grad
            one.local.grad = None if gradient is None else gradient.to("cpu", non_blocking=True)
        # These blocking copies also wait for the gradients queued before them.
        optimizer.step(divisor=divisor.cpu(), skip=skip.cpu())
        self.send_weights()
        for one in self.parameters.values():
            one.local.grad = None
