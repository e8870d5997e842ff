"""The arithmetic of K-FAC: the gradients of one linear layer, divided by its curvature.

A layer is y = D (x, 1) with D = (W b), or D = W without a bias. Its curvature is approximated by a
Kronecker product of two factors (Martens and Grosse, arXiv 1503.05671), over all N positions,

    A = mean of x x^T        with the bias, of (x, 1) (x, 1)^T
    G = mean of g g^T        g: gradient of the summed loss with respect to y (empirical Fisher)

and a gradient D becomes (G (x) A + damping)^-1 D:

    eigen     QG ((QG^T D QA) / (dG dA^T + l)) QA^T         G = QG dG QG^T, A = QA dA QA^T
    inverse   (G + sqrt(l) / p)^-1 D (A + sqrt(l) p)^-1     p = sqrt(mean dA / mean dG)
    input     D (A + l)^-1                                  with the input factor alone

l is the damping; if it is relative, the damping times the mean eigenvalue of the curvature. Where
several matrices are stacked in a weight, each has a G of its own, and they share A.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gristmill.base.errors import DataError
from gristmill.config.lora import LinearShape
from gristmill.config.optim import KfacConfig
from gristmill.optim.factors import (
    FLOOR,
    Eigen,
    advance,
    damped_inverse,
    decompose,
    mean_eigenvalue,
)
from gristmill.optim.spec import CheckpointState, Optimizer, Placement, StateEntry
from gristmill.plan.preconditioner import kfac_sizes


@dataclass(frozen=True)
class KfacLayer:
    """A linear layer whose gradient is preconditioned."""

    name: str
    """The module's name."""
    shape: LinearShape
    transposed: bool
    """Whether the weight is stored as inputs x outputs."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its weight, and of its bias if it has one."""
        return (f"{self.name}.weight", f"{self.name}.bias")[: 1 + self.shape.biased]

    def join(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The gradients of weight and bias as one matrix, outputs x inputs."""
        weight = gradients[0].T if self.transposed else gradients[0]
        return torch.cat([weight, gradients[1][:, None]], dim=1) if self.shape.biased else weight

    def separate(self, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of weight and bias that were joined."""
        weight = matrix[:, : self.shape.inputs]
        weight = (weight.T if self.transposed else weight).contiguous()
        bias = matrix[:, self.shape.inputs :].flatten()
        return (weight, bias) if self.shape.biased else (weight,)


class StepSettings(NamedTuple):
    """Settings of K-FAC that may change from step to step."""

    damping: float
    decay: float
    kl_clip: float


Inverse = tuple[torch.Tensor, ...]
"""What is kept of an inverted factor: eigenvalues and eigenvectors, or the damped inverse."""


@dataclass
class LayerCurvature:
    """The factors and inverses of a layer, as far as a process holds them."""

    layer: KfacLayer
    config: KfacConfig
    factors: list[torch.Tensor] = field(default_factory=list)
    """The factors of the inputs and, unless they are left out, of the outputs."""
    inverses: list[Inverse] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the factors in use."""
        return kfac_sizes(self.config, self.layer.shape)

    def allocate(self, device: torch.device, *, factors: bool) -> None:
        """Memory for the inverses, and for the factors if this process updates them."""
        self.factors = [torch.zeros(n, n, device=device) for n in self.sizes if factors]
        self.inverses = [
            tuple(torch.zeros(shape, device=device) for shape in inverse_shapes(self.config, n))
            for n in self.sizes
        ]

    def advance(
        self,
        samples: list[torch.Tensor],
        *,
        decay: float,
        updates: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Take a step's mean second moments into the running averages."""
        for factor, sample in zip(self.factors, samples, strict=True):
            advance(factor, sample, decay=decay, updates=updates, skip=skip)

    def invert_factor(self, number: int, settings: StepSettings) -> None:
        """Compute an inverse from its factor, in place."""
        factor = self.factors[number]
        new: Inverse
        if self.config.method == "eigen":
            new = decompose(factor)
        else:
            new = (damped_inverse(factor, self._dampings(settings.damping)[number]),)
        for kept, value in zip(self.inverses[number], new, strict=True):
            kept.copy_(value)

    def _dampings(self, damping: float) -> list[torch.Tensor]:
        """The part of the damping that each factor gets."""
        means = [mean_eigenvalue(factor) for factor in self.factors]
        alone = len(means) == 1
        if self.config.relative_damping:
            return [(damping if alone else damping**0.5) * mean for mean in means]
        if alone:
            return [torch.full_like(means[0], damping)]
        # Martens and Grosse's balance: (A + sqrt(l) p) (x) (G + sqrt(l) / p) has l on the diagonal
        # whatever p is, and this p keeps the mean of the mixed terms smallest.
        balance = (means[0] / torch.stack(means[1:]).mean()).sqrt()
        return [damping**0.5 * balance, *[damping**0.5 / balance for _ in means[1:]]]

    def precondition(self, matrix: torch.Tensor, settings: StepSettings) -> torch.Tensor:
        """A gradient, outputs x inputs, divided by the curvature."""
        first, *others = self.inverses
        parts = torch.split(matrix, list(self.layer.shape.parts)) if others else ()
        if self.config.method == "inverse":
            if others:
                pairs = zip(others, parts, strict=True)
                matrix = torch.cat([inverse[0] @ part for inverse, part in pairs])
            return matrix @ first[0]
        inputs = Eigen(*first)
        if not others:
            divided = (matrix @ inputs.basis) / self._damped(inputs.values, settings)
            return divided @ inputs.basis.T
        # Stacked matrices share their inputs, so they share A; each has a G of its own.
        return torch.cat(
            [
                self._divided(part, inputs, Eigen(*inverse), settings)
                for part, inverse in zip(parts, others, strict=True)
            ]
        )

    def _divided(
        self, part: torch.Tensor, inputs: Eigen, outputs: Eigen, settings: StepSettings
    ) -> torch.Tensor:
        """One of the stacked matrices, by both factors."""
        rotated = outputs.basis.T @ part @ inputs.basis
        curvature = torch.outer(outputs.values, inputs.values)
        return outputs.basis @ (rotated / self._damped(curvature, settings)) @ inputs.basis.T

    def _damped(self, eigenvalues: torch.Tensor, settings: StepSettings) -> torch.Tensor:
        if not self.config.relative_damping:
            return eigenvalues + settings.damping
        return eigenvalues + settings.damping * eigenvalues.mean().clamp(min=FLOOR)

    # -------------------------------------------------------------- checkpoints

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Everything to save, by kind and key."""
        for number, factor in enumerate(self.factors):
            yield FACTOR, f"{self.layer.name}.{number}", factor
        for number, inverse in enumerate(self.inverses):
            for kind, value in zip(inverse_kinds(self.config), inverse, strict=True):
                yield kind, f"{self.layer.name}.{number}", value

    def load(self, kind: str, key: str, value: torch.Tensor) -> None:
        """Load one of them."""
        targets = {(kind, key): tensor for kind, key, tensor in self.tensors()}
        target = targets[kind, key]
        if target.shape != value.shape:
            shapes = f"{tuple(value.shape)}, not {tuple(target.shape)}"
            raise DataError(f"{kind}/{key} has shape {shapes}")
        target.copy_(value)


FACTOR = "factor"


def inverse_kinds(config: KfacConfig) -> tuple[str, ...]:
    """The kinds of state that an inverted factor consists of."""
    return ("eigenvalues", "eigenvectors") if config.method == "eigen" else ("inverse",)


def inverse_shapes(config: KfacConfig, size: int) -> tuple[tuple[int, ...], ...]:
    """Their shapes, for a factor of a size."""
    return ((size,), (size, size)) if config.method == "eigen" else ((size, size),)


class PreconditionedOptimizer:
    """An optimizer with the state of the preconditioner before it, saved and restored as one. Kinds
    of state have different names in both."""

    def __init__(self, optimizer: Optimizer, preconditioner: CheckpointState) -> None:
        self.optimizer, self.preconditioner = optimizer, preconditioner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def step(self, *, divisor: torch.Tensor, skip: torch.Tensor) -> None:
        self.optimizer.step(divisor=divisor, skip=skip)

    def stepped_kinds(self) -> Mapping[str, Collection[str]]:
        return self.optimizer.stepped_kinds()

    @property
    def placements(self) -> Mapping[str, Placement]:
        return {**self.optimizer.placements, **self.preconditioner.placements}

    def entries(self) -> Iterator[StateEntry]:
        yield from self.optimizer.entries()
        yield from self.preconditioner.entries()

    def expects(self, kind: str, key: str) -> bool:
        return self.optimizer.expects(kind, key) or self.preconditioner.expects(kind, key)

    def load_entry(self, entry: StateEntry) -> None:
        ours = self.optimizer.expects(entry.kind, entry.key)
        (self.optimizer if ours else self.preconditioner).load_entry(entry)
