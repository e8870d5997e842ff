"""Seconds from a command to its first step and to its end, cold and warm.

    python benchmarks/starts.py --data tokens/train --validation tokens/val
    ... --nanogpt PATH/TO/nanoGPT          its own training script beside ours, at the same shape
    ... --compile true blocks              ours with the whole model or a block compiled
    ... --until "23M tokens"               a whole run instead of a few steps
    ... --device cpu --preset modern-nano --batch 4 --until "10 steps"        to try it

Each command is a process of its own, as a user starts it, with folders for caches that nobody else
uses: empty at first (cold), and as the command before left them (warm). Times are taken where the
command prints, so they contain everything: Python, imports, data, building, compiling, saving.
nanoGPT's script prints its first step when it is done with it and a validation of a few batches.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from loss_results import plain_table

from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.tokens.store import open_tokens

LIMIT = 1800.0
"""Seconds after which a command is given up."""


@dataclass(frozen=True)
class Command:
    """What is started."""

    name: str
    words: list[str]
    folder: Path
    first_step: re.Pattern[str]
    compiled: re.Pattern[str] | None = None
    """The line that says for how many seconds it compiled."""


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        commands = [ours(options, scratch, mode) for mode in options.compile]
        if options.nanogpt:
            commands.append(nanogpt(options, scratch))
        rows = []
        for command in commands:
            for state in ("cold", "warm"):
                rows.append({"run": f"{command.name}, {state}", **measure(command, scratch)})
                print("   ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(f"\nseconds from the command\n{plain_table(rows)}")


def ours(options: argparse.Namespace, scratch: Path, mode: str) -> Command:
    """`gristmill train` with a run file."""
    tables = {
        "name": "start",
        "preset": options.preset,
        "folder": str(scratch / "run"),
        "data": {"paths": str(options.data), "validation": str(options.validation)},
        "train": {"until": options.until, "batch": options.batch},
        "precision": {"compute": options.compute},
        "runtime": {"device": options.device, "compile": {"true": True}.get(mode, mode)},
    }
    if options.device == "cpu":
        del tables["runtime"]["compile"]  # type: ignore[attr-defined]
    file = scratch / f"{mode}.toml"
    file.write_text(tomli_w.dumps(tables))
    return Command(
        name="gristmill" + ("" if mode == "true" else f", {mode} compiled"),
        words=[sys.executable, "-m", "gristmill", "train", str(file)],
        folder=scratch,
        first_step=re.compile(r"^step 1/"),
        compiled=re.compile(r"compiled in ([\d.]+)s"),
    )


def nanogpt(options: argparse.Namespace, scratch: Path) -> Command:
    """nanoGPT's own script on the same token files, with as many steps and the same shape."""
    script = options.nanogpt / "train.py"
    if not script.is_file():
        raise SystemExit(f"{script} does not exist: give --nanogpt a checkout of nanoGPT")
    text = f'name = "x"\npreset = "{options.preset}"\ndata.paths = "{options.data}"\n'
    text += f'train = {{ until = "{options.until}", batch = {options.batch} }}\n'
    config = load_text(text, (), place="start.toml")
    vocab = open_tokens(options.data).info.vocab_size or 1
    model, numbers = config.model, resolve(config, vocab=vocab)
    checkout = scratch / "nanogpt"
    shutil.copytree(options.nanogpt, checkout, ignore=shutil.ignore_patterns(".git"))
    data = checkout / "data/start"
    data.mkdir(parents=True)
    for name, prefix in (("train", options.data), ("val", options.validation)):
        (data / f"{name}.bin").symlink_to(Path(f"{prefix}.bin").resolve())
    settings = {
        "dataset": "start",
        "device": options.device,
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[options.compute],
        "compile": options.device == "cuda",
        "n_layer": model.effective("layers"),
        "n_head": model.effective("heads"),
        "n_embd": model.effective("width"),
        "block_size": numbers.sequence,
        "batch_size": numbers.batch,
        "gradient_accumulation_steps": 1,
        "max_iters": numbers.steps,
        "lr_decay_iters": numbers.steps,
        "eval_interval": numbers.steps,
        "eval_iters": 10,
        "log_interval": 1,
        "out_dir": str(scratch / "run"),
    }
    return Command(
        name="nanoGPT",
        words=[
            sys.executable,
            "train.py",
            *(f"--{key}={value}" for key, value in settings.items()),
        ],
        folder=checkout,
        first_step=re.compile(r"^iter 0:"),
    )


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
    env |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
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
    return {
        key: found.get(key, "") for key in ("first line", "first step", "of that compiling", "end")
    }


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
    add("--preset", default="modern-small")
    add("--until", default="60 steps")
    add("--batch", type=int, default=32, help="windows in a step")
    add("--compile", nargs="+", choices=["true", "blocks"], default=["true"])
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--compute", choices=["bf16", "fp32"], default="bf16")
    options = parser.parse_args()
    options.data, options.validation = options.data.resolve(), options.validation.resolve()
    return options


if __name__ == "__main__":
    main()
