"""A step on XLA beside the same step in torch, on this CPU or on an NVIDIA GPU.

    make bench BENCH=xla ARGS="--preset gpt2-nano"
    make bench BENCH=xla ARGS="--device cuda --preset gpt2-small --batch 32 --precision bf16"

The ways to run it, of which the first is what the others are compared with:

    --device cpu     torch eager, torch compiled, XLA, and XLA from its cache
    --device cuda    torch as it runs by default, XLA, XLA from its cache, and with a loop of blocks
    --flags=...      one more way, with these XLA_FLAGS; can be given several times
    --settings=...   one more way, with these settings of a run; can be given several times

For example --flags=--xla_gpu_enable_triton_gemm=false --settings='runtime.xla_attention="plain"'.

Every way runs `gristmill bench` with random tokens in a process of its own. The ways take turns, a
few rounds long, so that other work on the machine meets all of them. Printed are medians over the
rounds: tokens a second, the most memory (of the process on a CPU, of the device on a GPU) and their
ratios to the first way in the same round; and the seconds of the first step, which compiles. Every
round and every set of flags begins with empty caches; a second start on XLA finds the compiled step
of the first. A way that fails is left out, with its last lines on stderr.
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
from typing import NamedTuple

RUN = """
name = "bench"
preset = "{preset}"
[data]
paths = "none"
[train]
until = "1000 steps"
batch = {batch}
"""
LAST_LINES = 5
"""What is shown of a way that fails."""
Figures = dict[str, float]


class Way(NamedTuple):
    """How a step is run."""

    settings: tuple[str, ...]
    flags: str = ""
    cache: str = "cache"
    """The name of its folder of compiled steps."""


XLA = "runtime.device=xla"
WAYS = {
    "cpu": {
        "torch, eager": Way(("runtime.device=cpu",)),
        "torch, compiled": Way(("runtime.device=cpu", "runtime.compile=true")),
        "XLA": Way((XLA,)),
        "XLA, from its cache": Way((XLA,)),
    },
    "cuda": {
        "torch": Way(("runtime.device=cuda",)),
        "XLA": Way((XLA,)),
        "XLA, from its cache": Way((XLA,)),
        "XLA, loop of blocks": Way((XLA, 'runtime.compile="blocks"')),
    },
}


def ways_of(given: argparse.Namespace) -> dict[str, Way]:
    """All ways by name."""
    ways = {
        name: way
        for name, way in WAYS[given.device].items()
        if given.only is None or name in given.only
    }
    for number, flags in enumerate(given.flags):
        ways[f"XLA {flags}"] = Way((XLA,), flags, f"flags-{number}")
    for number, words in enumerate(given.settings):
        ways[f"XLA {words}"] = Way((XLA, *words.split()), "", f"settings-{number}")
    common = () if given.precision is None else (f"precision.compute={given.precision}",)
    return {name: way._replace(settings=(*common, *way.settings)) for name, way in ways.items()}


def measure(folder: Path, file: Path, way: Way, given: argparse.Namespace) -> Figures | None:
    """What `gristmill bench` finds; None if it fails."""
    figures = folder / "figures.json"
    words = ["bench", str(file), *way.settings, "--random-tokens", "--warm-up=3"]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / way.cache),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {way.flags}".strip(),
        "JAX_PLATFORMS": given.device,
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gristmill", *words),
            *(f"--steps={given.steps}", f"--json={figures}"),
        ],
        env=environment,
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-LAST_LINES:]), file=sys.stderr)
        return None
    speed: Figures = json.loads(figures.read_text())["speed"]
    return speed


def table(ways: list[str], rounds: list[dict[str, Figures]]) -> list[str]:
    """Medians over the rounds, and of ratios to the first way in the same round."""
    width = max(map(len, ways)) + 2
    heading = f"{'tokens/s':>10}{'ratio':>7}{'step ms':>9}{'memory MiB':>12}{'ratio':>7}"
    lines = [f"{'':<{width}}{heading}{'first s':>9}"]
    for way in ways:
        both = [(one[way], one[ways[0]]) for one in rounds if {way, ways[0]} <= set(one)]
        if not both:
            lines.append(f"{way:<{width}}failed")
            continue

        def median(figure: str, both: list[tuple[Figures, Figures]] = both) -> float:
            return statistics.median(ours[figure] for ours, _ in both)

        def ratio(figure: str, both: list[tuple[Figures, Figures]] = both) -> float:
            return statistics.median(ours[figure] / first[figure] for ours, first in both)

        lines.append(
            f"{way:<{width}}{median('tokens_per_second'):>10,.0f}{ratio('tokens_per_second'):>7.2f}"
            f"{median('milliseconds'):>9.1f}{median('memory') / 2**20:>12,.0f}"
            f"{ratio('memory'):>7.2f}{median('first_step'):>9.1f}"
        )
    return lines


def options() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--device", choices=list(WAYS), default="cpu")
    found.add_argument("--preset", default="gpt2-nano")
    found.add_argument("--batch", type=int, default=16)
    found.add_argument("--precision", choices=("fp32", "bf16"), help="as the preset says if not")
    found.add_argument("--steps", type=int, default=10)
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--only", nargs="+", metavar="WAY", help="of the ways above, those named")
    found.add_argument("--flags", action="append", default=[], metavar="XLA_FLAGS")
    found.add_argument("--settings", action="append", default=[], metavar="KEY=VALUE ...")
    return found


def main() -> None:
    given = options().parse_args()
    ways = ways_of(given)
    print(f"{given.preset}, batch {given.batch}, {given.rounds} rounds of {given.steps} steps")
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(given.rounds):
            folder = Path(name) / f"round-{number}"
            folder.mkdir()
            file = folder / "run.toml"
            file.write_text(RUN.format(preset=given.preset, batch=given.batch))
            rounds.append({})
            for way, how in ways.items():
                speed = measure(folder, file, how, given)
                said = "failed" if speed is None else f"{speed['milliseconds']:.0f} ms"
                print(f"round {number + 1}: {way} {said}", file=sys.stderr, flush=True)
                if speed is not None:
                    rounds[-1][way] = speed
    print("\n".join(table(list(ways), rounds)))


if __name__ == "__main__":
    main()
