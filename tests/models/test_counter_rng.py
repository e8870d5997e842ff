"""Initial weights are a function of seed, name and position, with the right distribution."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gristmill.base.tensor_slices import TensorSlice
from gristmill.models import counter_rng as module
from gristmill.models.counter_rng import counter_rng, fill_normal, fill_uniform


def reference(seed: int, name: str, position: int) -> tuple[int, int]:
    """The bin of a value and 23 bits of its offset in it: SplitMix64 with Python's integers."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    bits = (position * 0x9E3779B97F4A7C15 + key) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    bits ^= bits >> 31
    return bits >> 48, bits >> 24 & (1 << 23) - 1


def test_values_follow_the_definition() -> None:
    drawn = torch.empty(40, 5)
    fill_normal(drawn, 1.0, seed=3, name="blocks.0.mlp.up.weight")
    for position, value in enumerate(drawn.flatten().tolist()):
        index, offset = reference(3, "blocks.0.mlp.up.weight", position)
        # The probability below the value, to less than a bin.
        below = math.erfc(-value / math.sqrt(2)) / 2
        assert below == pytest.approx((index + offset / 2**23) / 2**16, abs=2**-19)


def test_the_distribution_is_normal() -> None:
    drawn = torch.empty(1 << 21)
    fill_normal(drawn, 1.0, seed=4, name="w")
    shares = torch.special.ndtr(drawn.double().sort().values)
    wanted = (torch.arange(1 << 21).double() + 0.5) / (1 << 21)
    # Kolmogorov and Smirnov: beyond this once in a million.
    assert (shares - wanted).abs().max() < 2.7 / math.sqrt(1 << 21)
    assert 4.3 < drawn.abs().max() < 4.63
    beyond = (drawn.abs() > 3).double().mean()
    assert beyond.item() == pytest.approx(0.0026998, rel=0.05)


def test_moments_and_independence() -> None:
    one, other = torch.empty(1 << 19), torch.empty(1 << 19)
    fill_normal(one, 2.0, seed=1, name="a")
    fill_normal(other, 2.0, seed=1, name="b")
    for drawn in (one, other):
        scaled = drawn.double() / 2
        assert abs(scaled.mean()) < 0.006
        assert scaled.square().mean().item() == pytest.approx(1, abs=0.01)
        assert scaled.pow(4).mean().item() == pytest.approx(3, abs=0.06)
        assert abs((scaled[1:] * scaled[:-1]).mean()) < 0.006
    assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.006
    fill_uniform(one, -3.0, 1.0, seed=1, name="a")
    assert -3 < one.min() < -2.999 and 0.999 < one.max() < 1
    assert one.mean().item() == pytest.approx(-1, abs=0.01)


def test_a_region_equals_that_of_the_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.empty(30, 7, 3)
    fill_normal(whole, 0.5, seed=9, name="weight")
    region = TensorSlice((4, 2, 1), (29, 6, 3))
    monkeypatch.setattr(module, "_SMALL_CHUNK", 50)
    part = torch.empty(25, 8, 2)[:, ::2]
    fill_normal(part, 0.5, seed=9, name="weight", shape=(30, 7, 3), region=region)
    assert torch.equal(part, whole[region.slices])


@contextlib.contextmanager
def other_default() -> Iterator[None]:
    """What libraries do while they build a model."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Shapes are traced, and tensors that hold values may take part."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.parametrize("first", [other_default, tracing, torch.inference_mode])
def test_the_context_of_the_first_call_changes_nothing(first: Callable[[], Any]) -> None:
    usual, other = torch.empty(40, 5), torch.empty(40, 5)
    fill_normal(usual, 1.0, seed=3, name="w")
    module._bin_edges.cache_clear()
    with first():
        fill_normal(torch.empty(40, 5), 1.0, seed=3, name="w")
    fill_normal(other, 1.0, seed=3, name="w")
    assert torch.equal(usual, other)


def test_torchs_default_format_changes_nothing() -> None:
    usual, other = torch.empty(40, 5), torch.empty(40, 5)
    fill_normal(usual, 1.0, seed=3, name="w")
    with other_default():
        fill_normal(other, 1.0, seed=3, name="w")
    assert torch.equal(usual, other)


def test_positions_beyond_32_bits_have_values_of_their_own() -> None:
    shape, rows = (1 << 34, 8), torch.empty(3, 8)
    begins, found = [0, 1 << 29, 1 << 33], set()
    for begin in begins:
        region = TensorSlice((begin, 0), (begin + 3, 8))
        fill_normal(rows, 1.0, seed=1, name="table", shape=shape, region=region)
        found |= set(rows.flatten().tolist())
    assert len(found) == 72


def test_other_libraries_draw_the_same_values() -> None:
    state = torch.get_rng_state()
    own, theirs = torch.empty(50, 4), torch.empty(50, 4)
    with counter_rng(5, "layer"):
        torch.nn.init.normal_(theirs, mean=1.0, std=0.02)
        bound = torch.nn.init.uniform_(torch.empty(100), -2, 3)
        cut = torch.nn.init.trunc_normal_(torch.empty(1000), std=0.1, a=-0.2, b=0.2)
    fill_normal(own, 0.02, seed=5, name="layer:1")
    assert torch.equal(theirs, own + 1)
    assert bound.min() < -1.5 and 2.5 < bound.max() < 3
    assert cut.abs().max() <= 0.2 and cut.std().item() == pytest.approx(0.088, abs=0.01)
    assert torch.equal(torch.get_rng_state(), state)
