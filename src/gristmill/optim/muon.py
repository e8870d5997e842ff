"""The arithmetic of Muon: functions that update many equal matrices at once. Without the
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
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

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
    # The Frobenius norm is an upper bound of the largest singular value: all of them are in [0, 1]
    # from here on, where the polynomials converge. Zero matrices stay zero, thanks to TINY.
    norm_N11 = torch.linalg.vector_norm(x_NRC, dim=(1, 2), keepdim=True)
    x_NSL: torch.Tensor = (x_NRC / (norm_N11 * iteration.margin + TINY)).to(iteration.dtype)
    for a, b, c in iteration.rows:
        products_NSS = torch.bmm(x_NSL, in_order(x_NSL.mT))
        factors_NSS = torch.baddbmm(products_NSS, products_NSS, products_NSS, beta=b, alpha=c)
        # a X as part of the product: baddbmm would copy X, which is the larger, first.
        factors_NSS.diagonal(dim1=1, dim2=2).add_(a)
        x_NSL = torch.bmm(factors_NSS, x_NSL)
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
    # The norm stays that of the orthogonal matrix, so rates mean the same with and without this.
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


class Stack(NamedTuple):
    """Equal matrices, stacked, and their state."""

    gradients_NRC: torch.Tensor
    momenta_NRC: torch.Tensor
    moments_NL: torch.Tensor | None
    scalars: StepScalars


def advance_stacks(stacks: Sequence[Stack], rules: Sequence[MatrixRule]) -> list[torch.Tensor]:
    """The directions of matrices, one stack for each shape; updates their state in place. The
    rules differ in parts and scales only. One function for all compiles in a fraction of the time
    that one for each takes, and launches fewer and larger products."""
    advanced = [
        advance_momenta([one.gradients_NRC], [one.momenta_NRC], one.scalars, rule)[0]
        for one, rule in zip(stacks, rules, strict=True)
    ]
    parts = [
        _parts(u_NRC, one.moments_NL, rule)
        for u_NRC, one, rule in zip(advanced, stacks, rules, strict=True)
    ]
    found = _orthogonal([part for several in parts for part in several], rules[0])
    directions = []
    for one, several in zip(stacks, parts, strict=True):
        direction_NRC, new_NL = _joined(found[: len(several)])
        found = found[len(several) :]
        if one.moments_NL is not None and new_NL is not None:
            one.moments_NL.copy_(torch.where(one.scalars.skip > 0, one.moments_NL, new_NL))
        directions.append(direction_NRC.contiguous())
    return directions


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
    parts = _parts(torch.stack(list(advanced)), old_NL, rule)
    direction_NRC, new_NL = _joined(_orthogonal(parts, rule))
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
        # A skipped step may have computed NaN; `where` keeps it out, a product with 0 would not.
        weight.copy_(torch.where(skipped, before, before - scalars.lr * direction - decay))


class _Part(NamedTuple):
    """Equal matrices that are orthogonalised, tall ones transposed."""

    x_NSL: torch.Tensor
    moments_NL: torch.Tensor | None
    tall: bool
    scale: float


def _parts(u_NRC: torch.Tensor, moments_NL: torch.Tensor | None, rule: MatrixRule) -> list[_Part]:
    """The matrices that are stacked in each of these."""
    columns = u_NRC.shape[2]
    moments: Sequence[torch.Tensor | None] = [None] * len(rule.parts)
    if moments_NL is not None and rule.beta2 is not None:
        moments = torch.split(moments_NL, list(rule.moments(columns)), dim=1)
    whole = zip(torch.split(u_NRC, list(rule.parts), dim=1), moments, rule.scales, strict=True)
    return [
        _Part(x_NRC.mT if x_NRC.shape[1] > columns else x_NRC, moment, x_NRC.shape[1] > columns, s)
        for x_NRC, moment, s in whole
    ]


def _orthogonal(parts: Sequence[_Part], rule: MatrixRule) -> list[_Part]:
    """The parts' directions and new second moments; parts with equal sides are one batch."""
    assert rule.iteration is not None
    found = list(parts)
    for sides in sorted({tuple(part.x_NSL.shape[1:]) for part in parts}):
        which = [n for n, part in enumerate(parts) if tuple(part.x_NSL.shape[1:]) == sides]
        x_NSL = orthogonalise(torch.cat([parts[n].x_NSL for n in which]), rule.iteration).float()
        moments = [parts[n].moments_NL for n in which]
        old = [moment for moment in moments if moment is not None]
        counts = [len(parts[n].x_NSL) for n in which]
        new: Sequence[torch.Tensor | None] = [None] * len(which)
        if rule.beta2 is not None and old:
            x_NSL, new_NL = equalise(x_NSL, torch.cat(old), rule.beta2)
            new = torch.split(new_NL, counts)
        for n, x, moments_NL in zip(which, torch.split(x_NSL, counts), new, strict=True):
            found[n] = parts[n]._replace(x_NSL=x, moments_NL=moments_NL)
    return found


def _joined(parts: Sequence[_Part]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The directions (N, R, C) and second moments of matrices whose parts these are."""
    directions = [(part.x_NSL.mT if part.tall else part.x_NSL) * part.scale for part in parts]
    moments = [part.moments_NL for part in parts if part.moments_NL is not None]
    return torch.cat(directions, dim=1), torch.cat(moments, dim=1) if moments else None


# ------------------------------------------------------------------ how many at once
#
# An update needs several times the memory of its matrices, so a group of equal matrices is divided
# into chunks of limited size; small chunks of several groups go together.

PIECE = 2**27
"""Elements that are computed with at once, unless a single matrix has more."""


class Chunk(NamedTuple):
    """Equal matrices of a group that are updated at once."""

    group: dict[str, Any]
    scalars: StepScalars
    parameters: Sequence[nn.Parameter]

    @property
    def rule(self) -> MatrixRule:
        """The rule of the group."""
        rule: MatrixRule = self.group["rule"]
        return rule

    def weights(self) -> list[torch.Tensor]:
        """The matrices, without a gradient."""
        return [parameter.detach() for parameter in self.parameters]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the matrices."""
        return [p.grad for p in self.parameters if p.grad is not None]


def packed(chunks: Iterable[Chunk]) -> list[list[Chunk]]:
    """Chunks in their order, as many together as PIECE allows."""
    together: list[list[Chunk]] = []
    room = 0
    for chunk in chunks:
        size = sum(parameter.numel() for parameter in chunk.parameters)
        if size > room or not together:
            together.append([])
            room = PIECE
        together[-1].append(chunk)
        room -= size
    return together


def pieces(matrices: Sequence[Any], *, size: int) -> Iterable[Sequence[Any]]:
    """Equal matrices of a size, in as few even chunks as PIECE allows."""
    at_once = max(1, PIECE // size)
    length = math.ceil(len(matrices) / math.ceil(len(matrices) / at_once))
    return (matrices[begin : begin + length] for begin in range(0, len(matrices), length))


# ------------------------------------------------------------------ compiled steps


def maybe_compiled(
    function: Callable[..., Any],
    constants: Hashable,
    *,
    compiled: bool | None,
    device: torch.device,
) -> Callable[..., Any]:
    """A function that is called with the same constants, such as the rule of a group, each time."""
    return _compiled(function, constants) if is_compiled(compiled, device) else function


def is_compiled(compiled: bool | None, device: torch.device) -> bool:
    """Whether steps are compiled on a device; None asks for it on CUDA only."""
    return device.type == "cuda" if compiled is None else compiled


@cache
def _compiled(function: Any, constants: Hashable) -> Callable[..., Any]:
    # torch limits recompilations per code object, so each call with other constants gets its own.
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__)
    return torch.compile(copy, dynamic=False)
