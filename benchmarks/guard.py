"""What poisoned batches cost a run, and what the guard saves: one model, four runs.

    python benchmarks/guard.py
    python benchmarks/guard.py --steps 1200 --stretch 12

The text is Python's documentation, in order, one id for each byte. In the poisoned set stretches of
batches are random bytes. Every run sees the same samples in the same order and is validated on the
same clean text.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from gristmill.config.load import load_text
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.sources.python_docs import python_documents
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.train.run import Run

RUN = """
name = "{name}"
folder = "{folder}/{name}"
[model]
layers = 4
heads = 4
width = 128
context = 128
[data]
paths = "{folder}/{tokens}"
validation = "{folder}/held-out"
order = "sequential"
[train]
until = "{steps} steps"
batch = 16
[optim]
lr = 3e-3
[validate]
every = "{steps} steps"
windows = 64
[checkpoint]
every = "25 steps"
[track]
every = "1 steps"
[runtime]
device = "cpu"
"""
BATCH = 16 * 128
RUNS = {
    "clean": ("clean", None),
    "poisoned": ("poisoned", None),
    "skip": ("poisoned", "skip"),
    "rollback": ("poisoned", "rollback"),
    "clean-skip": ("clean", "skip"),
}
"""The tokens and the guard of each run."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        poisoned = write_sets(folder, options)
        print(f"{options.steps} steps of {BATCH} tokens, of which noise: {poisoned}\n")
        print("| run | validation loss | steps skipped or passed over |")
        print("| --- | --- | --- |")
        for run in options.only:
            tokens, guard = RUNS[run]
            loss, passed = train(folder, run, tokens, guard, options.steps)
            print(f"| {run} | {loss:.4f} | {passed} |", flush=True)


def train(folder: Path, name: str, tokens: str, guard: str | None, steps: int) -> tuple[float, int]:
    text = RUN.format(folder=folder, name=name, tokens=tokens, steps=steps)
    words = [] if guard is None else [f"train.guard.action={guard}"]
    outcome = Run(load_text(text, words, place="benchmark")).train()
    assert outcome.best_loss is not None
    newest = max((folder / name / "checkpoints").glob("step-*"))
    ranges = json.loads((newest / "state.json").read_text())["health"]["passed_over"]
    return outcome.best_loss, sum(end - begin for begin, end in ranges) // 16


def write_sets(folder: Path, options: argparse.Namespace) -> str:
    """A clean set, the same with noise in it, and other clean text; returns where the noise is."""
    text = "\n".join(document.text for document in python_documents())
    data = text.encode("ascii", "replace")
    needed = (options.steps + 2) * BATCH
    assert len(data) > needed + 64 * 129, "this Python has too little documentation"
    rng, noisy = np.random.default_rng(options.seed), bytearray(data[:needed])
    stretches = np.linspace(options.steps * 0.3, options.steps * 0.95, options.stretches)
    places = []
    for first in stretches.astype(int).tolist():
        size = options.stretch * BATCH
        noisy[first * BATCH : first * BATCH + size] = rng.integers(33, 127, size, "u1").tobytes()
        places.append(f"{first + 1} to {first + options.stretch}")
    contents = {"clean": data[:needed], "poisoned": noisy, "held-out": data[needed:]}
    for name, content in contents.items():
        document = Document(bytes(content).decode("ascii"), name)
        prepare_documents([document], tokenizer=open_tokenizer("bytes"), output=folder / name)
    return ", ".join(places)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--stretches", type=int, default=6)
    parser.add_argument("--stretch", type=int, default=8, help="steps of noise in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=RUNS, choices=RUNS, help="some of the runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
