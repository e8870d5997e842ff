"""Linear layers with fp32 weights and inputs in half precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gristmill.models.products import cast_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("biased", [False, True])
def test_same_as_autograd_through_the_casts(biased: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    x = drawn(2, 5, 24).bfloat16()[..., :16].detach().requires_grad_()  # not contiguous
    weight, outer = drawn(8, 16).requires_grad_(), drawn(2, 5, 8).bfloat16()
    bias = drawn(8).requires_grad_() if biased else None
    inputs = [one for one in (x, weight, bias) if one is not None]

    half = None if bias is None else bias.bfloat16()
    expected = functional.linear(x, weight.bfloat16(), half)
    expected_gradients = torch.autograd.grad(expected, inputs, outer)
    half = None if bias is None else bias.bfloat16()
    got = cast_linear(x, weight, half)
    gradients = torch.autograd.grad(got, inputs, outer)

    assert torch.equal(got, expected)
    assert gradients[1].dtype is torch.float32
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="products have one dtype on the CPU")
def test_gradients_are_not_rounded() -> None:
    x = torch.randn(512, 64, device=DEVICE).bfloat16()
    weight = torch.randn(32, 64, device=DEVICE, requires_grad=True)
    outer = torch.randn(512, 32, device=DEVICE).bfloat16()
    (gradient,) = torch.autograd.grad(cast_linear(x, weight, None), [weight], outer)
    exact = outer.double().T @ x.double()
    assert (gradient - exact).norm() < 1e-5 * exact.norm()
