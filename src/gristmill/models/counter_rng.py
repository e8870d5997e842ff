"""A counter-based random number generator for initial weights.

A value depends only on the seed, the name of the tensor and the position in it:

    seed, name ─────> key ──┐
    position in the tensor ─┴─> 64 mixed bits (SplitMix64) ──> one of 65,536 equally likely bins of
                                                              the normal distribution, and an offset
                                                              in the bin

Any slice of a tensor can therefore be generated alone, on any device, with the same bits. To ensure
this, every operation is on integers, or a single product or sum of floats per call, which no
compiler fuses. Values are uniform within a bin; the outermost bins end at 4.6 standard deviations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.base.tensor_slices import TensorSlice

_CHUNK = {"cuda": 1 << 24}
_SMALL_CHUNK = 1 << 15
"""Values generated at a time: on a CPU few enough for its cache and for one thread, since several
threads would synchronize after every operation."""


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer, as in torch."""
    return value - (1 << 64) if value >> 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)

_BINS = 1 << 16
_TAIL = 1 / (8 * _BINS)
"""The probability beyond the edge of the last bin; it is added to that bin."""


def fill_normal(
    target: torch.Tensor,
    std: float,
    *,
    seed: int,
    name: str,
    shape: Sequence[int] | None = None,
    region: TensorSlice | None = None,
) -> None:
    """Fill `target` with a region of the tensor `name` of a shape; by default with all of it."""
    edges = torch.from_numpy(_bin_edges()).to(_device(target))
    lows, widths = edges[:-1], edges[1:] - edges[:-1]
    for chunk, bits in _random_bits(target, seed, name, shape, region):
        chunk.copy_(_normal(bits, lows, widths).mul_(std).view(chunk.shape))


def fill_uniform(target: torch.Tensor, low: float, high: float, *, seed: int, name: str) -> None:
    """Fill a tensor with values between `low` and `high`."""
    for chunk, bits in _random_bits(target, seed, name, None, None):
        chunk.copy_(_uniform(bits >> 40).mul_(high - low).add_(low).view(chunk.shape))


def _random_bits(
    target: torch.Tensor,
    seed: int,
    name: str,
    shape: Sequence[int] | None,
    region: TensorSlice | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks of a tensor, some rows each, with 64 random bits for each value."""
    shape = tuple(target.shape) if shape is None else tuple(shape)
    region = TensorSlice.whole(shape) if region is None else region
    assert region.shape == tuple(target.shape), f"{region} is not {tuple(target.shape)}"
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    device = _device(target)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape:
        yield target, _mix(torch.zeros(1, dtype=torch.int64, device=device), key)
        return
    # Positions within a row.
    within = torch.zeros((), dtype=torch.int64, device=device)
    for begin, end, stride in zip(region.begin[1:], region.end[1:], strides[1:], strict=True):
        positions = torch.arange(begin, end, device=device).mul_(stride)
        within = within.unsqueeze(-1) + positions
    rows = max(1, _CHUNK.get(device.type, _SMALL_CHUNK) // max(1, within.numel()))
    for first in range(0, len(target), rows):
        chunk = target[first : first + rows]
        begin = region.begin[0] + first
        starts = torch.arange(begin, begin + len(chunk), device=device).mul_(strides[0])
        yield chunk, _mix((starts.unsqueeze(-1) + within.flatten()).flatten(), key)


def _device(target: torch.Tensor) -> torch.device:
    """Where values are generated: on the CPU for other devices, whose integers were not tested."""
    return target.device if target.device.type in ("cpu", "cuda") else torch.device("cpu")


def _mix(positions: torch.Tensor, key: int) -> torch.Tensor:
    """SplitMix64, in place: elements of its sequence, each from its position alone."""
    bits = positions.mul_(_STEP).add_(_signed(key))
    # Torch shifts in the sign bit; the mask clears it.
    bits ^= (bits >> 30).bitwise_and_((1 << 34) - 1)
    bits *= _FIRST
    bits ^= (bits >> 27).bitwise_and_((1 << 37) - 1)
    bits *= _SECOND
    bits ^= (bits >> 31).bitwise_and_((1 << 33) - 1)
    return bits


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Values between 0 and 1, both excluded, from the lowest 23 bits of integers."""
    return (bits & ((1 << 23) - 1)).float().add_(0.5).mul_(2.0**-23)


def _normal(bits: torch.Tensor, lows: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """Normally distributed values, from bins with these lower edges and widths."""
    bins = (bits >> 48).bitwise_and_(_BINS - 1)
    offsets = _uniform(bits >> 24).mul_(widths.index_select(0, bins))
    return offsets.add_(lows.index_select(0, bins))


@cache
def _bin_edges() -> npt.NDArray[np.float32]:
    """The edges of the bins. Not a tensor: one created under `FakeTensorMode` would be cached
    without values."""
    quantile = NormalDist().inv_cdf
    upper = [quantile(0.5 + index / _BINS) for index in range(_BINS // 2)]
    upper.append(quantile(1 - _TAIL))
    return np.array([*(-edge for edge in reversed(upper[1:])), *upper], np.float32)


class _CounterRngMode(TorchDispatchMode):
    """Replaces torch's generators for `normal_` and `uniform_`."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__()
        self._seed, self._name = seed, name
        self._calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operations, values = torch.ops.aten, (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
        if function is operations.normal_.default:
            fill_normal(args[0], values[1], seed=self._seed, name=self._next_name())
            return args[0].add_(values[0]) if values[0] else args[0]
        if function is operations.uniform_.default:
            fill_uniform(args[0], *values, seed=self._seed, name=self._next_name())
            return args[0]
        return function(*args, **(kwargs or {}))

    def _next_name(self) -> str:
        self._calls += 1
        return f"{self._name}:{self._calls}"


@contextmanager
def counter_rng(seed: int, name: str) -> Iterator[None]:
    """`normal_` and `uniform_` use this generator in this context, for code of other libraries."""
    with _CounterRngMode(seed, name):
        yield
