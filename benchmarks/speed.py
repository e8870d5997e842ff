"""Training speed of a GPT: ours beside nanoGPT's model, in one process.

    python benchmarks/speed.py --nanogpt PATH/TO/nanoGPT
    python benchmarks/speed.py --nanogpt PATH/TO/nanoGPT --device cuda --compute bf16 \\
        --layers 12 --heads 12 --width 768 --context 1024 --batch 64 --vocabulary 50257

Both start from the same weights, read random tokens of the same kind and use the same batch and
number format; on CUDA both are compiled. Ours is the real step: loader with read-ahead, schedule,
clipping, fused AdamW, records written to a file. nanoGPT's is its model and optimizer with its way
of reading batches and clipping. Blocks of steps alternate, so that a noisy machine disturbs both
alike; the ratio is that of the median blocks.
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
from gristmill.data.build import Wanted, build_stream
from gristmill.data.dataset import open_parts
from gristmill.data.loader import Loader
from gristmill.models.build import build_model
from gristmill.models.weights import from_gpt2
from gristmill.optim.build import build_optimizer
from gristmill.optim.schedule import build_schedule
from gristmill.parallel.spmd import SingleDevice
from gristmill.parallel.world import open_world
from gristmill.plan.arithmetic import token_cost
from gristmill.tokens.store import create_tokens
from gristmill.track.sinks import JsonlSink
from gristmill.train.meter import Meter
from gristmill.train.moment import Moment
from gristmill.train.tracker import Tracker

Step = Callable[[], torch.Tensor]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = make_tokens(folder / "random", options.vocabulary)
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
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--deterministic", action="store_true", help="for both, on CUDA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def make_tokens(prefix: Path, vocabulary: int) -> Path:
    """Two million random ids."""
    writer = create_tokens(
        prefix, vocab_size=vocabulary, end_of_text=0, tokenizer={"fingerprint": "random"}
    )
    writer.add(np.random.default_rng(0).integers(0, vocabulary, 2_000_000))
    writer.finish()
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
vocab = {options.vocabulary}
[data]
paths = "{tokens}"
order = "random"
[train]
until = "100k steps"
batch = {options.batch}
[runtime]
device = "{options.device}"
threads = {options.threads}
deterministic = {str(options.deterministic).lower()}
[precision]
compute = "{options.compute}"
"""
    return load_text(text, place="benchmark")


def padded_rows(vocabulary: int) -> int:
    return -(-vocabulary // 128) * 128


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
            vocab_size=padded_rows(options.vocabulary),
            n_layer=options.layers,
            n_head=options.heads,
            n_embd=options.width,
            dropout=0.0,
            bias=True,
        )
    )
    model.to(options.device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), options.device)
    forward = torch.compile(model) if options.device == "cuda" else model
    half = torch.autocast(options.device, torch.bfloat16, enabled=options.compute == "bf16")
    ids = np.memmap(f"{tokens}.bin", dtype=np.uint16, mode="r")
    generator = torch.Generator().manual_seed(0)

    def step() -> torch.Tensor:
        starts = torch.randint(len(ids) - options.context, (options.batch,), generator=generator)
        rows = [ids[s : s + options.context + 1].astype(np.int64) for s in starts.tolist()]
        window = torch.stack([torch.from_numpy(row) for row in rows])
        pair = [window[:, :-1].contiguous(), window[:, 1:].contiguous()]
        if options.device == "cuda":
            pair = [part.pin_memory().to("cuda", non_blocking=True) for part in pair]
        with half:
            _, loss = forward(*pair)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, step


@contextlib.contextmanager
def our_steps(config: RunConfig, start: torch.nn.Module, folder: Path) -> Iterator[Step]:
    """Our real step, from the loader to the record on disk."""
    assert config.model.vocab is not None
    numbers = resolve(config, vocab=config.model.vocab)
    world = open_world(config.runtime)
    model = build_model(config.model, vocab=numbers.vocab, device=world.device)
    weights = transposed(start.state_dict())
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = weights[name][: numbers.vocab]
    from_gpt2(model, weights, where="nanoGPT")
    check_same_function(model, start, numbers.sequence)
    optimizer = build_optimizer(config.optim, model)
    strategy = SingleDevice(config, model=model, optimizer=optimizer, world=world)
    schedule = build_schedule(config, numbers)
    train = open_parts(config.data, sequence=numbers.sequence).train
    wanted = Wanted(numbers.sequence, seed=0, samples=numbers.samples, cache=None)
    stream = build_stream(config.data, train, wanted)
    pin = world.device.type == "cuda"
    loader = Loader(stream, numbers.micro_batch, numbers.accumulate, pin=pin)
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

    def step() -> torch.Tensor:
        nonlocal progress
        before = progress
        lr = schedule.apply(optimizer, before)
        result = strategy.update(strategy.accumulate(next(batches), before))
        progress = before.after(samples=result.samples, tokens=result.tokens)
        meter.add(Moment(before, progress, result, lr=lr, data_wait=0.0))
        return result.loss

    yield step
    batches.close()
    tracker.close()


def transposed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """nanoGPT keeps linear layers untransposed, unlike Hugging Face's GPT-2."""
    return {n: w.T if ".c_" in n and w.dim() == 2 else w for n, w in weights.items()}


def check_same_function(ours: Any, theirs: Any, sequence: int) -> None:
    device = ours.embedding.weight.device
    ids = torch.randint(0, ours.vocab, (2, sequence), device=device)
    with torch.no_grad():
        loss = ours(ids, targets_BT=ids).total / ids.numel()
        expected = theirs(ids, ids)[1]
    # nanoGPT can predict its padded rows too, which hardly matters at the start.
    assert abs(float(loss - expected)) < 1e-2, "the two models do not compute the same"


def compare(options: argparse.Namespace, steps: dict[str, Step]) -> None:
    tokens = options.batch * options.context * options.steps
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    last: dict[str, torch.Tensor] = {}
    memory = dict.fromkeys(steps, 0)
    for block in range(options.blocks + 1):
        for name, step in steps.items():
            held = start_counting_memory(options)
            started = time.perf_counter()
            for _ in range(options.steps):
                last[name] = step()
            last[name].item()  # waits for the device
            if block:  # the first block warms up
                memory[name] = max(memory[name], peak_memory(options) - held)
                speeds[name].append(tokens / (time.perf_counter() - started))
    print(
        f"{options.layers} layers, width {options.width}, T {options.context}, batch "
        f"{options.batch}, vocabulary {options.vocabulary}, {options.compute}, {where(options)}"
        f"{', deterministic' if options.deterministic else ''}, "
        f"torch {torch.__version__}; {options.blocks} blocks of {options.steps} steps each"
    )
    for name, values in speeds.items():
        middle, spread = statistics.median(values), (min(values), max(values))
        print(
            f"{name:<10} {middle:9.0f} tokens/s  ({spread[0]:.0f} to {spread[1]:.0f}), "
            f"last loss {last[name].item():.3f}"
        )
        if memory[name]:
            print(f"{'':<10} {memory[name] / 2**30:9.1f} GiB in a step, above weights and moments")
    ratio = statistics.median(speeds["gristmill"]) / statistics.median(speeds["nanoGPT"])
    print(f"ratio      {ratio:9.3f}")


def start_counting_memory(options: argparse.Namespace) -> int:
    """Bytes held on the device now, by both models together."""
    if options.device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_memory(options: argparse.Namespace) -> int:
    return torch.cuda.max_memory_allocated() if options.device == "cuda" else 0


def where(options: argparse.Namespace) -> str:
    if options.device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{options.threads} CPU threads"


if __name__ == "__main__":
    main()
