"""Time and tokens to a validation loss: the recipes of nanoGPT and nanochat beside ours.

    python benchmarks/time_to_loss.py --data tokens/train --validation tokens/val \\
        --nanogpt PATH/TO/nanoGPT --nanochat PATH/TO/nanochat \\
        --json results.json --seeds 1 2 3
    ... time_to_loss.py 'nanogpt/*' --json results.json ...      only these runs, by name or
                                             pattern, before all options; --list shows all
    ... --json results.json --ablate         our preset with one part changed at a time
    ... --json a.json --ablate --shared      beside others on one device: losses, but no times
    ... --device cpu --compute fp32 --preset modern-nano --runs small.toml      to try it
    python benchmarks/time_to_loss.py --page results.json --notes notes.md -o docs/time-to-loss.md

The protocol, the same for all:

    time         of training steps alone, by the device's own clock; compiling and validation do not
                 count, and the first steps of a run, which compile, cost what the median one does
    validation   all windows of the validation text that do not overlap, in order
    ours         `Run.train` itself: loader, loop, records; nothing is saved before the end
    the loss     the lowest that a row of the baseline ends with, or --target; a run has reached it
                 if its last validation is at or below it, since a rate that has not yet come down
                 says nothing: hence one whole run for each of --tokens

--json is written after every run. Runs that it holds already, with the same settings, are not made
again, so a script that was killed or met its --limit goes on with the same command. Runs of one
process share compiled code where their graphs are equal. The rows are in `loss_rows.py`, and --runs
adds others; `loss_runs.py` makes a run, `loss_results.py` says what follows from all of them, and
`loss_page.py` makes the page.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from loss_page import write_page
from loss_results import (
    Group,
    Result,
    ablation_table,
    describe,
    horizon_table,
    odds,
    plain_table,
    read_results,
    rows_of,
    run_cells,
    target_of,
    verdict,
    write_results,
)
from loss_rows import OURS, Change, amount, rows_by_name
from loss_runs import Bench, Job, keep_compiled, make_run

from gristmill.base.units import format_count
from gristmill.tokens.store import open_tokens


def main() -> None:
    options = parse()
    if options.page:
        make_page(options)
    elif options.list:
        rows = rows_by_name(options.runs)
        print("\n".join(f"{name:<32}{row.about}" for name, row in rows.items()))
    else:
        run_all(options)


def make_page(options: argparse.Namespace) -> None:
    results = read_results(options.page)
    problem = odds(results)
    if problem:
        raise SystemExit(problem)
    notes = options.notes.read_text() if options.notes else ""
    write_page(results, options.output, given=options.target, notes=notes)
    print(options.output)


def run_all(options: argparse.Namespace) -> None:
    jobs = plan(options)
    keep_compiled()
    made = read_results([options.json]) if options.json and options.json.exists() else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        sets = open_tokens(options.data), open_tokens(options.validation)
        bench = Bench(options, *sets, Path(name), made)
        make_runs(bench, jobs)
    print_tables(bench.results, options)


def make_runs(bench: Bench, jobs: Sequence[Job]) -> None:
    """One run after the other, until all are made or the time is over."""
    started = time.monotonic()
    for number, job in enumerate(jobs, start=1):
        if time.monotonic() - started > bench.options.limit:
            print(f"the limit is reached: {len(jobs) - number + 1} runs are left", flush=True)
            return
        done = make_run(bench, job)
        if done is None:
            print(f"{job.name}, {format_count(job.tokens)}, seed {job.seed}: made before")
            continue
        bench.results = [result for result in bench.results if result.key != done.key] + [done]
        if bench.options.json:
            write_results(bench.options.json, bench.results)
        print(describe(done, f"{number} of {len(jobs)}"), flush=True)


# ------------------------------------------------------------------ printing


def print_tables(results: Sequence[Result], options: argparse.Namespace) -> None:
    target = target_of(results, options.target)
    found = {
        "baseline": [run_cells(row) for row in rows_of(results, "baseline")],
        "ours": horizon_table(rows_of(results, "ours"), target),
        "one part at a time": ablation_table(rows_of(results, "ablation")),
    }
    for title, rows in found.items():
        if rows:
            print(f"\n{title}\n{plain_table(rows)}")
    if found["baseline"] or found["ours"]:
        problem = odds(results)
        print("\n" + (problem or "\n".join(verdict(results, target))))


# ------------------------------------------------------------------ the command line


def plan(options: argparse.Namespace) -> list[Job]:
    """The runs that were asked for; the seeds and horizons of a row follow one another, since they
    share compiled code."""
    rows = rows_by_name(options.runs)
    peers = [name for name in ("nanogpt", "nanochat") if getattr(options, name) is not None]
    usual = ["ablate/*"] if options.ablate else [*(f"{name}/*" for name in peers), *OURS]
    wanted = options.names or usual
    for pattern in wanted:
        if not fnmatch.filter(rows, pattern):
            raise SystemExit(f"there is no run {pattern!r}; --list shows all")
    jobs = list[Job]()
    group: Group
    for name, row in rows.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted):
            continue
        if not isinstance(row, Change):
            peer = name.partition("/")[0]
            if getattr(options, peer) is None:
                raise SystemExit(f"{name} needs --{peer}, a checkout of it")
            group, horizons = "baseline", [amount(row.tokens)]
        elif name.startswith("ablate/"):
            group, horizons = "ablation", [options.ablate_tokens]
        else:
            group, horizons = "ours", options.tokens or [amount(one) for one in row.tokens]
        jobs += [Job(name, group, seed, n, row) for n in horizons for seed in options.seeds]
    return jobs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    which = "names or patterns, before all options; baseline and ours if not given"
    add("names", nargs="*", metavar="RUN", help=which)
    add("--data", type=Path, metavar="PREFIX", help="token files to train on, uint16")
    add("--validation", type=Path, metavar="PREFIX", help="token files to validate on")
    add("--nanogpt", type=Path, help="a checkout of nanoGPT")
    add("--nanochat", type=Path, help="a checkout of nanochat")
    add("--json", type=Path, help="write the results here after every run, and go on from there")
    add("--runs", type=Path, metavar="FILE.toml", help="further rows")
    add("--list", action="store_true", help="show the names of all runs")
    add("--ablate", action="store_true", help="the preset with one part changed at a time")
    add("--ablate-tokens", type=amount, default=20_000_000, metavar="N", help="horizon of --ablate")
    add("--tokens", type=amount, nargs="+", metavar="N", help="horizons of ours, for all rows")
    add("--seeds", type=int, nargs="+", default=[1337], metavar="N")
    add("--target", type=float, metavar="LOSS", help="the baseline's best if not given")
    add("--limit", type=float, default=math.inf, metavar="SECONDS", help="then begin no new run")
    add("--shared", action="store_true", help="others use the device too: record no times")
    add("--points", type=int, default=12, help="validations in a run")
    add("--preset", default="modern-small", help="ours")
    add("--baseline-preset", default="gpt2-small", help="the baseline's sizes")
    add("--batch", type=int, default=32, help="windows in a step of ours")
    add("--set", nargs="+", default=[], metavar="A.B=C", help="settings of all runs of ours")
    for name in ("layers", "heads", "width", "context"):
        add(f"--{name}", type=int, help="of all models, to try it")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--compute", choices=["bf16", "fp32"], default="bf16")
    add("--page", type=Path, nargs="+", metavar="RESULTS", help="make the page of these and end")
    add("-o", "--output", type=Path, default=Path("docs/time-to-loss.md"), help="of --page")
    add("--notes", type=Path, metavar="FILE.md", help="text for the end of --page")
    options = parser.parse_args()
    if not (options.page or options.list) and not (options.data and options.validation):
        parser.error("--data and --validation are needed")
    return options


if __name__ == "__main__":
    main()
