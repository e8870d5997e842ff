"""Systems that train the same GPT-2, built alike and measured side by side.

    nanoGPT        its model, optimizer, way of reading batches and clipping, from a checkout
    transformers   GPT2LMHeadModel with SDPA attention and fused AdamW, where it is installed
    gristmill      the real step: loader with read-ahead, schedule, clipping, optimizer, records

All get the same shape, batch, random tokens and number format; on CUDA all are compiled. That the
models compute the same is checked by `same_function.py`.

What differs: nanoGPT and transformers can predict the padded rows of the vocabulary, ours cannot;
transformers always has biases, and shifts the targets itself, so that it learns from one token less
per sample. Only ours warms its learning rate up, so losses after a few steps differ. GPT-2's own
GELU is the approximation with tanh, which nanoGPT does not have: it has the error function always.
transformers has both (`GELUS`), and gets ours.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.base.units import Progress
from gristmill.config.resolve import Resolved, resolve
from gristmill.config.schema import RunConfig
from gristmill.optim.schedule import build_schedule
from gristmill.strategies.compiling import use_heuristics
from gristmill.track.folder import RunFolder
from gristmill.track.sinks import JsonlSink
from gristmill.train.assemble import assemble, build_health, build_loader, build_meter
from gristmill.train.meter import StepEvent
from gristmill.train.tracker import Tracker

BASE = "nanoGPT"
GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
"""Our activations that are a GELU, and what GPT-2's settings in transformers call them."""


@dataclass(frozen=True)
class System:
    """Something that trains: `step` returns a loss that stays on the device."""

    step: Callable[[], torch.Tensor]
    close: Callable[[], None] = lambda: None


Builder = Callable[[], System]


def text_of_run(*, model: str, tokens: Path, batch: int, runtime: str, compute: str) -> str:
    """The run file that says what all systems train; `model` and `runtime` are lines of theirs."""
    return f"""
name = "speed"
[model]
{model}
[data]
paths = "{tokens}"
order = "random"
[train]
until = "100k steps"
batch = {batch}
micro_batch = {batch}
[runtime]
{runtime}
[precision]
compute = "{compute}"
"""


def numbers_of(config: RunConfig) -> Resolved:
    assert config.model.vocab is not None
    return resolve(config, vocab=config.model.vocab)


def builders(
    configs: Mapping[str, RunConfig], *, nanogpt: Path, tokens: Path, folder: Path
) -> dict[str, Builder]:
    """All systems that are here; `configs` are ours by name, the first that of the others too."""
    shared = next(iter(configs.values()))
    found: dict[str, Builder] = {BASE: partial(build_nanogpt, shared, nanogpt, tokens)}
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed, and left out")
    else:
        found["transformers"] = partial(build_transformers, shared, tokens)
    for number, (name, config) in enumerate(configs.items()):
        found[name] = partial(build_ours, config, folder / f"run-{number}")
    return found


# ------------------------------------------------------------------ the peers


def build_nanogpt(config: RunConfig, checkout: Path, tokens: Path) -> System:
    """nanoGPT's model with its optimizer, as its training script uses them."""
    device = device_of(config)
    model = nanogpt_model(config, checkout).to(device)
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    forward = compiled(model, device_of(config))

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = forward(inputs, targets)[1]
        return loss

    return plain_system(config, model, optimizer, loss_of, windows(config, tokens))


def nanogpt_model(config: RunConfig, checkout: Path, *, seed: int = 0) -> Any:
    module = _nanogpt_module(checkout)
    settings = module.GPTConfig(
        block_size=config.model.context,
        vocab_size=numbers_of(config).padded_vocab,
        n_layer=config.model.layers,
        n_head=config.model.heads,
        n_embd=config.model.width,
        dropout=0.0,
        bias=config.model.bias,
    )
    torch.manual_seed(seed)
    with contextlib.redirect_stdout(io.StringIO()), torch.device(device_of(config)):
        return module.GPT(settings)


def _nanogpt_module(checkout: Path) -> Any:
    if "nanogpt_model" not in sys.modules:
        file = checkout / "model.py"
        if not file.is_file():
            raise SystemExit(f"{file} does not exist: give --nanogpt a checkout of nanoGPT")
        spec = importlib.util.spec_from_file_location("nanogpt_model", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["nanogpt_model"] = module
        spec.loader.exec_module(module)
    return sys.modules["nanogpt_model"]


def nanogpt_rate(step: int, *, steps: int, peak: float) -> float:
    """nanoGPT's schedule: a warm-up over 5 % of the steps, then a cosine to a tenth."""
    warmup = round(0.05 * steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def build_transformers(config: RunConfig, tokens: Path) -> System:
    """GPT2LMHeadModel as it comes, computing its own loss from labels."""
    model = transformers_model(config)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=6e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    forward = compiled(model, device_of(config))

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = forward(input_ids=inputs, labels=inputs, use_cache=False).loss
        return loss

    return plain_system(config, model, optimizer, loss_of, windows(config, tokens))


def transformers_model(config: RunConfig) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    settings = GPT2Config(
        vocab_size=numbers_of(config).padded_vocab,
        n_positions=config.model.context,
        n_embd=config.model.width,
        n_layer=config.model.layers,
        n_head=config.model.heads,
        # What has no counterpart there is left at GPT-2's own.
        activation_function=GELUS.get(config.model.activation, "gelu_new"),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device_of(config)):
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    # What its loss is falls back to when nothing is said, without the warning.
    model.loss_type = "ForCausalLM"
    return model.float().train()


def windows(
    config: RunConfig, tokens: Path, *, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets from random places."""
    context, batch = numbers_of(config).sequence, numbers_of(config).batch
    count = len(np.memmap(f"{tokens}.bin", dtype=np.uint16, mode="r"))
    generator = torch.Generator().manual_seed(seed)

    def places() -> Iterator[torch.Tensor]:
        while True:
            yield torch.randint(count - context, (batch,), generator=generator)

    return pairs(config, tokens, places())


def pairs(
    config: RunConfig, tokens: Path, starts_of_steps: Iterator[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets from these places, read and sent to the device as nanoGPT does."""
    context = numbers_of(config).sequence
    ids = np.memmap(f"{tokens}.bin", dtype=np.uint16, mode="r")
    for starts in starts_of_steps:
        rows = [ids[at : at + context + 1].astype(np.int64) for at in starts.tolist()]
        window = torch.stack([torch.from_numpy(row) for row in rows])
        inputs, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        if device_of(config) == "cuda":
            inputs = inputs.pin_memory().to("cuda", non_blocking=True)
            targets = targets.pin_memory().to("cuda", non_blocking=True)
        yield inputs, targets


def plain_system(
    config: RunConfig,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]],
) -> System:
    half = torch.autocast(
        device_of(config), torch.bfloat16, enabled=config.precision.compute == "bf16"
    )

    def step() -> torch.Tensor:
        inputs, targets = next(pairs)
        with half:
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return System(step)


class Stopwatch:
    """Seconds between the ends of steps in the device's own time, as our records have them."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, list[float]()
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.monotonic())

    def drain(self) -> None:
        """Wait for the steps so far; what happens until the next mark is nobody's time."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            spans = [a.elapsed_time(b) / 1000 for a, b in pairwise(self._marks)]
        else:
            spans = [b - a for a, b in pairwise(self._marks)]
        self.seconds += spans
        self._marks.clear()


def compiled(model: Any, device: str, *, dynamic: bool | None = None) -> Any:
    """A model of others, on a GPU with the compiler's own heuristics instead of ours."""
    if device != "cuda":
        return model
    use_heuristics(None)
    return torch.compile(model, dynamic=dynamic)


def device_of(config: RunConfig) -> str:
    return config.runtime.device


# ------------------------------------------------------------------ ours


def build_ours(config: RunConfig, folder: Path) -> System:
    """Our real step, from the loader to the record on disk."""
    folder.mkdir(exist_ok=True)
    parts = assemble(config, RunFolder(folder))
    schedule = build_schedule(config, parts.resolved)
    progress = Progress()
    tracker = Tracker([JsonlSink(folder / "metrics.jsonl")], clock=lambda: progress)
    meter = build_meter(parts, tracker, build_health(parts, tracker))
    batches = build_loader(parts).starting_at(progress)

    def step() -> torch.Tensor:
        nonlocal progress
        before = progress
        asked = time.monotonic()
        micro_batches = next(batches)
        waited = time.monotonic() - asked
        lr = schedule.apply(parts.state.optimizer, before)
        result = parts.strategy.update(parts.strategy.accumulate(micro_batches, before))
        progress = before.after(samples=result.samples, tokens=result.tokens)
        meter.add(StepEvent(before, progress, result, lr=lr, data_wait=waited))
        return result.loss

    def close() -> None:
        batches.close()
        tracker.close()

    return System(step, close)
