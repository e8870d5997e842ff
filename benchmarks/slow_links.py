"""Ways to train together over slow links, beside all-reduce: step time, bytes sent, loss.

    python benchmarks/slow_links.py --tune                 learning rates first, then everything
    python benchmarks/slow_links.py --quick                three rows, two rates
    python benchmarks/slow_links.py --workers 4 8 --rows ddp 'gossip-*' --links 50 200 unlimited
    python benchmarks/slow_links.py --list                 the rows

All rows train the same model on the same samples with the same global batch. Each makes two runs:

    curve    on unlimited links, to the end: validation loss, and bytes on each worker's interface
             from the first step to the last, without those of validation
    times    the same run again, whose links change while it goes on: a stretch of steps for each
             of --links, then it is killed

The seconds that belong to a loss are its steps times the step time on those links. So the loss may
not depend on the links: the training losses of both runs are compared, and the page says how far
they differ. --links are rates in Mbit/s, with +slow-link (one worker has a tenth of the rate) or
+slow-cpu (one worker computes a fifth of the time).

--tune tries the same learning rates for every row, in short runs of their own, and keeps the best
in learning-rates.json in the output folder; later runs take it from there. Results are written
after every run. Runs that were made before with the same settings are not made again, so a script
that was stopped goes on with the same command.

Links are those of `network_namespaces.py`, which need root, ip and tc. Without these only unlimited
links are measured. Timings are of use only if nothing else keeps this machine busy.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from network_namespaces import (
    Readings,
    WorkersError,
    open_network,
    run_workers,
    why_not,
)
from slow_links_page import write_page
from slow_links_rows import MODELS, ROWS, Links, Row, Stretch, stretches

from gristmill.base.files import write_atomic
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.python_docs import python_documents
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.track.metrics import read_metrics
from gristmill.track.records import StepRecord, ValidationRecord
from gristmill.train.environment import code_commit

RUN = """\
name = "{name}"
folder = "{folder}/{name}"
[model]
layers = {layers}
heads = {heads}
width = {width}
context = {context}
[data]
paths = "{folder}/training"
validation = "{folder}/held-out"
[train]
until = "{steps} steps"
batch = {batch}
[optim]
lr = {lr}
[schedule]
warmup = 0.2
[validate]
every = "{validate} steps"
windows = 128
[checkpoint]
every = "1M steps"
keep_best = false
[runtime]
device = "cpu"
"""
VALIDATE = 37
"""Steps between two validations: never those of an exchange, so that their bytes do not mix."""
LR, LRS = 1e-3, (5e-4, 1e-3, 2e-3)
"""The learning rate where none was chosen, and those that --tune tries."""
TUNED = 74
"""Steps of a run of --tune."""
PATIENCE = 1200.0
"""Seconds after which a run hangs."""


# ------------------------------------------------------------------ all runs


@dataclass
class Bench:
    """What all runs share: the options, a folder with the text, and the results so far."""

    options: argparse.Namespace
    folder: Path
    results: dict[str, Any]

    def keep(self, kind: str, workers: int, row: Row, result: dict[str, Any]) -> None:
        runs = self.results.setdefault("runs", {})
        runs.setdefault(f"{workers}", {}).setdefault(row.name, {})[kind] = result
        write_atomic(self.options.output / "results.json", json.dumps(self.results, indent=1))

    def kept(self, kind: str, workers: int, row: Row, settings: list[str]) -> dict[str, Any] | None:
        found = self.results.get("runs", {}).get(f"{workers}", {}).get(row.name, {}).get(kind)
        return found if found is not None and found["settings"] == settings else None


def main() -> None:
    options = parse()
    if options.list:
        for row in ROWS:
            print(f"{row.name:<30}{' '.join(row.words(options.workers[0]))}")
        return
    if why_not():
        options.links = [Links(None)]
    check_steps(options)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        bench = Bench(options, Path(name), results)
        write_text(bench)
        bench.results["facts"] = compared_facts(bench)
        if options.tune:
            tune(bench)
        try:
            run_all(bench)
        finally:
            if bench.results.get("runs"):
                write_page(bench.results, options.output)
    print(f"\n{(options.output / 'README.md').read_text()}\nin {options.output}")


def check_steps(options: argparse.Namespace) -> None:
    """End the script if a run is too short for all stretches that are to be timed in it."""
    plans = [
        stretches(row, options.links, workers=workers)
        for row in chosen_rows(options)
        for workers in options.workers
    ]
    needed = max(plan[-1].end for plan in plans)
    if needed > options.steps:
        raise SystemExit(f"these --links take {needed} steps: give fewer, or --steps {needed}")


def run_all(bench: Bench) -> None:
    rates = learning_rates(bench)
    for workers in bench.options.workers:
        for row in chosen_rows(bench.options):
            lr = rates.get(row.name, LR)
            for kind, run in (("curve", run_curve), ("times", run_times)):
                began = time.monotonic()
                told = f"{workers} workers, {row.name}, {kind}"
                links = bench.options.links if kind == "times" else ()
                settings = [*row.words(workers), f"lr={lr}", *map(str, links)]
                if bench.kept(kind, workers, row, settings) is not None:
                    print(f"{told}: made before", flush=True)
                    continue
                try:
                    result = run(bench, workers, row, lr)
                except WorkersError as error:
                    # A row that this version cannot run must not keep the others from running.
                    print(f"{told}: FAILED, {error}", flush=True)
                    break
                result |= {"settings": settings, "lr": lr, "tuned": row.name in rates}
                result |= {"date": f"{date.today()}", "code": code_commit() or "unknown"}
                bench.keep(kind, workers, row, result)
                seconds = time.monotonic() - began
                print(f"{told}: {describe(result)} ({seconds:.0f} s)", flush=True)


def describe(result: dict[str, Any]) -> str:
    if "losses" in result:
        step, loss = result["losses"][-1]
        return f"loss {loss:.3f} after {step} steps, {_megabytes(result)} sent by each in a step"
    steps = result["step_seconds"]
    return ", ".join(f"{name}: {1000 * seconds:.0f} ms" for name, seconds in steps.items())


def _megabytes(result: dict[str, Any]) -> str:
    sent = result["sent_per_step"]
    return "an unknown amount" if sent is None else f"{sent / 1e6:.3f} MB"


def tune(bench: Bench) -> None:
    """Try the same learning rates for every row on unlimited links, with the first of --workers."""
    file, workers = bench.options.output / "learning-rates.json", bench.options.workers[0]
    tried = json.loads(file.read_text()) if file.exists() else {}
    for row in chosen_rows(bench.options):
        losses = tried.setdefault(row.name, {})
        for lr in LRS:
            if f"{lr}" in losses:
                continue
            try:
                records, _ = train(bench, workers, row, lr, steps=TUNED)
            except WorkersError as error:
                print(f"tuning {row.name}, rate {lr}: FAILED, {error}", flush=True)
                break
            losses[f"{lr}"] = _validations(records)[-1].loss
            print(f"tuning {row.name}, rate {lr}: loss {losses[f'{lr}']:.4f}", flush=True)
            write_atomic(file, json.dumps(tried, indent=1))


def learning_rates(bench: Bench) -> dict[str, float]:
    """The best rate of each row for which all were tried."""
    file = bench.options.output / "learning-rates.json"
    tried = json.loads(file.read_text()) if file.exists() else {}
    complete = {row: losses for row, losses in tried.items() if len(losses) == len(LRS)}
    return {row: float(min(losses, key=losses.__getitem__)) for row, losses in complete.items()}


# ------------------------------------------------------------------ one run


def run_curve(bench: Bench, workers: int, row: Row, lr: float) -> dict[str, Any]:
    records, readings = train(bench, workers, row, lr, steps=bench.options.steps)
    steps = [record for record in records if isinstance(record, StepRecord)]
    return {
        "losses": [[one.step, one.loss] for one in _validations(records)],
        "training": [record.loss for record in steps],
        "sent_per_step": _sent_per_step(records, readings),
    }


def _validations(records: list[Any]) -> list[ValidationRecord]:
    return [record for record in records if isinstance(record, ValidationRecord)]


def _sent_per_step(records: list[Any], readings: Readings) -> float | None:
    """Bytes that a worker sends for a step, on average, without those of validation."""
    if not readings.times:
        return None
    steps = [record for record in records if isinstance(record, StepRecord)]
    begin, end = steps[0].time - steps[0].step_seconds, steps[-1].time
    sent = mean(readings.sent_between(begin, end))
    for one in _validations(records):
        if begin < one.time < end:
            sent -= mean(readings.sent_between(one.time - one.seconds, one.time))
    return sent / len(steps)


def run_times(bench: Bench, workers: int, row: Row, lr: float) -> dict[str, Any]:
    plan = stretches(row, bench.options.links, workers=workers)
    records, _ = train(bench, workers, row, lr, steps=bench.options.steps, plan=plan)
    steps = [record for record in records if isinstance(record, StepRecord)]
    return {
        "training": [record.loss for record in steps],
        "step_seconds": {
            str(one.links): mean(record.step_seconds for record in steps[one.first : one.end])
            for one in plan
        },
    }


def train(
    bench: Bench,
    workers: int,
    row: Row,
    lr: float,
    *,
    steps: int,
    plan: list[Stretch] | None = None,
) -> tuple[list[Any], Readings]:
    """A whole run on unlimited links, or one that follows a plan; its records and byte counters."""
    options, name = bench.options, row.name
    run = bench.folder / name
    shutil.rmtree(run, ignore_errors=True)
    text = RUN.format(
        name=name,
        folder=bench.folder,
        steps=steps,
        batch=options.batch,
        lr=lr,
        validate=VALIDATE if plan is None else 10**6,
        **MODELS[options.model],
    )
    file = bench.folder / "run.toml"
    file.write_text(text)
    command = [sys.executable, "-m", "gristmill", "train", str(file), *row.words(workers)]
    metrics, waiting = run / "metrics.jsonl", list(plan or ())
    with open_network([None] * workers) as network:
        if waiting:
            waiting[0].links.apply(network)

        def enough() -> bool:
            if plan is None:
                return False
            done = metrics.read_bytes().count(b'{"kind": "step"') if metrics.exists() else 0
            if done < waiting[0].end:
                return False
            del waiting[0]
            if waiting:
                waiting[0].links.apply(network)
            return not waiting

        readings = run_workers(
            network, command, logs=bench.folder / "logs", timeout=PATIENCE, enough=enough
        )
    records = read_metrics(metrics)
    shutil.rmtree(run, ignore_errors=True)
    return records, readings


# ------------------------------------------------------------------ the text, the machine, options


def write_text(bench: Bench) -> None:
    """One id for each byte of a text; its last hundred thousand are for validation."""
    if bench.options.text:
        data = bench.options.text.read_bytes()
    else:
        data = "\n".join(one.text for one in python_documents()).encode("ascii", "replace")
    needed = bench.options.steps * bench.options.batch * 64 + 200_000
    if len(data) < needed:
        raise SystemExit(f"the text has {len(data)} bytes and should have {needed}: give --text")
    text = data.decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?")
    for name, part in (("training", text[:-100_000]), ("held-out", text[-100_000:])):
        document = Document(part, name)
        prepare_documents([document], tokenizer=open_tokenizer("bytes"), output=bench.folder / name)


def compared_facts(bench: Bench) -> dict[str, Any]:
    """What the page says of all runs; ends the script if those made before were different."""
    now = facts(bench)
    before = bench.results.get("facts", now)
    for name in ("machine", "model", "batch", "steps", "text"):
        if before[name] != now[name]:
            what = f"{name}: {before[name]}, and not {now[name]}"
            raise SystemExit(f"{bench.options.output} has runs with {what}: give another --output")
    return now


def facts(bench: Bench) -> dict[str, Any]:
    options, shape = bench.options, MODELS[bench.options.model]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "model": ", ".join(f"{name} {value}" for name, value in shape.items()),
        "batch": f"{options.batch} samples of {shape['context']} tokens over all workers",
        "steps": options.steps,
        "text": options.text.name if options.text else "the documentation of Python",
        "lrs": list(LRS),
        "tuned_steps": TUNED,
        "unshaped": why_not(),
    }


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    found = [row for row in ROWS if any(fnmatch.fnmatch(row.name, one) for one in options.rows)]
    if not found:
        raise SystemExit("no row has such a name: --list shows all")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[4])
    parser.add_argument("--rows", nargs="+", default=["*"], help="names or patterns")
    parser.add_argument("--links", nargs="+", type=Links.parse, help="in the order measured")
    parser.add_argument("--steps", type=int, default=6 * VALIDATE)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--batch", type=int, default=16, help="samples of all workers together")
    parser.add_argument("--text", type=Path, help="a text file to train on")
    parser.add_argument("--tune", action="store_true", help="choose learning rates first")
    parser.add_argument("--quick", action="store_true", help="few rows, links and steps")
    parser.add_argument("--list", action="store_true", help="show the rows")
    parser.add_argument("-o", "--output", type=Path, default=Path("slow-links"))
    options = parser.parse_args()
    if options.quick:
        options.steps = 2 * VALIDATE
        options.rows = ["ddp", "gossip-ring", "diloco"] if options.rows == ["*"] else options.rows
    names = ["unlimited", "200"] if options.quick else ["unlimited", "1000", "200", "50"]
    names += [] if options.quick else ["1000+slow-link"]
    options.links = options.links or [Links.parse(name) for name in names]
    return options


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the runs made so far are kept")
