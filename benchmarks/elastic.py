"""What it costs to lose workers: an elastic run that is disturbed, beside one that is not, with the
same data, settings and steps.

    python benchmarks/elastic.py
    python benchmarks/elastic.py --workers 4 --steps 2000 --every 10 --text book.txt

Every few seconds a random worker is killed, or frozen for longer than the others wait for it. The
supervisor starts killed ones again. Prints a table for each number of workers; --save keeps them in
a file. The exit status is 1 if a promise was broken: exit status 0, every step recorded once and in
order, finite losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.python_docs import python_documents
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import open_tokenizer

RUN = """
name = "{name}"
folder = "{folder}/{name}"
model = {{ layers = 2, heads = 2, width = 64, context = 64 }}
data = {{ paths = "{folder}/text", split = "95,5" }}
train = {{ until = "{steps} steps", batch = {batch} }}
optim.lr = 3e-3
validate = {{ every = "{often} steps", windows = 64 }}
checkpoint = {{ every = "{often} steps" }}
parallel = {{ elastic = true, timeout = "{timeout}s", gossip = {{ topology = "random" }} }}
runtime = {{ device = "cpu", threads = 1 }}
"""
PER_WORKER = 4
"""Samples of each worker in a step."""


@dataclass
class Blow:
    """A worker that was killed or frozen."""

    worker: int
    kind: str
    time: float


@dataclass
class Finished:
    """What a run came to."""

    status: int
    records: list[dict[str, Any]]
    workers: list[int]
    blows: list[Blow] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.records if one["kind"] == kind]

    @property
    def loss(self) -> float:
        return float(self.of("validation")[-1]["loss"])

    @property
    def seconds(self) -> float:
        steps = self.of("step")
        return float(steps[-1]["time"] - steps[0]["time"])

    def changes(self) -> list[tuple[int, float, int, str]]:
        """Step, time, workers present and text of every change of workers."""
        found = []
        for one in self.of("event"):
            match = re.search(r"with (\d+) of \d+ workers", one["text"])
            if match:
                found.append((one["step"], one["time"], int(match[1]), one["text"]))
        return found

    def unread(self, workers: int) -> int:
        """Samples that nobody read, because their worker was not there."""
        last = self.of("step")[-1]["step"]
        changes = [(step, present) for step, _, present, _ in self.changes()]
        ends = [step for step, _ in changes[1:]] + [last]
        missing = (
            (workers - present) * max(0, end - step)
            for (step, present), end in zip(changes, ends, strict=True)
        )
        return PER_WORKER * sum(missing)

    def pauses(self) -> list[float]:
        """Seconds from each kill to the first step that the others took without that worker, or
        with the process that had replaced it by then."""
        found = []
        for blow in self.blows:
            named = re.compile(rf"workers? (\d+, )*{blow.worker}(, \d+)* (is gone|are gone|joined)")
            times = [t for _, t, _, text in self.changes() if t > blow.time and named.search(text)]
            steps = [one["time"] for one in self.of("step") if times and one["time"] > times[0]]
            if steps and blow.kind == "killed":
                found.append(steps[0] - blow.time)
        return found

    def returns(self) -> list[float]:
        """Seconds from each kill until that worker trained again."""
        found = []
        for blow in self.blows:
            joined = re.compile(rf"workers? (\d+, )*{blow.worker}(, \d+)* joined")
            times = [t for _, t, _, text in self.changes() if t > blow.time and joined.search(text)]
            if times and blow.kind == "killed":
                found.append(times[0] - blow.time)
        return found

    def broken(self, steps: int) -> list[str]:
        """Promises that were not kept."""
        taken = [one["step"] for one in self.of("step")]
        losses = [float(one["loss"]) for one in (*self.of("step"), *self.of("validation"))]
        promises = {
            f"exit status {self.status}": self.status == 0,
            "a step is missing, or recorded twice": taken == list(range(1, steps + 1)),
            "a loss is not finite": all(map(math.isfinite, losses)),
        }
        return [what for what, kept in promises.items() if not kept]


def main() -> None:
    options = parse()
    pages, broken = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder, options.text)
        for workers in options.workers:
            calm = train(folder, workers, options, random.Random(options.seed), disturb=False)
            rough = train(folder, workers, options, random.Random(options.seed), disturb=True)
            page = table(calm, rough, workers, options.steps)
            broken += len(calm.broken(options.steps)) + len(rough.broken(options.steps))
            print(page, flush=True)
            pages.append(page)
    if options.save is not None:
        options.save.write_text("\n".join(pages))
    sys.exit(1 if broken else 0)


def train(
    folder: Path, workers: int, options: argparse.Namespace, rng: random.Random, *, disturb: bool
) -> Finished:
    """One run, disturbed or not."""
    name = f"{'rough' if disturb else 'calm'}-{workers}"
    file, run = folder / f"{name}.toml", folder / name
    values = {"folder": folder, "name": name, "steps": options.steps, "timeout": options.timeout}
    values |= {"batch": PER_WORKER * workers, "often": max(1, options.steps // 8)}
    file.write_text(RUN.format(**values))
    command = [sys.executable, "-m", "gristmill", "train", str(file)]
    command += [f"--processes={workers}", "--restarts=1000"]
    blows, frozen = list[Blow](), dict[int, float]()
    with (folder / f"{name}.txt").open("wb") as output:
        supervisor = subprocess.Popen(command, stdout=output, stderr=output)
        due = math.inf
        while supervisor.poll() is None:
            time.sleep(0.05)
            now = time.time()
            for pid in [pid for pid, until in frozen.items() if now > until]:
                del frozen[pid]
                send(pid, signal.SIGCONT)
            if disturb and due == math.inf and (run / "status.json").is_file():
                due = now + options.every
            if now > due:
                due = now + options.every
                blow = strike(supervisor.pid, run, rng, frozen, options)
                blows += [] if blow is None else [blow]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    newest = max((run / "checkpoints").glob("step-*"))
    saved = json.loads((newest / "state.json").read_text())["workers"]
    return Finished(supervisor.returncode, [json.loads(one) for one in lines], saved, blows)


def strike(
    supervisor: int,
    run: Path,
    rng: random.Random,
    frozen: dict[int, float],
    options: argparse.Namespace,
) -> Blow | None:
    """Kill a random worker that trains, or freeze it for a while; never the last one."""
    pids, present = children(supervisor), training(run)
    victims = [one for one in present if one in pids and pids[one] not in frozen]
    if len(victims) < 2:
        return None
    worker = rng.choice(victims)
    freezes = rng.random() < options.frozen
    if freezes:
        frozen[pids[worker]] = time.time() + options.timeout
    send(pids[worker], signal.SIGSTOP if freezes else signal.SIGKILL)
    return Blow(worker, "frozen" if freezes else "killed", time.time())


def training(run: Path) -> list[int]:
    """The workers that train, as the run said last; none when it is done."""
    text = (run / "metrics.jsonl").read_text()
    if json.loads((run / "status.json").read_text())["state"] != "running":
        return []
    named = re.findall(r"with \d+ of \d+ workers: ([\d, ]+\d)", text)
    world = re.findall(r"(\d+) processes; this is rank", text)
    if named:
        return [int(one) for one in named[-1].split(",")]
    return list(range(int(world[-1]))) if world else []


def children(parent: int) -> dict[int, int]:
    """The workers of a supervisor: process ids by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            values = (path.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(one[5:]): int(path.parent.name) for one in values if one[:5] == b"RANK="}
    return found


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def table(calm: Finished, rough: Finished, workers: int, steps: int) -> str:
    def spread(values: list[float]) -> str:
        if not values:
            return "-"
        return f"{statistics.median(values):.1f} (at most {max(values):.1f})"

    def count(one: Finished, kind: str) -> int:
        return sum(blow.kind == kind for blow in one.blows)

    samples = PER_WORKER * workers * steps
    returned = sum(text.count("joined") for *_, text in rough.changes())
    rows = [
        ("killed", count(calm, "killed"), count(rough, "killed")),
        ("frozen", count(calm, "frozen"), count(rough, "frozen")),
        ("times that workers joined again", 0, returned),
        ("changes of workers", len(calm.changes()), len(rough.changes())),
        ("steps recorded", len(calm.of("step")), len(rough.of("step"))),
        ("samples not read", 0, f"{rough.unread(workers) / samples:.1%}"),
        ("seconds from a kill to the next step without it", "-", spread(rough.pauses())),
        ("seconds until the killed one trains again", "-", spread(rough.returns())),
        ("seconds from the first step to the last", *(f"{x.seconds:.0f}" for x in (calm, rough))),
        ("validation loss at the end", f"{calm.loss:.4f}", f"{rough.loss:.4f}"),
        ("workers in the last checkpoint", len(calm.workers), len(rough.workers)),
        *[("promises broken", *["; ".join(one.broken(steps)) or "none" for one in (calm, rough)])],
    ]
    lines = [
        f"| {workers} workers, {steps} steps | undisturbed | disturbed |",
        "| --- | --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {a} | {b} | {c} |" for a, b, c in rows), ""])


def write_text(folder: Path, text: Path | None) -> None:
    """The token files: of a given text, or of Python's documentation, one id for each byte."""
    if text is not None:
        documents = [Document(text.read_text(encoding="utf-8"), text.name)]
    else:
        documents = python_documents()
    prepare_documents(documents, tokenizer=open_tokenizer("bytes"), output=folder / "text")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What it costs to lose workers.")
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two blows")
    parser.add_argument("--frozen", type=float, default=0.25, help="share of blows that freeze")
    parser.add_argument("--timeout", type=int, default=10, help="parallel.timeout in seconds")
    parser.add_argument("--text", type=Path, help="a text to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="a file for the tables")
    return parser.parse_args()


if __name__ == "__main__":
    main()
