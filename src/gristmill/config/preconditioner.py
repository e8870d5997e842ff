"""Settings of preconditioners, which change the gradients of linear layers before the optimizer
sees them.

Whatever depends on the run can be a number, or a table from points of the run to numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Literal

from pydantic import Field

from gristmill.base.errors import Problem
from gristmill.base.units import Duration
from gristmill.config.lora import LayerPatterns, matches, nearest_layers
from gristmill.config.settings import Settings
from gristmill.config.values import (
    Count,
    Fraction,
    Scheduled,
    ScheduledCount,
    ScheduledFraction,
    ScheduledNonNegative,
    ScheduledPositive,
    constant,
)


class KfacConfig(Settings):
    """K-FAC: the gradient of each linear layer, multiplied by the inverse of a Kronecker-factored
    approximation of its curvature. One factor is the second moment of the layer's inputs, the other
    that of the gradients of its outputs (empirical Fisher)."""

    type: Literal["kfac"] = "kfac"
    """Which preconditioner."""
    method: Literal["inverse", "eigen"] = "inverse"
    """inverse: each factor gets its part of the damping and is inverted. eigen: factors are
    decomposed and damping is added to the products of their eigenvalues, which is more exact and
    takes ten times as long."""
    sides: Literal["both", "input"] = "both"
    """input: only the factor of the inputs, as for Newton-Muon."""
    damping: ScheduledPositive = constant(0.1)
    """Added to the curvature before it is inverted."""
    relative_damping: bool = True
    """damping is a multiple of the mean eigenvalue of each layer's curvature; false: damping itself
    is added, as most other implementations do."""
    decay: ScheduledFraction = constant(0.95)
    """Memory of the factors, for each time that they are updated. The first updates are averaged
    evenly."""
    kl_clip: ScheduledNonNegative = constant(0.001)
    """Scale all preconditioned gradients down together until lr^2 x their product with the plain
    ones is at most this; 0 never scales."""
    factor_every: ScheduledCount = constant(10)
    """Steps from one update of the factors to the next."""
    inverse_every: ScheduledCount = constant(100)
    """Steps from one inversion of the factors to the next."""
    skip: LayerPatterns = ()
    """Linear layers that keep their plain gradient: names, or patterns with * and ?. The beginning
    of a name may be left out: "mlp.down" stands for "blocks.*.mlp.down". The head, embeddings and
    norms always keep theirs."""
    worker_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Which fraction of the processes hold the inverses of a layer and precondition its gradient
    (KAISA): 0 is one process, which sends the result to the others (least memory); 1 is all of them
    (least communication)."""

    def chosen(self, name: str) -> bool:
        """Whether the gradient of a linear layer inside a block is preconditioned."""
        return not any(matches(name, pattern) for pattern in self.skip)

    def problems(self, layers: Collection[str]) -> Iterator[Problem]:
        """Why nothing, or not what was meant, would be preconditioned among these layers."""
        for pattern in self.skip:
            if not any(matches(name, pattern) for name in layers):
                what = f"{pattern!r} matches no linear layer in a block of this model"
                yield Problem(what, "optim.preconditioner.skip", nearest_layers(pattern, layers))
        if not layers:
            what = "K-FAC is for linear layers, and the blocks of this model have none"
            yield Problem(what, "optim.preconditioner.type", "remove the table")
        elif not any(self.chosen(name) for name in layers):
            what = "leaves no layer to precondition"
            remedy = "skip fewer layers, or remove [optim.preconditioner]"
            yield Problem(what, "optim.preconditioner.skip", remedy)


_YOUNG_BASIS = Scheduled(((Duration.parse("0 steps"), 1), (Duration.parse("40 steps"), 10)))


class SoapConfig(Settings):
    """SOAP: Adam's second moment in the eigenbasis of Shampoo's factors, for the matrices inside
    blocks. With Muon, momentum is divided by its root before it is orthogonalised (SOAP-Muon)."""

    type: Literal["soap"] = "soap"
    """Which preconditioner."""
    decay: ScheduledFraction = constant(0.95)
    """Memory of the factors."""
    beta2: Fraction | None = None
    """Memory of the second moment in the eigenbasis; optim.beta2 with AdamW, 0.9 with Muon if not
    given."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    basis_every: ScheduledCount | None = None
    """Steps from one update of the eigenbasis to the next. If not given, 10 with Muon, and with
    AdamW 1 in the first 40 steps and 10 after them: the basis of a few gradients is soon wrong."""
    max_dim: Count = 8192
    """A side of a matrix that is longer than this is not rotated and has no factor."""

    def basis_schedule(self, *, muon: bool) -> Scheduled[int]:
        """`basis_every`, or what holds if it is not given."""
        if self.basis_every is not None:
            return self.basis_every
        return constant(10) if muon else _YOUNG_BASIS


PreconditionerConfig = Annotated[KfacConfig | SoapConfig, Field(discriminator="type")]
