"""What the report shows of a run's records, gathered while they are read once.

Records are not kept: curves are thinned as they grow (see `plots`), samples to `MOST_SAMPLES` steps
spread evenly, events to the newest `MOST_EVENTS`, and medians are those of values spread evenly. So
a run of a million steps takes seconds and no more memory than a short one.

Seconds are wall clock since the run's first record, pauses between a stop and a resume included:
the records do not say which gaps were pauses, and guessing would falsify comparisons. Where the
clock was set back, no time has passed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gristmill.report.plots import Plot, buckets
from gristmill.track.metrics import (
    STEP_FIELDS,
    EventRecord,
    Record,
    SampleRecord,
    StepRow,
    ValidationRecord,
    scan_metrics,
)

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
        found = scan_metrics(metrics, damaged=damaged)
        while block := list(islice(found, _BLOCK)):
            self._add(block)

    def _add(self, block: list[StepRow | Record]) -> None:
        self.records += len(block)
        stamps = [
            _STAMP(one) if isinstance(one, tuple) else (one.step, one.tokens, one.time)
            for one in block
        ]
        self._step, self._tokens, _ = stamps[-1]
        places_BP = np.array(stamps, dtype=np.float64)
        places_BP[:, 2] = self._elapsed(places_BP[:, 2])
        steps = [number for number, one in enumerate(block) if isinstance(one, tuple)]
        if steps:
            self._add_steps([block[number] for number in steps], places_BP[steps])
        checks = [n for n, one in enumerate(block) if isinstance(one, ValidationRecord)]
        if checks:
            rows = [_VALIDATED(block[number]) for number in checks]
            self._validation.add(np.array(rows, dtype=np.float64), places_BP[checks])
        if len(steps) < len(block):
            for one in block:
                if not isinstance(one, tuple):
                    self._add_other(one)

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
        found = self._samples.all()
        return [found[bucket[-1]] for bucket in buckets(len(found), limit=MOST_SAMPLES)]

    def events(self) -> dict[str, Any]:
        """The newest events, and how many there are."""
        return {"total": self._event_count, "newest": [asdict(one) for one in self._events]}

    def summary(self) -> dict[str, float | None]:
        """The headline numbers of a run; None if the run has no such number."""
        train_losses = [one for one in self._losses if math.isfinite(one)]
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
