"""Matrices in fp8 against torch's own casts; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gristmill.models.kernels.fp8 import E4M3, E5M2, Fp8, product, quantised

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (100, 176), (3, 16)])
def test_numbers_are_rounded_to_the_nearest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide = torch.logspace(-6, 3, shape[1], device=DEVICE)  # down to what rounds to zero
    x = (random(*shape) * wide).to(dtype)
    result = quantised(x)
    assert result.scale.item() == pytest.approx(x.abs().max().item() / 448)
    expected = (x.float() * (1 / result.scale)).clamp(-448, 448).to(E4M3).float()
    # Division on a GPU may be one unit off, which moves a few numbers to the next one.
    differing = (result.values.float() != expected).float().mean().item()
    assert differing <= (1e-3 if DEVICE == "cuda" else 0.0)


def test_a_matrix_of_zeros_stays_one() -> None:
    result = quantised(torch.zeros(16, 32, device=DEVICE))
    assert torch.isfinite(result.scale)
    assert not result.values.float().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_every_product(value: float) -> None:
    x = random(32, 32)
    x[3, 5] = value
    broken, whole = quantised(x), quantised(random(48, 32, seed=1))
    result = product(broken, whole, dtype=torch.float32, fast=True)
    assert not torch.isfinite(result).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [E4M3, E5M2])
def test_products(first: torch.dtype, dtype: torch.dtype) -> None:
    """Numbers that both formats hold exactly, so that only the result is rounded."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (n, 64), generator=generator).float() for n in (32, 48))
    half, four = torch.tensor(0.5, device=DEVICE), torch.tensor(4.0, device=DEVICE)
    left, right = Fp8(a.to(DEVICE, first), half), Fp8(b.to(DEVICE, E4M3), four)
    result = product(left, right, dtype=dtype, fast=False)
    assert result.dtype == dtype
    torch.testing.assert_close(result.cpu().float(), 2 * (a @ b.T), rtol=2**-8, atol=0)
