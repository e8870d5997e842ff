"""Curves for the report: the records of a run, thinned to what a screen can show.

A run has up to millions of steps and a chart about a thousand pixels. Consecutive records are put
into at most `LIMIT` buckets of nearly equal size; of each bucket a curve keeps

    mean   of the finite values, null if there is none: the line breaks there
    low    the smallest         } only if buckets hold more than one record,
    high   the largest          } so that a single spike is still visible

at the place (step, tokens, seconds) of the bucket's last record. Smoothing is left to the page,
where the reader can change it. Values keep six significant digits.

Records come some at a time, and nobody knows how many there will be. So buckets begin with one
record each, and whenever there are eight times as many as wanted, each two that are neighbours
become one: memory does not depend on the length of a run, and sizes differ by a quarter at most.

Records are read once and not kept: samples are thinned to `MOST_SAMPLES` steps spread evenly,
events to the newest `MOST_EVENTS`, and medians are those of values spread evenly. So a run of a
million steps takes seconds and no more memory than a short one.

Seconds are wall clock since the run's first record, pauses between a stop and a resume included:
the records do not say which gaps were pauses, and guessing would falsify comparisons. Where the
clock was set back, no time has passed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gristmill.track.metrics import (
    STEP_FIELDS,
    EventRecord,
    Record,
    SampleRecord,
    StepRow,
    ValidationRecord,
    scan_metrics,
)

LIMIT = 1000
FINER = 8
"""How many times more buckets there may be until the last record has come."""
MOST_SAMPLES = 200
MOST_EVENTS = 500
_MOST_VALUES = 50_000
_LAST_RECORDS = 20
_BLOCK = 4096
"""Records that are summed up at a time."""
STEP_CURVES = (
    *("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory_bytes", "loss_scale"),
    *("sent_bytes", "mixing", "sync_wait"),
)
VALIDATION_CURVES = ("loss", "perplexity", "bits_per_byte", "consensus_distance")
_STAMP = itemgetter(*map(STEP_FIELDS.index, ("step", "tokens", "time")))
_CURVES = itemgetter(*map(STEP_FIELDS.index, STEP_CURVES))
_VALIDATED = attrgetter(*VALIDATION_CURVES)
_LAST = itemgetter(*map(STEP_FIELDS.index, ("sent_bytes", "skipped", "nan")))


def buckets(count: int, *, limit: int = LIMIT) -> list[range]:
    """Split `count` records into at most `limit` runs whose sizes differ by one at most."""
    parts = min(count, limit)
    edges = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [range(first, last) for first, last in pairwise(edges)]


@dataclass(frozen=True)
class _Buckets:
    """Consecutive buckets: B of them, C curves."""

    records_B: npt.NDArray[np.int64]
    """How many records each holds."""
    places_BP: npt.NDArray[np.float64]
    """Step, tokens and seconds of the last record of each."""
    counts_BC: npt.NDArray[np.int64]
    """How many finite values."""
    sums_BC: npt.NDArray[np.float64]
    lows_BC: npt.NDArray[np.float64]
    highs_BC: npt.NDArray[np.float64]

    def merged(self, edges: npt.NDArray[np.int64]) -> _Buckets:
        """Fewer buckets, that begin at these ones."""
        last = np.append(edges[1:], len(self.records_B)) - 1
        return _Buckets(
            np.add.reduceat(self.records_B, edges),
            self.places_BP[last],
            np.add.reduceat(self.counts_BC, edges),
            np.add.reduceat(self.sums_BC, edges),
            np.minimum.reduceat(self.lows_BC, edges),
            np.maximum.reduceat(self.highs_BC, edges),
        )

    def followed_by(self, other: _Buckets) -> _Buckets:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Buckets(*map(np.concatenate, pairs))


class Plot:
    """Curves that grow with the records that come."""

    def __init__(self, names: Sequence[str], *, limit: int = LIMIT) -> None:
        self.names, self.limit = tuple(names), limit
        self.count = 0
        """Records so far."""
        self._size = 1
        """Records of a bucket."""
        self._buckets: _Buckets | None = None

    def add(self, values_BC: npt.NDArray[np.float64], places_BP: npt.NDArray[np.float64]) -> None:
        """Add what some records have for each name, with their steps, tokens and seconds."""
        if not len(values_BC):
            return
        self.count += len(values_BC)
        finite_BC = np.isfinite(values_BC)
        added = _Buckets(
            np.ones(len(values_BC), np.int64),
            places_BP,
            finite_BC.astype(np.int64),
            np.where(finite_BC, values_BC, 0.0),
            np.where(finite_BC, values_BC, np.inf),
            np.where(finite_BC, values_BC, -np.inf),
        )
        every = added if self._buckets is None else self._buckets.followed_by(added)
        if self._buckets is not None and self._size > 1:
            # Full buckets are left alone; the last may have room.
            every = every.merged(_edges(every.records_B, self._size))
        while len(every.records_B) > FINER * self.limit:
            self._size *= 2
            every = every.merged(_edges(every.records_B, self._size))
        self._buckets = every

    def thinned(self) -> dict[str, Any]:
        """The curves as the page reads them; a name without any finite value gives none."""
        if self._buckets is None:
            return {"step": [], "tokens": [], "seconds": [], "curves": {}}
        groups = buckets(len(self._buckets.records_B), limit=self.limit)
        thin = self._buckets.merged(np.array([group[0] for group in groups]))
        band = len(groups) < self.count
        curves = {}
        for number, name in enumerate(self.names):
            counts = thin.counts_BC[:, number]
            if not counts.any():
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = thin.sums_BC[:, number] / counts
            curves[name] = {
                "mean": _shown(mean),
                "low": _shown(thin.lows_BC[:, number]) if band else None,
                "high": _shown(thin.highs_BC[:, number]) if band else None,
            }
        steps, tokens, seconds = thin.places_BP.T
        return {
            "step": [int(step) for step in steps],
            "tokens": [int(count) for count in tokens],
            "seconds": [_rounded(second) for second in seconds],
            "curves": curves,
        }


def _edges(records: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Where new buckets of `size` records begin, if each of these goes whole into one of them."""
    begins = np.cumsum(records) - records
    return np.flatnonzero(np.diff(begins // size, prepend=-1))


def _shown(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [_rounded(value) if math.isfinite(value) else None for value in values.tolist()]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# ------------------------------------------------------------------ all records of a run

T = TypeVar("T")


class EvenlySpread(Generic[T]):
    """Some of many values: every one, every second, every fourth and so on, and the last."""

    def __init__(self, limit: int) -> None:
        self._limit, self._stride, self._seen = limit, 1, 0
        self._kept = list[T]()
        self._last = list[T]()

    def add(self, values: Sequence[T]) -> None:
        """Add some values."""
        self._kept += values[-self._seen % self._stride :: self._stride]
        self._seen += len(values)
        self._last = [*self._last, *values[-1:]][-1:]
        while len(self._kept) > 2 * self._limit:
            self._stride *= 2
            self._kept = self._kept[::2]

    def all(self) -> list[T]:
        """What was kept, at most twice the limit and one."""
        complete = (self._seen - 1) % self._stride == 0
        return self._kept if complete else self._kept + self._last


class RunDigest:
    """The records of a run, summed up."""

    def __init__(self, metrics: Path, *, damaged: Callable[[int, str], None]) -> None:
        self.records = 0
        self._train, self._validation = Plot(STEP_CURVES), Plot(VALIDATION_CURVES)
        self._clock: float | None = None
        self._seconds = 0.0
        self._step = self._tokens = 0
        self._losses = deque[float](maxlen=_LAST_RECORDS)
        self._speeds = EvenlySpread[float](_MOST_VALUES)
        self._mfus = EvenlySpread[float](_MOST_VALUES)
        self._memory = 0
        self._last: tuple[Any, ...] = (None, 0, 0)
        self._best: ValidationRecord | None = None
        self._final: ValidationRecord | None = None
        self._samples = EvenlySpread[dict[str, Any]](MOST_SAMPLES)
        self._sample: dict[str, Any] | None = None
        self._events, self._event_count = deque[EventRecord](maxlen=MOST_EVENTS), 0
        records = scan_metrics(metrics, damaged=damaged)
        while block := list(islice(records, _BLOCK)):
            self._add(block)

    def _add(self, block: list[StepRow | Record]) -> None:
        self.records += len(block)
        stamps = [
            _STAMP(item) if isinstance(item, tuple) else (item.step, item.tokens, item.time)
            for item in block
        ]
        self._step, self._tokens, _ = stamps[-1]
        places_BP = np.array(stamps, dtype=np.float64)
        places_BP[:, 2] = self._elapsed(places_BP[:, 2])
        steps = [number for number, item in enumerate(block) if isinstance(item, tuple)]
        if steps:
            self._add_steps([block[number] for number in steps], places_BP[steps])
        checks = [n for n, item in enumerate(block) if isinstance(item, ValidationRecord)]
        if checks:
            rows = [_VALIDATED(block[number]) for number in checks]
            self._validation.add(np.array(rows, dtype=np.float64), places_BP[checks])
        if len(steps) < len(block):
            for item in block:
                if not isinstance(item, tuple):
                    self._add_other(item)

    def _elapsed(self, clocks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds since the first record at each of these."""
        passed, known = np.zeros(len(clocks)), np.isfinite(clocks)
        if known.any():
            times = clocks[known]
            before = times[0] if self._clock is None else self._clock
            passed[known] = np.maximum(np.diff(times, prepend=before), 0.0)
            self._clock = float(times[-1])
        seconds = self._seconds + np.cumsum(passed)
        self._seconds = float(seconds[-1])
        return seconds

    def _add_steps(self, rows: list[Any], places_BP: npt.NDArray[np.float64]) -> None:
        values_BC = np.array([_CURVES(row) for row in rows], dtype=np.float64)
        self._train.add(values_BC, places_BP)
        self._last = _LAST(rows[-1])
        columns = dict(zip(STEP_CURVES, values_BC.T, strict=True))
        self._losses.extend(columns["loss"][-_LAST_RECORDS:].tolist())
        for kept, name in ((self._speeds, "tokens_per_second"), (self._mfus, "mfu")):
            kept.add(columns[name][np.isfinite(columns[name])].tolist())
        self._memory = max(self._memory, int(np.nan_to_num(columns["memory_bytes"]).max()))

    def _add_other(self, record: Record) -> None:
        if isinstance(record, ValidationRecord):
            if math.isfinite(record.loss):
                self._final = record
                if self._best is None or record.loss < self._best.loss:
                    self._best = record
        elif isinstance(record, EventRecord):
            self._events.append(record)
            self._event_count += 1
        elif isinstance(record, SampleRecord):
            if self._sample is None or self._sample["step"] != record.step:
                self._sample = {"step": record.step, "texts": []}
                self._samples.add([self._sample])
            self._sample["texts"].append({"prompt": record.prompt, "text": record.text})

    @property
    def train(self) -> dict[str, Any]:
        """The curves of the steps."""
        return self._train.thinned()

    @property
    def validation(self) -> dict[str, Any]:
        """The curves of the validations."""
        return self._validation.thinned()

    def samples(self) -> list[dict[str, Any]]:
        """Samples grouped by step, the last step always among them."""
        samples = self._samples.all()
        return [samples[bucket[-1]] for bucket in buckets(len(samples), limit=MOST_SAMPLES)]

    def events(self) -> dict[str, Any]:
        """The newest events, and how many there are."""
        return {"total": self._event_count, "newest": [asdict(event) for event in self._events]}

    def summary(self) -> dict[str, float | None]:
        """The headline numbers of a run; None if the run has no such number."""
        train_losses = [loss for loss in self._losses if math.isfinite(loss)]
        speeds, mfus, best = self._speeds.all(), self._mfus.all(), self._best
        sent, skipped, nan = self._last
        return {
            "step": self._step,
            "tokens": self._tokens,
            "seconds": self._seconds,
            "train_loss": statistics.fmean(train_losses) if train_losses else None,
            "final_loss": self._final.loss if self._final else None,
            "best_loss": best.loss if best else None,
            "best_step": best.step if best else None,
            "best_perplexity": best.perplexity if best and math.isfinite(best.perplexity) else None,
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "mfu": statistics.median(mfus) if mfus else None,
            "memory_bytes": self._memory or None,
            "sent_bytes": sent,
            "skipped": skipped,
            "nan": nan,
        }
