"""Measured numbers, how much of them is chance, and whether two models differ by more than that.

A measure is a mean over items, or a smooth function f of one, such as the perplexity exp(-mean).
Its standard error is that of the mean times the slope f' there:

    stderr = |f'| s / sqrt(n)        s: standard deviation of the items, n: their number

Two models on the same items are compared item by item, which removes what both find hard. Right or
wrong answers are compared by McNemar's exact test: of the items on which only one model is right,
either should have half. Other values are compared by the mean of their differences, whose p-value
is that of Student's t with n - 1 degrees of freedom: with few items the standard deviation is
itself uncertain. Below `LEAST` items nothing is said about chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SIGNIFICANT = 0.05
"""A difference with a smaller p-value is more than chance."""
ROUNDING = 1e-6
"""Relative differences below this come from the order of sums in fp32, not from the models."""
LEAST = 8
"""Items that a standard error or a p-value needs. The deviation that n normal items show is less
than half of the true one with the probability that chi-squared with n - 1 degrees of freedom is
below (n - 1) / 4: 38% for 2 items, 9% for 5, 3% for 8. With fewer items, too many standard errors
would promise twice the accuracy that there is."""
_NORMAL = 10_000
"""Degrees of freedom from which on Student's t is normal to four digits."""


@dataclass(frozen=True)
class Measure:
    """A number with its standard error."""

    value: float
    stderr: float | None
    """None if there are too few items to tell."""
    items: tuple[float, ...] = ()
    """Values of the items, if it was computed from their mean."""
    slope: float = 1.0
    """How the number changes with that mean."""


def mean(items: Sequence[float]) -> Measure:
    """The mean of some items."""
    return function_of_mean(items, value=math.fsum(items) / len(items))


def perplexity(log_probs: Sequence[float]) -> Measure:
    """e to the power of the mean negative log-probability."""
    average = -math.fsum(log_probs) / len(log_probs)
    value = math.exp(average) if average < 700 else math.inf
    return function_of_mean(log_probs, value=value, slope=-value)


def function_of_mean(items: Sequence[float], *, value: float, slope: float = 1.0) -> Measure:
    """A number that follows from the mean of some items."""
    error = _error(items)
    stderr = None if error is None or not math.isfinite(slope) else abs(slope) * error
    return Measure(value, stderr, tuple(items), slope)


def ratio(sums: Sequence[float], sizes: Sequence[float]) -> Measure:
    """The sum of some clusters over the sum of their sizes, such as the loss per token of texts."""
    total, size = math.fsum(sums), math.fsum(sizes)
    value, count = total / size, len(sums)
    # Deviations from the ratio, scaled so that their mean is the ratio itself.
    items = [
        value + (cluster - value * weight) * count / size
        for cluster, weight in zip(sums, sizes, strict=True)
    ]
    return function_of_mean(items, value=value)


def _error(items: Sequence[float]) -> float | None:
    """The standard error of a mean."""
    count = len(items)
    if count < LEAST:
        return None
    center = math.fsum(items) / count
    variance = math.fsum((item - center) ** 2 for item in items) / (count - 1)
    return math.sqrt(variance / count)


# ------------------------------------------------------------------ comparing two models


@dataclass(frozen=True)
class Difference:
    """A measure of one model minus that of another."""

    value: float
    stderr: float
    p: float
    """How likely a difference of this size is if the models are equally good."""
    paired: bool
    """Whether item was compared with item."""

    @property
    def significant(self) -> bool:
        return self.p < SIGNIFICANT


def compare(first: Measure, second: Measure, *, same_items: bool = True) -> Difference | None:
    """How much the second differs from the first; None if nothing is known about chance. They are
    compared item by item if both are of the `same_items`."""
    value = second.value - first.value
    if same_items and first.items and len(first.items) == len(second.items):
        both = list(zip(first.items, second.items, strict=True))
        stderr = _error([second.slope * b - first.slope * a for a, b in both])
        if stderr is None or not math.isfinite(stderr):
            return None
        if {*first.items, *second.items} <= {0.0, 1.0}:
            return Difference(value, stderr, _mcnemar(both), paired=True)
        if abs(value) <= ROUNDING * abs(first.value):
            return Difference(value, stderr, 1.0, paired=True)
        return Difference(value, stderr, _student_p(value, stderr, len(both) - 1), paired=True)
    if first.stderr is None or second.stderr is None:
        return None
    stderr = math.hypot(first.stderr, second.stderr)
    freedom = _freedom(first, second)
    return Difference(value, stderr, _student_p(value, stderr, freedom), paired=False)


def _freedom(first: Measure, second: Measure) -> int:
    """Degrees of freedom of a difference by Welch and Satterthwaite, rounded down; a measure whose
    items are not known is one of many."""
    known = [
        (measure.stderr or 0.0, len(measure.items) - 1)
        for measure in (first, second)
        if measure.items
    ]
    below = math.fsum(error**4 / count for error, count in known)
    above = math.hypot(first.stderr or 0.0, second.stderr or 0.0) ** 4
    return _NORMAL if above >= below * _NORMAL else int(above / below)


def _mcnemar(both: Sequence[tuple[float, float]]) -> float:
    """The two-sided p-value of McNemar's exact test."""
    only_first = sum(a > b for a, b in both)
    only_second = sum(b > a for a, b in both)
    count, fewer = only_first + only_second, min(only_first, only_second)
    if only_first == only_second:
        return 1.0
    tail = math.fsum(_binomial(count, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail)


def _binomial(count: int, k: int) -> float:
    """The probability of k heads in `count` tosses."""
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(ways - count * math.log(2))


def _student_p(value: float, stderr: float, freedom: int) -> float:
    """The two-sided p-value of a difference under Student's t."""
    if stderr == 0:
        return 1.0 if value == 0 else 0.0
    t = abs(value / stderr)
    if freedom >= _NORMAL:
        return math.erfc(t / math.sqrt(2))
    # For whole degrees of freedom the integral is a finite sum (Abramowitz and Stegun 26.7.3, 4).
    angle = math.atan2(t, math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + inside)
    return max(0.0, 1.0 - inside)
