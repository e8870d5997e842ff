"""The loss kernel against the definition in double precision; in Triton's interpreter where there
is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from gristmill.models.kernels import cross_entropy as module
from gristmill.models.kernels.cross_entropy import cross_entropy_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
)
@pytest.mark.parametrize(("vocab", "columns"), [(70, 96), (128, 128), (300, 300)])
def test_losses_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
    vocab: int,
    columns: int,
    dtype: torch.dtype,
    tolerance: float,
    cap: float | None,
) -> None:
    monkeypatch.setattr(module, "BLOCK", 64)  # several blocks a row
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(9, columns, generator=generator)).to(DEVICE, dtype)
    logits[0, :vocab] = -60.0  # a row far below zero
    targets = torch.randint(0, vocab, (9,), generator=generator).to(DEVICE)
    factors = torch.rand(9, generator=generator).to(DEVICE)
    exact = logits[:, :vocab].double().requires_grad_()
    shaped = exact if cap is None else cap * torch.tanh(exact / cap)
    expected = functional.cross_entropy(shaped, targets, reduction="none")
    (expected * factors).sum().backward()
    assert exact.grad is not None

    only_losses = cross_entropy_(logits, targets, None, vocab=vocab, cap=cap)
    losses = cross_entropy_(logits, targets, factors, vocab=vocab, cap=cap)

    assert torch.equal(only_losses, losses)
    # The GPU's own tanh, used for half precision, is exact to 11 bits.
    rough = cap is not None and DEVICE == "cuda" and dtype != torch.float32
    tolerances = {"rtol": 1e-3, "atol": 5e-3} if rough else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(losses.double(), expected.detach(), **tolerances)
    error = (logits[:, :vocab].double() - exact.grad).norm() / exact.grad.norm()
    assert error < tolerance
    assert not logits[:, vocab:].any()


def test_rows_may_have_a_stride() -> None:
    wide = torch.randn(5, 80, device=DEVICE)
    rows = wide[:, :48]
    kept = wide[:, 48:].clone()
    targets = torch.arange(5, device=DEVICE)
    expected = functional.cross_entropy(rows, targets, reduction="none")
    losses = cross_entropy_(rows, targets, torch.ones(5, device=DEVICE), vocab=48, cap=None)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(wide[:, 48:], kept)
