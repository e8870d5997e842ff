"""Settings of optimizers, preconditioners, and the learning rate over a run.

A preconditioner changes the gradients of linear layers before the optimizer sees them.
Whatever of it depends on the run can be a number, or a table from points of the run to numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from gristmill.base.errors import Problem
from gristmill.base.units import Duration
from gristmill.config.lora import LayerPatterns, matches, nearest_layers
from gristmill.config.model import Role
from gristmill.config.settings import (
    Count,
    Fraction,
    Scheduled,
    ScheduledCount,
    ScheduledFraction,
    ScheduledNonNegative,
    ScheduledPositive,
    Settings,
    Span,
    WholeSpan,
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
    """Decay rate of the factors' moving averages, per update. The first updates are averaged
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
    """Decay rate of the factors' moving averages."""
    beta2: Fraction | None = None
    """Decay rate of the second moment in the eigenbasis; if not given, optim.beta2 with AdamW and
    0.9 with Muon."""
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


class MomentumRise(NamedTuple):
    """A momentum that rises in a line at the start of a run."""

    start: float
    end: float
    over: Duration | float


class OptimizerConfig(Settings):
    """What the rest of the program may ask of any optimizer's settings."""

    steps_on_host: ClassVar[bool] = True
    """Whether a step is light enough for the CPU, as runtime.offload wants it."""

    if TYPE_CHECKING:
        # Every kind declares these itself, with its own default.
        type: str
        lr: float

    @property
    def preconditioning(self) -> PreconditionerConfig | None:
        """How gradients are preconditioned, if this optimizer can follow a preconditioner."""
        return getattr(self, "preconditioner", None)

    @property
    def momentum_rise(self) -> MomentumRise | None:
        """How momentum rises; None if it does not."""
        return None

    def state_bytes(self, role: Role) -> int:
        """Bytes of state for each element of a parameter with this role."""
        return 8


class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay, one fused kernel."""

    family: ClassVar[str] = "adam"
    """Optimizers that take over each other's settings when a run file's type is changed."""

    type: Literal["adamw"] = "adamw"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0)] = 6e-4
    """Peak learning rate."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.95
    """Decay rate of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of matrices and embeddings; biases and norm gains are never decayed."""
    embedding_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of token and position embeddings, also of a tied head; lr if not given. The
    schedule and its min_lr are those of lr; these rates follow in proportion."""
    table_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of tables of later layers, such as value embeddings; lr if not given."""
    head_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of a head that is not tied; lr if not given."""
    vector_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of biases, gains and gates; lr if not given."""
    embedding_min_lr: Annotated[float, Field(ge=0)] | None = None
    """Learning rate of what embedding_lr is for at the end of the decay; if not given, it is in
    proportion to schedule.min_lr."""
    head_min_lr: Annotated[float, Field(ge=0)] | None = None
    """The same for a head that is not tied."""
    preconditioner: PreconditionerConfig | None = None
    """What changes the gradients before the optimizer sees them; nothing if not given."""


class AdamConfig(AdamWConfig):
    """Adam with L2 instead of decoupled weight decay."""

    type: Literal["adam"] = "adam"  # type: ignore[assignment]
    """Which optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 of matrices and embeddings: weight_decay x weight is added to the gradient. Biases and
    norm gains have none."""


class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate."""
    momentum: Fraction = 0.9
    """Momentum: decay rate of the sum of gradients."""
    nesterov: bool = False
    """Nesterov momentum: add the gradient once more to the decayed sum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 of matrices and embeddings: weight_decay x weight is added to the gradient. Biases and
    norm gains have none."""
    preconditioner: PreconditionerConfig | None = None
    """What changes the gradients before the optimizer sees them; nothing if not given."""

    def state_bytes(self, role: Role) -> int:
        return 4 if self.momentum else 0


class _AccumConfig(OptimizerConfig):
    family: ClassVar[str] = "adam"

    lr: Annotated[float, Field(gt=0)] = 6e-4
    """Peak learning rate."""
    accum: Count = 4
    """Steps whose gradients are averaged before the stored moments advance. Weights move at every
    step all the same."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment, for each time that it advances."""
    beta2: Fraction = 0.98
    """Decay rate of the second moment, for each time that it advances."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""

    def state_bytes(self, role: Role) -> int:
        return 12


class AccumAdamWConfig(_AccumConfig):
    """AdamW whose moments see the mean gradient of several steps: for workers that exchange weights
    instead of gradients, whose own gradients are noisy."""

    type: Literal["accum-adamw"] = "accum-adamw"
    """Which optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of matrices and embeddings; biases and norm gains are never decayed."""


class AccumAdamConfig(_AccumConfig):
    """accum-adamw with L2 instead of decoupled weight decay."""

    type: Literal["accum-adam"] = "accum-adam"
    """Which optimizer."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 of matrices and embeddings: weight_decay x weight is added to the gradient. Biases and
    norm gains have none."""


class MuonConfig(OptimizerConfig):
    """Muon for the matrices inside blocks: momentum with all singular values made equal. Adam for
    embeddings, tables, the head and vectors."""

    type: Literal["muon"] = "muon"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0)] = 0.02
    """Peak learning rate of matrices. The schedule and its min_lr are those of this rate; all other
    rates follow in proportion."""
    momentum: Fraction = 0.95
    """Momentum: decay rate of the running mean of gradients."""
    momentum_start: Fraction | None = None
    """Momentum at the start, from which it rises; 0.85, or momentum if lower, if not given."""
    momentum_warmup: Span = Duration.parse("300 steps")
    """How long momentum rises: a duration, or a fraction of the run; 0 for none."""
    nesterov: bool = True
    """Nesterov momentum: mix the gradient once more into the mean before it is orthogonalised."""
    steps: Count = 5
    """Steps of the iteration that orthogonalises."""
    coefficients: Literal["polar-express", "quintic"] = "polar-express"
    """Polynomials of the iteration; polar-express: the best one for each step; quintic: one for all
    steps, as in the first Muon."""
    scale: Literal["shape", "rms"] = "shape"
    """Size of an update. shape: sqrt(max(1, rows / columns)). rms: 0.2 sqrt(max(rows, columns)),
    the size of AdamW's updates, for which rates like AdamW's fit."""
    normalise: Literal["none", "neurons"] = "none"
    """neurons: divide each row (column, if there are more columns) of an update by its root mean
    square over time, which is NorMuon."""
    beta2: Fraction | None = None
    """Decay rate of these mean squares; 0.95 if not given."""
    split: bool = True
    """Orthogonalise matrices that are stored as one, such as query, key and value, separately."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Decay of matrices: rate x weight_decay is taken off at each step."""
    cautious: bool = False
    """Decay only where update and weight have the same sign, times rate / peak rate."""
    embedding_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of token and position embeddings, also of a tied head; 0.004 if not given."""
    table_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of tables of later layers, such as value embeddings; 0.004 if not given."""
    head_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of a head that is not tied; 0.004 if not given."""
    vector_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak rate of biases, gains and gates; 0.004 if not given."""
    adam_beta1: Fraction = 0.8
    """Decay rate of Adam's first moment."""
    adam_beta2: Fraction = 0.95
    """Decay rate of Adam's second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-10
    """Added to the root of Adam's second moment."""
    adam_weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of embeddings, tables and head, each times its own rate; vectors are never decayed."""
    preconditioner: PreconditionerConfig | None = None
    """What changes the gradients before the optimizer sees them; nothing if not given."""

    steps_on_host: ClassVar[bool] = False

    @property
    def momentum_rise(self) -> MomentumRise:
        return MomentumRise(self.first_momentum, self.momentum, self.momentum_warmup)

    def state_bytes(self, role: Role) -> int:
        return 4 if role is Role.MATRIX else 8

    @property
    def first_momentum(self) -> float:
        """Momentum of the first step, if it rises."""
        return min(0.85, self.momentum) if self.momentum_start is None else self.momentum_start


AnyOptimizerConfig = Annotated[
    AdamWConfig | AdamConfig | SGDConfig | MuonConfig | AccumAdamWConfig | AccumAdamConfig,
    Field(discriminator="type"),
]


class _Warmup(Settings):
    warmup: Span = 0.02
    """Linear rise at the start: a duration, or a fraction of the run; 0 for none."""
    initial_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate from which the warm-up rises."""
    convention: Literal["gristmill", "megatron"] = "gristmill"
    """How the warm-up and skipped steps are counted. gristmill: the last step of the warm-up has
    the peak rate, and every step advances the schedule. megatron: as Megatron-LM's scheduler: the
    first step has initial_lr, the peak comes one step later, and steps that an fp16 overflow skips
    do not advance the schedule, for which the host waits for every fp16 step."""


class _Decaying(_Warmup):
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay and after it."""
    decay: WholeSpan | None = None
    """Where the decay ends, counted from the start of the run; the run's end if not given."""


class ConstantSchedule(_Warmup):
    """Constant after the warm-up."""

    type: Literal["constant"] = "constant"
    """Which schedule."""


class LinearSchedule(_Decaying):
    """Linear decay."""

    type: Literal["linear"] = "linear"
    """Which schedule."""


class CosineSchedule(_Decaying):
    """Cosine decay: half a wave."""

    type: Literal["cosine"] = "cosine"
    """Which schedule."""


class CosineRestartsSchedule(_Decaying):
    """Cosine decay with warm restarts: several half waves, each of which begins at the peak."""

    type: Literal["cosine-restarts"] = "cosine-restarts"
    """Which schedule."""
    cycles: Count = 2
    """How many half waves between the warm-up and the end of the decay."""


class PolynomialSchedule(_Decaying):
    """Polynomial decay: (1 - t) to a power."""

    type: Literal["polynomial"] = "polynomial"
    """Which schedule."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """The power; 1 is a straight line."""


class InverseSqrtSchedule(_Warmup):
    """The "noam" schedule: falls with the inverse square root of the time since the start."""

    type: Literal["inverse-sqrt"] = "inverse-sqrt"
    """Which schedule."""
    warmup: Span = 0.02
    """Linear rise to the peak; its length also sets how fast the rate falls, so not zero."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """The rate never falls below this."""
    end: WholeSpan | None = None
    """After this point, counted from the start of the run, the rate is min_lr; never if not
    given."""


class WarmupStableDecaySchedule(_Warmup):
    """Constant, then a decay at the end; the constant part can be extended later."""

    type: Literal["warmup-stable-decay"] = "warmup-stable-decay"
    """Which schedule."""
    decay: WholeSpan = 0.2
    """Length of the final decay."""
    end: WholeSpan | None = None
    """Where the final decay ends, counted from the start of the run; the run's end if not given."""
    shape: Literal["linear", "cosine", "sqrt", "exponential"] = "linear"
    """How the final decay falls; sqrt is 1 - sqrt(t), exponential is 2^(1 - t) - 1."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end."""


ScheduleConfig = Annotated[
    ConstantSchedule
    | LinearSchedule
    | CosineSchedule
    | CosineRestartsSchedule
    | PolynomialSchedule
    | InverseSqrtSchedule
    | WarmupStableDecaySchedule,
    Field(discriminator="type"),
]
