"""The kernel that casts operands of blocks, against plain torch; in Triton's interpreter where
there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gristmill.models.fp8 import (
    ALIGNED,
    BOTH,
    CAST_ROWS,
    FUSED,
    GRADIENT,
    TRANSPOSED,
    UNTRANSPOSED,
    X,
    fp8_cast,
    results,
)
from gristmill.models.kernels.fp8 import cast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(CAST_ROWS, 128), (2 * CAST_ROWS + 16, 208), (16, 48)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    wide = torch.logspace(-7, 0.3, shape[-1])  # down to what rounds to zero
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    return (numbers * wide).to(half)


def both(
    x: torch.Tensor, h: torch.Tensor | None, operand: int, activation: str, written: int = BOTH
) -> list[list[torch.Tensor]]:
    """What the kernel and plain torch make of it; the last is the amax."""
    scales = torch.tensor([2.0**-7, 2.0**-6, 2.0**-13])[:, None].expand(-1, ALIGNED).contiguous()
    amax = torch.zeros(3)
    summed = operand == GRADIENT
    plain = [*fp8_cast(x, h, scales, amax, operand, activation, written, summed), amax]
    amax = torch.zeros(3, device=DEVICE)
    h = None if h is None else h.to(DEVICE)
    found = by_kernel(x.to(DEVICE), h, scales.to(DEVICE), amax, operand, activation, written)
    return [plain, [one.cpu() for one in (*found, amax)]]


def by_kernel(
    x: torch.Tensor,
    h: torch.Tensor | None,
    scales: torch.Tensor,
    amax: torch.Tensor,
    operand: int,
    activation: str,
    written: int,
) -> tuple[torch.Tensor, ...]:
    groups = -(-x.shape[0] // CAST_ROWS) if operand == GRADIENT else 0
    found = results(x, operand, written, groups=groups)
    cast(x, h, scales, amax, operand, found, activation=activation, rows=CAST_ROWS)
    return found


def compare(plain: list[torch.Tensor], found: list[torch.Tensor], *, exact: bool) -> None:
    untransposed, transposed, sums, amax = found
    assert torch.equal(untransposed.T.view(torch.uint8), transposed.view(torch.uint8))
    assert untransposed.dtype == plain[0].dtype
    differing = (untransposed.float() != plain[0].float()).float().mean().item()
    assert differing <= (0.0 if exact else 2e-3)
    torch.testing.assert_close(untransposed.float(), plain[0].float(), rtol=0.26, atol=2.0**-8)
    torch.testing.assert_close(amax, plain[3], rtol=0 if exact else 1e-4, atol=0)
    if sums.numel():
        torch.testing.assert_close(sums.sum(0), plain[2].sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("operand", [X, GRADIENT])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_rounded_and_transposed(shape: tuple[int, int], operand: int) -> None:
    compare(*both(random(*shape), None, operand, ""), exact=True)


def test_either_is_written_alone() -> None:
    x = random(*SHAPES[1])
    _, (untransposed, transposed, *_) = both(x, None, X, "")
    _, (only, nothing, *_) = both(x, None, X, "", UNTRANSPOSED)
    assert torch.equal(only, untransposed)
    assert not nothing.numel()
    _, (nothing, only, *_) = both(x, None, X, "", TRANSPOSED)
    assert torch.equal(only, transposed)
    assert not nothing.numel()


@pytest.mark.parametrize("activation", FUSED)
def test_activations(activation: str) -> None:
    x = random(*SHAPES[1])
    compare(*both(x, None, X, activation), exact=activation.startswith("relu"))


@pytest.mark.parametrize("activation", FUSED)
def test_slopes_of_activations(activation: str) -> None:
    d, h = random(*SHAPES[1]), random(*SHAPES[1], seed=1).flip(1).contiguous()
    compare(*both(d, h, GRADIENT, activation), exact=activation.startswith("relu"))


@pytest.mark.parametrize("operand", [X, GRADIENT])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_becomes_not_a_number(value: float, operand: int) -> None:
    x = random(32, 48)
    x[3, 5] = value
    found = both(x, None, operand, "")
    # Triton's interpreter makes numbers of what is none.
    for untransposed, transposed, *_ in found if DEVICE == "cuda" else found[:1]:
        assert untransposed[3, 5].isnan() and transposed[5, 3].isnan()
        assert torch.equal(untransposed.T.float().isnan(), transposed.float().isnan())


def test_the_amax_is_only_raised() -> None:
    x = random(32, 48).to(DEVICE)
    scales, amax = torch.ones(3, ALIGNED, device=DEVICE), torch.full((3,), 100.0, device=DEVICE)
    by_kernel(x, None, scales, amax, X, "", BOTH)
    assert amax.tolist() == [100.0, 100.0, 100.0]
    by_kernel(1000 * x, None, scales, amax, X, "", BOTH)
    assert amax[0] > 100
    assert amax[1:].tolist() == [100.0, 100.0]
