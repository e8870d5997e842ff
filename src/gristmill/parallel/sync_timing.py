"""How long a process of several waits for the others in a step.

    on the CPU   a collective blocks the thread that computes: the time of the step in which this
                 thread did not compute
    on a GPU     collectives have streams of their own, and most hide behind the backward pass: from
                 the end of this process's backward pass to the end of the last collective

Given up: on a GPU, what is waited for in the middle of a pass (gathered weights, a neighbour in a
pipeline) counts as computing, since only a profiler can tell the two apart. On the CPU, a thread
that has to wait for a processor counts as waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gristmill.parallel.device import Device


class SyncTimer:
    """Measures the waiting of one step, from now on."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._computed = time.thread_time()
        self._begin = device.mark()
        self._done = self._begin

    def done(self) -> None:
        """This process's own gradients are computed."""
        self._done = self.device.mark()

    def end(self) -> Callable[[], float]:
        """Gradients are those of all processes. The seconds, to be asked for when the device has
        come so far."""
        end = self.device.mark()
        if self.device.is_async:
            return lambda: end.seconds_since(self._done)
        waited = end.seconds_since(self._begin) - (time.thread_time() - self._computed)
        return lambda: max(0.0, waited)


def backward(loss: torch.Tensor, done: Callable[[], None]) -> None:
    """The backward pass of a loss; `done` is called at its end, before it waits for exchanges that
    it began."""
    # Wrappers put hooks on the loss, and their waiting at the end of the pass. This tensor's hook
    # is called before those, so that what it puts there comes first.
    start = loss.clone()
    engine = torch.autograd.Variable._execution_engine
    start.register_hook(lambda gradient: engine.queue_callback(done))
    start.backward()
