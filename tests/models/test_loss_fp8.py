"""The loss with the head in fp8 against the plain one, in bf16 and in double precision; Triton's
interpreter and torch's products in fp8 on the CPU stand for the GPU.

Tolerances: e4m3 rounds to 4 significant bits, which is 0.026 of a number in the mean square, and
e5m2 to 3 bits, 0.05 to 0.07. A sum of products of such numbers has about their common error,
sqrt(0.026^2 + 0.06^2) = 0.07, since both the sum and its errors add up as random numbers do; and
probabilities move a little because the logits do. A logit that is the sum of random products is
off by 0.037 of its usual size. Here that is 0.8, so the loss of a token is off by 0.03, and the
mean over 100 tokens by 0.003, less than a thousandth of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from gristmill.base.units import Progress
from gristmill.config.schema import RunConfig
from gristmill.data.loader import make_batch
from gristmill.distributed.world import open_world
from gristmill.models import loss as module
from gristmill.models.loss import linear_cross_entropy
from gristmill.models.loss_terms import LossTerms
from gristmill.models.spec import Kernels
from gristmill.train.build import build_strategy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, D, V, ROWS = 100, 64, 250, 256


class Result(NamedTuple):
    total: float
    d_hidden: torch.Tensor
    d_head: torch.Tensor


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Inputs for slices of 64 and 36 tokens."""
    monkeypatch.setattr(module, "CPU_SLICE_BYTES", 2 * ROWS * 64)
    monkeypatch.setattr(module, "CPU_SLICE_TOKENS", 64)
    monkeypatch.setattr(module, "SLICE_BYTES", 2 * ROWS * 64)
    generator = torch.Generator().manual_seed(0)
    head = 0.1 * torch.randn(ROWS, D, generator=generator)
    targets = torch.randint(0, V, (N,), generator=generator)
    hidden = torch.randn(N, D, generator=generator) + head[targets]
    weights = torch.rand(N, generator=generator).round(decimals=1)
    weights[10:20] = 0.0
    made = {"hidden": hidden.bfloat16(), "head": head, "targets": targets, "weights": weights}
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


def plain(
    tensors: dict[str, torch.Tensor], *, weights: torch.Tensor | None, cap: float | None
) -> Result:
    """Loss and gradients by definition, in double precision."""
    hidden, head = (tensors[k].double().requires_grad_() for k in ("hidden", "head"))
    logits = hidden @ head[:V].T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    losses = functional.cross_entropy(logits, tensors["targets"], reduction="none")
    total = losses.sum() if weights is None else (losses * weights.double()).sum()
    total.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return Result(total.item(), hidden.grad, head.grad)


def ours(
    tensors: dict[str, torch.Tensor],
    *,
    weights: torch.Tensor | None = None,
    cap: float | None = None,
    scale: float = 1.0,
    fp8: bool = True,
    sampled: int | None = None,
) -> Result:
    hidden, head = (tensors[k].clone().requires_grad_() for k in ("hidden", "head"))
    factor = torch.tensor(scale, device=DEVICE)
    loss = linear_cross_entropy(
        *(hidden, head, tensors["targets"]),
        LossTerms(weights, factor, cap=cap, sampled=sampled),
        vocab=V,
        fp8=fp8,
    )
    loss.scaled.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    assert (hidden.grad.dtype, head.grad.dtype) == (torch.bfloat16, torch.float32)
    return Result(loss.total.item(), hidden.grad / scale, head.grad / scale)


def assert_alike(got: torch.Tensor, wanted: torch.Tensor) -> None:
    got = got.double()
    assert (got - wanted).norm() / wanted.norm() < 0.1
    assert functional.cosine_similarity(got.flatten(), wanted.flatten(), dim=0) > 0.995


@pytest.mark.parametrize(
    ("weighted", "cap"),
    [
        *((False, None), (True, 5.0)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((False, 5.0), (True, None))),
    ],
)
def test_value_and_gradients(
    tensors: dict[str, torch.Tensor], weighted: bool, cap: float | None
) -> None:
    weights = tensors["weights"] if weighted else None
    exact, half = (
        plain(tensors, weights=weights, cap=cap),
        ours(tensors, weights=weights, cap=cap, fp8=False),
    )
    got = ours(tensors, weights=weights, cap=cap)
    assert got.total == pytest.approx(half.total, rel=1e-3)
    assert got.total != half.total
    assert_alike(got.d_hidden, exact.d_hidden)
    assert_alike(got.d_head, exact.d_head)
    assert not got.d_head[V:].any()
    assert weights is None or not got.d_hidden[10:20].any()


def test_a_sampled_softmax(tensors: dict[str, torch.Tensor]) -> None:
    half, got = (ours(tensors, cap=5.0, sampled=128, fp8=fp8) for fp8 in (False, True))
    assert got.total == pytest.approx(half.total, rel=1e-3)
    assert got.total != half.total
    assert_alike(got.d_hidden, half.d_hidden.double())
    assert_alike(got.d_head, half.d_head.double())


def test_gradients_of_a_model_that_is_often_right(tensors: dict[str, torch.Tensor]) -> None:
    """The gradient of a likely target is no longer close to 1, so it is rounded like the rest."""
    tensors["head"] *= 2.5
    tensors["hidden"] += 2 * tensors["head"][tensors["targets"]].bfloat16()
    exact, got = plain(tensors, weights=None, cap=None), ours(tensors)
    assert exact.total / N < 1.5
    # Logits are of size 2 here, hence the losses of tokens off by 0.07 and their mean by 0.007.
    assert got.total == pytest.approx(exact.total, abs=0.02 * N)
    assert_alike(got.d_hidden, exact.d_hidden)
    assert_alike(got.d_head, exact.d_head)


@pytest.mark.parametrize("size", [1e-3, pytest.param(1.0, marks=pytest.mark.slow), 1e3])
def test_weights_of_any_size_count_fully(tensors: dict[str, torch.Tensor], size: float) -> None:
    """Large ones do not overflow, small ones are not lost."""
    weights = size * tensors["weights"]
    exact, got = plain(tensors, weights=weights, cap=None), ours(tensors, weights=weights)
    assert got.total == pytest.approx(exact.total, rel=1e-3)
    assert_alike(got.d_hidden, exact.d_hidden)
    assert_alike(got.d_head, exact.d_head)


@pytest.mark.slow
def test_the_scale_of_the_loss_is_not_rounded_away(tensors: dict[str, torch.Tensor]) -> None:
    """2^-30 times these gradients is far below what e5m2 holds."""
    whole, small = ours(tensors), ours(tensors, scale=2.0**-30)
    torch.testing.assert_close(small.d_head, whole.d_head, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(small.d_hidden, whole.d_hidden, rtol=1e-5, atol=1e-6)


def test_rows_that_all_count_nothing(tensors: dict[str, torch.Tensor]) -> None:
    got = ours(tensors, weights=torch.zeros(N, device=DEVICE))
    assert got.total == 0
    assert not got.d_hidden.any()
    assert not got.d_head.any()


def test_a_head_of_zeros_learns(tensors: dict[str, torch.Tensor]) -> None:
    tensors["head"].zero_()
    exact, got = plain(tensors, weights=None, cap=None), ours(tensors)
    assert got.total == pytest.approx(exact.total, rel=1e-5)
    assert_alike(got.d_head, exact.d_head)
    assert not got.d_hidden.any()


def test_hidden_states_that_are_not_finite_show_in_the_loss(
    tensors: dict[str, torch.Tensor],
) -> None:
    tensors["hidden"][70, 3] = torch.nan
    assert np.isnan(ours(tensors).total)


def test_a_loss_that_is_only_measured_is_in_bf16(tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        measured = partial(
            linear_cross_entropy,
            *(tensors["hidden"], tensors["head"], tensors["targets"]),
            vocab=V,
        )
        assert torch.equal(measured(fp8=True).total, measured(fp8=False).total)


@pytest.mark.slow
def test_slices_change_little(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slice has a scale of its own for its hidden states."""
    sliced = ours(tensors)
    for name in ("SLICE_BYTES", "CPU_SLICE_BYTES"):
        monkeypatch.setattr(module, name, 2**30)
    whole = ours(tensors)
    assert sliced.total == pytest.approx(whole.total, rel=1e-3)
    assert (sliced.d_hidden - whole.d_hidden).norm() / whole.d_hidden.norm() < 0.1


@pytest.mark.slow
def test_a_run_learns_as_in_bf16(make_run: Callable[..., RunConfig]) -> None:
    """The loss falls to less than a third, and the noise of fp8 moves it by less than 1 %; twice
    that is allowed, since the CPU's rounding differs between machines."""

    def curve(*, fp8: bool) -> list[float]:
        device = f'runtime.device="{DEVICE}"'
        config = make_run('precision.compute="bf16"', "runtime.compile=false", device)
        strategy = build_strategy(config, vocab=257, world=open_world(config.runtime))
        strategy.model.kernels = Kernels(head_fp8=fp8)
        batch = [make_batch(np.random.default_rng(0).integers(0, 257, (1, 13)))]
        return [
            strategy.update(strategy.accumulate(batch, Progress(steps=n))).loss.item()
            for n in range(20)
        ]

    half, eighth = curve(fp8=False), curve(fp8=True)
    assert half[-1] < half[0] - 1.5
    assert eighth == pytest.approx(half, rel=0.02)
    assert eighth != half
