"""Who waits for whom, and how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gristmill.distributed.device import Device
from gristmill.strategies.spmd import SyncTimer, backward

Crowd = Callable[..., list[Any]]

LONGER = 1.0
"""Seconds that the second process computes more than the first."""


def a_step() -> tuple[float, float]:
    """Seconds waited in a step, and those from the own end of the backward pass to its return."""
    model = fully_shard(nn.Linear(4, 4))
    ended = list[float]()
    dist.barrier()
    timer = SyncTimer(Device(torch.device("cpu")))
    loss = model(torch.ones(2, 4)).sum()
    if dist.get_rank() == 1:
        begun = time.thread_time()
        while time.thread_time() < begun + LONGER:
            pass
    backward(loss, lambda: ended.append(time.monotonic()))
    (own,) = ended
    returned = time.monotonic()
    dist.all_reduce(torch.ones(()))
    return timer.end()(), returned - own


def test_the_faster_process_waits(crowd: Crowd) -> None:
    (waited, after), (least, _) = crowd(2, a_step)
    assert waited > 0.5 * LONGER
    assert after > 0.5 * LONGER, "called when the waiting was over"
    assert least < waited


def test_the_gradient_is_that_of_the_loss() -> None:
    weight, calls = torch.tensor(3.0, requires_grad=True), []
    backward(weight.square(), lambda: calls.append(weight.grad))
    assert weight.grad == pytest.approx(6.0)
    assert len(calls) == 1
    assert calls[0] is weight.grad, "called at the end"
