"""What follows from the runs of `optimizers.py`: the best settings of a row, its final runs, and
when they reach the loss that the reference ends with.

    result.json   {"sweep": {…}, "runs": [{"name": "trial/adamw@lr=0.003,beta2=0.95", …},
                                          {"name": "final/adamw@lr=0.006,beta2=0.95", …}, …]}

The fields of a run are those of `loss_results.py`. Final runs of a row that differ in their seed
have one curve, the mean of theirs. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from loss_results import Cells, Point, Result, Row, reached, read_results
from optimizer_rows import REFERENCE, OptimizerRow, Sweep, from_table
from optimizer_search import Candidate, best_candidate, next_candidate, path

RunKind = Literal["trial", "final"]

BEST = 2
"""So many rows, the best ones, have a run for each seed; so has the reference."""


def run_name(kind: RunKind, row: OptimizerRow, candidate: Candidate) -> str:
    return f"{kind}/{row.name}@{candidate}"


@dataclass
class Sweeping:
    """A sweep with the runs that are made."""

    sweep: Sweep
    runs: list[Result]

    # -------------------------------------------------------------- trials

    def trials(self, row: OptimizerRow) -> dict[str, Result]:
        """The trials that say something about a row's settings, by the names of candidates."""
        begin = f"trial/{row.name}@"
        return {
            run.name.removeprefix(begin): run
            for run in self.runs
            if run.name.startswith(begin) and (run.loss is not None or run.diverged)
        }

    def losses(self, row: OptimizerRow) -> dict[str, float]:
        found = self.trials(row)
        return {name: math.inf if run.loss is None else run.loss for name, run in found.items()}

    def next_trial(self, row: OptimizerRow) -> Candidate | None:
        return next_candidate(row.knobs, self.losses(row), trials=self.sweep.trials)

    def best(self, row: OptimizerRow) -> Candidate | None:
        return best_candidate(row.knobs, self.losses(row), trials=self.sweep.trials)

    def trial_cells(self, row: OptimizerRow) -> list[Cells]:
        """All trials of a row, in the order in which they were made."""
        made, best = self.trials(row), self.best(row)
        found = []
        for candidate in path(row.knobs, self.losses(row), trials=self.sweep.trials):
            run = made.get(str(candidate))
            if run is not None:
                found.append(
                    {
                        "row": row.title,
                        "settings": candidate.text,
                        "loss": "diverged" if run.loss is None else f"{run.loss:.4f}",
                        "": "best" if candidate == best else "",
                    }
                )
        return found

    # -------------------------------------------------------------- final runs

    def final(self, row: OptimizerRow) -> FinalRuns | None:
        """The final runs with the best settings; None if there are none."""
        candidate = self.best(row)
        if candidate is None:
            return None
        name = run_name("final", row, candidate)
        runs = [run for run in self.runs if run.name == name and run.loss is not None]
        runs.sort(key=lambda run: self.sweep.seeds.index(run.seed))
        return FinalRuns(row, candidate, Row(tuple(runs))) if runs else None

    def finals(self) -> list[FinalRuns]:
        return [one for one in map(self.final, self.sweep.rows) if one is not None]

    def with_all_seeds(self) -> list[str]:
        """Names of the rows that get a run for each seed: the best by the first one, and the
        reference."""
        seed = self.sweep.seeds[0]
        losses = {
            one.row.name: run.loss
            for one in self.finals()
            for run in one.runs.runs
            if run.seed == seed and run.loss is not None
        }
        best = sorted(losses, key=lambda name: losses[name])[:BEST]
        return [name for name in losses if name in {*best, REFERENCE}]


@dataclass(frozen=True)
class FinalRuns:
    """The final runs of a row."""

    row: OptimizerRow
    candidate: Candidate
    runs: Row

    @property
    def loss(self) -> float:
        return self.runs.loss

    @property
    def step_seconds(self) -> float:
        """The mean over a run, since not all steps do the same; the median over the seeds."""
        return statistics.median(run.seconds / run.steps for run in self.runs.runs)

    @property
    def memory(self) -> int | None:
        return max((run.memory for run in self.runs.runs if run.memory), default=None)

    @cached_property
    def curve(self) -> tuple[Point, ...]:
        """The mean over the seeds."""
        curves = [{point.step: point for point in run.curve} for run in self.runs.runs]
        steps = [step for step in curves[0] if all(step in curve for curve in curves)]
        return tuple(
            Point(
                step=points[0].step,
                tokens=points[0].tokens,
                seconds=statistics.fmean(point.seconds for point in points),
                loss=statistics.fmean(point.loss for point in points),
            )
            for points in ([curve[step] for curve in curves] for step in steps)
        )

    def steps_to(self, loss: float) -> float | None:
        return reached([(point.step, point.loss) for point in self.curve], loss)

    def seconds_to(self, loss: float) -> float | None:
        """None if it is not reached, or if the runs were not timed."""
        found = reached([(point.seconds, point.loss) for point in self.curve], loss)
        return found or None

    def share(self, finals: Iterable[FinalRuns]) -> float | None:
        """The part of a step that the same optimizer without the preconditioner does not need."""
        base = next((one for one in finals if one.row.name == self.row.base), None)
        if base is None or not self.step_seconds:
            return None
        return 1 - base.step_seconds / self.step_seconds


def read_sweep(file: Path) -> Sweeping:
    """A result file."""
    try:
        sweep = from_table(json.loads(file.read_text())["sweep"])
        return Sweeping(sweep, read_results([file]))
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{file}: not a result of optimizers.py: {error!r}") from None


# ------------------------------------------------------------------ tables and sentences


def result_table(sweeping: Sweeping) -> list[Cells]:
    """A line for each row that has a final run, and its distance from the reference."""
    finals = sweeping.finals()
    base = next((one for one in finals if one.row.name == REFERENCE), None)
    return [_cells(one, finals, base) for one in finals]


def _cells(one: FinalRuns, finals: Sequence[FinalRuns], base: FinalRuns | None) -> Cells:
    spread, share = one.runs.spread, one.share(finals)
    cells = {
        "row": one.row.title,
        "settings": one.candidate.text,
        "seeds": str(len(one.runs.runs)),
        "loss": f"{one.loss:.4f}" + ("" if spread is None else f" ± {spread:.4f}"),
    }
    if base is not None:
        title = base.row.title
        cells["difference"] = "" if one is base else f"{one.loss - base.loss:+.4f}"
        steps, seconds = one.steps_to(base.loss), one.seconds_to(base.loss)
        cells[f"steps to {title}'s loss"] = _ratio(steps, base.curve[-1].step, digits=0)
        cells["seconds to it"] = _ratio(seconds, base.curve[-1].seconds, digits=1)
    step, memory = one.step_seconds, one.memory
    return cells | {
        "ms/step": f"{1000 * step:.1f}" if step else "",
        "preconditioner": "" if share is None else f"{100 * share:.0f} %",
        "GiB": f"{memory / 2**30:.1f}" if memory else "",
    }


def _ratio(value: float | None, whole: float, *, digits: int) -> str:
    return f"{value:.{digits}f} ({value / whole:.2f})" if value is not None and whole else "-"


def verdict(sweeping: Sweeping) -> list[str]:
    """How long each row takes to the loss that the reference ends with, in sentences."""
    finals = sweeping.finals()
    base = next((one for one in finals if one.row.name == REFERENCE), None)
    if base is None:
        return [f"There is no final run of {REFERENCE}, so nothing to compare with."]
    steps, seconds = base.curve[-1].step, base.curve[-1].seconds
    within = f" and {seconds:.1f} seconds" if seconds else ""
    lines = [f"{base.row.title} ends at {base.loss:.4f} after {steps} steps{within}."]
    for one in sorted(finals, key=lambda one: one.loss):
        if one is not base:
            lines.append(f"{one.row.title}{_beside(one, base)}.")
    return lines


def _beside(one: FinalRuns, base: FinalRuns) -> str:
    name, steps, whole = base.row.title, base.curve[-1].step, base.curve[-1].seconds
    found, seconds = one.steps_to(base.loss), one.seconds_to(base.loss)
    if found is not None:
        time = f" and {seconds / whole:.2f} of its seconds" if seconds and whole else ""
        return (
            f" has that loss after {found / steps:.2f} of {name}'s steps{time}, and ends at "
            f"{one.loss:.4f}"
        )
    behind = f" does not reach it: it ends {one.loss - base.loss:.4f} higher"
    back, mine, own = base.steps_to(one.loss), base.seconds_to(one.loss), one.curve[-1].seconds
    if back is None:
        return behind
    time = f" and {mine / own:.2f} of the seconds" if mine and own else ""
    return f"{behind}, at a loss that {name} has after {back / steps:.2f} of the steps{time}"
