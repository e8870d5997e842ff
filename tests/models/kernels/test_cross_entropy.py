"""The loss kernel against the definition in double precision; in Triton's interpreter where there
is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from _pytest.mark import ParameterSet
from torch.nn import functional

pytest.importorskip("triton")

from gristmill.models.kernels import cross_entropy as module
from gristmill.models.kernels.cross_entropy import cross_entropy_
from gristmill.models.kernels.fp8 import E5M2, Fp8
from gristmill.models.loss_terms import LossTerms, TokenTargets

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


CAPS = (None, 5.0, 60.0, 300.0)
DTYPES = ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2))
SHAPES = ((70, 96), (128, 128), (300, 300))


def cases() -> Iterator[ParameterSet]:
    """All combinations; those that are not slow have every cap, format and shape."""
    for (c, cap), (d, dtype), (s, shape) in product(*map(enumerate, (CAPS, DTYPES, SHAPES))):
        marks = () if d == c % 3 and s == (c + 1) % 3 else pytest.mark.slow
        yield pytest.param(*shape, *dtype, cap, marks=marks)


@pytest.mark.parametrize(("vocab", "columns", "dtype", "tolerance", "cap"), cases())
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
    logits = (4 * torch.randn(5, columns, generator=generator)).to(DEVICE, dtype)
    logits[0, :vocab] = -60.0  # a row far below zero
    logits[1, :vocab] = -600.0
    targets = torch.randint(0, vocab, (5,), generator=generator).to(DEVICE)
    factors = torch.rand(5, generator=generator).to(DEVICE)
    exact = logits[:, :vocab].double().requires_grad_()
    shaped = exact if cap is None else cap * torch.tanh(exact / cap)
    expected = functional.cross_entropy(shaped, targets, reduction="none")
    (expected * factors).sum().backward()
    assert exact.grad is not None

    only_losses = cross_entropy_(
        logits, TokenTargets(targets), None, LossTerms(cap=cap), vocab=vocab
    )
    losses = cross_entropy_(logits, TokenTargets(targets), factors, LossTerms(cap=cap), vocab=vocab)

    # The compiler may order their sums otherwise. A loss is the difference of numbers as large as
    # the logits, which in fp32 are this far apart.
    spacing = 2.0**-23 * shaped.detach().abs().amax(1)
    assert ((only_losses - losses).abs() <= 1e-6 * (1 + losses.abs()) + spacing).all()
    # The GPU's own tanh, used for half precision, is exact to 11 bits.
    rough = cap is not None and DEVICE == "cuda" and dtype != torch.float32
    tolerances = {"rtol": 1e-3, "atol": 5e-3} if rough else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(losses.double(), expected.detach(), **tolerances)
    # So far apart are the powers of such numbers, too.
    rounding = (spacing * exact.grad.norm(dim=1)).norm()
    error = (logits[:, :vocab].double() - exact.grad).norm()
    assert error < tolerance * exact.grad.norm() + rounding
    assert not logits[:, vocab:].any()


@pytest.mark.parametrize("cap", [None, 5.0, 60.0])
def test_weights_of_sampled_columns(monkeypatch: pytest.MonkeyPatch, cap: float | None) -> None:
    monkeypatch.setattr(module, "BLOCK", 64)
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 100, (5,), generator=generator).to(DEVICE)
    log_weights = 3 * torch.rand(192, generator=generator).to(DEVICE)
    log_weights[:100] = 0.0
    logits = (4 * torch.randn(5, 192, generator=generator)).to(DEVICE)
    factors = torch.rand(5, generator=generator).to(DEVICE)
    exact = logits.double().requires_grad_()
    shaped = exact if cap is None else cap * torch.tanh(exact / cap)
    weighted = shaped + log_weights.double()
    expected = functional.cross_entropy(weighted, targets, reduction="none")
    (expected * factors).sum().backward()
    assert exact.grad is not None

    losses = cross_entropy_(
        logits,
        TokenTargets(targets),
        factors,
        LossTerms(cap=cap),
        vocab=192,
        log_weights_V=log_weights,
    )

    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_second_target(monkeypatch: pytest.MonkeyPatch, cap: float | None) -> None:
    """It adds to the gradient; the loss is that of the first one."""
    monkeypatch.setattr(module, "BLOCK", 64)
    generator = torch.Generator().manual_seed(4)
    logits = (4 * torch.randn(5, 192, generator=generator)).to(DEVICE)
    targets, others = torch.randint(0, 190, (2, 5), generator=generator).to(DEVICE)
    others[2] = targets[2]
    factors, more = torch.rand(2, 5, generator=generator).to(DEVICE)
    more[3] = 0.0
    exact = logits[:, :190].double().requires_grad_()
    shaped = exact if cap is None else cap * torch.tanh(exact / cap)
    expected = functional.cross_entropy(shaped, targets, reduction="none")
    second = functional.cross_entropy(shaped, others, reduction="none")
    (expected * factors + second * more).sum().backward()
    assert exact.grad is not None

    given = TokenTargets(targets, others, more)
    losses = cross_entropy_(logits, given, factors, LossTerms(cap=cap), vocab=190)

    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :190].double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert not logits[:, 190:].any()


@pytest.mark.parametrize(
    ("vocab", "columns", "cap"),
    [
        (70, 96, 5.0),
        (128, 128, None),
        *(pytest.param(70, 96, cap, marks=pytest.mark.slow) for cap in (None, 300.0)),
        *(pytest.param(128, 128, cap, marks=pytest.mark.slow) for cap in (5.0, 300.0)),
    ],
)
def test_a_copy_in_fp8(
    monkeypatch: pytest.MonkeyPatch, vocab: int, columns: int, cap: float | None
) -> None:
    """e5m2 has two digits behind the first: a number is at most an eighth of itself away, and what
    is below half of the format's smallest number is lost."""
    monkeypatch.setattr(module, "BLOCK", 64)
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(9, columns, generator=generator)).to(DEVICE, torch.bfloat16)
    logits[:, vocab:] = 50.0  # padding must not count, whatever it holds
    targets = torch.randint(0, vocab, (9,), generator=generator).to(DEVICE)
    factors = 1e-6 * torch.rand(9, generator=generator).to(DEVICE)
    factors[5] = 0.0
    alone, scale = logits.clone(), factors.max() / 2**13
    copy = Fp8(torch.empty_like(logits, dtype=E5M2), scale)

    losses = cross_entropy_(
        logits, TokenTargets(targets), factors, LossTerms(cap=cap), vocab=vocab, copy=copy
    )

    expected = cross_entropy_(
        alone, TokenTargets(targets), factors, LossTerms(cap=cap), vocab=vocab
    )
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, alone)
    gradient, got = logits.double(), copy.values.double() * scale
    # The gradient was rounded to bf16, the copy was not before it was rounded to fp8.
    assert ((got - gradient).abs() <= 0.13 * gradient.abs() + 2**-17 * scale).all()
    assert (got - gradient).norm() / gradient.norm() < 0.08
    assert not got[:, vocab:].any()
    assert not got[5].any()


def test_a_copy_beyond_the_format_becomes_its_largest() -> None:
    logits = torch.zeros(16, 32, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.arange(16, device=DEVICE)
    copy = Fp8(torch.empty_like(logits, dtype=E5M2), torch.ones((), device=DEVICE))
    factors = torch.full((16,), 1e9, device=DEVICE)
    cross_entropy_(logits, TokenTargets(targets), factors, LossTerms(), vocab=32, copy=copy)
    on_target = torch.eye(16, 32, device=DEVICE, dtype=torch.bool)
    assert torch.equal(copy.values.float(), torch.where(on_target, -57344.0, 57344.0))


def test_rows_may_have_a_stride() -> None:
    wide = torch.randn(5, 80, device=DEVICE)
    rows = wide[:, :48]
    kept = wide[:, 48:].clone()
    targets = torch.arange(5, device=DEVICE)
    expected = functional.cross_entropy(rows, targets, reduction="none")
    ones = torch.ones(5, device=DEVICE)
    losses = cross_entropy_(rows, TokenTargets(targets), ones, LossTerms(), vocab=48)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(wide[:, 48:], kept)
