"""The sliced loss against the plain one in double precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gristmill.models import loss as module
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.loss_terms import LossTerms

N, D, V, ROWS = 300, 12, 70, 96


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Inputs for several slices of 64 tokens."""
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", 4 * ROWS * 64)
    monkeypatch.setattr(module, "CPU_SLICE_TOKENS", 64)
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(N, D, generator=generator),
        "head": torch.randn(ROWS, D, generator=generator),
        "targets": torch.randint(0, V, (N,), generator=generator),
        "weights": torch.rand(N, generator=generator).round(decimals=1),
    }


def plain(
    tensors: dict[str, torch.Tensor], *, weighted: bool, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients by definition, in double precision."""
    hidden, head = (tensors[k].double().requires_grad_() for k in ("hidden", "head"))
    logits = hidden @ head[:V].T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    losses = functional.cross_entropy(logits, tensors["targets"], reduction="none")
    total = (losses * tensors["weights"].double()).sum() if weighted else losses.sum()
    total.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return total.detach(), hidden.grad, head.grad


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients(
    tensors: dict[str, torch.Tensor], weighted: bool, cap: float | None
) -> None:
    total, d_hidden, d_head = plain(tensors, weighted=weighted, cap=cap)
    hidden, head = (tensors[k].clone().requires_grad_() for k in ("hidden", "head"))
    weights = tensors["weights"] if weighted else None
    loss = linear_cross_entropy(
        *(hidden, head, tensors["targets"], LossTerms(weights, torch.tensor(0.25), cap=cap)),
        vocab=V,
    )
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert loss.scaled.item() == pytest.approx(0.25 * total.item(), rel=1e-5)
    (2 * loss.scaled).backward()
    assert torch.allclose(hidden.grad.double(), 0.5 * d_hidden, atol=1e-4, rtol=1e-4)
    assert torch.allclose(head.grad.double(), 0.5 * d_head, atol=1e-3, rtol=1e-4)
    assert not head.grad[V:].any()


@pytest.mark.parametrize("cap", [None, 3.0])
def test_a_head_with_a_bias(tensors: dict[str, torch.Tensor], cap: float | None) -> None:
    """A bias is one more feature of the head, on which all hidden states have 1."""
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
    wide = dict(tensors)
    wide["hidden"] = torch.cat((tensors["hidden"], torch.ones(N, 1)), dim=1)
    wide["head"] = torch.cat((tensors["head"], bias[:, None]), dim=1)
    total, d_hidden, d_head = plain(wide, weighted=True, cap=cap)
    inputs = tensors["hidden"], tensors["head"], bias
    hidden, head, bias = (one.clone().requires_grad_() for one in inputs)
    terms = LossTerms(tensors["weights"], cap=cap)
    loss = linear_cross_entropy(hidden, head, tensors["targets"], terms, vocab=V, bias_V=bias)
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    loss.scaled.backward()
    assert torch.allclose(hidden.grad.double(), d_hidden[:, :D], atol=1e-4, rtol=1e-4)
    assert torch.allclose(head.grad.double(), d_head[:, :D], atol=1e-3, rtol=1e-4)
    assert torch.allclose(bias.grad.double(), d_head[:, D], atol=1e-3, rtol=1e-4)


def test_all_logits_are_never_kept(tensors: dict[str, torch.Tensor]) -> None:
    kept: list[int] = []
    hidden, head = (tensors[k].clone().requires_grad_() for k in ("hidden", "head"))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        linear_cross_entropy(hidden, head, tensors["targets"], vocab=V)
    assert kept
    assert max(kept) <= max(N * D, ROWS * D) < N * ROWS


def test_slices_do_not_change_the_result(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def total() -> float:
        return linear_cross_entropy(
            tensors["hidden"], tensors["head"], tensors["targets"], vocab=V
        ).total.item()

    sliced = total()
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", 2**30)
    assert sliced == pytest.approx(total(), rel=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_precision(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype, tolerance: float
) -> None:
    total, d_hidden, _ = plain(tensors, weighted=False)
    hidden, head = (tensors[k].clone().requires_grad_() for k in ("hidden", "head"))
    loss = linear_cross_entropy(hidden.to(dtype), head, tensors["targets"], vocab=V)
    loss.scaled.backward()
    assert loss.total.item() == pytest.approx(total.item(), rel=tolerance)
    assert head.grad.dtype == torch.float32
    assert (hidden.grad - d_hidden).norm() / d_hidden.norm() < tolerance


def test_a_large_scale_saves_small_fp16_gradients(tensors: dict[str, torch.Tensor]) -> None:
    """Gradients too small for fp16 survive because they are scaled before they are rounded."""

    def gradient(scale: float) -> torch.Tensor:
        hidden, head = (tensors[k].clone().requires_grad_() for k in ("hidden", "head"))
        terms = LossTerms(scale=torch.tensor(scale))
        loss = linear_cross_entropy(hidden.half(), head, tensors["targets"], terms, vocab=V)
        loss.scaled.backward()
        return head.grad / scale

    _, _, d_head = plain(tensors, weighted=False)
    lost = (gradient(1e-8) - d_head).norm() / d_head.norm()
    kept = (gradient(1e-8 * 2**30) - d_head).norm() / d_head.norm()
    assert lost > 0.5
    assert kept < 0.01


@pytest.mark.parametrize("sampled", [None, 64])
def test_sums_by_source_are_those_of_each_source_alone(sampled: int | None) -> None:
    """The total and all gradients are, to the bit, those without."""
    torch.manual_seed(3)
    hidden_BTD = torch.randn(5, 40, 8, requires_grad=True)
    head_VD = torch.randn(96, 8, requires_grad=True)
    targets_BT, weights_BT = torch.randint(0, 90, (5, 40)), torch.rand(5, 40)
    sources_B = torch.tensor([2, 0, 2, 0, 2])
    terms = LossTerms(weights_BT, scale=torch.tensor(0.5), sampled=sampled)
    plain = linear_cross_entropy(hidden_BTD, head_VD, targets_BT, terms, vocab=90)
    gradients = torch.autograd.grad(plain.scaled, [hidden_BTD, head_VD])
    told = linear_cross_entropy(
        hidden_BTD,
        head_VD,
        targets_BT,
        terms._replace(sources_B=sources_B, sources=4),
        vocab=90,
    )
    again = torch.autograd.grad(told.scaled, [hidden_BTD, head_VD])
    assert told.scaled.equal(plain.scaled) and told.total[0].equal(plain.total)
    assert all(one.equal(other) for one, other in zip(gradients, again, strict=True))
    assert told.total[2] == told.total[4] == 0.0
    for source in (0, 2):
        alone_BT = weights_BT * (sources_B == source)[:, None]
        alone = linear_cross_entropy(
            hidden_BTD, head_VD, targets_BT, terms._replace(loss_weights_BT=alone_BT), vocab=90
        )
        assert told.total[1 + source].item() == pytest.approx(alone.total.item(), rel=1e-5)


def test_a_traced_loss_knows_the_shape_of_sums_by_source() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden_BTD = torch.randn(2, 4, 8, requires_grad=True)
        head_VD = torch.randn(96, 8, requires_grad=True)
        targets_BT, sources_B = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2).long()
        terms = LossTerms(scale=torch.ones(()), sources_B=sources_B, sources=3)
        loss = linear_cross_entropy(hidden_BTD, head_VD, targets_BT, terms, vocab=90)
        assert loss.total.shape == (4,) and loss.scaled.shape == ()
