"""The loss kernels with gradients in fp8 against the definition in double precision; in Triton's
interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from gristmill.models.kernels import cross_entropy_fp8 as module
from gristmill.models.kernels.cross_entropy_fp8 import SHIFT, gradient, losses_and_log_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(("vocab", "columns"), [(70, 96), (128, 128), (300, 304)])
def test_losses_and_gradients(
    monkeypatch: pytest.MonkeyPatch, vocab: int, columns: int, cap: float | None
) -> None:
    monkeypatch.setattr(module, "BLOCK", 64)  # several blocks a row
    generator = torch.Generator().manual_seed(vocab)
    rows = 70  # more than a tile, and no multiple of 16
    logits = (3 * torch.randn(rows, columns, generator=generator)).to(DEVICE, torch.bfloat16)
    logits[0, :vocab] = -60.0  # a row far below zero
    logits[:, vocab:] = 50.0  # padding must not count, whatever it holds
    targets = torch.randint(0, vocab, (rows,), generator=generator).to(DEVICE)
    weights = torch.rand(rows, generator=generator).to(DEVICE)
    weights[5] = 0.0
    exact = logits[:, :vocab].double().requires_grad_()
    shaped = exact if cap is None else cap * torch.tanh(exact / cap)
    expected = functional.cross_entropy(shaped, targets, reduction="none")
    (expected * weights).sum().backward()
    assert exact.grad is not None

    losses, log_sums = losses_and_log_sums(logits, targets, vocab=vocab, cap=cap)
    scale = torch.tensor(1 / SHIFT, device=DEVICE)
    result = gradient(
        *(logits, targets, log_sums, weights * SHIFT), vocab=vocab, cap=cap, scale=scale
    )

    # The GPU's own tanh is exact to 11 bits.
    rough = cap is not None and DEVICE == "cuda"
    tolerances = {"rtol": 1e-3, "atol": 5e-3} if rough else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(losses.double(), expected.detach(), **tolerances)
    got = result.rows_MN.double() * scale
    # Two digits behind the first: a number is at most an eighth of itself away, the mean square
    # over all numbers is about 0.07; and what is below half of the smallest number is lost.
    slack = 0.01 if rough else 1e-4
    missed = (got[:, :vocab] - exact.grad).abs()
    assert (missed <= (0.125 + slack) * exact.grad.abs() + 2**-17 / SHIFT).all()
    assert missed.norm() / exact.grad.norm() < 0.08
    assert not got[:, vocab:].any()
    assert not got[5].any()
    assert torch.equal(result.turned_NM[:, :rows].float(), result.rows_MN.float().T)
    assert result.turned_NM.shape == (columns, 80)
    assert not result.turned_NM[:, rows:].float().any()


def test_a_gradient_beyond_the_format_becomes_its_largest() -> None:
    logits = torch.zeros(16, 32, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.arange(16, device=DEVICE)
    _, log_sums = losses_and_log_sums(logits, targets, vocab=32, cap=None)
    factors = torch.full((16,), 1e9, device=DEVICE)
    scale = torch.ones((), device=DEVICE)
    result = gradient(logits, targets, log_sums, factors, vocab=32, cap=None, scale=scale)
    on_target = torch.eye(16, 32, device=DEVICE, dtype=torch.bool)
    largest = torch.where(on_target, -57344.0, 57344.0)
    assert torch.equal(result.rows_MN.float(), largest)
