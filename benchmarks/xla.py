"""A step on XLA beside the same step in eager and in compiled torch, on this CPU.

    make bench BENCH=xla ARGS="--preset gpt2-nano"

Every way runs `gristmill bench` with random tokens in a process of its own. The ways take turns, a
few rounds long, so that other work on the machine meets all of them. Printed are medians over the
rounds of the median step, of the first step, which compiles, and of the most memory of the process,
and of their ratios to eager torch in the same round. Every round begins with empty caches; a second
start on XLA finds the compiled step of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
name = "bench"
preset = "{preset}"
[data]
paths = "none"
[train]
until = "1000 steps"
batch = {batch}
"""
EAGER = "torch, eager"
WAYS = {
    EAGER: ("runtime.device=cpu",),
    "torch, compiled": ("runtime.device=cpu", "runtime.compile=true"),
    "XLA": ("runtime.device=xla",),
    "XLA, from its cache": ("runtime.device=xla",),
}


def measure(
    folder: Path, cache: Path, file: Path, settings: tuple[str, ...], steps: int
) -> dict[str, float]:
    figures = folder / "figures.json"
    words = ["bench", str(file), *settings, "--random-tokens", f"--steps={steps}", "--warm-up=3"]
    subprocess.run(
        [sys.executable, "-m", "gristmill", *words, f"--json={figures}"],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    speed: dict[str, float] = json.loads(figures.read_text())["speed"]
    return speed


def medians(
    rounds: list[dict[str, dict[str, float]]], way: str, figure: str
) -> tuple[float, float]:
    """A figure of a way, and its ratio to eager torch in the same round."""
    found = [one[way][figure] for one in rounds]
    ratios = [one[way][figure] / one[EAGER][figure] for one in rounds]
    return statistics.median(found), statistics.median(ratios)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--preset", default="gpt2-nano")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    print(f"{given.preset}, batch {given.batch}, {given.rounds} rounds of {given.steps} steps")
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "run.toml"
        file.write_text(RUN.format(preset=given.preset, batch=given.batch))
        for number in range(given.rounds):
            cache = folder / f"cache-{number}"
            rounds.append({})
            for way, settings in WAYS.items():
                rounds[-1][way] = measure(folder, cache, file, settings, given.steps)
                step = rounds[-1][way]["milliseconds"]
                print(f"round {number + 1}: {way} {step:.0f} ms", file=sys.stderr, flush=True)
    print(f"{'':<22}{'step ms':>9}{'ratio':>7}{'first s':>9}{'memory MiB':>12}{'ratio':>7}")
    for way in WAYS:
        step, slower = medians(rounds, way, "milliseconds")
        first, _ = medians(rounds, way, "first_step")
        memory, larger = medians(rounds, way, "memory")
        print(
            f"{way:<22}{step:>9.1f}{slower:>7.2f}{first:>9.1f}{memory / 2**20:>12.0f}{larger:>7.2f}"
        )


if __name__ == "__main__":
    main()
