"""Measure what a machine's devices reach, for the constants of the step's formula.

    products    of several shapes; peak share and half sizes are fitted to them
    attention   causal, forward
    copy        of a tensor that no cache holds
    launch      many tiny kernels: the host's time for one
    peers       a copy from the first device to the second, if there are two

Each is repeated for a moment, and the fastest time counts: others use the machine too.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from gristmill.base.errors import UserError
from gristmill.base.units import timestamp
from gristmill.plan.calibration import Calibration
from gristmill.plan.hardware import Hardware, match_hardware, open_hardware

_SHAPES = ((256, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (256, 4096))
"""Rows, and inner and outer size, of products on a GPU; a processor's are a quarter."""
_MOMENT = 0.25
"""Seconds for each measurement."""
_TINY = 200
"""Tiny kernels that are launched in a row."""


def measure_machine() -> Calibration:
    """Measure the first CUDA device, or the processor."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware, name = _kind(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    precision = "bf16" if device.type == "cuda" else "fp32"
    products = _products(device, dtype)
    rates = fitted_products(products, peak=hardware.peak(precision), start=hardware)
    rates["attention_share_native"] = _attention(device, dtype, hardware.peak(precision))
    rates["attention_share"] = rates["attention_share_native"]
    rates["launch"] = _launch(device)
    bandwidth = _copy(device)
    peers = torch.cuda.device_count() > 1 if device.type == "cuda" else False
    return Calibration(
        kind=hardware.name,
        device=name,
        when=timestamp(),
        rates=rates,
        memory_bandwidth=bandwidth,
        inside=_peers() if peers else None,
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
    a search over a grid that becomes finer."""
    names = ("product_share", "half_rows", "half_features")
    best = [getattr(start.rates, name) for name in names]

    def error(share: float, rows: float, features: float) -> float:
        wrong = 0.0
        for m, k, n, seconds in times:
            planned = 2 * m * k * n / (peak * share) * (1 + rows / m)
            planned *= (1 + features / k) * (1 + features / n)
            wrong += math.log(planned / seconds) ** 2
        return wrong

    step = 2.0
    while step > 1.01:
        choices = itertools.product(*[(max(one / step, 1e-3), one, one * step) for one in best])
        found = min(choices, key=lambda point: error(*point))
        if list(found) == best:
            step = math.sqrt(step)
        best = list(found)
    return dict(zip(names, best, strict=True))


def _products(device: torch.device, dtype: torch.dtype) -> list[tuple[int, int, int, float]]:
    scale = 1 if device.type == "cuda" else 4
    times = []
    for rows, features in _SHAPES:
        m, k = rows // scale, features // scale
        one = torch.randn(m, k, device=device, dtype=dtype)
        other = torch.randn(k, k, device=device, dtype=dtype)
        times.append((m, k, k, _seconds(functools.partial(torch.matmul, one, other), device)))
    return times


def _attention(device: torch.device, dtype: torch.dtype, peak: float) -> float:
    sequence, heads, size = (2048, 16, 128) if device.type == "cuda" else (256, 4, 64)
    query = torch.randn(1, heads, sequence, size, device=device, dtype=dtype)

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    flops = 4 * sequence**2 * heads * size / 2
    narrow = 1 + open_hardware("cpu").rates.half_head / size
    return flops * narrow / (peak * _seconds(attend, device))


def _copy(device: torch.device) -> float:
    size = 2**28 if device.type == "cuda" else 2**26
    one = torch.empty(size, device=device, dtype=torch.uint8)
    other = torch.ones_like(one)
    return 2 * size / _seconds(lambda: one.copy_(other), device)


def _launch(device: torch.device) -> float:
    one = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(_TINY):
            one.add_(1)

    return _seconds(many, device) / _TINY


def _peers() -> float:
    size = 2**28
    one = torch.ones(size, device="cuda:0", dtype=torch.uint8)
    other = torch.empty(size, device="cuda:1", dtype=torch.uint8)
    return size / _seconds(lambda: other.copy_(one), torch.device("cuda:1"))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The fastest of many times."""
    return min(_times(work, device))


def _times(work: Callable[[], object], device: torch.device) -> Iterator[float]:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    settle()
    end = time.perf_counter() + _MOMENT
    while True:
        start = time.perf_counter()
        work()
        settle()
        yield time.perf_counter() - start
        if time.perf_counter() > end:
            return


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
