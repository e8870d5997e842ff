"""Does second order pay? AdamW and Muon with and without K-FAC and SOAP, each tuned by the same
search with as many trials, then compared in steps and in seconds.

    python benchmarks/optimizers.py --size cpu --data tokens/train --validation tokens/val \\
        --output cpu.json
    ... --resume cpu.json                go on after an interruption, or with more --rows
    ... --rows adamw,muon                only these rows of optimizers.toml
    ... --only-trials, --only-finals     one half of the work
    ... --plan                           what would run, and how long that takes
    python benchmarks/optimizers.py --page docs cpu.json 124m.json

Sizes:

    cpu    3 layers of 128, windows of 128 tokens: about 70 minutes on two slow cores. Meant for a
           vocabulary of bytes (`gristmill prepare --tokenizer bytes`) and about 100,000 tokens of
           validation text, since all of it is read at each validation
    124m   the model of modern-small in bf16: about 15 minutes on an H200. Set TMPDIR to a folder in
           memory, such as /dev/shm: each run saves its end there

--output is written after every run. Model, text and its order, batch and schedule are the same for
all rows; `optimizer_search.py` describes the search, `optimizer_rows.py` holds the sizes,
`optimizer_results.py` says what follows from the runs, and `optimizer_page.py` makes the page. Runs
are those of `time_to_loss.py`, with one difference: the first steps, which compile, count as the
mean of the others, since a preconditioner does more in some steps than in others.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from loss_results import Result, describe, plain_table, write_results
from loss_rows import Change, amount
from loss_runs import Bench, Job, keep_compiled, make_run
from optimizer_page import write_pages
from optimizer_results import (
    BEST,
    RunKind,
    Sweeping,
    read_sweep,
    result_table,
    run_name,
    verdict,
)
from optimizer_rows import REFERENCE, ROWS, SIZES, OptimizerRow, Sweep, joined, read_rows, to_table
from optimizer_search import Candidate

from gristmill.base.errors import UserError
from gristmill.base.units import format_count
from gristmill.tokens.format import TokenReader
from gristmill.tokens.store import open_tokens

SHAPE = ("layers", "heads", "width", "context")


def main() -> None:
    options = parse()
    if options.page:
        print(write_pages([read_sweep(file) for file in options.results], options.page))
    elif options.plan:
        print("\n".join(plan_lines(options)))
    else:
        try:
            run_sweep(options)
        except UserError as error:
            raise SystemExit(str(error)) from None


# ------------------------------------------------------------------ the sweep


class LimitError(Exception):
    """The time that was given is over."""


class Runner:
    """Makes the runs of a sweep, and writes each to the result file when it is done."""

    def __init__(self, bench: Bench, sweeping: Sweeping, output: Path) -> None:
        self.bench, self.sweeping, self.output = bench, sweeping, output
        self.started = time.monotonic()

    def tune(self, row: OptimizerRow) -> None:
        """The trials of a row. One that fails for another reason than its settings ends them: the
        row goes on when the sweep does."""
        while (candidate := self.sweeping.next_trial(row)) is not None:
            made = self.run("trial", row, candidate, seed=self.sweeping.sweep.seeds[0])
            if made.error and not made.diverged:
                return

    def finish(self, row: OptimizerRow, *, seed: int) -> None:
        """A final run with the best settings of a row, unless it was made."""
        best = self.sweeping.best(row)
        if self.sweeping.next_trial(row) is not None:
            print(f"{row.name}: no final run, since not all of its trials are made", flush=True)
        elif best is None:
            print(f"{row.name}: no final run, since all of its trials diverged", flush=True)
        else:
            self.run("final", row, best, seed=seed)

    def run(self, kind: RunKind, row: OptimizerRow, candidate: Candidate, *, seed: int) -> Result:
        sweep, words = self.sweeping.sweep, row.words(candidate)
        tokens = sweep.tokens if kind == "final" else sweep.trial_tokens
        if kind == "trial":
            words.append(f'validate.every="{tokens} tokens"')
        change = Change(f"{row.title}, {candidate.text}", words)
        job = Job(run_name(kind, row, candidate), kind, seed, tokens, change)
        before = next((run for run in self.sweeping.runs if run.key == self.key(job)), None)
        if before is not None and (before.error is None or before.diverged):
            return before
        if time.monotonic() - self.started > self.bench.options.limit:
            raise LimitError
        made = make_run(self.bench, job)
        assert made is not None, "runs that were made are not asked for again"
        kept = [run for run in self.sweeping.runs if run.key != made.key]
        self.sweeping.runs = self.bench.results = [*kept, made]
        self.write()
        print(describe(made, kind), flush=True)
        return made

    @staticmethod
    def key(job: Job) -> tuple[str, int, int]:
        return job.name, job.tokens, job.seed

    def write(self) -> None:
        more = {"sweep": to_table(self.sweeping.sweep)}
        write_results(self.output, self.sweeping.runs, more=more)


def run_sweep(options: argparse.Namespace) -> None:
    keep_compiled()
    texts = open_tokens(options.data), open_tokens(options.validation)
    sweeping = sweeping_of(options, texts)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        bench = Bench(options, *texts, Path(name), sweeping.runs, first_steps="mean")
        runner = Runner(bench, sweeping, options.output)
        runner.write()
        try:
            make_runs(runner, chosen_rows(options), options)
        except LimitError:
            print("the limit is reached; --resume goes on", flush=True)
    if sweeping.finals():
        print(f"\n{plain_table(result_table(sweeping))}\n")
        print("\n".join(verdict(sweeping)))


def make_runs(runner: Runner, rows: Sequence[OptimizerRow], options: argparse.Namespace) -> None:
    """All trials, then a final run of each row, then the other seeds of those that matter."""
    sweeping = runner.sweeping
    if not options.only_finals:
        for row in rows:
            runner.tune(row)
    if not options.only_trials:
        first, *others = sweeping.sweep.seeds
        for row in rows:
            runner.finish(row, seed=first)
        names = sweeping.with_all_seeds()
        for row in rows:
            for seed in others if row.name in names else ():
                runner.finish(row, seed=seed)


def sweeping_of(options: argparse.Namespace, texts: Sequence[TokenReader]) -> Sweeping:
    """The sweep that was asked for, with the runs that are made."""
    asked = asked_sweep(options, [one.info.fingerprint[:12] for one in texts])
    if options.resume is None:
        return Sweeping(asked, [])
    before = read_sweep(options.resume)
    return Sweeping(joined(before.sweep, asked), before.runs)


def asked_sweep(options: argparse.Namespace, texts: Sequence[str]) -> Sweep:
    names = ("preset", "device", "compute", *SHAPE, "batch", "set")
    return Sweep(
        size=options.size,
        trials=options.trials,
        trial_tokens=options.trial_tokens,
        tokens=options.tokens,
        seeds=tuple(options.seeds),
        points=options.points,
        common={name: getattr(options, name) for name in names} | {"text": list(texts)},
        rows=tuple(chosen_rows(options)),
    )


def chosen_rows(options: argparse.Namespace) -> list[OptimizerRow]:
    rows = read_rows(options.rows_file, size=options.size)
    wanted = options.rows.split(",") if options.rows else list(rows)
    for name in wanted:
        if name not in rows:
            raise SystemExit(f"there is no row {name!r}; there are {', '.join(rows)}")
    return [row for name, row in rows.items() if name in wanted]


# ------------------------------------------------------------------ the plan


def plan_lines(options: argparse.Namespace) -> list[str]:
    """What would run, and how long it takes if all rows are as fast as the rate says."""
    rows = chosen_rows(options)
    sweep = asked_sweep(options, [])
    sweeping = Sweeping(sweep, [])
    if options.resume is not None:
        before = read_sweep(options.resume)
        text = {"text": before.sweep.common["text"]}  # --data is not read for a plan
        asked = replace(sweep, common={**sweep.common, **text})
        sweeping = Sweeping(joined(before.sweep, asked), before.runs)
    more = len(sweep.seeds) - 1
    seeded = min(len(rows), BEST + any(row.name == REFERENCE for row in rows))
    made = {kind: sum(run.group == kind for run in sweeping.runs) for kind in ("trial", "final")}
    trials = 0 if options.only_finals else max(0, len(rows) * sweep.trials - made["trial"])
    finals = 0 if options.only_trials else max(0, len(rows) + more * seeded - made["final"])
    size, lines, whole = SIZES[options.size], list[str](), 0.0
    for title, runs, tokens, points in (
        ("trials", trials, sweep.trial_tokens, 1),
        ("final runs, at most", finals, sweep.tokens, sweep.points),
    ):
        # The untrained model is validated too.
        around = size.overhead_seconds + (points + 1) * size.validation_seconds
        seconds = runs * (tokens / options.rate + around)
        whole += seconds
        lines.append(
            f"{runs:>4} {title}: {format_count(tokens)} tokens each, "
            f"{format_count(runs * tokens)} in all, {seconds / 60:.0f} min"
        )
    names = ", ".join(row.name for row in rows)
    total = trials * sweep.trial_tokens + finals * sweep.tokens
    return [
        f"rows: {names}",
        *lines,
        f"{trials + finals:>4} runs: {format_count(total)} tokens, {whole / 60:.0f} min at "
        f"{options.rate:,.0f} tokens/s, with {size.overhead_seconds:g} s around a run and "
        f"{size.validation_seconds:g} s for a validation; rows with a preconditioner are slower, "
        "and compiling comes on top",
    ]


# ------------------------------------------------------------------ the command line


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Does second order pay?")
    add = parser.add_argument
    add("results", nargs="*", type=Path, metavar="RESULT", help="files that --page is made of")
    add("--size", choices=list(SIZES), default="cpu")
    add("--data", type=Path, metavar="PREFIX", help="token files to train on")
    add("--validation", type=Path, metavar="PREFIX", help="token files to validate on")
    add("--output", type=Path, metavar="FILE.json", help="write the results here after every run")
    add("--resume", type=Path, metavar="FILE.json", help="go on with this sweep, in the same file")
    add("--page", type=Path, metavar="DIR", help="make the page of the RESULT files and end")
    add("--plan", action="store_true", help="say what would run and how long, and end")
    add("--rows", metavar="A,B", help="only these rows")
    add("--rows-file", type=Path, default=ROWS, metavar="FILE.toml", help="other rows")
    add("--only-trials", action="store_true", help="tune, and stop before the final runs")
    add("--only-finals", action="store_true", help="no trials: those of --resume are enough")
    add("--trials", type=int, metavar="N", help="for each row")
    add("--trial-tokens", type=amount, metavar="N")
    add("--tokens", type=amount, metavar="N", help="of a final run")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    add("--points", type=int, metavar="N", help="validations in a final run")
    add("--limit", type=float, default=math.inf, metavar="SECONDS", help="then begin no new run")
    add("--rate", type=float, metavar="N", help="tokens per second, for --plan")
    add("--shared", action="store_true", help="others use the device too: record no times")
    add("--preset", help="of the model, schedule and Muon")
    add("--batch", type=int, help="windows in a step")
    add("--set", nargs="+", metavar="A.B=C", help="settings of all rows")
    for name in SHAPE:
        add(f"--{name}", type=int, help="of the model, to try it")
    add("--device", choices=["cuda", "cpu"])
    add("--compute", choices=["bf16", "fp32"])
    options = parser.parse_args()
    for name, value in asdict(SIZES[options.size]).items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    problem = _problem(options)
    if problem:
        parser.error(problem)
    options.output = options.output or options.resume
    return options


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options taken together."""
    if bool(options.page) != bool(options.results):
        return "--page DIR and result files go together"
    if options.only_trials and options.only_finals:
        return "--only-trials and --only-finals leave nothing to do"
    if options.only_finals and not options.resume:
        return "--only-finals needs the trials of --resume FILE"
    if min(options.trials, options.tokens, options.trial_tokens, options.points) < 1:
        return "--trials, --tokens, --trial-tokens and --points must be at least 1"
    if options.page or options.plan:
        return None
    if not (options.data and options.validation):
        return "--data and --validation are needed"
    if not (options.output or options.resume):
        return "--output or --resume is needed"
    if options.resume is None and options.output.exists():
        return f"{options.output} exists: go on with --resume {options.output}, or move it away"
    return None


if __name__ == "__main__":
    main()
