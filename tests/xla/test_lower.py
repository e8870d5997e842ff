"""Traced torch code in JAX against torch itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from gristmill.base.errors import UserError
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.loss_terms import LossTerms

jax = pytest.importorskip("jax", reason="needs JAX; `make test-xla` installs it and runs this")

from gristmill.strategies.xla import loss as xla_loss  # noqa: E402
from gristmill.strategies.xla.graph import meta, trace  # noqa: E402
from gristmill.strategies.xla.lower import Context, Lowered  # noqa: E402

pytestmark = pytest.mark.xla


def lowered(function: Any, *inputs: torch.Tensor) -> Lowered:
    return Lowered(trace(function, *(meta(one.shape, one.dtype) for one in inputs)))


def in_jax(value: torch.Tensor) -> Any:
    return value.int().numpy() if value.dtype is torch.int64 else value.detach().numpy()


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_and_its_gradients_are_those_of_torch(
    cap: float | None, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_loss, "CPU_SLICE_BYTES", 0)
    monkeypatch.setattr(xla_loss, "SLICE_TOKENS", 5)  # which divides neither 12 nor 24
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(24, 8, generator=draw, requires_grad=True)
    head = torch.randn(20, 8, generator=draw, requires_grad=True)
    targets = torch.randint(0, 17, (24,), generator=draw)
    weights = torch.rand(24, generator=draw)

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        hidden, head, targets, weights = inputs
        given = weights if weighted else None
        return linear_cross_entropy(
            hidden, head, targets, LossTerms(given, cap=cap), vocab=17
        ).total

    inputs = (hidden, head, targets, weights)
    traced = lowered(loss, *inputs)
    given = weights if weighted else None
    torch_loss = linear_cross_entropy(hidden, head, targets, LossTerms(given, cap=cap), vocab=17)
    torch_loss.scaled.backward()
    arrays = [in_jax(one) for one in inputs]
    for shards in (1, 2):
        found, gradients = jax.value_and_grad(
            lambda *args, n=shards: traced(*args, context=Context(shards=n)), argnums=(0, 1)
        )(*arrays)
        assert float(found) == pytest.approx(torch_loss.total.item(), rel=1e-6)
        for ours, theirs in zip(gradients, (hidden.grad, head.grad), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_that_of_torch(groups: int, masked: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    query = torch.randn(2, 4, 6, 8, generator=draw)
    key, value = (torch.randn(2, groups, 6, 8, generator=draw) for _ in range(2))
    mask = torch.rand(2, 1, 6, 6, generator=draw) > 0.5
    mask |= torch.eye(6, dtype=torch.bool)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        query, key, value, mask = inputs
        chosen = {"attn_mask": mask} if masked else {"is_causal": True}
        return functional.scaled_dot_product_attention(
            query, key, value, scale=0.3, enable_gqa=True, **chosen
        )

    inputs = (query, key, value, mask)
    found = lowered(attend, *inputs)(*map(in_jax, inputs))
    np.testing.assert_allclose(found, attend(*inputs), atol=1e-6)


def test_dtypes_are_those_of_torch() -> None:
    """JAX would promote bf16 times a scalar tensor of fp32 to fp32."""
    x, y = torch.ones(3, dtype=torch.bfloat16), torch.tensor(1 / 3)
    found = lowered(lambda x, y: x * y, x, y)(jax.numpy.ones(3, jax.numpy.bfloat16), y.numpy())
    assert found.dtype == jax.numpy.bfloat16
    assert found.tolist() == (x * y).tolist()


def test_memory_that_is_changed_in_place_is_followed() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1:].mul_(2).add_(1)
        return y

    x = torch.arange(4.0)
    assert lowered(change, x)(x.numpy()).tolist() == change(x).tolist()


@pytest.mark.parametrize("offset", [-2, 0, 1])
def test_a_diagonal_that_is_changed_in_place_is_followed(offset: int) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        diagonal = y.diagonal(offset, dim1=2, dim2=1)
        diagonal.mul_(diagonal).add_(3)
        return y

    x = torch.rand(2, 3, 5)
    assert lowered(change, x)(x.numpy()).tolist() == change(x).tolist()


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(UserError, match=r"aten\.erfinv\.default, which has no translation to XLA"):
        lowered(torch.erfinv, torch.zeros(2))
