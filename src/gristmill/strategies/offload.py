"""Optimizer offload: optimizer state in host memory, for models too large for the device.

    device    weights, gradients, activations
    host      a copy of this process's trained weights, and all optimizer state

A step copies gradients to the host, updates the weights there, and copies them back: 8 bytes over
the bus per parameter, amortised over the micro-batches of a step. To the optimizer and to
checkpoints, the host copies are the parameters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gristmill.optim.spec import Optimizer
from gristmill.strategies.sharding import ShardedParameters


class Offload:
    """Host copies of a process's parameters."""

    def __init__(self, parameters: ShardedParameters) -> None:
        self.on_device = {n: one for n, one in parameters.items() if one.local.requires_grad}
        self.parameters = dict(parameters)
        for name, one in self.on_device.items():
            copy = torch.empty_like(one.local, device="cpu", pin_memory=one.local.is_cuda)
            copy.copy_(one.local.detach())
            local = nn.Parameter(copy, one.local.requires_grad)
            self.parameters[name] = replace(one, local=local)

    def send_weights(self) -> None:
        """Copy the host's weights to the device."""
        for name, one in self.on_device.items():
            host = self.parameters[name].local.detach()
            one.local.detach().copy_(host, non_blocking=True)

    def step(self, optimizer: Optimizer, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        """Step the optimizer with the device's gradients."""
        for name, one in self.on_device.items():
            gradient, host = one.local.grad, self.parameters[name].local
            host.grad = None if gradient is None else gradient.to("cpu", non_blocking=True)
        # These blocking copies also wait for the gradients queued before them.
        optimizer.step(divisor=divisor.cpu(), skip=skip.cpu())
        self.send_weights()
        for name in self.on_device:
            self.parameters[name].local.grad = None
