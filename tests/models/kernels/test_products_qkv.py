"""Queries, keys and values from one product, against double precision; in Triton's interpreter
where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gristmill.models.kernels import products as module
from gristmill.models.kernels.products import sum_of_products
from gristmill.models.products import (
    QKV_DEPTH,
    QKV_ROWS,
    QKV_WIDEST,
    QKV_WIDTH,
    project_qkv,
    worth_fusing_qkv,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, N, K = (384, 512, 192) if DEVICE == "cuda" else (48, 64, 32)
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "QKV_TILES", module.QKV_TILES._replace(M=16, N=32, K=16))


def random(*shape: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    values = spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, HALF)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", ["apart", "in reverse", "of one tensor", "not aligned"])
def test_the_sum_of_products(kind: str) -> None:
    weight = random(3 * K, N, seed=0, spread=K**-0.5)
    parts = [random(M, K, seed=seed) for seed in (1, 2, 3)]
    if kind == "in reverse":  # addresses that go down
        parts = sorted(parts, key=torch.Tensor.data_ptr, reverse=True)
    elif kind == "of one tensor":
        parts = list(torch.cat(parts, dim=1).chunk(3, dim=1))
    elif kind == "not aligned":
        parts[1] = random(M * K + 1, seed=4)[1:].view(M, K)

    got = sum_of_products(parts, weight)

    exact = torch.cat(parts, dim=1).double() @ weight.double()
    assert error(got, exact) < 5e-3


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gradients(biased: bool, dtype: torch.dtype) -> None:
    x = random(M, N, seed=0).requires_grad_()
    weight = random(3 * K, N, seed=1, spread=N**-0.5).to(dtype).requires_grad_()
    bias = random(3 * K, seed=2).requires_grad_() if biased else None
    outer = [random(M, K, seed=seed) for seed in (3, 4, 5)]
    inputs = [one for one in (x, weight, bias) if one is not None]
    exact = [one.detach().double().requires_grad_() for one in inputs]

    outputs = project_qkv(x, weight, bias)
    got = torch.autograd.grad(outputs, inputs, outer)

    y = exact[0] @ exact[1].T + (exact[2] if biased else 0.0)
    expected = torch.autograd.grad(y, exact, torch.cat(outer, dim=1).double())
    assert error(torch.cat(outputs, dim=1).detach(), y.detach()) < 5e-3
    for mine, wanted, of in zip(got, expected, inputs, strict=True):
        assert mine.dtype is of.dtype
        assert error(mine, wanted) < 1e-2


def test_what_is_worth_fusing_qkv() -> None:
    def worth(rows: int, width: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return worth_fusing_qkv(torch.empty(2, rows // 2, width, dtype=dtype), outputs=outputs)

    assert worth(QKV_ROWS, QKV_WIDTH, 3 * QKV_DEPTH)
    assert not worth(QKV_ROWS + 2, QKV_WIDTH, 3 * QKV_DEPTH)
    assert not worth(QKV_ROWS, QKV_WIDTH + 1, 3 * QKV_DEPTH)
    assert not worth(QKV_ROWS, QKV_WIDTH, 3 * QKV_DEPTH + 3)
    assert not worth(QKV_ROWS, QKV_WIDTH, 3 * QKV_DEPTH, torch.float32)
    assert worth(QKV_ROWS, QKV_WIDEST, 3 * QKV_WIDEST)
    assert not worth(QKV_ROWS, QKV_WIDEST + QKV_WIDTH, 3 * QKV_WIDEST)
