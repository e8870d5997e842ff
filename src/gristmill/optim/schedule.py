"""The learning rate as a pure function of progress.

Time is counted in samples. With w the end of the warm-up and e the end of the decay,

    s < w    peak (s + batch) / w                   the last warm-up step has the full rate
    s >= w   a shape of t = (s - w) / (e - w)       from 1 at t = 0 to min_lr at t = 1 and after

where s is the number of samples before the step and batch the number in it, so no step has a rate
of zero. With `convention = "megatron"` the rates are those of Megatron's scheduler, which does not
look ahead:

    s <= w   initial + (peak - initial) s / w       the first step has the initial rate

and s does not count the samples of steps that an fp16 overflow skipped.

During a batch ramp the rate may scale with the batch, by `lr_power`:

    rate (batch / full batch) ** power              min_lr included

Momentum may warm up linearly too, and SOAP's settings may change at points of the run. Its bases
are refreshed in the first step and in every one that comes after a multiple of `basis_every` steps.
`Schedule.apply` is the only place that sets optimizer settings
which depend on progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gristmill.base.units import Progress
from gristmill.config.optim import (
    ConstantSchedule,
    CosineRestartsSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    MuonConfig,
    OptimizerConfig,
    PolynomialSchedule,
    SoapConfig,
    WarmupStableDecaySchedule,
)
from gristmill.config.resolve import BatchRamp, Resolved
from gristmill.config.schema import RunConfig
from gristmill.config.settings import Scheduled, Settings
from gristmill.optim.spec import Optimizer

Shape = Callable[[int, float, float], float]
"""Samples since the start, peak and floor -> how far the rate is above the floor, from 0 to 1."""
Height = Callable[[float], float]


@dataclass(frozen=True)
class Rise:
    """A value that changes linearly from `start` to `end` over `samples`, then stays."""

    start: float
    end: float
    samples: int

    def at(self, progress: Progress) -> float:
        """The value for the step that starts at `progress`."""
        if progress.samples >= self.samples:
            return self.end
        return self.start + (self.end - self.start) * progress.samples / self.samples


@dataclass(frozen=True)
class SoapRhythm:
    """What SOAP does over a run."""

    decay: Scheduled[float]
    basis_every: Scheduled[int]


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run."""

    peak: float
    floor: float
    warmup: int
    ramp: BatchRamp
    shape: Shape
    initial: float = 0.0
    """The rate from which the warm-up rises."""
    looks_ahead: bool = True
    """Whether a step of the warm-up has the rate that belongs to its last sample, not its first."""
    holds: bool = False
    """Whether skipped steps do not advance the schedule."""
    batch_power: float = 0.0
    """The exponent of batch / full batch, which multiplies the rate."""
    momentum: Rise | None = None
    soap: SoapRhythm | None = None

    def rate(
        self,
        progress: Progress,
        *,
        skipped_samples: int = 0,
        peak: float | None = None,
        floor: float | None = None,
    ) -> float:
        """The learning rate of the step that starts at `progress`; `peak` and `floor` are those of
        parameters that have their own."""
        peak, floor = self.peak if peak is None else peak, self.floor if floor is None else floor
        batch = self.ramp.batch_at(progress.samples)
        factor: float = (batch / self.ramp.full) ** self.batch_power
        samples = progress.samples - (skipped_samples if self.holds else 0)
        if samples < self.warmup:
            rise = factor * (peak - self.initial)
            if not self.looks_ahead:
                return factor * self.initial + rise * samples / self.warmup
            return factor * self.initial + rise * min(1.0, (samples + batch) / self.warmup)
        return factor * (floor + (peak - floor) * self.shape(samples, peak, floor))

    def apply(self, optimizer: Optimizer, progress: Progress, *, skipped_samples: int = 0) -> float:
        """Set each group's rate, its momentum if it has one, and what SOAP needs; returns the
        learning rate."""
        rate = self.rate(progress, skipped_samples=skipped_samples)
        for group in optimizer.param_groups:
            factor, floor = group.get("lr_factor", 1.0), group.get("min_lr")
            group["lr"] = rate * factor
            if floor is not None or (self.initial and factor != 1.0):
                # Other than the peak, these are not in proportion.
                group["lr"] = self.rate(
                    progress,
                    skipped_samples=skipped_samples,
                    peak=self.peak * factor,
                    floor=self.floor * factor if floor is None else floor,
                )
            if self.momentum is not None and "momentum" in group:
                group["momentum"] = self.momentum.at(progress)
            if self.soap is not None and "refresh" in group:
                group["factor_decay"] = self.soap.decay.at(progress)
                group["refresh"] = progress.steps % self.soap.basis_every.at(progress) == 0
        return rate


def build_schedule(config: RunConfig, resolved: Resolved) -> Schedule:
    """The schedule of a run."""
    settings, rise = config.schedule, config.optim.momentum_rise
    return Schedule(
        peak=config.optim.lr,
        floor=getattr(settings, "min_lr", 0.0),
        warmup=resolved.samples_of(settings.warmup),
        ramp=resolved.ramp,
        shape=_SHAPES[type(settings)](settings, resolved),
        initial=settings.initial_lr,
        looks_ahead=settings.convention != "megatron",
        # Other formats have no loss scale that has to be found by trial.
        holds=settings.convention == "megatron" and config.precision.compute == "fp16",
        batch_power=0.0 if config.train.ramp is None else config.train.ramp.lr_power,
        momentum=None
        if rise is None
        else Rise(rise.start, rise.end, resolved.samples_of(rise.over)),
        soap=_soap_rhythm(config.optim),
    )


def _soap_rhythm(optim: OptimizerConfig) -> SoapRhythm | None:
    soap = optim.preconditioning
    if not isinstance(soap, SoapConfig):
        return None
    return SoapRhythm(soap.decay, soap.basis_schedule(muon=isinstance(optim, MuonConfig)))


def _half_cosine(time: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * time))


def _decaying(settings: Settings, resolved: Resolved, height: Height) -> Shape:
    """Stretch a height over the time from the end of warm-up to the end of decay."""
    assert isinstance(settings, LinearSchedule | CosineSchedule | PolynomialSchedule)
    begin = resolved.samples_of(settings.warmup)
    end = resolved.samples if settings.decay is None else resolved.samples_of(settings.decay)
    return lambda samples, *_: height(min(1.0, (samples - begin) / max(1, end - begin)))


def _restarts(settings: CosineRestartsSchedule, resolved: Resolved) -> Shape:
    begin = resolved.samples_of(settings.warmup)
    end = resolved.samples if settings.decay is None else resolved.samples_of(settings.decay)
    length = max(1, end - begin)

    def height(samples: int, peak: float, floor: float) -> float:
        # In whole samples: rounding must not turn the start of a cycle into its end.
        into_cycle = (samples - begin) * settings.cycles % length
        return _half_cosine(into_cycle / length) if samples < end else 0.0

    return height


def _stable(settings: WarmupStableDecaySchedule, resolved: Resolved) -> Shape:
    heights: dict[str, Height] = {
        "linear": lambda time: 1 - time,
        "cosine": _half_cosine,
        "sqrt": lambda time: 1 - math.sqrt(time),
        "exponential": lambda time: 2 * 0.5**time - 1,
    }
    end = None if settings.end is None else resolved.samples_of(settings.end)
    length = resolved.last_samples_of(settings.decay, end=end)
    begin = (resolved.samples if end is None else end) - length
    height = heights[settings.shape]
    return lambda s, *_: 1.0 if s < begin else height(min(1.0, (s - begin) / max(1, length)))


def _inverse_sqrt(settings: InverseSqrtSchedule, resolved: Resolved) -> Shape:
    # Without a warm-up, which only Megatron allows, the rate falls from the first sample on.
    warmup = max(1, resolved.samples_of(settings.warmup))
    end = math.inf if settings.end is None else resolved.samples_of(settings.end)

    def height(samples: int, peak: float, floor: float) -> float:
        if samples > end:
            return 0.0
        span = max(peak - floor, 1e-300)
        return max(0.0, (peak * math.sqrt(warmup / max(1, samples)) - floor) / span)

    return height


_SHAPES: dict[type[Settings], Callable[..., Shape]] = {
    ConstantSchedule: lambda settings, resolved: lambda *_: 1.0,
    LinearSchedule: lambda settings, resolved: _decaying(settings, resolved, lambda t: 1 - t),
    CosineSchedule: lambda settings, resolved: _decaying(settings, resolved, _half_cosine),
    CosineRestartsSchedule: _restarts,
    PolynomialSchedule: lambda settings, resolved: _decaying(
        settings, resolved, lambda t: (1 - t) ** settings.power
    ),
    InverseSqrtSchedule: _inverse_sqrt,
    WarmupStableDecaySchedule: _stable,
}
