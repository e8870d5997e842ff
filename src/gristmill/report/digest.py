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
_STEP, _TOKENS, _TIME = map(STEP_FIELDS.index, ("step", "tokens", "time"))
_LAST = itemgetter(*map(STEP_FIELDS.index, ("sent_bytes", "skipped", "nan")))

T = TypeVar("T")


class EvenlySpread(Generic[T]):
    """Some of many values: every one, every second, every fourth and so on, and the last."""

    def __init__(self, limit: int) -> None:
        self._limit, self._stride, self._seen = limit, 1, 0
        self._kept = list[T]()
        self._last: T | None = None

    def add(self, value: T) -> None:
        self._seen += 1
        self._last = value
        if self._seen % self._stride:
            return
        self._kept.append(value)
        if len(self._kept) > 2 * self._limit:
            self._stride *= 2
            self._kept = self._kept[1::2]

    def all(self) -> list[T]:
        """What was kept, at most twice the limit."""
        whole = not self._seen % self._stride
        return self._kept if whole or self._last is None else [*self._kept, self._last]


class _Block:
    """Curves, and the records that have not been added to them."""

    def __init__(self, names: Sequence[str], columns: Callable[[Any], Any]) -> None:
        self.plot = Plot(names)
        self._columns = columns
        self.rows, self.places = list[Any](), list[tuple[int, int, float]]()

    def close(self) -> npt.NDArray[np.float64]:
        """Add the records to the curves, and return their values."""
        values_BC = np.array([self._columns(row) for row in self.rows], dtype=np.float64)
        self.plot.add(values_BC, np.array(self.places, dtype=np.float64))
        self.rows, self.places = [], []
        return values_BC.reshape(-1, len(self.plot.names))


class RunDigest:
    """The records of a run, summed up."""

    def __init__(self, metrics: Path, *, damaged: Callable[[int, str], None]) -> None:
        self.records = 0
        self._train = _Block(STEP_CURVES, itemgetter(*map(STEP_FIELDS.index, STEP_CURVES)))
        self._validation = _Block(VALIDATION_CURVES, attrgetter(*VALIDATION_CURVES))
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
        for record in scan_metrics(metrics, damaged=damaged):
            self.records += 1
            if isinstance(record, tuple):
                self._advance(record[_STEP], record[_TOKENS], record[_TIME])
                self._put(self._train, record)
            else:
                self._advance(record.step, record.tokens, record.time)
                self._add(record)
        self._close_steps()
        self._validation.close()

    def _advance(self, step: int, tokens: int, clock: float) -> None:
        self._step, self._tokens = step, tokens
        if math.isfinite(clock):
            if self._clock is not None and clock > self._clock:
                self._seconds += clock - self._clock
            self._clock = clock

    def _put(self, block: _Block, record: Any) -> None:
        block.rows.append(record)
        block.places.append((self._step, self._tokens, self._seconds))
        if len(block.rows) == _BLOCK:
            if block is self._train:
                self._close_steps()
            else:
                block.close()

    def _close_steps(self) -> None:
        if not self._train.rows:
            return
        self._last = _LAST(self._train.rows[-1])
        columns = dict(zip(STEP_CURVES, self._train.close().T, strict=True))
        self._losses.extend(columns["loss"][-_LAST_RECORDS:].tolist())
        for kept, name in ((self._speeds, "tokens_per_second"), (self._mfus, "mfu")):
            for value in columns[name][np.isfinite(columns[name])].tolist():
                kept.add(value)
        self._memory = max(self._memory, int(np.nan_to_num(columns["memory_bytes"]).max()))

    def _add(self, record: Record) -> None:
        if isinstance(record, ValidationRecord):
            self._put(self._validation, record)
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
                self._samples.add(self._sample)
            self._sample["texts"].append({"prompt": record.prompt, "text": record.text})

    @property
    def train(self) -> dict[str, Any]:
        """The curves of the steps."""
        return self._train.plot.thinned()

    @property
    def validation(self) -> dict[str, Any]:
        """The curves of the validations."""
        return self._validation.plot.thinned()

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
