"""Two targets for each token against the definition in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from gristmill.models import loss as module
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.loss_terms import LossTerms, sample_rows

SEQUENCE, D, V = 25, 12, 200
N = 8 * SEQUENCE
FIRST, SECOND = 0.5, 0.2
terms = LossTerms(scale=torch.tensor(FIRST), mtp_scale=torch.tensor(SECOND))


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Inputs for slices of 64 tokens, whose borders are not those of sequences."""
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", 4 * V * 64)
    monkeypatch.setattr(module, "CPU_SLICE_TOKENS", 64)
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[41] = targets[40]  # both targets of token 40 are the same
    return {
        "hidden": torch.randn(N, D, generator=generator),
        "head": torch.randn(V, D, generator=generator),
        "targets": targets,
        "weights": torch.rand(N, generator=generator).round(),
    }


def in_sequences(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> Any:
    return hidden.unflatten(0, (-1, SEQUENCE)), head, targets.view(-1, SEQUENCE)


def by_definition(
    tensors: dict[str, torch.Tensor], weights: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, ...]:
    """The loss of the next token, and the gradients of the weighted sum of both losses."""
    hidden, head = (tensors[k].double().requires_grad_() for k in ("hidden", "head"))
    logits = hidden @ head.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    targets = tensors["targets"]
    first = (functional.cross_entropy(logits, targets, reduction="none") * weights).sum()
    second = torch.zeros((), dtype=torch.double)
    for token in range(N):
        if (token + 1) % SEQUENCE:
            both = weights[token] * weights[token + 1]
            second = second + both * functional.cross_entropy(logits[token], targets[token + 1])
    gradients = torch.autograd.grad(FIRST * first + SECOND * second, (hidden, head))
    return first.detach(), *gradients


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients(
    tensors: dict[str, torch.Tensor], weighted: bool, cap: float | None
) -> None:
    weights = tensors["weights"] if weighted else torch.ones(N)
    total, *wanted = by_definition(tensors, weights.double(), cap)
    hidden, head = (tensors[k].clone().requires_grad_() for k in ("hidden", "head"))
    loss = linear_cross_entropy(
        *in_sequences(hidden, head, tensors["targets"]),
        terms._replace(loss_weights_BT=weights if weighted else None, cap=cap),
        vocab=V,
    )
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    for got, exact in zip(torch.autograd.grad(loss.scaled, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


def test_among_the_rows_of_a_sample(tensors: dict[str, torch.Tensor]) -> None:
    hidden, head = (tensors[k].clone().requires_grad_() for k in ("hidden", "head"))
    targets = tensors["targets"]
    loss = linear_cross_entropy(
        *in_sequences(hidden, head, targets), terms._replace(sampled=64), vocab=V
    )
    found = torch.autograd.grad(loss.scaled, (hidden, head))

    exact_hidden, exact_head = (tensors[k].double().requires_grad_() for k in ("hidden", "head"))
    sample = sample_rows(targets, vocab=V, rows=64)
    total = torch.zeros((), dtype=torch.double)
    for token in range(N):
        rows, log_weights = sample.rows_SR[token // 64], sample.log_weights_SR[token // 64]
        logits = exact_head[rows] @ exact_hidden[token] + log_weights.double()
        near = [(FIRST, token)]
        if (token + 1) % SEQUENCE and (token + 1) % 64:
            near.append((SECOND, token + 1))
        for scale, of in near:
            total = total + scale * functional.cross_entropy(logits, sample.targets_N[of])
    wanted = torch.autograd.grad(total, (exact_hidden, exact_head))
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


def test_validation_has_one_target(tensors: dict[str, torch.Tensor]) -> None:
    rows = in_sequences(tensors["hidden"], tensors["head"], tensors["targets"])
    with torch.no_grad():
        one = linear_cross_entropy(*rows, vocab=V)
        two = linear_cross_entropy(*rows, LossTerms(mtp_scale=torch.ones(())), vocab=V)
    assert torch.equal(one.total, two.total)
