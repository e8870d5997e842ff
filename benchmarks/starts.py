"""Seconds from a command to its first step and to its end, cold and warm.

    python benchmarks/starts.py --data tokens/train --validation tokens/val
    ... --nanogpt PATH/TO/nanoGPT          its own training script beside ours
    ... --nanochat PATH/TO/nanochat        the same; --peer-preset and --peer-until, if not as ours
    ... --compile true blocks              ours with the whole model and with blocks compiled
    ... --until "23M tokens"               a whole run instead of a few steps
    ... --device cpu --preset modern-nano --batch 4 --until "10 steps"        to try it

Each command is a process of its own, as a user starts it, with folders for caches that nobody else
uses: empty at first (cold), and as the command before left them (warm). Times are taken where the
command prints, so they contain everything: Python, imports, data, building, compiling, saving.
nanochat's script validates as ours does: on the whole text, before the first step and after the
last one. nanoGPT's draws as many windows of it at random, and as many of the training text. Losses
are the last ones that they print, nanochat's in bits per byte. On a CPU, give it a short text.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from loss_results import plain_table
from start_commands import MODES, Command, nanochat, nanogpt, ours

COLUMNS = ("first line", "first step", "of that compiling", "end", "validation")
LIMIT = 1800.0
"""Seconds after which a command is given up."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        commands = [ours(options, scratch, mode) for mode in options.compile]
        if options.nanogpt:
            commands.append(nanogpt(options, scratch))
        if options.nanochat:
            commands.append(nanochat(options, scratch))
        rows = []
        for command in commands:
            for state in options.states:
                rows.append({"run": f"{command.name}, {state}", **measure(command, scratch)})
                print("   ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(f"\nseconds from the command\n{plain_table(rows)}")


def measure(command: Command, scratch: Path) -> dict[str, str]:
    """Start it and note when it printed what."""
    shutil.rmtree(scratch / "run", ignore_errors=True)
    caches = scratch / "caches" / command.name
    places = {
        "XDG_CACHE_HOME": caches,
        "TORCHINDUCTOR_CACHE_DIR": caches / "inductor",
        "TRITON_CACHE_DIR": caches / "triton",
    }
    caches.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **{key: str(path) for key, path in places.items()}}
    env |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **command.environment}
    started = time.monotonic()
    found = dict[str, str]()

    def note(name: str) -> None:
        found.setdefault(name, f"{time.monotonic() - started:.1f}")

    process = subprocess.Popen(
        command.words,
        cwd=command.folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = read(process, command, note)
    if process.wait(LIMIT):
        raise SystemExit(f"{command.name} ended with {process.returncode}:\n{''.join(said[-20:])}")
    note("end")
    if command.compiled is not None:
        compiled = [float(hit[1]) for line in said if (hit := command.compiled.search(line))]
        found["of that compiling"] = f"{sum(compiled):.1f}" if compiled else ""
    if command.validation is not None:
        results = [hit[1] for line in said if (hit := command.validation.search(line))]
        found["validation"] = results[-1] if results else ""
    return {key: found.get(key, "") for key in COLUMNS}


def read(
    process: subprocess.Popen[str], command: Command, note: Callable[[str], None]
) -> list[str]:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        note("first line")
        if command.first_step.search(line):
            note("first step")
        said.append(line)
    return said


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="PREFIX", help="token files to train on")
    add("--validation", type=Path, required=True, metavar="PREFIX")
    add("--nanogpt", type=Path, help="a checkout of nanoGPT")
    add("--nanochat", type=Path, help="a checkout of nanochat")
    add("--peer-preset", help="whose layers and width the peers have; ours if not given")
    add("--peer-until", help="how long the peers train; as long as ours if not given")
    add("--states", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    add("--preset", default="modern-small")
    add("--until", default="60 steps")
    add("--batch", type=int, default=32, help="windows in a step")
    add("--compile", nargs="+", choices=list(MODES), default=["auto"])
    add("--set", nargs="+", default=[], metavar="A.B=C", help="further settings of ours")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--compute", choices=["bf16", "fp32"], default="bf16")
    options = parser.parse_args()
    options.data, options.validation = options.data.resolve(), options.validation.resolve()
    return options


if __name__ == "__main__":
    main()
