"""Products of blocks in fp8, against the same rounding written out in plain torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.nn import functional

from gristmill.config.model import GPTConfig
from gristmill.models.build import build_model
from gristmill.models.fp8 import FUSED, MARGIN, Fp8Scales
from gristmill.models.gpt import GPT
from gristmill.models.layers import Block, BlockContext, Linear
from gristmill.models.recompute import Recompute

CPU = torch.device("cpu")
Kind = Literal["none", "selective", "full"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def no_others(numbers: torch.Tensor) -> None:
    """There are no other processes."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in fp8, with the power of two as a scale that the largest of them needs."""
    largest, most = x.abs().max().item(), torch.finfo(dtype).max
    scale = 2.0 ** (math.floor(math.log2(largest / most)) + 1)
    return (x.float() / scale).clamp(-most, most).to(dtype).float() * scale


def linear(bias: bool = True) -> tuple[Linear, Fp8Scales]:
    layer = Linear(32, 48, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(random(48, 32, seed=1))
        if bias:
            layer.bias.copy_(random(48, seed=2))
    return layer, Fp8Scales({"only": layer}, CPU)


def measure(scales: Fp8Scales, run: Callable[[], torch.Tensor]) -> None:
    """Set scales from exactly these operands."""
    with scales.calibrating():
        run().backward()
    scales.update(no_others)
    scales.amax_LO /= MARGIN
    scales._write_scales()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients(bias: bool, dtype: torch.dtype) -> None:
    """A weight in the dtype of its input is cast again for the backward pass, others are kept."""
    layer, scales = linear(bias)
    x, d = (random(2, 16, size, seed=size).to(dtype) for size in (32, 48))
    x.requires_grad_()
    measure(scales, lambda: (layer(x) * d).sum())
    x.grad, layer.weight.grad = None, None
    if bias:
        layer.bias.grad = None
    y = layer(x)
    (y * d).sum().backward()
    x8, w8, d8 = rounded(x, E4M3), rounded(layer.weight, E4M3), rounded(d, E5M2)
    rounds = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    expected = functional.linear(x8, w8, layer.bias)
    torch.testing.assert_close(y, expected.to(dtype), **rounds)
    torch.testing.assert_close(x.grad, (d8 @ w8).to(dtype), **rounds)
    expected = d8.flatten(0, 1).T @ x8.flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-5, atol=1e-3)
    if bias:
        sums = d.float().flatten(0, 1).sum(0)
        torch.testing.assert_close(layer.bias.grad, sums.to(dtype).float(), rtol=1e-5, atol=1e-4)


def mlp(activation: str) -> tuple[Block, Fp8Scales]:
    config = GPTConfig(layers=1, heads=2, width=32, context=16, activation=activation)
    model = build_model(config, vocab=64, device=CPU)
    model.initialise(seed=1)
    block = model.get_submodule("blocks.0")
    assert isinstance(block, Block)
    return block, Fp8Scales(model.fp8_layers(["mlp"]), CPU)


@pytest.mark.parametrize("activation", FUSED)
def test_an_mlp_computes_what_its_layers_do(activation: str) -> None:
    block, scales = mlp(activation)
    context = BlockContext(torch.arange(16))
    x, d = random(2, 16, 32, seed=3).requires_grad_(), random(2, 16, 32, seed=4)
    measure(scales, lambda: (block.mlp(x, context) * d).sum())
    found = []
    for block.mlp.may_fuse in (True, False):
        block.zero_grad()
        x.grad = None
        y = block.mlp(x, context)
        (y * d).sum().backward()
        found.append([y, x.grad, *(p.grad for p in block.mlp.parameters())])
    for fused, apart in zip(*found, strict=True):
        # Rounding to fp8 turns the least difference into a unit here and there.
        assert (fused - apart).norm() < 2e-3 * apart.norm()


def test_the_amax_of_a_step_scales_the_next() -> None:
    layer, scales = linear()
    x = random(16, 32)
    measure(scales, lambda: layer(x).sum())
    layer(1000 * x).sum().backward()
    scales.update(no_others)
    assert scales.amax_LO[0, 0] == pytest.approx(1000 * x.abs().max().item())
    assert layer.fp8_scales is not None
    power = math.floor(math.log2(scales.amax_LO[0, 0] / 448)) + 1
    assert layer.fp8_scales[0, 0] == 2.0**power
    layer(x).sum().backward()
    scales.update(no_others)
    assert scales.amax_LO[0, 0] == pytest.approx(950 * x.abs().max().item())


def test_an_operand_of_zeros_is_scaled_as_the_largest_of_other_layers() -> None:
    names = ("first", "zero", "last")
    layers = {name: linear(bias=False)[0] for name in names}
    torch.nn.init.zeros_(layers["zero"].weight)
    scales = Fp8Scales(layers, CPU)

    def loss() -> torch.Tensor:
        # The gradient of what is before a layer of zeros is zero too.
        passed = layers["zero"](layers["first"](random(16, 32))[:, :32])
        return (passed * random(16, 48, seed=4)).sum() + layers["last"](3 * random(16, 32)).sum()

    measure(scales, loss)
    assert scales.amax_LO[0, 2] == scales.amax_LO[1, 1] == 0, "operands of zeros"
    found = {name: layer.fp8_scales[:, 0] for name, layer in layers.items()}
    largest = torch.stack(list(found.values())).amax(0)
    assert found["zero"][1] == largest[1]
    assert found["first"][2] == largest[2]
    assert scales.state()["zero"][1] == 0, "saved as it was seen"


def test_gradients_that_were_never_finite_are_scaled_as_ones() -> None:
    layer, scales = linear()
    measure(scales, lambda: layer(random(16, 32)).sum() * torch.inf)
    assert scales.amax_LO[0, 2] == 0
    assert layer.fp8_scales is not None
    assert layer.fp8_scales[2, 0] == 2.0**-15  # a power of two above 1 / 57344


def test_a_skipped_step_leaves_scales_alone() -> None:
    layer, scales = linear()
    measure(scales, lambda: layer(random(16, 32)).sum())
    before = scales.state()
    layer(1e6 * random(16, 32)).sum().backward()
    scales.update(no_others, torch.ones(()))
    assert scales.state() == before
    layer(random(16, 32)).sum().backward()
    scales.update(no_others, torch.zeros(()))
    assert scales.amax_LO.max() < 1e3


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(value: float) -> None:
    layer, scales = linear()
    x = random(16, 32)
    measure(scales, lambda: layer(x).sum())
    x[3, 5] = value
    y = layer(x)
    assert not y[3].isfinite().any()
    assert y[[0, 1, 2, 4]].isfinite().all()
    d = random(16, 48)
    d[2, 0] = value
    layer.zero_grad()
    layer(random(16, 32)).backward(d)
    assert not layer.weight.grad[0].isfinite().any()


def test_larger_numbers_than_any_before_are_clamped() -> None:
    layer, scales = linear(bias=False)
    x = random(16, 32)
    measure(scales, lambda: layer(x).sum())
    assert layer.fp8_scales is not None
    most = 448 * layer.fp8_scales[0, 0].item()
    clamped = functional.linear(rounded((100 * x).clamp(-most, most), E4M3), layer.weight)
    y = layer(100 * x)
    assert y.isfinite().all()
    assert (y - clamped).norm() < 0.05 * clamped.norm()


def test_without_training_nothing_is_in_fp8() -> None:
    layer, scales = linear()
    x = random(16, 32)
    measure(scales, lambda: layer(x).sum())
    before = scales.state()
    layer.eval()
    torch.testing.assert_close(layer(x), functional.linear(x, layer.weight, layer.bias))
    layer.train()
    assert (layer(x) - functional.linear(x, layer.weight, layer.bias)).abs().max() > 1e-3
    assert scales.state() == before


def test_scales_are_saved_and_loaded() -> None:
    layer, scales = linear()
    measure(scales, lambda: layer(random(16, 32)).sum())
    other, loaded = linear()
    assert not loaded.calibrated
    loaded.load(scales.state())
    assert loaded.calibrated
    assert torch.equal(layer.fp8_scales, other.fp8_scales)
    assert loaded.state() == scales.state()


@pytest.mark.parametrize(
    "state",
    [
        3,
        {},
        {"other": [1.0, 1.0, 1.0]},
        {"only": [1.0, 1.0]},
        {"only": [1.0, 1.0, math.inf]},
        {"only": [1.0, 1.0, -1.0]},
        {"only": ["a", 1.0, 1.0]},
    ],
)
def test_other_states_are_refused(state: Any) -> None:
    _, scales = linear()
    with pytest.raises(ValueError, match="fp8"):
        scales.load(state)


# ------------------------------------------------------------------ models


def losses(*, compile_: bool = False, recompute: Kind = "none", **settings: Any) -> list[float]:
    """Of three steps of plain descent after one that measures, and a checksum of the weights."""
    config = GPTConfig(**{"layers": 2, "heads": 4, "width": 64, "context": 32, **settings})
    model = build_model(config, vocab=64, device=CPU)
    assert isinstance(model, GPT)
    model.initialise(seed=0)
    scales = Fp8Scales(model.fp8_layers(["attention", "mlp"]), CPU)
    for number, block in enumerate(model.blocks.values()):
        if compile_:
            block.forward = torch.compile(
                block.forward, dynamic=False, fullgraph=True, backend="aot_eager"
            )
        Recompute(recompute, 1).wrap(block, number)
    tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    found = []
    for step in range(4):
        with scales.calibrating() if step == 0 else contextlib.nullcontext():
            logits = model(inputs)
            value = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            value.backward()
        scales.update(no_others)
        with torch.no_grad():
            for parameter in model.parameters():
                if step and parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
        found.append(value.item())
    return [*found, sum(p.double().abs().sum().item() for p in model.parameters())]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_blocks_are_the_same(recompute: Kind) -> None:
    kept, again = losses(), losses(recompute=recompute)
    tolerance = 1e-6 if recompute == "full" else 1e-3  # which does not fuse the MLP
    assert again == pytest.approx(kept, rel=tolerance)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_compiled_blocks_are_about_the_same(activation: str) -> None:
    torch.compiler.reset()
    plain = losses(activation=activation)
    compiled = losses(activation=activation, compile_=True)
    assert compiled == pytest.approx(plain, rel=1e-3)
    assert plain[1] > plain[2] > plain[3]
