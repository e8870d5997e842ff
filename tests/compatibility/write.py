"""Writes a token set and a run with the program as it is, to be opened by all later versions:

    python tests/compatibility/write.py

They go to the folder of the program's version beside this file. Run it once for each release; what
is there already is never written again.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gristmill.tokens.format import program_version

WORDS = "mill water stone grain wheel river flour bread wind sack dust morning miller".split()
RUN = """
name = "small"
model = { layers = 1, heads = 2, width = 16, context = 32 }
data = { paths = "tokens/mill", split = "90,10" }
train = { until = "6 steps", batch = 4, seed = 7 }
optim = { lr = 1e-2 }
validate = { every = "6 steps", windows = 8 }
checkpoint = { keep_best = false }
runtime = { device = "cpu", threads = 1 }
"""
HOST = "somewhere"


def write(folder: Path) -> None:
    """All of it, by the commands a user would give."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        draw = random.Random(0)
        documents = [" ".join(draw.choices(WORDS, k=40)) + "." for _ in range(60)]
        lines = [json.dumps({"text": text}) for text in documents]
        Path("text.jsonl").write_text("\n".join(lines), encoding="utf-8")
        Path("small.toml").write_text(RUN, encoding="utf-8")
        call("prepare", "text.jsonl", "-o", "tokens/mill", "-t", "bytes")
        call("train", "small.toml")
        about = Path("runs/small/environment.json")
        known = json.loads(about.read_text(encoding="utf-8"))
        known |= {"host": HOST, "platform": HOST, "device": HOST}
        about.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        metrics = Path("runs/small/metrics.jsonl")
        named = metrics.read_text(encoding="utf-8").replace(f'"{platform.node()}"', f'"{HOST}"')
        metrics.write_text(named, encoding="utf-8")
        log = Path("runs/small/origin.txt")
        log.write_text("gristmill train small.toml\n", encoding="utf-8")
        Path("runs/small/.lock").unlink()
        shutil.copytree(name, folder)


def call(*words: str) -> None:
    """A command, which must end well."""
    subprocess.run([sys.executable, "-m", "gristmill", *words], check=True)


if __name__ == "__main__":
    place = Path(__file__).resolve().parent / program_version().split()[1]
    if place.exists() and any(place.iterdir()):
        sys.exit(f"{place} is there already")
    write(place)
