"""The arithmetic of Muon: one function that updates many equal matrices at once. Without the
iteration it is that of momentum alone, for directions which something else has whitened.

For each matrix W (R, C) with gradient g, momentum mu, rate lr and shape factor s:

    m <- mu m + (1 - mu) g
    u  = mu m + (1 - mu) g      with nesterov; else m
    X  = u / (margin |u|)       then, for each row (a, b, c) of coefficients,
    X <- a X + (b A + c A A) X  with A = X X^T: keeps singular vectors, moves singular values to 1
    W <- W - lr s X - decay W   if cautious, decay only where X and W have the same sign

The iteration is batched matrix products over equal shapes, on the shorter side. Scalars that change
from step to step are tensors, so that functions compile once. A skipped step computes as usual and
then keeps the old values.

Shapes: N matrices, R rows, C columns; S the shorter and L the longer of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Row = tuple[float, float, float]

QUINTIC: Row = (3.4445, -4.7750, 2.0315)
"""The same polynomial at every step, steep at zero. After five steps, singular values that were
above 0.003 of the norm are between 0.68 and 1.20."""

POLAR_EXPRESS: tuple[Row, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Each is optimal for the interval that the previous one leaves, for a margin of 2 %."""

POLISH: Row = (1.875, -1.25, 0.375)
"""Cubic convergence to 1, for steps beyond POLAR_EXPRESS."""

TINY = 1e-12
"""Keeps a division by a norm finite; far below any relevant gradient norm."""


@dataclass(frozen=True)
class Iteration:
    """How matrices are orthogonalised."""

    rows: tuple[Row, ...]
    margin: float
    """The norm is multiplied by this, so that rounding never leaves the polynomials' range."""
    dtype: torch.dtype


def build_iteration(
    kind: Literal["polar-express", "quintic"], *, steps: int, dtype: torch.dtype
) -> Iteration:
    """An iteration with a number of steps and a kind of coefficients."""
    if kind == "quintic":
        return Iteration((QUINTIC,) * steps, margin=1.0, dtype=dtype)
    more = max(0, steps - len(POLAR_EXPRESS))
    return Iteration((*POLAR_EXPRESS[:steps], *(POLISH,) * more), margin=1.02, dtype=dtype)


def orthogonalise(x_NRC: torch.Tensor, iteration: Iteration) -> torch.Tensor:
    """Each matrix with its singular values moved close to 1, in the iteration's dtype."""
    if x_NRC.shape[1] > x_NRC.shape[2]:
        transposed: torch.Tensor = orthogonalise(in_order(x_NRC.mT), iteration).mT
        return transposed
    norm_N11 = torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True)
    x_NSL: torch.Tensor = (x_NRC / (norm_N11 * iteration.margin + TINY)).to(iteration.dtype)
    for a, b, c in iteration.rows:
        products_NSS = torch.bmm(x_NSL, in_order(x_NSL.mT))
        factors_NSS = torch.baddbmm(products_NSS, products_NSS, products_NSS, beta=b, alpha=c)
        x_NSL = torch.baddbmm(x_NSL, factors_NSS, x_NSL, beta=a)
    return x_NSL


def in_order(x: torch.Tensor) -> torch.Tensor:
    """A matmul operand: on some CPUs a transposed one costs a millisecond, however small."""
    return x.contiguous() if x.device.type == "cpu" else x


def shape_scale(kind: Literal["shape", "rms"], rows: int, columns: int) -> float:
    """The factor of an orthogonal matrix of a shape."""
    if kind == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def equalise(
    x_NRC: torch.Tensor, moment_NL: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each line along the longer side by the root of its running mean square, keeping the
    matrix norm; returns the new moments too."""
    short = 2 if x_NRC.shape[1] >= x_NRC.shape[2] else 1
    moment_NL = torch.lerp(x_NRC.square().mean(dim=short), moment_NL, beta)
    # A line that never had a gradient stays zero.
    equal_NRC = x_NRC * moment_NL.clamp(min=1e-10).rsqrt().unsqueeze(short)
    norms = [torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (x_NRC, equal_NRC)]
    return equal_NRC * (norms[0] / (norms[1] + TINY)), moment_NL


@dataclass(frozen=True)
class MatrixRule:
    """The constants of a group of equal matrices."""

    parts: tuple[int, ...]
    """Rows of the matrices stacked in each parameter."""
    scales: tuple[float, ...]
    """The factor of each part's direction."""
    iteration: Iteration | None
    """None does not orthogonalise."""
    nesterov: bool
    cautious: bool
    beta2: float | None
    """NorMuon's decay rate of second moments; None does not equalise lines."""

    def moments(self, columns: int) -> tuple[int, ...]:
        """The number of second moments of each part: one per line of the longer side."""
        return tuple(max(rows, columns) for rows in self.parts)


class StepScalars(NamedTuple):
    """What changes from step to step: zero-dimensional tensors on the device."""

    lr: torch.Tensor
    decay: torch.Tensor
    momentum: torch.Tensor
    factor_decay: torch.Tensor
    """Memory of factors; 0 without any."""
    divisor: torch.Tensor
    skip: torch.Tensor


def update_matrices(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    scalars: StepScalars,
    rule: MatrixRule,
) -> None:
    """Update equal matrices and their state, in place."""
    advanced = advance_momenta(gradients, momenta, scalars, rule)
    direction_NRC = find_directions(advanced, moments, scalars, rule)
    move_weights(weights, direction_NRC.unbind(), scalars, rule)


def advance_stack(
    gradients_NRC: torch.Tensor,
    momenta_NRC: torch.Tensor,
    moments_NL: torch.Tensor | None,
    scalars: StepScalars,
    rule: MatrixRule,
) -> torch.Tensor:
    """The directions of stacked matrices; updates their state in place. One operation for all of
    them compiles in a fraction of the time that one for each takes."""
    (advanced_NRC,) = advance_momenta([gradients_NRC], [momenta_NRC], scalars, rule)
    direction_NRC, new_NL = _directions(advanced_NRC, moments_NL, rule)
    if moments_NL is not None and new_NL is not None:
        moments_NL.copy_(torch.where(scalars.skip > 0, moments_NL, new_NL))
    return direction_NRC.contiguous()  # tall matrices come transposed


def advance_momenta(
    gradients: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    scalars: StepScalars,
    rule: MatrixRule,
) -> list[torch.Tensor]:
    """Update the momenta in place; returns what to orthogonalise. Works on shards too."""
    skipped = scalars.skip > 0
    advanced = []
    for gradient, momentum in zip(gradients, momenta, strict=True):
        scaled = gradient.float() / scalars.divisor
        new = torch.lerp(scaled, momentum, scalars.momentum)
        advanced.append(torch.lerp(scaled, new, scalars.momentum) if rule.nesterov else new)
        momentum.copy_(torch.where(skipped, momentum, new))
    return advanced


def find_directions(
    advanced: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    scalars: StepScalars,
    rule: MatrixRule,
) -> torch.Tensor:
    """The directions of whole matrices; updates their second moments in place."""
    if rule.iteration is None:
        return torch.stack(list(advanced))
    old_NL = torch.stack(list(moments)) if moments else None
    direction_NRC, new_NL = _directions(torch.stack(list(advanced)), old_NL, rule)
    skipped = scalars.skip > 0
    for moment, new in zip(moments, () if new_NL is None else new_NL, strict=True):
        moment.copy_(torch.where(skipped, moment, new))
    return direction_NRC


def move_weights(
    weights: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    scalars: StepScalars,
    rule: MatrixRule,
) -> None:
    """Update weights in place. Works on shards too."""
    skipped = scalars.skip > 0
    for weight, direction in zip(weights, directions, strict=True):
        before = weight.float()
        decay = before * scalars.decay
        if rule.cautious:
            decay = torch.where(direction * before > 0, decay, 0.0)
        weight.copy_(torch.where(skipped, before, before - scalars.lr * direction - decay))


def _directions(
    u_NRC: torch.Tensor, moments_NL: torch.Tensor | None, rule: MatrixRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Orthogonal directions of stacked matrices and their new second moments, part by part, with
    equal parts batched."""
    assert rule.iteration is not None
    parts = torch.split(u_NRC, list(rule.parts), dim=1)
    lengths = list(rule.moments(u_NRC.shape[2]))
    old = () if moments_NL is None else torch.split(moments_NL, lengths, dim=1)
    directions: dict[int, torch.Tensor] = {}
    new: dict[int, torch.Tensor] = {}
    for rows in sorted(set(rule.parts)):
        which = [number for number, other in enumerate(rule.parts) if other == rows]
        x_NRC = orthogonalise(torch.cat([parts[n] for n in which]), rule.iteration).float()
        if rule.beta2 is not None and old:
            x_NRC, new_NL = equalise(x_NRC, torch.cat([old[n] for n in which]), rule.beta2)
            new.update(zip(which, new_NL.chunk(len(which)), strict=True))
        scaled = (x_NRC * rule.scales[which[0]]).chunk(len(which))
        directions.update(zip(which, scaled, strict=True))
    order = range(len(rule.parts))
    joined = torch.cat([directions[n] for n in order], dim=1)
    return joined, torch.cat([new[n] for n in order], dim=1) if new else None
