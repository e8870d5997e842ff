"""What `time_to_loss.py` and `optimizers.py` measured: the records, their file, and what follows.

    results.json   {"runs": [{"name": "modern-small", "group": "ours", "seed": 1, "asked": 20000000,
                              "loss": 3.96, "seconds": 40.1, "curve": [[step, tokens, s, loss], …],
                              "settings": {…}, "facts": {"device": "…", "software": "…", …}, …}, …]}

Runs of one name and horizon that differ in their seed only are one row: the mean of their losses
with the standard deviation, and the median of their seconds. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from gristmill.base.files import write_atomic
from gristmill.base.units import format_count

Group = Literal["baseline", "ours", "ablation", "trial", "final"]

UNTIMED = 10
"""Steps at the start of a run whose time is not counted: compiling is among them."""

NOT_FINITE = "the loss is not finite"
DIVERGED = ("the run has diverged", NOT_FINITE)
"""Words in the errors of runs that diverged."""

FirstSteps = Literal["median", "mean"]
"""What the first steps of a run, which are not timed, count as. The mean is right where some steps
do more than others, as those that update a preconditioner."""

REFERENCE = "ablate/preset"
"""The row of the ablation that the others are compared with: nothing changed."""


@dataclass(frozen=True)
class Step:
    """One training step."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """One validation."""

    step: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Result:
    """One run."""

    name: str
    group: Group
    seed: int
    asked: int
    """Tokens of the horizon as asked for; whole steps may make a few more of them."""
    about: str
    settings: Mapping[str, Any]
    facts: Mapping[str, str]
    """What must be known to judge the numbers: machine, versions, text."""
    date: str
    loss: float | None = None
    """Validation loss at the end; None if the run failed."""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Of the steps alone, those that compiled taken as ordinary ones; 0 if they were not timed."""
    untimed_seconds: float = 0.0
    """What the first steps took, which is not counted."""
    wall: float = 0.0
    """From building to the last save."""
    memory: int | None = None
    """Most bytes held on a GPU while training."""
    curve: tuple[Point, ...] = field(default=())
    error: str | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        return self.name, self.asked, self.seed

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def diverged(self) -> bool:
        """Whether training itself came to no loss; other errors say nothing about the settings."""
        return self.error is not None and any(words in self.error for words in DIVERGED)


def untimed(steps: Sequence[Step]) -> int:
    """How many of the first steps are not timed: never more than half of a short run."""
    return min(UNTIMED, len(steps) // 2)


def clock(steps: Sequence[Step], *, first_steps: FirstSteps = "median") -> list[float]:
    """Counted seconds after each step; the first ones cost what the median or mean token does."""
    left_out = untimed(steps)
    typical = statistics.median if first_steps == "median" else statistics.fmean
    token = typical([step.seconds / step.tokens for step in steps[left_out:]])
    first = [token * step.tokens for step in steps[:left_out]]
    return list(accumulate([*first, *(step.seconds for step in steps[left_out:])]))


def measured(
    steps: Sequence[Step], losses: Mapping[int, float], *, first_steps: FirstSteps = "median"
) -> dict[str, Any]:
    """The fields of a result that follow from its steps and the validations after some of them."""
    seconds = clock(steps, first_steps=first_steps)
    tokens = list(accumulate(step.tokens for step in steps))
    curve = tuple(
        Point(step, tokens[step - 1], seconds[step - 1], loss) for step, loss in losses.items()
    )
    assert curve and curve[-1].step == len(steps), "a run ends with a validation"
    final = curve[-1].loss
    return {
        "loss": final if math.isfinite(final) else None,
        "error": None if math.isfinite(final) else NOT_FINITE,
        "steps": len(steps),
        "tokens": tokens[-1],
        "seconds": seconds[-1],
        "untimed_seconds": sum(step.seconds for step in steps[: untimed(steps)]),
        "curve": tuple(point for point in curve if math.isfinite(point.loss)),
    }


def without_times(result: Result) -> Result:
    """For runs that shared their device with others: how long they took says nothing."""
    curve = tuple(replace(point, seconds=0.0) for point in result.curve)
    return replace(result, seconds=0.0, untimed_seconds=0.0, wall=0.0, curve=curve)


def reached(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Where the line through pairs of a place and a loss is first down to a loss."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y1 <= loss < y0:
            return x0 + (y0 - loss) / (y0 - y1) * (x1 - x0)
    return points[0][0] if points and points[0][1] <= loss else None


# ------------------------------------------------------------------ files


def write_results(
    path: Path, results: Iterable[Result], *, more: Mapping[str, Any] | None = None
) -> None:
    """All runs so far, so that a killed script loses only the one in progress; `more` stands before
    them in the file."""
    runs = []
    for result in results:
        run = asdict(result)
        run["curve"] = [list(asdict(point).values()) for point in result.curve]
        runs.append(run)
    write_atomic(path, json.dumps({**(more or {}), "runs": runs}, indent=1, allow_nan=False) + "\n")


def read_results(paths: Iterable[Path]) -> list[Result]:
    """The runs of several files; of two with the same name, horizon and seed the later one."""
    found: dict[tuple[str, int, int], Result] = {}
    known = {one.name for one in fields(Result)}
    for path in paths:
        for run in json.loads(path.read_text())["runs"]:
            run["curve"] = tuple(Point(*values) for values in run["curve"])
            result = Result(**{key: value for key, value in run.items() if key in known})
            found[result.key] = result
    return list(found.values())


# ------------------------------------------------------------------ what follows


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed only."""

    runs: tuple[Result, ...]
    failed: int = 0
    """Others of the same kind that came to no loss."""

    @property
    def first(self) -> Result:
        return self.runs[0]

    @property
    def loss(self) -> float:
        return statistics.fmean(run.loss for run in self.runs if run.loss is not None)

    @property
    def spread(self) -> float | None:
        """Standard deviation of the losses; None for a single run."""
        losses = [run.loss for run in self.runs if run.loss is not None]
        return statistics.stdev(losses) if len(losses) > 1 else None

    @property
    def seconds(self) -> float:
        """Median over the seeds, which one disturbed run does not move."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def tokens(self) -> int:
        return self.first.tokens

    @property
    def middle(self) -> Result:
        """The run whose loss is nearest to the mean: the one to draw."""
        return min(self.runs, key=lambda run: abs((run.loss or math.inf) - self.loss))

    def reaching(self, target: float) -> int:
        return sum(run.loss is not None and run.loss <= target for run in self.runs)


def rows_of(results: Iterable[Result], group: Group) -> list[Row]:
    """The rows of a group, names in the order of their first runs, each from the shortest on."""
    found: dict[tuple[str, int, str], list[Result]] = {}
    for result in results:
        if result.group == group:
            key = (result.name, result.asked, _but_for_seed(result.settings))
            found.setdefault(key, []).append(result)
    names = list(dict.fromkeys(name for name, _, _ in found))
    rows = []
    for key in sorted(found, key=lambda key: (names.index(key[0]), key[1])):
        there = tuple(run for run in found[key] if run.loss is not None)
        if there:
            rows.append(Row(there, failed=len(found[key]) - len(there)))
    return rows


def _but_for_seed(settings: Mapping[str, Any]) -> str:
    train = {key: value for key, value in settings.get("train", {}).items() if key != "seed"}
    return json.dumps({**settings, "train": train}, sort_keys=True)


def target_of(results: Sequence[Result], given: float | None = None) -> float | None:
    """The loss to reach: the lowest mean of the baseline's rows, unless one is given."""
    rows = rows_of(results, "baseline")
    return given if given is not None else min((row.loss for row in rows), default=None)


def first_to_reach(rows: Iterable[Row], target: float | None) -> Row | None:
    """The row that is at or below the loss, in the mean over its seeds, after the least time.

    Of the horizons of one name only the shortest that reaches it counts, however long it took, and
    no row of which a run failed.
    """
    shortest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.first.asked):
        if target is not None and row.loss <= target and row.seconds and not row.failed:
            shortest.setdefault(row.first.name, row)
    return min(shortest.values(), key=lambda row: row.seconds, default=None)


def in_the_same_time(rows: Iterable[Row], base: Row | None) -> Row | None:
    """The longest row that took no longer than the baseline (but for one per cent of it), if it
    took nearly as long."""
    seconds = base.seconds if base is not None else 0.0
    near = [row for row in rows if 0.9 * seconds <= row.seconds <= 1.01 * seconds and row.seconds]
    return max((row for row in near if not row.failed), key=lambda row: row.seconds, default=None)


def odds(results: Iterable[Result]) -> str | None:
    """Why the runs cannot be compared; None if they can."""
    known = [run.facts for run in results if run.facts]
    if len({(facts["validation"], facts["windows"]) for facts in known}) > 1:
        return "these runs were validated on different windows: their losses do not compare"
    if len({facts["device"] for facts in known}) > 1:
        return "these runs were made on different devices: their seconds do not compare"
    return None


# ------------------------------------------------------------------ tables


Cells = dict[str, str]

WORDS = ("run", "what", "row", "settings")
"""Columns of tables that hold words, not numbers."""


def describe(result: Result, place: str) -> str:
    """A run in two lines."""
    head = f"[{place}] {result.name}, {format_count(result.asked)}, seed {result.seed}"
    if result.error:
        return f"{head}: {result.error}"
    memory = f", {result.memory / 2**30:.1f} GiB" if result.memory else ""
    end = f"{head}: loss {result.loss:.4f} after {format_count(result.tokens)} tokens"
    if not result.seconds:
        losses = ", ".join(f"{point.loss:.3f}" for point in result.curve)
        return f"{end}{memory}\n    losses  {losses}"
    curve = ", ".join(f"{point.seconds:.0f}: {point.loss:.3f}" for point in result.curve)
    return (
        f"{end} in {result.seconds:.1f} s, {result.rate:,.0f} tokens/s{memory}; wall "
        f"{result.wall:.0f} s, of which {result.untimed_seconds:.0f} s for the first steps, which "
        f"are not timed\n    seconds: loss  {curve}"
    )


def run_cells(row: Row) -> Cells:
    """What is said about a row in every table."""
    memory = [run.memory for run in row.runs if run.memory]
    return {
        "run": row.first.name,
        "what": row.first.about,
        "seeds": str(len(row.runs)) + (f", {row.failed} failed" if row.failed else ""),
        "tokens": format_count(row.tokens),
        "steps": str(row.first.steps),
        "loss": f"{row.loss:.4f}" + ("" if row.spread is None else f" ± {row.spread:.4f}"),
        "seconds": f"{row.seconds:.1f}" if row.seconds else "",
        "tokens/s": f"{row.tokens / row.seconds:,.0f}" if row.seconds else "",
        "GiB": f"{max(memory) / 2**30:.1f}" if memory else "",
    }


def horizon_table(rows: Sequence[Row], target: float | None) -> list[Cells]:
    """Rows with how many of their seeds reach the loss."""
    return [
        run_cells(row)
        | ({} if target is None else {"reach": f"{row.reaching(target)} of {len(row.runs)}"})
        for row in rows
    ]


def ablation_table(rows: Sequence[Row]) -> list[Cells]:
    """Rows with their distance from the one in which nothing was changed."""
    base = next((row for row in rows if row.first.name == REFERENCE), None)
    found = []
    for row in rows:
        cells = run_cells(row)
        if base is not None:
            cells["difference"] = "" if row is base else f"{row.loss - base.loss:+.4f}"
            cells["time ratio"] = f"{row.seconds / base.seconds:.3f}" if base.seconds else ""
        found.append(cells)
    return found


def verdict(results: Sequence[Result], target: float | None) -> list[str]:
    """Tokens and seconds to the loss, the baseline's and ours, in sentences."""
    if target is None:
        return ["No loss to reach is known: there is no run of the baseline."]
    rows = {group: rows_of(results, group) for group in ("baseline", "ours")}
    base = first_to_reach(rows["baseline"], target)
    lines = [f"The loss to reach is {target:.4f}."]
    if base is not None:
        lines.append(
            f"{base.first.name} has it after {base.seconds:.1f} seconds and "
            f"{format_count(base.tokens)} tokens."
        )
    for name in dict.fromkeys(row.first.name for row in rows["ours"]):
        mine = [row for row in rows["ours"] if row.first.name == name]
        best = first_to_reach(mine, target)
        if best is None:
            lowest = min(row.loss for row in mine)
            lines.append(f"{name} does not reach it with these horizons: {lowest:.4f} at best.")
            continue
        beside = ""
        if base is not None:
            beside = (
                f": {base.seconds / best.seconds:.2f} times as fast as the baseline, with "
                f"{best.tokens / base.tokens:.2f} of its tokens"
            )
        lines.append(
            f"{name} has it after {best.seconds:.1f} seconds and {format_count(best.tokens)} "
            f"tokens ({best.reaching(target)} of {len(best.runs)} seeds){beside}."
        )
        whole = in_the_same_time(mine, base)
        if whole is not None:
            lines.append(
                f"In the baseline's time, {whole.seconds:.1f} seconds and "
                f"{format_count(whole.tokens)} tokens, {name} ends at {whole.loss:.4f}: "
                f"{target - whole.loss:.3f} lower."
            )
    return lines


def plain_table(rows: Sequence[Cells]) -> str:
    """Columns as wide as they need to be, for a terminal."""
    names = [name for name in rows[0] if any(row.get(name) for row in rows)]
    widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) for name in names}

    def line(cells: Mapping[str, str]) -> str:
        return "  ".join(
            cells.get(name, "").ljust(widths[name])
            if name in WORDS
            else cells.get(name, "").rjust(widths[name])
            for name in names
        ).rstrip()

    return "\n".join([line({name: name for name in names}), *map(line, rows)])
