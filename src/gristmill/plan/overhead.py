"""What the command `train` takes besides its steps and validation.

    start      Python and its imports, opening the data, building the model; a GPU's own start
    compile    on a GPU, before the first step, with nothing in the cache
    samples    texts at the start, at their interval and at the end, token by token
    saves      pauses for checkpoints, and writing the last one

The imports are timed on this machine, and stand for its speed at everything that Python does. The
other figures were measured once:

    start      two x86 cores: 3.3 to 3.6 s to the first validation, imports included. One H200: 5.1
               to 7.5 s to the first step without compiling (benchmarks/results/2026-11-17.md)
    compile    one H200, `modern-small`: blocks 29.2 s to the first step with nothing in the cache,
               23.7 s if several processes compile (decision 0029); as one graph 44.1 s
               (docs/guides/gpu.md), 1.1 s more for each of its layers
    samples    `modern-nano` on two x86 cores: 0.25 s for 64 tokens in 4 layers
    saves      one H200: a checkpoint of 3.22 GiB is on disk after 2.3 s (docs/measurements.md). Two
               x86 cores: training pauses 0.04 s, and the last of 30 MiB takes 0.3 s
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass

from gristmill.config.model import GPTConfig
from gristmill.config.resolve import Resolved
from gristmill.config.schema import RunConfig
from gristmill.plan.arithmetic import count_multiplied, gpt_size
from gristmill.plan.hardware import Hardware

USUAL_IMPORTS = 3.0
"""Seconds of the imports on a machine that is not at hand."""
SECONDS_PER_LAYER, SLOWER = 1.1, 0.011
"""Compilation time of a whole model per layer, and how much slower steps with compiled blocks are,
as a fraction; measured on an H200."""
_OPENING, _OPENING_ON_GPU = 1.0, 3.0
_COMPILE, _COMPILE_AHEAD = 24.0, 18.0
_LAYER_TOKEN = 1e-3
_PAUSE, _LAST_SAVE, _SAVED_EACH_SECOND = 0.04, 0.3, 1.5e9
_IMPORTS = "import gristmill.train.run, time; print(time.process_time())"
_PATIENCE = 60.0


@dataclass(frozen=True)
class Overhead:
    """Seconds of a run besides its steps and validation."""

    start: float
    compile: float = 0.0
    samples: float = 0.0
    saves: float = 0.0

    @property
    def total(self) -> float:
        return self.start + self.compile + self.samples + self.saves


def time_imports() -> float:
    """Seconds that the imports of `train` take here, in a process of their own: this one has no
    torch. Its processor time counts, as other programs only slow it down, and files that it had to
    read from the disk are in memory when `train` starts."""
    command = [sys.executable, "-c", _IMPORTS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
        return float(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return USUAL_IMPORTS


def run_overhead(
    config: RunConfig,
    resolved: Resolved,
    hardware: Hardware,
    *,
    devices: int,
    imports: float,
    training: float,
    validations: int,
) -> Overhead:
    """The overhead of a run whose steps take `training` seconds."""
    model = config.model
    assert isinstance(model, GPTConfig)
    on_gpu = hardware.device == "cuda"
    compiles = config.runtime.compiles(hardware.device)
    rows = resolved.padded_vocab
    # A new best loss is saved, and at worst each is one.
    saves = validations * _PAUSE + _LAST_SAVE
    saves += gpt_size(config, rows=rows).checkpoint / _SAVED_EACH_SECOND
    return Overhead(
        start=imports + (_OPENING_ON_GPU if on_gpu else _OPENING),
        compile=_compile_seconds(config, model, devices, training) if compiles else 0.0,
        samples=_sample_seconds(config, resolved, model, hardware),
        saves=saves,
    )


def _compile_seconds(config: RunConfig, model: GPTConfig, devices: int, training: float) -> float:
    """As `strategies/compiling.py` chooses: blocks for short runs and several processes."""
    wanted = config.runtime.compile
    if devices > 1 or wanted == "blocks" or config.masks_documents:
        blocks = True
    else:
        blocks = wanted is None and SLOWER * training < SECONDS_PER_LAYER * model.layers
    if blocks:
        return _COMPILE if devices > 1 else _COMPILE_AHEAD
    return _COMPILE + SECONDS_PER_LAYER * model.layers


def _sample_seconds(
    config: RunConfig, resolved: Resolved, model: GPTConfig, hardware: Hardware
) -> float:
    """Every token goes through the model alone, which reads all of its weights for it."""
    sample = config.sample
    if sample is None:
        return 0.0
    every = max(1, resolved.samples_of(sample.every))
    times = 1 + math.ceil(resolved.samples / every)
    weights = 4 * count_multiplied(model, rows=resolved.padded_vocab)
    token = model.layers * _LAYER_TOKEN
    token += weights / (hardware.memory_bandwidth * hardware.rates.memory_share)
    return times * len(sample.prompts) * sample.tokens * token
