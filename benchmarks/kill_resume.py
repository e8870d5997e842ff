"""Kill a run at random moments, start it again, compare it with one that nobody disturbed.

    python benchmarks/kill_resume.py --kills 40
    python benchmarks/kill_resume.py --kills 40 --processes 4 --layout "dp_shard=2 tp=2"

Every process is a real `gristmill train`, killed with SIGKILL and restarted with no cleaning, until
the run is complete; then its losses, validation losses, weights and optimizer state are compared
bit for bit with the undisturbed run's. Rounds repeat until the number of kills is reached. Of
several processes a random one is killed; the others have to end by themselves, and the last line
has to name it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.python_docs import python_documents
from gristmill.text.tokenizers.tokenizer import open_tokenizer

RUN = """
name = "victim"
[model]
layers = 2
heads = 2
width = 64
context = 64
dropout = 0.1
[data]
paths = "tokens"
[train]
until = "{steps} steps"
batch = 8
accumulate = 2
[validate]
every = "20 steps"
windows = 16
[checkpoint]
every = "7 steps"
[sample]
every = "50 steps"
tokens = 10
"""


@dataclass
class Count:
    """What was seen over all rounds."""

    kills: int = 0
    while_saving: int = 0
    before_first_save: int = 0
    steps_lost: list[int] = field(default_factory=list)
    wrong: int = 0
    rounds: int = 0
    restarts_that_failed: int = 0
    seconds_to_end: list[float] = field(default_factory=list)
    """From a kill to the end of all processes."""
    named: int = 0
    """Kills after which the last line named the process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--layout", default="", help="settings of [parallel], such as tp=2")
    options = parser.parse_args()
    words = [f"parallel.{word}" for word in options.layout.split()]
    if "cp=" in options.layout:
        words.append("model.dropout=0.0")
    if options.processes > 1:
        words += ["--processes", str(options.processes)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = list(python_documents())[:150]
        prepare_documents(documents, tokenizer=open_tokenizer("bytes"), output=folder / "tokens")
        (folder / "run.toml").write_text(RUN.format(steps=options.steps))
        started = time.monotonic()
        assert start(folder, "undisturbed", words).wait() == 0
        duration = time.monotonic() - started
        count = Count()
        rng = random.Random(options.seed)
        while count.kills < options.kills:
            one_round(folder, count, words, rng=rng, limit=options.kills, duration=duration)
        report(options, count, duration)


def start(folder: Path, run: str, words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gristmill", "train", "run.toml", f"folder={run}", *words]
    with (folder / "errors.txt").open("wb") as errors:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)


def one_round(
    folder: Path,
    count: Count,
    words: list[str],
    *,
    rng: random.Random,
    limit: int,
    duration: float,
) -> None:
    count.rounds += 1
    run = f"victim-{count.rounds}"
    while True:
        process = start(folder, run, words)
        try:
            code = process.wait(rng.uniform(0.3, duration) if count.kills < limit else None)
        except subprocess.TimeoutExpired:
            take_note(folder / run, count)
            kill_one(process, count, rng, errors=folder / "errors.txt")
            continue
        if code == 0:
            break
        count.restarts_that_failed += 1
        raise SystemExit(f"a restart ended with status {code}")
    if fingerprint(folder / run) != fingerprint(folder / "undisturbed"):
        count.wrong += 1


def kill_one(
    process: subprocess.Popen[bytes], count: Count, rng: random.Random, *, errors: Path
) -> None:
    """Kill a process, or one of those that it supervises, and wait until all have ended."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    place = rng.randrange(len(children)) if children else 0
    victim = int(children[place]) if children else process.pid
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    process.wait()
    count.kills += 1
    count.seconds_to_end.append(time.monotonic() - started)
    lines = errors.read_text().strip().splitlines() or [""]
    count.named += f"rank {place} " in lines[-1]


def take_note(run: Path, count: Count) -> None:
    """What a kill at this moment meets and costs."""
    root = run / "checkpoints"
    count.while_saving += any(root.glob(".writing-*")) if root.is_dir() else False
    saved = CheckpointFolder(root).committed()
    if not saved:
        count.before_first_save += 1
    metrics = run / "metrics.jsonl"
    if metrics.is_file() and saved:
        lines = metrics.read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
        count.steps_lost.append(max(0, max(steps, default=0) - int(saved[-1].name[5:])))


def fingerprint(run: Path) -> str:
    """A hash of all losses and of the final state."""
    digest = hashlib.sha256()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "event":
            continue
        kept = {k: record.get(k) for k in ("kind", "step", "loss", "grad_norm", "lr", "text")}
        digest.update(json.dumps(kept).encode())
    newest = CheckpointFolder(run / "checkpoints").committed()[-1]
    for file in sorted(newest.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def report(options: argparse.Namespace, count: Count, duration: float) -> None:
    lost = sorted(count.steps_lost) or [0]
    print(f"undisturbed run of {options.steps} steps: {duration:.1f} s; a save every 7 steps")
    if options.processes > 1:
        slow = sorted(count.seconds_to_end)
        print(f"processes                  {options.processes}, {options.layout or 'copies'}")
        print(
            f"seconds until all ended    median {slow[len(slow) // 2]:.1f}, at most {slow[-1]:.1f}"
        )
        print(f"named in the last line     {count.named} of {count.kills}")
    print(f"kills                      {count.kills} in {count.rounds} rounds")
    print(f"  while saving             {count.while_saving}")
    print(f"  before the first save    {count.before_first_save}")
    print(f"steps lost by a kill       median {lost[len(lost) // 2]}, at most {lost[-1]}")
    print(f"restarts that failed       {count.restarts_that_failed}")
    print(f"rounds with other results  {count.wrong}")


if __name__ == "__main__":
    main()
