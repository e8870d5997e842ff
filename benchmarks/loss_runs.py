"""One run of `time_to_loss.py` or `optimizers.py`, ours or the baseline's, and the settings and
facts that go with it.

    Job      a name, a row, a seed and a horizon
    Bench    what all runs share: the options, both texts, a folder, and the results so far

Ours is `Run.train` itself, read back from its records. The loop of nanoGPT and nanochat is
written out here, with the same clock and validation; nanochat gets whole windows in random order,
as ours does, since places at random are worse.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import io
import json
import math
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from loss_results import FirstSteps, Group, Result, Step, measured, without_times
from loss_rows import Change, NanochatRecipe, Recipe
from nanochat_peer import HEAD_WIDTH, nanochat_model, nanochat_optimizer, set_nanochat_rates
from peers import (
    Stopwatch,
    compiled,
    device_of,
    nanogpt_model,
    nanogpt_rate,
    numbers_of,
    pairs,
    plain_system,
    windows,
)

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_count
from gristmill.config.load import load_preset, load_text
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.data.sampling import spread_samples
from gristmill.distributed.world import open_world
from gristmill.plan.arithmetic import count_multiplied, count_parameters
from gristmill.tokens.format import TokenReader
from gristmill.track.folder import run_folder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import StepRecord, ValidationRecord
from gristmill.train.environment import code_commit, version
from gristmill.train.run import Run

GRAPHS = 1024
"""Compiled versions of a function that are kept: the runs of one process are more than usual."""

VALIDATED_AT_ONCE = 16
"""Windows of the baseline's validation; its logits are held whole."""


@dataclass(frozen=True)
class Job:
    """One run to make."""

    name: str
    group: Group
    seed: int
    tokens: int
    row: Recipe | NanochatRecipe | Change


@dataclass
class Bench:
    """What all runs share."""

    options: argparse.Namespace
    training: TokenReader
    validation: TokenReader
    folder: Path
    results: list[Result] = field(default_factory=list)
    first_steps: FirstSteps = "median"

    def windows(self, sequence: int) -> np.ndarray:
        """Starts of the validation windows: every one that fits, one behind the other."""
        fitting = (len(self.validation) - 1) // sequence
        starts = spread_samples(fitting, most=fitting) * sequence
        assert np.array_equal(starts, np.arange(fitting) * sequence), "ours takes other windows"
        return starts


# ------------------------------------------------------------------ one run


def make_run(bench: Bench, job: Job) -> Result | None:
    """One run, its failure included: the others are made all the same. None if it was made."""
    result = Result(
        name=job.name,
        group=job.group,
        seed=job.seed,
        asked=job.tokens,
        about=job.row.about,
        settings={},
        facts={},
        date=date.today().isoformat(),
    )
    started = time.monotonic()
    try:
        config = config_of(bench, job)
        settings = settings_of(bench, config, job)
        result = dataclasses.replace(result, settings=settings, facts=facts_of(bench, config, job))
        if is_made(bench, result):
            return None
        free()
        train = run_ours if isinstance(job.row, Change) else run_peer
        found = train(bench, config, job)
    except UserError as error:
        found = {"error": str(error)}
    except Exception as error:  # of any kind: hours of other runs would be lost with it
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    result = dataclasses.replace(result, wall=time.monotonic() - started, **found)
    return without_times(result) if bench.options.shared else result


def is_made(bench: Bench, wanted: Result) -> bool:
    settings = json.loads(json.dumps(wanted.settings))
    return any(
        one.key == wanted.key and one.error is None and one.settings == settings
        for one in bench.results
    )


def keep_compiled() -> None:
    """Runs with equal graphs share compiled code; others must not make it be thrown away."""
    torch._dynamo.config.recompile_limit = GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = GRAPHS


def free() -> None:
    """Give the memory of the run before back, and count the peak anew; compiled code stays."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------ settings


def config_of(bench: Bench, job: Job) -> RunConfig:
    """The settings of a run; of the baseline, those that say its shape, batch and text."""
    options, row = bench.options, job.row
    shape = [
        f"model.{name}={value}"
        for name in ("layers", "heads", "width", "context")
        if (value := getattr(options, name)) is not None
    ]
    if not isinstance(row, Change):
        tables = load_preset(options.baseline_preset)
        tables["model"] |= {"bias": False, "vocab": bench.training.info.vocab_size}
        words, batch = shape, row.batch
        if isinstance(row, NanochatRecipe) and row.layers is not None:
            words = [*shape, f"model.layers={row.layers}", f"model.width={row.width}"]
            words.append(f"model.heads={(row.width or HEAD_WIDTH) // HEAD_WIDTH}")
    else:
        tables = {"preset": row.preset or options.preset}
        words, batch = [*shape, *options.set, *row.set], options.batch
    tables |= {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", job.name),
        "folder": str(bench.folder / "run"),
        "data": {"paths": str(options.data), "validation": str(options.validation)},
        "train": {"until": f"{job.tokens} tokens", "batch": batch, "seed": job.seed},
        "precision": {"compute": options.compute},
        "runtime": {"device": options.device},
        "validate": {
            "every": f"{max(1, job.tokens // options.points)} tokens",
            "windows": len(bench.validation),  # more than there are: all of them
        },
        # The end is saved in any case, when the time no longer counts.
        "checkpoint": {"every": "1T tokens", "keep_best": False},
    }
    return load_text(tomli_w.dumps(tables), words, place=job.name)


def settings_of(bench: Bench, config: RunConfig, job: Job) -> dict[str, Any]:
    """What makes this run another one than those of the same name."""
    sets = (bench.training, bench.validation)
    texts = {"text": [one.info.fingerprint[:12] for one in sets]}
    if not isinstance(job.row, Change):
        shape = config.model.model_dump(include={"layers", "heads", "width", "context", "vocab"})
        own = {**dataclasses.asdict(job.row), "compute": config.precision.compute}
        return shape | own | texts
    kept = {"model", "optim", "schedule", "train", "precision"}
    data = config.data.model_dump(mode="json", include={"order", "documents", "sequence"})
    return config.model_dump(mode="json", exclude_none=True, include=kept) | {"data": data} | texts


def facts_of(bench: Bench, config: RunConfig, job: Job) -> dict[str, str]:
    """What a reader has to know about the machine, the versions, the model and the text."""
    world = open_world(config.runtime, tf32=config.precision.tf32)
    software = {"torch": torch.__version__, "triton": version("triton")}
    model, vocab = config.model, bench.training.info.vocab_size or 1
    numbers = resolve(config, vocab=vocab)
    parameters = count_parameters(model, rows=numbers.padded_vocab)
    multiplied = count_multiplied(model, rows=numbers.padded_vocab)
    heads = model.heads
    if isinstance(job.row, NanochatRecipe):
        # No positions are learned, the head is not tied, every other layer has a table.
        heads = model.width // HEAD_WIDTH
        parameters = multiplied + (1 + -(-model.layers // 2)) * numbers.padded_vocab * model.width
    if isinstance(job.row, Recipe):
        digest = hashlib.sha256((bench.options.nanogpt / "model.py").read_bytes()).hexdigest()
        code = f"nanoGPT (SHA-256 of model.py {digest[:12]})"
    elif isinstance(job.row, NanochatRecipe):
        source = (bench.options.nanochat / "nanochat/gpt.py").read_bytes()
        code = f"nanochat (SHA-256 of gpt.py {hashlib.sha256(source).hexdigest()[:12]})"
    else:
        code = " ".join(filter(None, ("gristmill", version("gristmill"), code_commit())))
    cores = f", {torch.get_num_threads()} threads" if config.runtime.device == "cpu" else ""
    held, windows_held = bench.validation, len(bench.windows(numbers.sequence))
    return {
        "device": world.device.name + cores,
        "software": ", ".join(f"{name} {number}" for name, number in software.items() if number),
        "code": code,
        "model": f"{model.layers} layers, {heads} heads, width {model.width}, "
        f"{format_count(parameters)} parameters, {format_count(multiplied)} of them in matrix "
        f"products and the rest in tables and vectors, {numbers.sequence} tokens in a window, "
        f"{config.precision.compute}",
        "training": f"{len(bench.training):,} tokens",
        "validation": f"{len(held):,} tokens (SHA-256 {held.info.fingerprint[:12]})",
        "windows": f"{windows_held:,}",
    }


# ------------------------------------------------------------------ ours


def run_ours(bench: Bench, config: RunConfig, job: Job) -> dict[str, Any]:
    """A training run as a user makes it, and what its records say."""
    folder = run_folder(config)
    shutil.rmtree(folder.path, ignore_errors=True)
    # The progress of the run goes where it does not disturb the tables.
    with contextlib.redirect_stdout(sys.stderr):
        outcome = Run(config).train()
    if outcome.exit is not Exit.DONE:
        raise SystemExit("stopped; the runs before this one are kept")
    records = read_metrics(folder.metrics)
    shutil.rmtree(folder.path, ignore_errors=True)
    made = [record for record in records if isinstance(record, StepRecord)]
    checks = [one for one in records if isinstance(one, ValidationRecord) and one.step > 0]
    before = [0, *(record.tokens for record in made)]
    steps = [
        Step(record.tokens - begin, record.step_seconds)
        for begin, record in zip(before, made, strict=False)
    ]
    expected = len(bench.windows(config.data.sequence or config.model.context))
    assert all(check.windows == expected for check in checks), "validated on other windows"
    return {
        "memory": made[-1].memory_bytes if config.runtime.device == "cuda" else None,
        **measured(
            steps,
            {check.step: check.loss for check in checks},
            first_steps=bench.first_steps,
        ),
    }


# ------------------------------------------------------------------ the baselines


@dataclass(frozen=True)
class Peer:
    """A baseline, ready to train."""

    model: Any
    step: Callable[[], torch.Tensor]
    set_rates: Callable[[int, int], None]
    """Given a step and their number."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The loss of some windows, for validation."""


def build_nanogpt(bench: Bench, config: RunConfig, job: Job) -> Peer:
    """nanoGPT's model with its optimizer, schedule and way of reading, as its script has them."""
    recipe, device = job.row, device_of(config)
    assert isinstance(recipe, Recipe)
    model = nanogpt_model(config, bench.options.nanogpt, seed=job.seed).to(device)
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer = model.configure_optimizers(0.1, recipe.lr, (0.9, 0.95), device)
    # Not dynamic: after a run with another batch, it would be compiled for batches of any size.
    forward = compiled(model, device, dynamic=False)
    system = plain_system(
        config,
        model,
        optimizer,
        lambda inputs, targets: forward(inputs, targets)[1],
        windows(config, bench.options.data, seed=job.seed),
    )

    def set_rates(step: int, steps: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = nanogpt_rate(step, steps=steps, peak=recipe.lr)

    half = torch.autocast(device, torch.bfloat16, enabled=config.precision.compute == "bf16")

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with half:
            found: torch.Tensor = model(inputs, targets)[1]
        return found

    return Peer(model, system.step, set_rates, loss)


def build_nanochat(bench: Bench, config: RunConfig, job: Job) -> Peer:
    """nanochat's model with its optimizer and schedules; it clips nothing and casts by itself."""
    recipe = job.row
    assert isinstance(recipe, NanochatRecipe)
    model = nanochat_model(config, bench.options.nanochat, seed=job.seed)
    optimizer = nanochat_optimizer(model, scale=recipe.scale, decay=recipe.decay)
    forward = compiled(model, device_of(config), dynamic=False)
    sequence = numbers_of(config).sequence
    generator = torch.Generator().manual_seed(job.seed)

    def starts() -> Iterator[torch.Tensor]:
        whole, batch = (len(bench.training) - 1) // sequence, numbers_of(config).batch
        while True:
            yield from torch.randperm(whole, generator=generator).mul(sequence).split(batch)[:-1]

    batches = pairs(config, bench.options.data, starts())

    def step() -> torch.Tensor:
        loss: torch.Tensor = forward(*next(batches))
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    def set_rates(step: int, steps: int) -> None:
        set_nanochat_rates(optimizer, step, steps=steps, decay=recipe.decay)

    return Peer(model, step, set_rates, model)


def run_peer(bench: Bench, config: RunConfig, job: Job) -> dict[str, Any]:
    """A run of a baseline, timed and validated as ours is."""
    assert bench.training.info.dtype == "uint16", "windows are read as ids of 16 bits"
    build = build_nanogpt if isinstance(job.row, Recipe) else build_nanochat
    device, peer = device_of(config), build(bench, config, job)
    per_step = numbers_of(config).tokens_per_step
    count = max(1, round(job.tokens / per_step))
    points = bench.options.points
    due = {math.ceil(count * number / points) for number in range(1, points + 1)}
    watch, losses, peak = Stopwatch(device), dict[int, float](), 0
    watch.mark()
    for step in range(count):
        peer.set_rates(step, count)
        peer.step()
        watch.mark()
        if step + 1 in due:
            watch.drain()
            if device == "cuda":
                peak = max(peak, torch.cuda.max_memory_allocated())
            losses[step + 1] = validate_peer(bench, config, peer)
            print(f"{job.name} step {step + 1} of {count}: {losses[step + 1]:.4f}", file=sys.stderr)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            watch.mark()
    steps = [Step(per_step, seconds) for seconds in watch.seconds]
    return {"memory": peak or None, **measured(steps, losses)}


@torch.no_grad()
def validate_peer(bench: Bench, config: RunConfig, peer: Peer) -> float:
    """The mean loss over the validation windows, in the format of training."""
    device, sequence = device_of(config), numbers_of(config).sequence
    starts, total = bench.windows(sequence).tolist(), 0.0
    peer.model.eval()
    for first in range(0, len(starts), VALIDATED_AT_ONCE):
        chosen = starts[first : first + VALIDATED_AT_ONCE]
        rows = [bench.validation.read(start, sequence + 1).astype(np.int64) for start in chosen]
        ids = torch.from_numpy(np.stack(rows)).to(device)
        loss = peer.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        total += float(loss) * len(chosen)
    peer.model.train()
    return total / len(starts)
