"""The health of a run: which steps are outliers, and what follows from that.

    value      loss or gradient norm of a step, as all processes see it
    limit      median + threshold x spread of the last `window` values, where the spread is the
               median absolute deviation, scaled to a standard deviation; norms on a
               logarithmic scale
    outlier    a step with a value above its limit
    spike      a non-finite step, or several outliers in a row; it lasts until the loss was below
               its old limit for some steps in a row

While a spike lasts, checkpoints from before it are kept; after a non-finite step nothing is saved.
With `[train.guard]`, outliers are skipped, or the run is rolled back to a checkpoint from before
them and skips their batches.

Every process must reach the same conclusion at the same step. On a GPU the results of a step arrive
late, and how late varies, so a step is used only `lag` steps after it. All of this state is part of
a checkpoint, so that a resumed run decides as an uninterrupted one would.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import GuardConfig
from gristmill.strategies.strategy import StepLimits

FEWEST = 16
"""Without a guard: values needed before any can be an outlier."""
IN_A_ROW = 3
"""Outliers in a row that make a spike."""
CALM = 8
"""Steps in a row below the old limit that end a spike."""
MOST_ROLLBACKS = 10
SMALLEST_SPREAD = 0.005
"""The minimum spread as a fraction of the median, since values may hardly vary."""


class DivergedError(UserError):
    """The run has diverged."""


@dataclass(frozen=True)
class StepOutcome:
    """The results of one step."""

    step: int
    begin: int
    """Samples before the step."""
    end: int
    """Samples after it."""
    loss: float
    norm: float
    skipped: bool
    """Whether the weights stayed as they were."""
    overflow: bool = False
    """Whether that is because the fp16 loss scale was too high, which is normal."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class Spike:
    """Where a streak of bad steps began."""

    step: int
    """The first bad step."""
    begin: int
    """Samples before the step that precedes it, which may have caused it."""
    limit: float | None
    """The loss must stay below this to count as recovered; None if any finite loss will do."""


class RobustSpread:
    """The last values of a number, and the limit for the next."""

    def __init__(self, *, window: int, threshold: float, fewest: int, factors: bool) -> None:
        """`factors`: compare logarithms, for values that vary by factors, such as norms."""
        self._values = deque[float](maxlen=window)
        self.threshold, self.fewest, self.factors = threshold, fewest, factors
        self.limit = math.inf
        """For the next value."""

    @property
    def values(self) -> list[float]:
        return list(self._values)

    @values.setter
    def values(self, values: Iterable[float]) -> None:
        self._values.extend(values)
        self.limit = self._find_limit()

    def _find_limit(self) -> float:
        if len(self._values) < self.fewest:
            return math.inf
        values = [math.log(value) for value in self._values] if self.factors else self._values
        median = statistics.median(values)
        deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
        if self.factors:
            return math.exp(median + self.threshold * max(deviation, SMALLEST_SPREAD))
        return median + self.threshold * max(deviation, SMALLEST_SPREAD * abs(median))

    def add(self, value: float) -> None:
        """Values above the limit are clipped to it: a single one hardly moves the limit, but a
        lasting change becomes the new normal."""
        if math.isfinite(value) and not (self.factors and value <= 0):
            self._values.append(min(value, self.limit))
            self.limit = self._find_limit()


class RunHealth:
    """Judges the steps of a run, one after another."""

    def __init__(self, guard: GuardConfig | None, *, lag: int, warn: Callable[[str], None]) -> None:
        self.guard, self.lag, self.warn = guard, lag, warn
        settings = guard or GuardConfig()
        # Without a guard, a hasty verdict does no harm. A guard must know first what is normal.
        fewest = FEWEST if guard is None else settings.window
        self.patience = settings.patience or IN_A_ROW
        self.most_rollbacks = settings.rollbacks or MOST_ROLLBACKS
        self._losses, self._norms = (
            RobustSpread(
                window=settings.window,
                threshold=settings.threshold,
                fewest=fewest,
                factors=factors,
            )
            for factors in (False, True)
        )
        self._limits: dict[int, StepLimits] = {}
        """The limits that apply from a step on."""
        self._streak = self._calm = 0
        self._previous: int | None = None
        """Samples before the last step that was observed."""
        self._first: Spike | None = None
        """The first step of the streak."""
        self.spike: Spike | None = None
        self.bad = 0
        """Steps in a row, up to the last, that were not finite or that the guard skipped."""
        self.non_finite = 0
        """Steps in a row, up to the last, that were not finite: their state is not worth saving."""
        self.loss: float | None = None
        """The loss of the last step that was observed."""
        self.rollback_at: int | None = None
        """The step after which the run goes back."""
        self.rollbacks = 0
        """Rollbacks in a row, without enough good steps after the skipped samples in between."""
        self._good = 0
        """Good steps in a row after the skipped samples."""
        self.skipped_batches: list[tuple[int, int]] = []
        """Ranges of samples that were not trained on, in order."""

    # -------------------------------------------------------------- judging

    def limits(self, step: int) -> StepLimits | None:
        """The limits of a step that is about to be taken; None if there are none."""
        known = [start for start in self._limits if start <= step]
        return self._limits[max(known)] if known else None

    def skip_limits(self, step: int) -> StepLimits | None:
        """The limits above which the step must not change the weights."""
        skips = self.guard is not None and self.guard.action == "skip"
        return self.limits(step) if skips else None

    def observe(self, outcome: StepOutcome) -> None:
        """Judge a step."""
        limits = self.limits(outcome.step)
        self.loss = outcome.loss
        if not outcome.overflow:
            guarded = outcome.skipped and outcome.finite
            self.bad = self.bad + 1 if outcome.skipped else 0
            self.non_finite = 0 if outcome.finite else self.non_finite + 1
            if guarded:
                self.skip_batches([(outcome.begin, outcome.end)])
                self.warn(f"skipped step {outcome.step}: {_described(outcome, limits)}")
            # A step that the guard skipped did not change the weights.
            outlier = not outcome.finite or (not guarded and self._is_outlier(outcome, limits))
            self._count(outcome, limits, outlier)
            self._losses.add(outcome.loss)
            if self.guard is not None:
                self._norms.add(outcome.norm)
        # Drop limits that no later step needs.
        applies = outcome.step + 1 + self.lag
        needed = max((start for start in self._limits if start <= outcome.step + 1), default=0)
        self._limits = {start: limits for start, limits in self._limits.items() if start >= needed}
        self._limits[applies] = StepLimits(self._losses.limit, self._norms.limit)
        self._previous = outcome.begin

    def _is_outlier(self, outcome: StepOutcome, limits: StepLimits | None) -> bool:
        if limits is None:
            return False
        # Clipping handles a large gradient, unless the guard is set to do so.
        norm = self.guard is not None and outcome.norm > limits.norm
        return outcome.loss > limits.loss or norm

    def _count(self, outcome: StepOutcome, limits: StepLimits | None, outlier: bool) -> None:
        """Update streaks and spikes."""
        self._streak = self._streak + 1 if outlier else 0
        if self._streak == 1:
            limit = None if limits is None or math.isinf(limits.loss) else limits.loss
            # Trouble right after skipped samples: too few of them were skipped.
            behind = outcome.begin == self._passed_until
            before = outcome.begin if behind or self._previous is None else self._previous
            self._first = Spike(outcome.step, before, limit)
        past = not outlier and outcome.begin >= self._passed_until
        self._good = self._good + 1 if past else 0
        if self._good == CALM:
            self.rollbacks = 0
        if (
            self.guard is not None
            and self.guard.action == "rollback"
            and self._streak == self.patience
            and self.rollback_at is None
        ):
            self.rollback_at = outcome.step + self.lag
        if self.spike is not None:
            self._follow(self.spike, outcome)
        elif self._streak >= IN_A_ROW or not outcome.finite:
            self.spike, self._calm = self._first, 0
            self.warn(
                f"step {outcome.step}: {_described(outcome, limits)}; checkpoints from before "
                f"step {outcome.step - self._streak + 1} are kept until the loss recovers"
            )

    def _follow(self, spike: Spike, outcome: StepOutcome) -> None:
        """Find out whether a spike is over."""
        limit = math.inf if spike.limit is None else spike.limit
        calm = outcome.finite and not outcome.skipped and outcome.loss <= limit
        self._calm = self._calm + 1 if calm else 0
        if self._calm == CALM:
            self.spike = None
            self.warn(f"the loss has recovered from the spike at step {spike.step}")

    # -------------------------------------------------------------- consequences

    @property
    def good_before(self) -> int | None:
        """Checkpoints before this step must be kept; None if all checkpoints are good."""
        return None if self.spike is None else self.spike.step

    def skips_batch(self, sample: int) -> bool:
        """Whether the batch that begins with this sample is skipped."""
        return any(begin <= sample < end for begin, end in self.skipped_batches)

    def roll_back(self, end: int) -> Rollback:
        """The rollback to make when `rollback_at` is reached; `end` are the samples so far. If the
        trouble continues right after the skipped samples, twice as many are skipped."""
        assert self._first is not None
        step, begin = self._first.step, self._first.begin
        more = sum(end - first for first, last in self.skipped_batches if last == begin)
        return Rollback(step, begin, end + more, self.rollbacks + 1)

    def rolled_back(self, back: Rollback, then: RunHealth) -> None:
        """Continue without the samples that led to a spike. `self` is the health of the older
        checkpoint, `then` that of the run before the rollback."""
        self.skip_batches([*then.skipped_batches, (back.begin, back.end)])
        self.rollbacks, self._good = back.rollbacks, 0

    @property
    def _passed_until(self) -> int:
        """The end of the last skipped range."""
        return self.skipped_batches[-1][1] if self.skipped_batches else 0

    def skip_batches(self, more: Iterable[tuple[int, int]]) -> None:
        """Also skip the samples in these ranges."""
        ranges = list[tuple[int, int]]()
        for batches in sorted([*self.skipped_batches, *more]):
            if ranges and batches[0] <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(ranges[-1][1], batches[1]))
            else:
                ranges.append(batches)
        self.skipped_batches = ranges

    def failure(self, what: str) -> UserError:
        """The error for a run that has diverged."""
        since, inspect = "the start", ""
        if self.spike is not None:
            since = f"step {self.spike.step}"
            inspect = f", or inspect the data from sample {self.spike.begin} on"
        return DivergedError(
            f"the run has diverged since {since}: {what}",
            where="training",
            remedy=f"lower optim.lr or lengthen the warm-up{inspect}; the same command resumes "
            "from the newest checkpoint, and with --from STEP from an older one",
            exit=Exit.DATA,
        )

    def check_end(self, *, uniform: float) -> None:
        """Raise an error if the run ends in a spike; `uniform` is the loss of uniform guessing."""
        if self.non_finite:
            count = f"the last {self.non_finite} steps" if self.non_finite > 1 else "the last step"
            raise self.failure(f"loss or gradient of {count} was not finite")
        if self.spike is not None and self.loss is not None and self.loss > 1.05 * uniform:
            what = f"it ends with a loss of {self.loss:.4g}, and guessing has {uniform:.4g}"
            raise self.failure(what)

    # -------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """The state as JSON, which has no infinity."""

        def plain(limits: StepLimits) -> list[float | None]:
            return [value if math.isfinite(value) else None for value in limits]

        return {
            "losses": self._losses.values,
            "norms": self._norms.values,
            "limits": [[start, *plain(limits)] for start, limits in self._limits.items()],
            "streak": self._streak,
            "calm": self._calm,
            "previous": self._previous,
            "first": None if self._first is None else asdict(self._first),
            "spike": None if self.spike is None else asdict(self.spike),
            "bad": self.bad,
            "non_finite": self.non_finite,
            "loss": self.loss if self.loss is not None and math.isfinite(self.loss) else None,
            "rollback_at": self.rollback_at,
            "rollbacks": self.rollbacks,
            "good": self._good,
            "passed_over": self.skipped_batches,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint; it is empty in those of older versions."""
        if not state:
            return
        self._losses.values, self._norms.values = state["losses"], state["norms"]
        self._limits = {
            start: StepLimits(*(math.inf if value is None else value for value in values))
            for start, *values in state["limits"]
        }
        self._streak, self._calm = state["streak"], state["calm"]
        self._previous = state["previous"]
        self._first = None if state["first"] is None else Spike(**state["first"])
        self.spike = None if state["spike"] is None else Spike(**state["spike"])
        self.bad, self.non_finite, self.loss = state["bad"], state["non_finite"], state["loss"]
        self.rollback_at, self.rollbacks = state["rollback_at"], state["rollbacks"]
        self._good = state["good"]
        self.skipped_batches = [(begin, end) for begin, end in state["passed_over"]]


@dataclass(frozen=True)
class Rollback:
    """A return to a checkpoint from before a spike, skipping the samples that led to it."""

    step: int
    """The first bad step."""
    begin: int
    end: int
    """The range of samples to skip."""
    rollbacks: int
    """Rollbacks in a row, this one included."""

    def __str__(self) -> str:
        return (
            f"loss or gradient norm spiked at step {self.step}: samples {self.begin} to "
            f"{self.end - 1} are passed over (rollback {self.rollbacks})"
        )


def _described(outcome: StepOutcome, limits: StepLimits | None) -> str:
    where = f"samples {outcome.begin} to {outcome.end - 1}"
    if not outcome.finite or limits is None:
        return f"loss or gradient is not finite, and the update was skipped ({where})"
    loss = f"loss {outcome.loss:.4g} (limit {limits.loss:.4g})"
    limit = f" (limit {limits.norm:.3g})" if math.isfinite(limits.norm) else ""
    return f"{loss}, gradient norm {outcome.norm:.3g}{limit}, {where}"
