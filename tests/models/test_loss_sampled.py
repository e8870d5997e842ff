"""The sampled softmax: which rows are taken, and a loss over them against the definition in double
precision."""

from __future__ import annotations

import pytest
import torch

from gristmill.models import loss as module
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.loss_terms import LossTerms, sample_rows
from gristmill.models.spec import ShardComm

N, D, V, ROWS, SAMPLED = 300, 12, 700, 768, 192
"""Two slices of tokens, the second one shorter, and rows of padding behind the vocabulary."""


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    # Of the tokens that share rows, no more than these are computed at once.
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", 4 * SAMPLED * 64)
    monkeypatch.setattr(module, "CPU_SLICE_TOKENS", 64)
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(N, D, generator=generator),
        "head": torch.randn(ROWS, D, generator=generator),
        # About half of the targets of a slice are distinct.
        "targets": torch.randint(0, V // 7, (N,), generator=generator) * 7,
        "weights": torch.rand(N, generator=generator).round(decimals=1),
    }


def test_targets_come_first_and_no_row_twice(tensors: dict[str, torch.Tensor]) -> None:
    targets = tensors["targets"][:SAMPLED]
    sample = sample_rows(targets, vocab=V, rows=SAMPLED)
    rows, distinct = sample.rows_SR[0].tolist(), len(set(targets.tolist()))
    assert len(set(rows)) == SAMPLED
    assert max(rows) < V
    assert set(rows[:distinct]) == set(targets.tolist())
    assert not set(rows[distinct:]) & set(targets.tolist())
    assert torch.equal(sample.rows_SR[0, sample.targets_N], targets)
    assert not sample.log_weights_SR[0, :distinct].any()
    assert (sample.log_weights_SR[0, distinct:] > 0).any()


def test_a_batch_always_draws_the_same_rows(tensors: dict[str, torch.Tensor]) -> None:
    targets = tensors["targets"][:SAMPLED]
    first, again = (sample_rows(targets, vocab=V, rows=SAMPLED).rows_SR[0] for _ in range(2))
    assert torch.equal(first, again)
    changed = targets.clone()
    changed[0] = changed[1]
    other = sample_rows(changed, vocab=V, rows=SAMPLED).rows_SR[0]
    assert len(set(first.tolist()) - set(other.tolist())) > 20


def test_the_weights_of_every_row_are_one_on_average() -> None:
    """Over many batches, that is, with zero where it is not drawn; rows with smaller ids are drawn
    more often."""
    generator, batches = torch.Generator().manual_seed(1), 2000
    sums, squares, counts = torch.zeros(3, 2000)
    for _ in range(batches):
        targets = torch.randint(0, 4, (40,), generator=generator)
        sample = sample_rows(targets, vocab=2000, rows=128)
        rows, weights = sample.rows_SR[0], sample.log_weights_SR[0].exp()
        sums[rows] += weights
        squares[rows] += weights.square()
        counts[rows] += 1
    assert (sums[:4] == batches).all()
    mean = sums[4:] / batches
    error = ((squares[4:] / batches - mean.square()) / batches).sqrt()
    assert ((mean - 1).abs() < 5 * error).all()
    assert mean.mean().item() == pytest.approx(1, abs=0.005)
    assert counts[4:500].mean() > 2 * counts[1500:].mean()


def test_all_tokens_may_be_distinct() -> None:
    targets = torch.arange(64)
    sample = sample_rows(targets, vocab=200, rows=64)
    assert sorted(sample.rows_SR[0].tolist()) == targets.tolist()
    assert not sample.log_weights_SR.any()


def by_definition(
    tensors: dict[str, torch.Tensor], *, cap: float | None, bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Loss and gradients of hidden states, head and bias."""
    hidden, head = (tensors[k].double().requires_grad_() for k in ("hidden", "head"))
    bias = bias.double().requires_grad_()
    total = torch.zeros((), dtype=torch.double)
    sample = sample_rows(tensors["targets"], vocab=V, rows=SAMPLED)
    for number, (rows, log_weights) in enumerate(
        zip(sample.rows_SR, sample.log_weights_SR, strict=True)
    ):
        part = slice(number * SAMPLED, (number + 1) * SAMPLED)
        logits = hidden[part] @ head[rows].T + bias[rows]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        powers = logits.exp() * log_weights.double().exp()
        own = logits.gather(1, sample.targets_N[part, None])[:, 0]
        total = total + ((powers.sum(1).log() - own) * tensors["weights"][part].double()).sum()
    return total.detach(), *torch.autograd.grad(total, (hidden, head, bias))


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("biased", [False, True])
def test_value_and_gradients(
    tensors: dict[str, torch.Tensor], cap: float | None, biased: bool
) -> None:
    bias = biased * torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
    total, *wanted = by_definition(tensors, cap=cap, bias=bias)
    leaves = [tensors["hidden"].clone(), tensors["head"].clone(), *([bias] if biased else [])]
    hidden, head, *given = (leaf.requires_grad_() for leaf in leaves)
    loss = linear_cross_entropy(
        *(hidden, head, tensors["targets"]),
        LossTerms(tensors["weights"], cap=cap, sampled=SAMPLED),
        vocab=V,
        bias_V=given[0] if biased else None,
    )
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    found = torch.autograd.grad(loss.scaled, (hidden, head, *given))
    for got, exact in zip(found, wanted, strict=False):
        assert torch.allclose(got.double(), exact, atol=1e-3, rtol=1e-4)
    assert not found[1][V:].any()


def test_the_mean_of_many_draws_is_the_full_loss(tensors: dict[str, torch.Tensor]) -> None:
    """A token without weight changes what is drawn, and nothing else."""
    hidden, targets = tensors["hidden"][:41], tensors["targets"][:41].clone()
    weights = torch.ones(41)
    weights[-1] = 0.0

    def loss(sampled: int | None) -> float:
        head = tensors["head"].clone().requires_grad_()
        rows = (hidden / 16, head, targets, LossTerms(weights, sampled=sampled))
        return linear_cross_entropy(*rows, vocab=V).total.item() / 40

    full, drawn = loss(None), []
    for other in range(300):
        targets[-1] = other
        drawn.append(loss(512))
    mean = sum(drawn) / len(drawn)
    assert max(drawn) - min(drawn) > 0.01
    assert mean == pytest.approx(full, abs=0.006)


def test_validation_uses_all_rows(tensors: dict[str, torch.Tensor]) -> None:
    inputs = (tensors["hidden"], tensors["head"], tensors["targets"])
    with torch.no_grad():
        sampled = linear_cross_entropy(*inputs, LossTerms(sampled=SAMPLED), vocab=V).total
        assert torch.equal(sampled, linear_cross_entropy(*inputs, vocab=V).total)


def test_more_rows_than_the_vocabulary_has_are_all(tensors: dict[str, torch.Tensor]) -> None:
    inputs = (tensors["hidden"], tensors["head"].requires_grad_(), tensors["targets"])
    sampled = linear_cross_entropy(*inputs, LossTerms(sampled=V), vocab=V).total
    assert torch.equal(sampled, linear_cross_entropy(*inputs, vocab=V).total)


def test_a_head_with_sharded_rows_uses_all_rows(tensors: dict[str, torch.Tensor]) -> None:
    class Shards(ShardComm):
        """One shard that has all rows, so that nothing has to be exchanged."""

        shards = 2

    hidden, head = (tensors[name].clone().requires_grad_() for name in ("hidden", "head"))
    targets, options = tensors["targets"], {"vocab": V, "comm": Shards()}
    found = []
    for sampled in (None, SAMPLED):
        terms = LossTerms(sampled=sampled)
        loss = linear_cross_entropy(hidden, head, targets, terms, **options)
        found.append((loss.total, *torch.autograd.grad(loss.scaled, (hidden, head))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
