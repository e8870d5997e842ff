"""K-FAC against what it approximates: a dense natural gradient, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.config.lora import LinearShape
from gristmill.config.optim import KfacConfig
from gristmill.optim.factors import advance
from gristmill.optim.kfac import KfacLayer, LayerCurvature, StepSettings

X, Y = 5, 4
NO_SKIP, SKIP = torch.zeros(()), torch.ones(())


@pytest.fixture(autouse=True)
def _exact() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(before)


def settings(damping: float) -> StepSettings:
    return StepSettings(damping, 0.95, 0.0)


def curvature(inputs: torch.Tensor, outputs: torch.Tensor, **words: Any) -> LayerCurvature:
    """That of a layer that saw these inputs and output gradients, as rows."""
    config = KfacConfig(type="kfac", **words)
    layer = KfacLayer("layer", LinearShape(inputs.shape[1], (outputs.shape[1],), False), False)
    made = LayerCurvature(layer, config)
    made.allocate(torch.device("cpu"), factors=True)
    samples = [one.T @ one / len(one) for one in (inputs, outputs)]
    made.advance(samples[: len(made.factors)], decay=0.95, updates=torch.zeros(()), skip=NO_SKIP)
    return made


def invert(made: LayerCurvature, at: StepSettings) -> None:
    for number in range(len(made.factors)):
        made.invert_factor(number, at)


@pytest.mark.parametrize("damping", [1e-3, 0.3])
def test_a_natural_gradient_where_inputs_and_gradients_are_independent(damping: float) -> None:
    """With every input in the company of every gradient, the Fisher matrix is a Kronecker
    product."""
    inputs, outputs = torch.randn(7, X), torch.randn(6, Y)
    pairs = [torch.outer(g, x).flatten() for x in inputs for g in outputs]
    fisher = sum(torch.outer(one, one) for one in pairs) / len(pairs)
    gradient = torch.randn(Y, X)
    expected = torch.linalg.solve(fisher + damping * torch.eye(X * Y), gradient.flatten())
    made = curvature(inputs, outputs, method="eigen", relative_damping=False)
    invert(made, settings(damping))
    found = made.precondition(gradient, settings(damping))
    torch.testing.assert_close(found, expected.view(Y, X), rtol=1e-10, atol=1e-12)
    # The same damping relative to the mean eigenvalue.
    relative = damping / (fisher.trace().item() / (X * Y))
    made = curvature(inputs, outputs, method="eigen")
    invert(made, settings(relative))
    again = made.precondition(gradient, settings(relative))
    torch.testing.assert_close(again, found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("relative", [True, False])
def test_the_inverse_method_divides_damping_between_the_factors(relative: bool) -> None:
    inputs, outputs = torch.randn(50, X), 0.01 * torch.randn(50, Y)
    made = curvature(inputs, outputs, method="inverse", relative_damping=relative)
    invert(made, settings(0.01))
    a, g = made.factors
    means = a.trace() / X, g.trace() / Y
    balance = (means[0] / means[1]).sqrt()
    parts = [0.1 * one for one in (means if relative else (balance, 1 / balance))]
    gradient = torch.randn(Y, X)
    left = torch.linalg.solve(g + parts[1] * torch.eye(Y), gradient)
    expected = torch.linalg.solve(a + parts[0] * torch.eye(X), left.T).T
    found = made.precondition(gradient, settings(0.01))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_the_factor_of_the_inputs_alone(method: str) -> None:
    inputs, outputs, gradient = torch.randn(50, X), torch.randn(50, Y), torch.randn(Y, X)
    made = curvature(inputs, outputs, method=method, sides="input")
    invert(made, settings(0.1))
    (a,) = made.factors
    damped = a + 0.1 * a.trace() / X * torch.eye(X)
    expected = torch.linalg.solve(damped, gradient.T).T
    torch.testing.assert_close(made.precondition(gradient, settings(0.1)), expected)


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_a_layer_in_other_coordinates_moves_alike(method: str) -> None:
    """With M on its inputs and N on its outputs, W becomes N W M^-1, and so does the step."""
    inputs, outputs = torch.randn(60, X), torch.randn(60, Y)
    gradient = outputs.T @ inputs
    m, n = torch.randn(X, X) + 3 * torch.eye(X), torch.randn(Y, Y) + 3 * torch.eye(Y)
    moved = inputs @ m.T, outputs @ torch.linalg.inv(n)
    tiny = settings(1e-20)
    plain, other = curvature(inputs, outputs, method=method), curvature(*moved, method=method)
    for one in (plain, other):
        invert(one, tiny)
    expected = n @ plain.precondition(gradient, tiny) @ torch.linalg.inv(m)
    found = other.precondition(moved[1].T @ moved[0], tiny)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_stacked_matrices_have_gradients_of_their_own() -> None:
    """Three matrices in one weight are preconditioned as three layers with the same inputs."""
    inputs, outputs, gradient = torch.randn(50, X), torch.randn(50, 9), torch.randn(9, X)
    config = KfacConfig(type="kfac", method="eigen")
    layer = KfacLayer("qkv", LinearShape(X, (4, 3, 2), False), False)
    whole = LayerCurvature(layer, config)
    whole.allocate(torch.device("cpu"), factors=True)
    parts = outputs.split([4, 3, 2], dim=1)
    samples = [one.T @ one / 50 for one in (inputs, *parts)]
    whole.advance(samples, decay=0.95, updates=torch.zeros(()), skip=NO_SKIP)
    invert(whole, settings(0.1))
    apart = []
    for part, its in zip(parts, gradient.split([4, 3, 2]), strict=True):
        one = curvature(inputs, part, method="eigen")
        invert(one, settings(0.1))
        apart.append(one.precondition(its, settings(0.1)))
    torch.testing.assert_close(whole.precondition(gradient, settings(0.1)), torch.cat(apart))


@pytest.mark.parametrize("transposed", [False, True])
def test_weight_and_bias_are_one_matrix(transposed: bool) -> None:
    layer = KfacLayer("layer", LinearShape(X, (Y,), True), transposed)
    weight, bias = torch.randn(X, Y) if transposed else torch.randn(Y, X), torch.randn(Y)
    joined = layer.join((weight, bias))
    assert joined.shape == (Y, X + 1)
    assert torch.equal(joined[:, X], bias)
    for found, expected in zip(layer.separate(joined), (weight, bias), strict=True):
        assert torch.equal(found, expected)


def test_the_first_samples_are_averaged_evenly() -> None:
    factor, updates = torch.zeros(2, 2), torch.zeros(())
    samples = [torch.randn(2, 2) for _ in range(6)]
    for sample in samples[:3]:
        advance(factor, sample, decay=0.75, updates=updates, skip=NO_SKIP)
        updates += 1
    torch.testing.assert_close(factor, sum(samples[:3]) / 3)
    before = factor.clone()
    advance(factor, torch.full((2, 2), torch.nan), decay=0.75, updates=updates, skip=SKIP)
    assert torch.equal(factor, before)
    for sample in samples[3:]:
        advance(factor, sample, decay=0.75, updates=updates, skip=NO_SKIP)
        updates += 1
    expected = sum(samples[:4]) / 4
    for sample in samples[4:]:
        expected = 0.75 * expected + 0.25 * sample
    torch.testing.assert_close(factor, expected)
