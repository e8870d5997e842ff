"""Measures how long a process waits for the others in a step.

    on the CPU   collectives block the computing thread: the step's wall time minus its thread time
    on a GPU     collectives have their own streams, and most overlap with the backward pass: from
                 the end of this process's backward pass to the end of the last collective

Given up: on a GPU, waiting inside a pass (for gathered weights, for another pipeline stage) counts
as computing, since only a profiler can tell them apart. On the CPU, waiting for a core counts as
waiting for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gristmill.distributed.device import Device


class SyncTimer:
    """Measures the wait of one step, which starts now."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._computed = time.thread_time()
        self._begin = device.mark()
        self._done = self._begin

    def done(self) -> None:
        """This process's own gradients are computed."""
        self._done = self.device.mark()

    def end(self) -> Callable[[], float]:
        """Gradients are synchronised. Returns a function for the seconds waited, to call once the
        device has finished."""
        end = self.device.mark()
        if self.device.is_async:
            return lambda: end.seconds_since(self._done)
        waited = end.seconds_since(self._begin) - (time.thread_time() - self._computed)
        return lambda: max(0.0, waited)


def backward(loss: torch.Tensor, done: Callable[[], None]) -> None:
    """Run the backward pass; `done` is called at its end, before it waits for collectives."""
    # FSDP hooks the loss and queues its waiting as a callback at the end of the pass. This tensor's
    # hook runs before it, so its callback comes first.
    start = loss.clone()
    engine = torch.autograd.Variable._execution_engine
    start.register_hook(lambda gradient: engine.queue_callback(done))
    start.backward()
