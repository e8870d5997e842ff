"""Measure what a machine's devices reach, for the constants of the step's formula.

    products    of several shapes; peak share and half sizes are fitted to them
    attention   causal, forward and backward
    copy        of a tensor that no cache holds
    launch      many tiny kernels: the host's time for one
    collective  an all-reduce between all devices, if there are several

A product takes long enough here that its launch does not count, and several are queued before the
device is waited for. On a processor the fastest of many times counts, since others use it too; on a
GPU the median after a moment of full load, since its clock falls then, as it does in training.

Six shapes cannot tell three constants apart where one makes up for another, so the fit is drawn
towards the table's values (`HOLD`).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from gristmill.base.errors import UserError
from gristmill.base.units import timestamp
from gristmill.plan.calibration import Calibration
from gristmill.plan.hardware import Hardware, match_hardware, open_hardware

_SHAPES = (
    *((512, 4096, 4096), (2048, 1024, 4096), (8192, 1024, 1024), (8192, 768, 3072)),
    *((8192, 4096, 1024), (8192, 2048, 2048), (8192, 4096, 4096), (32768, 1024, 4096)),
)
"""Rows, inner and outer size of products on a GPU; a processor's are a quarter."""
_MOMENT = 0.25
"""Seconds for each measurement."""
_LOAD = 2.0
"""Seconds of full load before the first one, on a GPU."""
_QUEUED = 2e-3
"""Seconds of work that is queued at a time."""
_TINY = 200
"""Tiny kernels that are launched in a row."""
_EXCHANGED = 2**28
"""Bytes of an all-reduce."""
HOLD = 0.02
"""How much the square of a constant's change (of its logarithm) counts, where that of the error of
a product counts 1."""
_MOST = 0.95
"""The largest share of its peak that a GPU can be found to reach. The peak of a processor is not
known: the table's is that of a laptop."""


def measure_machine() -> Calibration:
    """Measure the first CUDA device, or the processor, and what several devices exchange."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware, name = _kind(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = hardware.peak("bf16" if device.type == "cuda" else "fp32")
    if device.type == "cuda":
        _load(device)
    rates = fitted_products(_products(device, dtype), peak=peak, start=hardware)
    rates["attention_share_native"] = _attention(device, dtype, hardware, peak)
    rates["attention_share"] = rates["attention_share_native"]
    rates["launch"] = _launch(device)
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    return Calibration(
        kind=hardware.name,
        device=name,
        when=timestamp(),
        rates=rates,
        memory_bandwidth=_copy(device),
        inside=measure_collective(count, "cuda") if count > 1 else None,
    )


def _kind(device: torch.device) -> tuple[Hardware, str]:
    if device.type == "cpu":
        return open_hardware("cpu"), f"processor with {os.cpu_count()} cores"
    properties = torch.cuda.get_device_properties(device)
    found = match_hardware(properties.name, memory=properties.total_memory)
    if found is None:
        what = f"the table has no kind of device for {properties.name!r}"
        raise UserError(what, where="--calibrate", remedy="plan for a kind that is near: --gpu")
    return found, properties.name


def fitted_products(
    times: list[tuple[int, int, int, float]], *, peak: float, start: Hardware
) -> dict[str, float]:
    """Peak share and half sizes that fit the seconds of products of rows x inner by inner x outer:
    a search over a grid that becomes finer, from the table's values on."""
    names = ("product_share", "half_rows", "half_features")
    first = [getattr(start.rates, name) for name in names]
    most = _most(start)

    def error(share: float, rows: float, features: float) -> float:
        if share > most:
            return math.inf
        changes = zip((share, rows, features), first, strict=True)
        wrong = HOLD * sum(math.log(new / old) ** 2 for new, old in changes)
        for m, k, n, seconds in times:
            planned = 2 * m * k * n / (peak * share) * (1 + rows / m)
            planned *= (1 + features / k) * (1 + features / n)
            wrong += math.log(planned / seconds) ** 2
        return wrong

    best, step = first, 2.0
    while step > 1.01:
        choices = itertools.product(*[(value / step, value, value * step) for value in best])
        found = min(choices, key=lambda point: error(*point))
        if list(found) == best:
            step = math.sqrt(step)
        best = list(found)
    return dict(zip(names, best, strict=True))


def _load(device: torch.device) -> None:
    """Keep a device busy, until its clock is that of training."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    end = time.perf_counter() + _LOAD
    while time.perf_counter() < end:
        for _ in range(10):
            torch.matmul(a, a)
        torch.cuda.synchronize(device)


def _products(device: torch.device, dtype: torch.dtype) -> list[tuple[int, int, int, float]]:
    scale = 1 if device.type == "cuda" else 4
    times = []
    for shape in _SHAPES:
        m, k, n = (size // scale for size in shape)
        a, b = (torch.randn(size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
        out = torch.empty(m, n, device=device, dtype=dtype)
        multiply = functools.partial(torch.mm, a, b, out=out)
        times.append((m, k, n, _seconds(multiply, device)))
    return times


def _attention(device: torch.device, dtype: torch.dtype, hardware: Hardware, peak: float) -> float:
    """The share of the peak that both passes of attention reach."""
    on_gpu = device.type == "cuda"
    samples, heads, sequence, size = shape = (8, 16, 2048, 128) if on_gpu else (1, 4, 256, 64)
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(shape, device=device, dtype=dtype)

    def attend() -> None:
        y = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(y, (query, key, value), gradient)

    # Two products forward and five backward.
    flops = 3.5 * 4 * samples * sequence**2 * heads * size / 2
    narrow = 1 + hardware.rates.half_head / size
    return min(_most(hardware), flops * narrow / (peak * _seconds(attend, device)))


def _most(hardware: Hardware) -> float:
    return math.inf if hardware.device == "cpu" else _MOST


def _copy(device: torch.device) -> float:
    size = 2**28 if device.type == "cuda" else 2**26
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _launch(device: torch.device) -> float:
    one = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(_TINY):
            one.add_(1)

    return _seconds(many, device) / _TINY


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long a device takes for some work."""
    on_gpu = device.type == "cuda"

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            work()
        if on_gpu:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    run(1)
    count = max(1, math.ceil(_QUEUED / run(1))) if on_gpu else 1
    times, end = [run(count)], time.perf_counter() + _MOMENT
    while time.perf_counter() < end:
        times.append(run(count))
    return statistics.median(times) if on_gpu else min(times)


# ------------------------------------------------------------------ between devices


def measure_collective(processes: int, device: str, *, size: int = _EXCHANGED) -> float | None:
    """Bytes a second, in one direction, that each device sends in an all-reduce between as many
    devices of this machine; None if they cannot exchange anything."""
    from torch.multiprocessing.spawn import ProcessException, start_processes

    with tempfile.TemporaryDirectory(prefix="gristmill-calibrate-") as name:
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _exchange, (processes, device, size, name), nprocs=processes, start_method="spawn"
            )
            seconds = float(Path(name, "seconds").read_text())
        except (ProcessException, OSError, ValueError):
            return None
    # It is scattered and gathered, each time all but one's own part.
    return 2 * (processes - 1) / processes * size / seconds


def _exchange(rank: int, processes: int, device: str, size: int, folder: str) -> None:
    """One of the processes."""
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=processes,
    )
    values = torch.ones(size // 4, device=place)

    def once() -> float:
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        if device == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter() - start

    # The same number on all of them: a collective that one leaves out hangs the others.
    seconds = min(once() for _ in range(6))
    if rank == 0:
        Path(folder, "seconds").write_text(repr(seconds))
    dist.destroy_process_group()


# ------------------------------------------------------------------ doubts


def slower_than_kind(calibration: Calibration, hardware: Hardware) -> list[str]:
    """Where a machine is a fifth or more slower than its kind in the table, in words."""
    found = []
    rates = replace(hardware.rates, **dict(calibration.rates))
    mine, table = rates.product_share, hardware.rates.product_share
    if mine < 0.8 * table:
        found.append(f"matrix products reach {mine:.0%} of the peak, and usually {table:.0%}")
    usual = hardware.memory_bandwidth * hardware.rates.memory_share
    if calibration.memory_bandwidth and calibration.memory_bandwidth < 0.8 * usual:
        gigabytes = calibration.memory_bandwidth / 1e9
        found.append(f"memory moves {gigabytes:,.0f} GB/s, and usually {usual / 1e9:,.0f}")
    return found
