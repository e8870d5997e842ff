"""Random numbers for initial weights, from a seed, a name and a place, and from nothing else.

    seed, name ──> key ──┐
    place in the tensor ─┴─> 64 mixed bits (SplitMix64) ──> which of 65,536 equally likely parts of
                                                           the normal distribution, where in it

So any part of a tensor can be drawn alone, on any device, and has the same bits there. For that,
every operation is on integers, or a product or sum of floats in a call of its own, which no
compiler fuses. In a part numbers are uniform; the outermost end at 4.6 standard deviations.
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
"""Numbers that are drawn at a time: on a CPU, as many as stay in its cache, and as one thread does
at once; several would wait for each other after every operation."""


def _signed(value: int) -> int:
    """The same 64 bits as torch's integers."""
    return value - (1 << 64) if value >> 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)

_PARTS = 1 << 16
_LAST = 1 / (8 * _PARTS)
"""The share of the distribution beyond the end of the last part, which stands for it too."""


def fill_normal(
    target: torch.Tensor,
    std: float,
    *,
    seed: int,
    name: str,
    shape: Sequence[int] | None = None,
    region: TensorSlice | None = None,
) -> None:
    """Fill a tensor with what a region of the tensor `name` of a shape holds; without them, it is
    the whole of it."""
    nodes = torch.from_numpy(_nodes()).to(_device(target))
    parts = nodes[:-1], nodes[1:] - nodes[:-1]
    for piece, bits in _mixed(target, seed, name, shape, region):
        piece.copy_(_normal(bits, *parts).mul_(std).view(piece.shape))


def fill_uniform(target: torch.Tensor, low: float, high: float, *, seed: int, name: str) -> None:
    """Fill a tensor with numbers between two."""
    for piece, bits in _mixed(target, seed, name, None, None):
        piece.copy_(_share(bits >> 40).mul_(high - low).add_(low).view(piece.shape))


def _mixed(
    target: torch.Tensor,
    seed: int,
    name: str,
    shape: Sequence[int] | None,
    region: TensorSlice | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a tensor, some rows at a time, with 64 bits for each of their numbers."""
    shape = tuple(target.shape) if shape is None else tuple(shape)
    region = TensorSlice.whole(shape) if region is None else region
    assert region.shape == tuple(target.shape), f"{region} is not {tuple(target.shape)}"
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    device = _device(target)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape:
        yield target, _mix(torch.zeros(1, dtype=torch.int64, device=device), key)
        return
    within = torch.zeros((), dtype=torch.int64, device=device)
    for begin, end, stride in zip(region.begin[1:], region.end[1:], strides[1:], strict=True):
        places = torch.arange(begin, end, device=device).mul_(stride)
        within = within.unsqueeze(-1) + places
    rows = max(1, _CHUNK.get(device.type, _SMALL_CHUNK) // max(1, within.numel()))
    for first in range(0, len(target), rows):
        piece = target[first : first + rows]
        begin = region.begin[0] + first
        starts = torch.arange(begin, begin + len(piece), device=device).mul_(strides[0])
        yield piece, _mix((starts.unsqueeze(-1) + within.flatten()).flatten(), key)


def _device(target: torch.Tensor) -> torch.device:
    """Where its numbers are drawn: Apple's GPUs have no 64-bit floats."""
    return target.device if target.device.type in ("cpu", "cuda") else torch.device("cpu")


def _mix(places: torch.Tensor, key: int) -> torch.Tensor:
    """SplitMix64: numbers of a sequence, each from its place alone."""
    bits = places.mul_(_STEP).add_(_signed(key))
    # Torch shifts the sign in, which a mask takes out again.
    bits ^= (bits >> 30).bitwise_and_((1 << 34) - 1)
    bits *= _FIRST
    bits ^= (bits >> 27).bitwise_and_((1 << 37) - 1)
    bits *= _SECOND
    bits ^= (bits >> 31).bitwise_and_((1 << 33) - 1)
    return bits


def _share(bits: torch.Tensor) -> torch.Tensor:
    """Numbers between 0 and 1, and never either, from the lowest 23 bits of integers."""
    return (bits & ((1 << 23) - 1)).float().add_(0.5).mul_(2.0**-23)


def _normal(bits: torch.Tensor, ends: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Normally distributed numbers, of parts that begin at `ends`."""
    part = (bits >> 48).bitwise_and_(_PARTS - 1)
    inside = _share(bits >> 24).mul_(lengths.index_select(0, part))
    return inside.add_(ends.index_select(0, part))


@cache
def _nodes() -> npt.NDArray[np.float32]:
    """Where parts begin, and the end of the last. No tensor is kept: one that is made while shapes
    are traced (`FakeTensorMode`) has no numbers."""
    quantile = NormalDist().inv_cdf
    upper = [quantile(0.5 + number / _PARTS) for number in range(_PARTS // 2)]
    upper.append(quantile(1 - _LAST))
    return np.array([*(-node for node in reversed(upper[1:])), *upper], np.float32)


class _Drawing(TorchDispatchMode):
    """Draws what torch would draw from its generators."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__()
        self._seed, self._name = seed, name
        self._drawn = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operations, values = torch.ops.aten, (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
        if function is operations.normal_.default:
            fill_normal(args[0], values[1], seed=self._seed, name=self._next())
            return args[0].add_(values[0]) if values[0] else args[0]
        if function is operations.uniform_.default:
            fill_uniform(args[0], *values, seed=self._seed, name=self._next())
            return args[0]
        return function(*args, **(kwargs or {}))

    def _next(self) -> str:
        self._drawn += 1
        return f"{self._name}:{self._drawn}"


@contextmanager
def drawing(seed: int, name: str) -> Iterator[None]:
    """While this lasts, `normal_` and `uniform_` are drawn as here, for code that is not ours."""
    with _Drawing(seed, name):
        yield
