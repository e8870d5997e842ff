"""A step on XLA beside the same step in eager and in compiled torch, on this CPU.

    make bench BENCH=xla ARGS="--preset gpt2-nano"

Every way runs `gristmill bench` with random tokens in a process of its own. Printed are the median
step, the first step, which compiles, and the most memory, with ratios to eager torch. A second
start on XLA finds the compiled step in its cache.
"""

from __future__ import annotations

import argparse
import json
import os
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
WAYS = {
    "torch, eager": ("runtime.device=cpu",),
    "torch, compiled": ("runtime.device=cpu", "runtime.compile=true"),
    "XLA": ("runtime.device=xla",),
    "XLA, from its cache": ("runtime.device=xla",),
}


def measure(folder: Path, file: Path, settings: tuple[str, ...], steps: int) -> dict[str, float]:
    figures = folder / "figures.json"
    words = ["bench", str(file), *settings, "--random-tokens", f"--steps={steps}", "--warm-up=3"]
    subprocess.run(
        [sys.executable, "-m", "gristmill", *words, f"--json={figures}"],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    speed: dict[str, float] = json.loads(figures.read_text())["speed"]
    return speed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--preset", default="gpt2-nano")
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--steps", type=int, default=10)
    given = options.parse_args()
    print(f"{given.preset}, batch {given.batch}, median of {given.steps} steps")
    print(f"{'':<22}{'step ms':>9}{'ratio':>7}{'first s':>9}{'memory MiB':>12}{'ratio':>7}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "run.toml"
        file.write_text(RUN.format(preset=given.preset, batch=given.batch))
        eager: dict[str, float] = {}
        for way, settings in WAYS.items():
            found = measure(folder, file, settings, given.steps)
            eager = eager or found
            print(
                f"{way:<22}{found['milliseconds']:>9.1f}"
                f"{found['milliseconds'] / eager['milliseconds']:>7.2f}"
                f"{found['first_step']:>9.1f}{found['memory'] / 2**20:>12.0f}"
                f"{found['memory'] / eager['memory']:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
