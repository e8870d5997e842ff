"""The kernels of a step of training under torch's profiler; on a CPU, its operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 3


class KernelTime(NamedTuple):
    """What one kernel takes in a step."""

    name: str
    milliseconds: float
    launches: float


def kernel_times(step: Callable[[], torch.Tensor], device: str) -> list[KernelTime]:
    """The kernels of a step, the longest first; the mean of a few steps."""
    gpu = device == "cuda"
    step().item()  # waits for the device
    kind = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as profiler:
        for _ in range(STEPS):
            loss = step()
        loss.item()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if gpu and event.device_type == DeviceType.CUDA:
            found[event.name].append(event.self_device_time_total)
        elif not gpu:
            found[event.name].append(event.self_cpu_time_total)
    times = [
        KernelTime(name, sum(each) / 1000 / STEPS, len(each) / STEPS)
        for name, each in found.items()
    ]
    return sorted(times, key=lambda one: -one.milliseconds)


def print_kernels(name: str, times: Sequence[KernelTime], *, rows: int) -> None:
    total = sum(one.milliseconds for one in times)
    print(f"{name}: all kernels of a step {total:.2f} ms")
    for one in times[:rows]:
        print(f"  {one.milliseconds:>9.3f} ms {one.launches:>7.1f} x  {one.name[:100]}")
