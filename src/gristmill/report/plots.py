"""The records of a run, summed up while they come: curves, samples, events, headline numbers.

A run has up to millions of steps and a chart about a thousand pixels, so curves are thinned: see
`thinning`. Smoothing is left to the page, where the reader can change it. In the report, values
keep six significant digits, and buckets are merged into at most `LIMIT` of nearly equal size.

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
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gristmill.report.reading import SOURCE, STEPS, VALIDATION, GroupRows, LineReader
from gristmill.report.thinning import Curves
from gristmill.track.records import EventRecord, Record, SampleRecord, StragglerRecord

LIMIT = 1000
FINER = 8
"""How many times more buckets there may be until the last record has come."""
MOST_SAMPLES = 200
MOST_EVENTS = 500
MOST_STRAGGLERS = 200
_MOST_VALUES = 50_000
_LAST_RECORDS = 20
_PACE_RECORDS = 400
_BLOCK = 1 << 18
"""Bytes that are read at a time."""
STEP_CURVES = (
    *("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory_bytes", "loss_scale"),
    *("sent_bytes", "mixing", "sync_wait"),
)
PART_CURVES = ("loss", "tokens", "perplexity", "bits_per_byte")
VALIDATION_CURVES = ("loss", "perplexity", "bits_per_byte", "consensus_distance")


def buckets(count: int, *, limit: int = LIMIT) -> list[range]:
    """Split `count` records into at most `limit` runs whose sizes differ by one at most."""
    parts = min(count, limit)
    edges = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [range(first, last) for first, last in pairwise(edges)]


def plotted(curves: Curves, names: Sequence[str], *, limit: int = LIMIT) -> dict[str, Any]:
    """Curves as the report's page reads them; a name without any finite value gives none."""
    if not curves.count:
        return {"step": [], "tokens": [], "seconds": [], "curves": {}}
    held = set(curves.names)
    names = [name for name in names if name in held]
    groups = buckets(curves.used, limit=limit)
    thin = curves.stored(names).merged(np.array([group[0] for group in groups]))
    band = len(groups) < curves.count
    drawn = {
        name: {
            "mean": _shown(mean),
            "low": _shown(low) if band else None,
            "high": _shown(high) if band else None,
        }
        for name, mean, low, high in zip(
            names, thin.means_CB, thin.lows_CB, thin.highs_CB, strict=True
        )
    }
    steps, tokens, seconds = thin.places_BP.T
    return {
        "step": [int(step) for step in steps],
        "tokens": [int(count) for count in tokens],
        "seconds": [_rounded(second) for second in seconds],
        "curves": drawn,
    }


def _shown(values: npt.NDArray[Any]) -> list[float | None]:
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


class SamplePlace(NamedTuple):
    """Where samples of a step begin."""

    step: int
    offset: int


@dataclass(frozen=True)
class DigestLimits:
    """How much is kept of a run."""

    steps: int = FINER * LIMIT
    """Buckets of the curves of steps."""
    others: int = FINER * LIMIT
    """Buckets of all other curves."""
    values: int | None = None
    """Values that medians are made of; as many as the report takes if None."""
    samples: int = MOST_SAMPLES
    """Steps whose samples are kept, spread evenly."""
    newest_samples: int = 0
    """The newest steps whose samples are kept in any case."""
    sample_places: int = 0
    """Steps of which is known where their samples lie in the file, spread evenly."""
    events: int = MOST_EVENTS
    stragglers: int = MOST_STRAGGLERS


class RunDigest:
    """The records of a run, summed up: of a whole file, or of lines as they come."""

    def __init__(
        self,
        metrics: Path | None = None,
        *,
        damaged: Callable[[int, str], None] = lambda number, why: None,
        limits: DigestLimits | None = None,
    ) -> None:
        """`damaged` is called with the number of a line that cannot be read, and why."""
        limits = limits or DigestLimits()
        values = limits.values or _MOST_VALUES
        self.limits, self.records, self.lines = limits, 0, 0
        self.groups: dict[str, Curves] = {}
        """Curves by what their names begin with; those of steps by nothing."""
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.time: float | None = None
        """Wall clock of the last record."""
        self._damaged, self._reader = damaged, LineReader()
        self._losses = deque[float](maxlen=_LAST_RECORDS)
        self._pace = deque[tuple[float, float]](maxlen=_PACE_RECORDS)
        self._speeds = EvenlySpread[float](values)
        self._mfus = EvenlySpread[float](values)
        self._recent: dict[str, deque[float]] = {
            name: deque(maxlen=_LAST_RECORDS) for name in ("tokens_per_second", "mfu")
        }
        self._memory = 0
        self._last: dict[str, Any] = {"sent_bytes": None, "skipped": 0, "nan": 0}
        self._best: dict[str, float] | None = None
        self._final: float | None = None
        self._samples = EvenlySpread[dict[str, Any]](limits.samples)
        self._newest = deque[dict[str, Any]](maxlen=max(1, limits.newest_samples))
        self.sample_places = EvenlySpread[SamplePlace](limits.sample_places)
        self._events, self._event_count = deque[EventRecord](maxlen=limits.events), 0
        self._stragglers = deque[StragglerRecord](maxlen=limits.stragglers)
        if metrics is not None:
            self._read_whole(metrics)

    def _read_whole(self, metrics: Path) -> None:
        with metrics.open("rb") as file:
            rest, begin = b"", 0
            while piece := file.read(_BLOCK):
                lines, newline, rest = (rest + piece).rpartition(b"\n")
                if newline:
                    begin += self.add_lines(lines + newline, offset=begin)
            if rest and self._reader.is_whole(rest):
                self.add_lines(rest + b"\n", offset=begin)

    # ------------------------------------------------------------------ lines

    def add_lines(self, data: bytes, *, offset: int = 0) -> int:
        """Add complete lines, which begin at this offset of the file; returns their length."""
        lines = data[:-1].split(b"\n")
        before = self.lines
        block = self._reader.read(
            lines, damaged=lambda number, why: self._damaged(before + number + 1, why)
        )
        self.lines += len(lines)
        self.records += len(block.stamps_BP)
        if not len(block.stamps_BP):
            return len(data)
        places_BP = block.stamps_BP
        self.step, self.tokens = map(int, places_BP[-1, :2])
        clocks = places_BP[:, 2].copy()
        places_BP[:, 2] = self._elapsed(clocks)
        for rows in block.groups:
            self._add_rows(rows, places_BP[rows.numbers], clocks[rows.numbers])
        if block.texts:
            begins = [offset, *accumulate((len(line) + 1 for line in lines), initial=offset)][1:]
            for number, record in block.texts:
                self._add_text(record, begins[number])
        return len(data)

    def _elapsed(self, clocks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Seconds since the first record at each of these."""
        passed, known = np.zeros(len(clocks)), np.isfinite(clocks)
        if known.any():
            times = clocks[known]
            before = times[0] if self.time is None else self.time
            passed[known] = np.maximum(np.diff(times, prepend=before), 0.0)
            self.time = float(times[-1])
        seconds = self.seconds + np.cumsum(passed)
        self.seconds = float(seconds[-1])
        return seconds

    def _add_rows(
        self, rows: GroupRows, places_BP: npt.NDArray[np.float64], clocks: npt.NDArray[np.float64]
    ) -> None:
        curves = self.groups.get(rows.group)
        if curves is None:
            most = self.limits.steps if rows.group == STEPS else self.limits.others
            curves = self.groups[rows.group] = Curves(most)
        curves.add(rows.names, rows.values_BC, places_BP)
        columns = dict(zip(rows.names, rows.values_BC.T, strict=True))
        if rows.group == STEPS:
            self._add_steps(columns, places_BP, clocks)
        elif rows.group == VALIDATION:
            self._add_validations(columns, places_BP)

    def _add_steps(
        self,
        columns: dict[str, npt.NDArray[np.float64]],
        places_BP: npt.NDArray[np.float64],
        clocks: npt.NDArray[np.float64],
    ) -> None:
        count = len(places_BP)
        nothing = np.full(count, np.nan)
        for name in self._last:
            values = columns.get(name, nothing)
            if math.isfinite(values[-1]):
                self._last[name] = int(values[-1])
            elif name == "sent_bytes":
                self._last[name] = None
        self._losses.extend(columns.get("loss", nothing)[-_LAST_RECORDS:].tolist())
        recent = slice(-_PACE_RECORDS, None)
        pace = zip(places_BP[recent, 0].tolist(), clocks[recent].tolist(), strict=True)
        self._pace.extend(one for one in pace if math.isfinite(one[1]))
        for kept, name in ((self._speeds, "tokens_per_second"), (self._mfus, "mfu")):
            values = columns.get(name, nothing)
            values = values[np.isfinite(values)]
            kept.add(values.tolist())
            self._recent[name].extend(values[-_LAST_RECORDS:].tolist())
        memory = columns.get("memory_bytes", nothing)
        self._memory = max(self._memory, int(np.nan_to_num(memory, posinf=0).max()))

    def _add_validations(
        self,
        columns: dict[str, npt.NDArray[np.float64]],
        places_BP: npt.NDArray[np.float64],
    ) -> None:
        perplexities = columns.get("perplexity")
        for number, loss in enumerate(columns.get("loss", ())):
            if not math.isfinite(loss):
                continue
            self._final = float(loss)
            if self._best is None or loss < self._best["loss"]:
                perplexity = math.nan if perplexities is None else float(perplexities[number])
                step = int(places_BP[number, 0])
                self._best = {"loss": float(loss), "step": step, "perplexity": perplexity}

    def _add_text(self, record: Record, offset: int) -> None:
        if isinstance(record, EventRecord):
            self._events.append(record)
            self._event_count += 1
        elif isinstance(record, StragglerRecord):
            self._stragglers.append(record)
        elif isinstance(record, SampleRecord):
            if not self._newest or self._newest[-1]["step"] != record.step:
                sample = {"step": record.step, "texts": []}
                self._newest.append(sample)
                if self.limits.samples:
                    self._samples.add([sample])
                if self.limits.sample_places:
                    self.sample_places.add([SamplePlace(record.step, offset)])
            self._newest[-1]["texts"].append({"prompt": record.prompt, "text": record.text})

    # ------------------------------------------------------------------ what came of them

    @property
    def train(self) -> dict[str, Any]:
        """The curves of the steps, as the report's page reads them."""
        return plotted(self.groups.get(STEPS, Curves(2)), STEP_CURVES)

    @property
    def validation(self) -> dict[str, Any]:
        """The curves of the validations, as the report's page reads them."""
        return plotted(self.groups.get(VALIDATION, Curves(2)), VALIDATION_CURVES)

    @property
    def parts(self) -> dict[str, Any]:
        """The curves of each source and of each further set of validation text, by what their
        names begin with."""
        groups = [
            group
            for group in self.groups
            if group.startswith(SOURCE) or (group.startswith(VALIDATION) and group != VALIDATION)
        ]
        return {group: plotted(self.groups[group], PART_CURVES) for group in sorted(groups)}

    def samples(self) -> list[dict[str, Any]]:
        """Samples grouped by step, the last step always among them."""
        samples = self._samples.all()
        return [samples[bucket[-1]] for bucket in buckets(len(samples), limit=MOST_SAMPLES)]

    def newest_samples(self) -> list[dict[str, Any]]:
        """The samples of the last few steps, the newest last."""
        return list(self._newest)

    def events(self) -> dict[str, Any]:
        """The newest events, and how many there are."""
        return {"total": self._event_count, "newest": [asdict(event) for event in self._events]}

    def stragglers(self) -> list[dict[str, Any]]:
        """The newest records of processes that were slower than the others."""
        return [asdict(record) for record in self._stragglers]

    def recent(self, name: str) -> float | None:
        """The median of the last few values of `tokens_per_second` or `mfu`."""
        values = self._recent[name]
        return statistics.median(values) if values else None

    def pace(self) -> float | None:
        """Wall clock seconds for a step lately, with all that happens between steps."""
        if len(self._pace) < 2:
            return None
        (first, begin), (last, end) = self._pace[0], self._pace[-1]
        return (end - begin) / (last - first) if last > first and end > begin else None

    def summary(self) -> dict[str, float | None]:
        """The headline numbers of a run; None if the run has no such number."""
        train_losses = [loss for loss in self._losses if math.isfinite(loss)]
        speeds, mfus, best = self._speeds.all(), self._mfus.all(), self._best
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "train_loss": statistics.fmean(train_losses) if train_losses else None,
            "final_loss": self._final,
            "best_loss": best["loss"] if best else None,
            "best_step": int(best["step"]) if best else None,
            "best_perplexity": (
                best["perplexity"] if best and math.isfinite(best["perplexity"]) else None
            ),
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "mfu": statistics.median(mfus) if mfus else None,
            "memory_bytes": self._memory or None,
            **self._last,
        }
