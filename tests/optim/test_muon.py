"""The iteration against singular value decompositions in float64."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from gristmill.optim.muon import (
    Iteration,
    build_iteration,
    equalise,
    orthogonalise,
    shape_scale,
)

Kind = Literal["polar-express", "quintic"]


def matrix(rows: int, columns: int, *, smallest: float, seed: int = 1) -> torch.Tensor:
    """Random singular vectors, singular values spread evenly in logarithm from 1 down."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    left, _, right = torch.linalg.svd(noise, full_matrices=False)
    values = torch.logspace(0, math.log10(smallest), min(rows, columns), dtype=torch.float64)
    return left * values @ right


def iteration(kind: Kind, steps: int, dtype: torch.dtype = torch.float64) -> Iteration:
    return build_iteration(kind, steps=steps, dtype=dtype)


# The lowest and highest singular value that so many steps may leave.
ENDS = [
    ("quintic", 5, 0.63, 1.21),
    ("quintic", 8, 0.68, 1.14),
    ("polar-express", 5, 0.85, 1.15),
    ("polar-express", 6, 0.99, 1.01),
    ("polar-express", 8, 1 - 1e-6, 1 + 1e-6),
]


@pytest.mark.parametrize(("kind", "steps", "low", "high"), ENDS)
@pytest.mark.parametrize("shape", [(40, 40), (24, 100), (100, 24)], ids=str)
@pytest.mark.parametrize("smallest", [0.3, 0.01, 0.003])
def test_singular_values_come_close_to_one_and_vectors_stay(
    kind: Kind, steps: int, low: float, high: float, shape: tuple[int, int], smallest: float
) -> None:
    given = matrix(*shape, smallest=smallest)
    made = orthogonalise(given[None], iteration(kind, steps))[0]
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    inside = left.mT @ made @ right.mT
    values = inside.diagonal()
    assert low <= values.min() and values.max() <= high
    torch.testing.assert_close(inside, values.diag(), rtol=0, atol=1e-11)
    torch.testing.assert_close(made, left * values @ right, rtol=0, atol=1e-11)


def test_many_steps_reach_the_polar_factor() -> None:
    given = matrix(30, 50, smallest=0.01)
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    made = orthogonalise(given[None], iteration("polar-express", 9))[0]
    torch.testing.assert_close(made, left @ right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["quintic", "polar-express"])
def test_fp32_follows_float64(kind: Kind) -> None:
    given = matrix(32, 64, smallest=0.01)[None]
    exact = orthogonalise(given, iteration(kind, 5))
    rough = orthogonalise(given.float(), iteration(kind, 5, torch.float32))
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["quintic", "polar-express"])
def test_bf16_stays_in_the_range_of_the_polynomials(kind: Kind) -> None:
    given = matrix(32, 64, smallest=0.01)[None]
    made = orthogonalise(given.float(), iteration(kind, 5, torch.bfloat16))
    values = torch.linalg.svdvals(made.double())
    assert values.min() > 0.6 and values.max() < 1.25


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16)], ids=str)
def test_a_batch_is_its_matrices_one_by_one(shape: tuple[int, int]) -> None:
    given = torch.stack([matrix(*shape, smallest=0.1, seed=seed) * 10**seed for seed in range(5)])
    together = orthogonalise(given, iteration("polar-express", 5))
    for one, made in zip(given, together, strict=True):
        alone = orthogonalise(one[None], iteration("polar-express", 5))[0]
        torch.testing.assert_close(made, alone, rtol=0, atol=1e-12)


def test_a_tall_matrix_is_its_transpose_turned() -> None:
    given = matrix(40, 16, smallest=0.1)[None]
    tall, wide = (orthogonalise(x, iteration("quintic", 5)) for x in (given, given.mT))
    # Not to the bit: the norm sums in the order of memory.
    assert torch.allclose(tall, wide.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_the_size_of_a_matrix_does_not_matter(factor: float) -> None:
    given = matrix(20, 30, smallest=0.1)[None]
    plain, scaled = (orthogonalise(x, iteration("quintic", 5)) for x in (given, given * factor))
    torch.testing.assert_close(plain, scaled, rtol=0, atol=1e-5)


def test_nothing_stays_nothing() -> None:
    zero = torch.zeros(2, 8, 12)
    made = orthogonalise(zero, iteration("polar-express", 5, torch.float32))
    assert torch.equal(made, zero)
    equal, moments = equalise(made, torch.zeros(2, 12), 0.9)
    assert torch.equal(equal, zero) and torch.equal(moments, torch.zeros(2, 12))


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)], ids=str)
def test_equalised_lines_have_one_size_and_the_norm_stays(shape: tuple[int, int]) -> None:
    given = matrix(*shape, smallest=0.1)[None]
    made, moments = equalise(given, torch.zeros(1, max(shape), dtype=torch.float64), 0.9)
    short = 2 if shape[0] >= shape[1] else 1
    sizes = made.square().mean(dim=short)
    # At the first step the mean over time is that of this step, whatever its memory.
    torch.testing.assert_close(sizes, sizes.mean().expand_as(sizes))
    torch.testing.assert_close(made.norm(), given.norm())
    torch.testing.assert_close(moments, 0.1 * given.square().mean(dim=short))


def test_the_factor_of_a_shape() -> None:
    assert shape_scale("shape", 64, 16) == 2.0
    assert shape_scale("shape", 16, 64) == 1.0
    assert shape_scale("rms", 16, 64) == shape_scale("rms", 64, 16) == 1.6
