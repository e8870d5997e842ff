"""Products with an activation against plain ones in double precision; in Triton's interpreter where
there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from gristmill.models.kernels import products as module
from gristmill.models.kernels.products import activation_backward, linear_activation
from gristmill.models.products import (
    MLP_INNER,
    MLP_ROWS,
    MLP_WIDEST,
    MLP_WIDTH,
    fused_mlp,
    worth_fusing_mlp,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M, N, K = (256, 512, 128) if DEVICE == "cuda" else (48, 64, 32)
FUNCTIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "relu2": lambda h: functional.relu(h).square(),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "FORWARD", module.FORWARD._replace(M=16, N=16, K=16))
        monkeypatch.setattr(module, "BACKWARD", module.BACKWARD._replace(M=16, N=32, K=16))


def random(*shape: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    values = spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, torch.float16 if DEVICE == "cpu" else torch.bfloat16)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("activation", MLP_WIDEST)
@pytest.mark.parametrize("biased", [False, True])
def test_forward_and_backward(activation: str, biased: bool) -> None:
    x, weight = random(M, K, seed=0), random(N, K, seed=1, spread=K**-0.5)
    bias = random(N, seed=2) if biased else None
    upper, d_upper = random(K, N, seed=3, spread=K**-0.5), random(M, K, seed=4)

    kept, out = linear_activation(x, weight, bias, activation)
    d_pre = activation_backward(d_upper, upper, out if activation == "relu2" else kept, activation)

    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    exact.requires_grad_()
    expected = FUNCTIONS[activation](exact)
    (expected * (d_upper.double() @ upper.double())).sum().backward()
    assert exact.grad is not None
    assert error(out, expected.detach()) < 5e-3
    assert error(d_pre, exact.grad) < 5e-3
    assert kept.numel() == (0 if activation == "relu2" else out.numel())


def test_what_is_worth_fusing() -> None:
    def worth(rows: int, width: int, inner: int, activation: str, dtype: torch.dtype) -> bool:
        x = torch.empty(2, rows // 2, width, dtype=dtype)
        return worth_fusing_mlp(x, inner=inner, activation=activation)

    half = torch.bfloat16
    assert worth(MLP_ROWS, MLP_WIDTH, MLP_INNER, "relu2", half)
    assert not worth(MLP_ROWS + 2, MLP_WIDTH, MLP_INNER, "relu2", half)
    assert not worth(MLP_ROWS, MLP_WIDTH + 1, MLP_INNER, "relu2", half)
    assert not worth(MLP_ROWS, MLP_WIDTH, MLP_INNER + 1, "relu2", half)
    assert not worth(MLP_ROWS, MLP_WIDTH, MLP_INNER, "swiglu", half)
    assert not worth(MLP_ROWS, MLP_WIDTH, MLP_INNER, "relu2", torch.float32)
    for activation, widest in MLP_WIDEST.items():
        assert worth(MLP_ROWS, widest, MLP_INNER, activation, half)
        assert not worth(MLP_ROWS, widest + MLP_WIDTH, MLP_INNER, activation, half)


@pytest.mark.parametrize("activation", MLP_WIDEST)
@pytest.mark.parametrize("biased", [False, True])
def test_the_fused_part_has_the_gradients_of_the_plain_one(activation: str, biased: bool) -> None:
    def inputs() -> list[torch.Tensor]:
        made = [
            random(M, K, seed=0),
            random(N, K, seed=1, spread=K**-0.5).float(),  # as a model keeps its weights
            random(N, seed=2),
            random(K, N, seed=3, spread=N**-0.5).float(),
        ]
        return [tensor.requires_grad_() for tensor in made]

    x, up, bias, down = inputs()
    y = fused_mlp(x, up, bias if biased else None, down, activation)
    outer = random(M, K, seed=5)
    (y * outer).sum().backward()

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs()]
    h = exact[0] @ exact[1].T + (exact[2] if biased else 0.0)
    expected = FUNCTIONS[activation](h) @ exact[3].T
    (expected * outer.double()).sum().backward()
    assert error(y.detach(), expected.detach()) < 1e-2
    for got, wanted in zip((x, up, bias, down), exact, strict=True):
        if wanted.grad is not None and (biased or got is not bias):
            assert error(got.grad, wanted.grad) < 1e-2
