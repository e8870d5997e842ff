"""What is sent is as small and as close as each format promises, whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.strategies.decentralized.codecs import (
    BLOCK,
    CHUNK,
    Codec,
    CodecName,
    Int8Codec,
    TopKCodec,
    build_codec,
)

NAMES: tuple[CodecName, ...] = ("fp32", "bf16", "int8", "top-k")
SIZES = (*range(1, 70), 255, 256, 257, 511, 777, 1024, 2049, 4095, 4096, 4097, 4161, 8193, 12300)
DENSITY = 1 / 64


def numbers(n: int, *, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


def codec_of(name: CodecName, *, density: float = DENSITY) -> Codec:
    return build_codec(name, density=density)


def through(codec: Codec, flat: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(flat), flat.numel())


def error_bound(name: CodecName, flat: torch.Tensor) -> torch.Tensor:
    if name == "fp32":
        return torch.zeros_like(flat)
    if name == "bf16":
        return flat.abs() * 2**-8
    blocks = torch.split(flat, BLOCK)
    largest = torch.cat([block.abs().max().expand_as(block) for block in blocks])
    return largest / 254 * (1 + 1e-4)


# ------------------------------------------------------------------ sizes


def payload_bytes(name: CodecName, n: int) -> int:
    return codec_of(name).encode(numbers(n)).numel()


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_decodes_to_as_many_numbers(name: CodecName) -> None:
    codec = codec_of(name)
    for n in SIZES:
        payload = codec.encode(numbers(n))
        assert payload.dtype == torch.uint8 and payload.dim() == 1
        decoded = codec.decode(payload, n)
        assert decoded.dtype == torch.float32 and decoded.shape == (n,)


@pytest.mark.parametrize(
    ("name", "n", "size"),
    [
        ("fp32", 1000, 4000),
        ("bf16", 1001, 2002),
        ("int8", 256, 4 + 256),
        ("int8", 257, 8 + 257),
        # 64 of 4096: two levels, 64 places of 12 bits, 64 codes of 2 bits.
        ("top-k", 4096, 8 + 96 + 16),
        # And 16 of the 1024 that are left.
        ("top-k", 5120, 2 * 8 + 120 + 20),
        # One at least: half of the last three bytes is empty, as are three quarters of the last.
        ("top-k", 1, 8 + 3 + 1),
    ],
)
def test_sizes_are_those_of_the_format(name: CodecName, n: int, size: int) -> None:
    assert payload_bytes(name, n) == size


def test_top_k_sends_a_hundredth_of_fp32_and_less() -> None:
    assert payload_bytes("fp32", 10**6) > 136 * payload_bytes("top-k", 10**6)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e30])
def test_no_number_is_farther_off_than_its_format_allows(name: CodecName, scale: float) -> None:
    codec = codec_of(name)
    for n in SIZES:
        flat = numbers(n, seed=n, scale=scale)
        assert (through(codec, flat) - flat).abs().le(error_bound(name, flat)).all()
    assert codec.lossy == (name != "fp32")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_int8_bears_numbers_of_any_size(values: list[float]) -> None:
    flat = torch.tensor(values, dtype=torch.float32)
    decoded = through(Int8Codec(), flat)
    # The smallest subnormal is what two roundings below the normal range can be off.
    bound = error_bound("int8", flat.double()) + 2 * 2**-149
    assert (decoded.double() - flat.double()).abs().le(bound).all()


def test_an_int8_block_is_as_fine_as_its_own_numbers() -> None:
    huge, tiny = numbers(BLOCK, scale=1e20), numbers(BLOCK, seed=1, scale=1e-20)
    decoded = through(Int8Codec(), torch.cat((huge, tiny)))[BLOCK:]
    assert (decoded - tiny).norm() < 0.02 * tiny.norm()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zero(name: CodecName) -> None:
    for n in (1, 300, CHUNK + 5):
        assert not through(codec_of(name), torch.zeros(n)).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 700, CHUNK + 3])
def test_what_is_not_finite_is_seen_on_the_other_side(
    name: CodecName, bad: float, place: int
) -> None:
    flat = numbers(CHUNK + 10)
    flat[place] = bad
    decoded = through(codec_of(name), flat)
    assert not decoded[place].isfinite()
    # Other blocks and chunks do not suffer.
    clean = slice(BLOCK, 2 * BLOCK) if place > CHUNK else slice(CHUNK, None)
    assert decoded[clean].isfinite().all()


# ------------------------------------------------------------------ top-k


@pytest.mark.parametrize("density", [1 / 4096, 1 / 64, 0.05, 0.3, 1.0])
def test_top_k_picks_the_largest_of_every_chunk(density: float) -> None:
    flat = numbers(2 * CHUNK + 1001)
    decoded = through(TopKCodec(density=density), flat)
    for before, after in zip(flat.split(CHUNK), decoded.split(CHUNK), strict=True):
        k = max(1, round(density * before.numel()))
        places = set(after.nonzero().flatten().tolist())
        assert places == set(before.abs().topk(k).indices.tolist())
        assert torch.equal(after.sign(), before.sign() * (after != 0))
        assert len(after.abs().unique()) == min(k, 2) + (k < before.numel())


def test_every_place_of_a_chunk_can_be_sent() -> None:
    codec, flat = TopKCodec(density=1 / 4096), torch.zeros(CHUNK, CHUNK)
    flat.fill_diagonal_(-3.0)
    assert torch.equal(through(codec, flat.view(-1)), flat.view(-1))


def test_two_levels_are_sent_as_they_are() -> None:
    flat = torch.zeros(CHUNK)
    flat[10:20], flat[100:125], flat[4090:] = 5.0, -0.5, -5.0
    decoded = through(TopKCodec(density=41 / CHUNK), flat)
    torch.testing.assert_close(decoded, flat, rtol=1e-6, atol=0)


def test_the_levels_are_those_of_the_least_squared_error() -> None:
    flat = numbers(40).abs().sort(descending=True).values
    error = (through(TopKCodec(density=1.0), flat) - flat).square().sum()
    splits = [(flat[:at], flat[at:]) for at in range(1, len(flat))]
    best = min(sum(group.var(correction=0) * len(group) for group in pair) for pair in splits)
    torch.testing.assert_close(error, torch.as_tensor(best), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e38])
def test_top_k_never_adds_energy(scale: float) -> None:
    flat = torch.rand(3 * CHUNK + 17, generator=torch.Generator().manual_seed(0)) * 3 * scale
    decoded = through(TopKCodec(density=DENSITY), flat).double() / scale
    before = flat.double() / scale
    lost = (before - decoded).square().sum()
    torch.testing.assert_close(lost, before.square().sum() - decoded.square().sum())


# ------------------------------------------------------------------ feedback


@pytest.mark.parametrize("name", NAMES)
def test_with_feedback_the_sum_of_what_arrives_follows_the_sum_of_what_was_put_in(
    name: CodecName,
) -> None:
    """Without it the error of top-k grows with the rounds."""
    n, rounds, codec = CHUNK + 100, 600, codec_of(name)
    residual, put_in, arrived = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    plain, norms = torch.zeros(n), []
    steady = numbers(n, seed=99)
    for number in range(rounds):
        flat = steady + 0.1 * numbers(n, seed=number)
        put_in += flat
        sent = through(codec, flat + residual)
        residual = flat + residual - sent
        arrived += sent
        plain += through(codec, flat)
        norms.append(float(residual.norm()))
    torch.testing.assert_close(arrived + residual, put_in, rtol=1e-4, atol=2e-2)
    # After 64 rounds everything has had its turn, and the residual grows no more.
    assert max(norms[300:]) < 1.3 * max(norms[:300]) + 1e-3
    if name == "top-k":
        assert (arrived - put_in).norm() < 0.2 * (plain - put_in).norm()
    if name == "fp32":
        assert not residual.any()


# ------------------------------------------------------------------ memory and determinism


@pytest.mark.parametrize("name", NAMES)
def test_the_same_numbers_give_the_same_bytes_with_ties_too(name: CodecName) -> None:
    codec, flat = codec_of(name), numbers(3 * CHUNK + 33).round()
    before = flat.clone()
    payload = codec.encode(flat)
    assert torch.equal(codec.encode(flat.clone()), payload)
    assert torch.equal(flat, before)
    kept = payload.clone()
    codec.decode(payload, flat.numel())
    assert torch.equal(payload, kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_is_read_from_the_middle_of_a_buffer(name: CodecName) -> None:
    codec, flat = codec_of(name), numbers(1001)
    payload = codec.encode(flat)
    for offset in (1, 2, 3):
        buffer = torch.cat((payload.new_zeros(offset), payload, payload.new_zeros(5)))
        inside = buffer[offset : offset + payload.numel()]
        assert torch.equal(codec.decode(inside, 1001), codec.decode(payload, 1001))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_decodes_what_a_cpu_encoded_and_the_other_way_round(name: CodecName) -> None:
    codec, flat = codec_of(name), numbers(3 * CHUNK + 77)
    here, there = codec.encode(flat), codec.encode(flat.cuda()).cpu()
    n = flat.numel()
    torch.testing.assert_close(codec.decode(here.cuda(), n).cpu(), codec.decode(here, n))
    torch.testing.assert_close(codec.decode(there, n), codec.decode(here, n))
