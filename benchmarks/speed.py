"""Training speed of a nano GPT on the CPU: ours beside nanoGPT's model, in one process.

    python benchmarks/cpu_speed.py --nanogpt PATH/TO/nanoGPT

Both start from the same weights and read the same tokens with the same batch and number format.
Ours is the real step: loader with read-ahead, schedule, clipping, fused AdamW, records written to a
file. nanoGPT's is its model and optimizer with its way of reading batches, clipping and reading the
loss. Blocks of steps alternate, so that a noisy machine disturbs both alike; the ratio is that of
the median blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.base.units import Duration, Progress
from gristmill.checkpoint.state import Counters
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.data.dataset import open_parts
from gristmill.data.loader import Loader
from gristmill.data.sampling import build_index
from gristmill.models.build import build_model
from gristmill.models.weights import from_gpt2
from gristmill.optim.build import build_optimizer
from gristmill.optim.schedule import build_schedule
from gristmill.parallel.spmd import SingleDevice
from gristmill.parallel.world import open_world
from gristmill.plan.arithmetic import token_cost
from gristmill.text.prepare import prepare_documents
from gristmill.text.python_docs import python_documents
from gristmill.text.tokenizers import train_tokenizer
from gristmill.track.sinks import JsonlSink
from gristmill.train.meter import Meter
from gristmill.train.moment import Moment
from gristmill.train.tracker import Tracker

VOCABULARY = 2048
Step = Callable[[], float]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = make_tokens(folder / "python")
        config = make_config(options, tokens)
        theirs_model, theirs = nanogpt_steps(options, tokens)
        with our_steps(config, theirs_model, folder) as ours:
            compare(options, {"nanoGPT": theirs, "gristmill": ours})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", required=True, type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=9, help="measured blocks of each")
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def make_tokens(prefix: Path) -> Path:
    documents = list(python_documents())
    tokenizer = train_tokenizer((d.text for d in documents), vocab_size=VOCABULARY)
    prepare_documents(documents, tokenizer=tokenizer, output=prefix)
    return prefix


def make_config(options: argparse.Namespace, tokens: Path) -> RunConfig:
    text = f"""
name = "bench"
[model]
layers = {options.layers}
heads = {options.heads}
width = {options.width}
context = {options.context}
activation = "gelu"
[data]
paths = "{tokens}"
order = "random"
[train]
until = "100k steps"
batch = {options.batch}
[runtime]
device = "cpu"
threads = {options.threads}
"""
    return load_text(text, place="benchmark")


def nanogpt_steps(options: argparse.Namespace, tokens: Path) -> tuple[torch.nn.Module, Step]:
    """nanoGPT's model with its optimizer, batches, clipping and reading of the loss."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", options.nanogpt / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.GPT(
        module.GPTConfig(
            block_size=options.context,
            vocab_size=VOCABULARY,
            n_layer=options.layers,
            n_head=options.heads,
            n_embd=options.width,
            dropout=0.0,
            bias=True,
        )
    )
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")
    ids = np.memmap(f"{tokens}.bin", dtype=np.uint16, mode="r")
    generator = torch.Generator().manual_seed(0)

    def step() -> float:
        starts = torch.randint(len(ids) - options.context, (options.batch,), generator=generator)
        rows = [ids[s : s + options.context + 1].astype(np.int64) for s in starts.tolist()]
        window = torch.stack([torch.from_numpy(row) for row in rows])
        _, loss = model(window[:, :-1].contiguous(), window[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return model, step


@contextlib.contextmanager
def our_steps(config: RunConfig, start: torch.nn.Module, folder: Path) -> Iterator[Step]:
    """Our real step, from the loader to the record on disk."""
    numbers = resolve(config, vocab=VOCABULARY)
    world = open_world(config.runtime)
    model = build_model(config.model, vocab=numbers.vocab, device=world.device)
    from_gpt2(model, transposed(start.state_dict()), where="nanoGPT")
    check_same_function(model, start, numbers.sequence)
    optimizer = build_optimizer(config.optim, model)
    strategy = SingleDevice(config, model=model, optimizer=optimizer, world=world)
    schedule = build_schedule(config, numbers)
    part = open_parts(config.data, sequence=numbers.sequence).train
    index = build_index("random", part.stretch, sequence=numbers.sequence, seed=0)
    loader = Loader(part, index, numbers.sequence, numbers.micro_batch, numbers.accumulate)
    progress = Progress()
    tracker = Tracker([JsonlSink(folder / "metrics.jsonl")], clock=lambda: progress)
    meter = Meter(
        tracker,
        counters=Counters(),
        every=Duration.parse("1 step"),
        cost=token_cost(config.model, rows=numbers.padded_vocab, sequence=numbers.sequence),
        world=world,
        bad_steps=10,
    )
    batches = loader.starting_at(progress)

    def step() -> float:
        nonlocal progress
        before = progress
        lr = schedule.apply(optimizer, before)
        result = strategy.update(strategy.accumulate(next(batches), before))
        progress = before.after(samples=result.samples, tokens=result.tokens)
        meter.add(Moment(before, progress, result, lr=lr, data_wait=0.0))
        return float(result.loss.item())

    yield step
    batches.close()
    tracker.close()


def transposed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """nanoGPT keeps linear layers untransposed, unlike Hugging Face's GPT-2."""
    return {n: w.T if ".c_" in n and w.dim() == 2 else w for n, w in weights.items()}


def check_same_function(ours: Any, theirs: Any, sequence: int) -> None:
    ids = torch.randint(0, VOCABULARY, (2, sequence))
    with torch.no_grad():
        loss = ours(ids, targets_BT=ids).total / ids.numel()
        expected = theirs(ids, ids)[1]
    assert abs(float(loss - expected)) < 1e-4, "the two models do not compute the same"


def compare(options: argparse.Namespace, steps: dict[str, Step]) -> None:
    tokens = options.batch * options.context * options.steps
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    last: dict[str, float] = {}
    for block in range(options.blocks + 1):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(options.steps):
                last[name] = step()
            if block:  # the first block warms up
                speeds[name].append(tokens / (time.perf_counter() - started))
    print(
        f"{options.layers} layers, width {options.width}, T {options.context}, batch "
        f"{options.batch}, vocabulary {VOCABULARY}, fp32, {options.threads} threads, "
        f"torch {torch.__version__}; {options.blocks} blocks of {options.steps} steps each"
    )
    for name, values in speeds.items():
        middle, spread = statistics.median(values), (min(values), max(values))
        print(
            f"{name:<10} {middle:9.0f} tokens/s  ({spread[0]:.0f} to {spread[1]:.0f}), "
            f"last loss {last[name]:.3f}"
        )
    ratio = statistics.median(speeds["gristmill"]) / statistics.median(speeds["nanoGPT"])
    print(f"ratio      {ratio:9.3f}")


if __name__ == "__main__":
    main()
