"""nanochat's model, optimizer and schedule, from a checkout, for `time_to_loss.py`.

Its files are used as they are. What its training script computes in itself, the schedules of rate,
momentum and decay, is written out here with its defaults, so that another text, vocabulary and
length can be given. FlashAttention 3 is used where its loader finds it; without it attention is
that of torch, and all layers attend to the whole window, since short windows would only cost time.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peers import device_of

from gristmill.config.schema import RunConfig

HEAD_WIDTH = 128
RATES = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5}
"""The defaults of its training script for 524,288 tokens a step."""
WARMUP, FALLING, FINAL = 40, 0.65, 0.05
"""Steps of warm-up, the part of the run in which the rate falls, and where it ends."""
MOMENTA, RISE = (0.85, 0.97, 0.90), 400
"""Muon's momentum at first, from step RISE on, and at the end."""


def nanochat_model(config: RunConfig, checkout: Path, *, seed: int) -> Any:
    """The model at our number of layers, width and context, on the device, with its own start."""
    module = _module(config, checkout)
    settings = module.GPTConfig(
        sequence_len=config.model.context,
        vocab_size=config.model.vocab,
        n_layer=config.model.layers,
        n_head=max(1, config.model.width // HEAD_WIDTH),
        n_kv_head=max(1, config.model.width // HEAD_WIDTH),
        n_embd=config.model.width,
        window_pattern="SSSL" if _has_fa3() else "L",
    )
    torch.manual_seed(seed)
    with contextlib.redirect_stdout(io.StringIO()):
        with torch.device("meta"):
            model = module.GPT(settings)
        model.to_empty(device=device_of(config))
        model.init_weights()
    return model


def nanochat_optimizer(model: Any, *, scale: float, decay: float) -> Any:
    """Its optimizer, with all rates times `scale`."""
    rates = {name: rate * scale for name, rate in RATES.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        return model.setup_optimizer(**rates, weight_decay=decay)


def set_nanochat_rates(optimizer: Any, step: int, *, steps: int, decay: float) -> None:
    """Rate, momentum and decay of a step."""
    falling = round(FALLING * steps)
    left = (steps - step) / max(1, falling)
    factor = min(1.0, left + (1 - left) * FINAL)
    if step < WARMUP:
        factor = (step + 1) / WARMUP
    first, most, last = MOMENTA
    momentum = most
    if step < RISE:
        momentum = first + (most - first) * step / RISE
    elif step >= steps - falling:
        momentum = last + (most - last) * left
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
        if group["kind"] == "muon":
            group["momentum"] = momentum
            group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / steps))


def _module(config: RunConfig, checkout: Path) -> Any:
    if not (checkout / "nanochat/gpt.py").is_file():
        raise SystemExit(f"{checkout} has no nanochat/gpt.py: give --nanochat a checkout of it")
    # Read when its modules are imported.
    os.environ["NANOCHAT_DTYPE"] = {"bf16": "bfloat16", "fp32": "float32"}[config.precision.compute]
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module("nanochat.gpt")


def _has_fa3() -> bool:
    return bool(importlib.import_module("nanochat.flash_attention").HAS_FA3)
