"""Parts of a block beside plain versions of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gristmill.models import layers
from gristmill.models.layers import gelu


@pytest.mark.parametrize("arm", [True, False])
@pytest.mark.parametrize("shape", [(3, 17, 40), (1, 1, 40), (1, 16, 64), (5, 7)])
def test_gelu_is_the_plain_one_to_rounding(
    arm: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_ARM", arm)
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).requires_grad_()
    outer = torch.randn(shape, generator=generator)
    exact = x.detach().double().requires_grad_()
    functional.gelu(exact).backward(outer.double())

    result = gelu(x)
    result.backward(outer)

    assert exact.grad is not None and x.grad is not None
    torch.testing.assert_close(result.double(), functional.gelu(exact), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=4e-6, rtol=1e-6)
    # What comes after meets the layout that it would meet without.
    assert result.is_contiguous() and x.grad.is_contiguous()


def test_gelu_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_ARM", True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    compiled = torch.compile(gelu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), functional.gelu(x))
