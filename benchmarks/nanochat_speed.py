"""Training speed of nanochat beside ours at its own sizes, in bf16 and in fp8.

    python benchmarks/nanochat_speed.py --nanochat PATH/TO/nanochat --depth 20 --batch 16
    python benchmarks/nanochat_speed.py --nanochat PATH/TO/nanochat --depth 24 --width 1024 \
        --sequence 1024 --vocab 50304 --batch 32
    python benchmarks/nanochat_speed.py --nanochat PATH/TO/nanochat --device cpu --depth 2 --batch 1

nanochat with D layers has a width of 64 D, heads of 128, sequences of 2048 and 32,768 tokens; its
model, optimizer and fp8 are used as they are, compiled, without clipping. Ours is the modern recipe
with as many layers of that width, and the same batch:

    ours        the loss over the whole vocabulary, of the next token only, as nanochat's
    ours, fp8   the same with the linear layers of blocks and the head in fp8, as nanochat's

Both have value embeddings, ours in fewer layers; neither computes what the other does to the bit.
Blocks of steps alternate (`blocks.py`). `--kernels 20` shows where the time of a step goes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from blocks import Plan, as_json, describe, measure, report
from nanochat_peer import HEAD_WIDTH, nanochat_model, nanochat_optimizer
from peers import Builder, System, build_ours, compiled, device_of, numbers_of, windows

from gristmill.bench.measure import write_random_tokens
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.distributed.world import open_world

VOCABULARY, SEQUENCE = 32768, 2048
PEER = "nanochat"
FP8 = 'precision.fp8=["head", "mlp", "attention"]'
SAME = ("train.mtp=unset", "train.sampled_softmax=unset")


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        tokens = write_random_tokens(folder / "random", vocabulary=options.vocab)
        ours = {"ours": SAME, "ours, fp8": (*SAME, FP8)}
        configs = {name: ours_at(options, tokens, words) for name, words in ours.items()}
        config = configs["ours"]
        open_world(config.runtime, tf32=config.precision.tf32)
        systems: dict[str, Builder] = {
            PEER: partial(build_nanochat, config, options.nanochat, tokens, fp8=False)
        }
        if options.device == "cuda":
            fp8 = partial(build_nanochat, config, options.nanochat, tokens, fp8=True)
            systems[f"{PEER}, fp8"] = fp8
        for number, (name, one) in enumerate(configs.items()):
            systems[name] = partial(build_ours, one, folder / f"run-{number}")
        plan = Plan(
            blocks=options.blocks,
            steps=options.steps,
            device=options.device,
            tokens_per_step=numbers_of(config).tokens_per_step,
            kernels=options.kernels,
        )
        describe(config, plan, title="modern")
        chosen = {name: build for name, build in systems.items() if name not in options.without}
        found = measure(chosen, config, plan)
        for base in (PEER, f"{PEER}, fp8"):
            if base in found:
                print(f"\nratios to {base}")
                report(config, found, plan, base=base)
        if options.json:
            options.json.write_text(json.dumps(as_json(found), indent=1) + "\n")


def ours_at(options: argparse.Namespace, tokens: Path, words: tuple[str, ...]) -> RunConfig:
    """The modern recipe at the size of nanochat."""
    width = options.width or 64 * options.depth
    text = f"""
name = "speed"
preset = "modern-medium"
[model]
layers = {options.depth}
width = {width}
heads = {max(1, width // HEAD_WIDTH)}
context = {options.sequence}
vocab = {options.vocab}
value_embeddings = {min(6, (options.depth + 1) // 2)}
[data]
paths = "{tokens}"
order = "random"
[train]
until = "100k steps"
batch = {options.batch}
micro_batch = {options.batch}
[runtime]
device = "{options.device}"
compile = {"true" if options.device == "cuda" else "false"}
[precision]
compute = "{"bf16" if options.device == "cuda" else "fp32"}"
"""
    return load_text(text, words, place="benchmark")


def build_nanochat(config: RunConfig, checkout: Path, tokens: Path, *, fp8: bool) -> System:
    """nanochat's step, without the schedules, which cost nothing."""
    model = nanochat_model(config, checkout, seed=0)
    if fp8:
        convert_to_fp8(model)
    optimizer = nanochat_optimizer(model, scale=1.0, decay=0.1)
    forward = compiled(model, device_of(config), dynamic=False)
    batches = windows(config, tokens)

    def step() -> torch.Tensor:
        loss: torch.Tensor = forward(*next(batches))
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return System(step)


def convert_to_fp8(model: Any) -> None:
    """Its own layers in fp8, where its training script uses them: both sides of a matrix multiples
    of 16, and the shorter at least 128."""
    fp8 = importlib.import_module("nanochat.fp8")

    def chosen(module: torch.nn.Module, name: str) -> bool:
        if not isinstance(module, torch.nn.Linear):
            return False
        sides = module.in_features, module.out_features
        return all(side % 16 == 0 for side in sides) and min(sides) >= 128

    settings = fp8.Float8LinearConfig.from_recipe_name("tensorwise")
    fp8.convert_to_float8_training(model, config=settings, module_filter_fn=chosen)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nanochat", required=True, type=Path, help="a checkout of nanochat")
    parser.add_argument("--depth", type=int, default=20, help="layers")
    parser.add_argument("--width", type=int, help="if not given, 64 for each layer, as nanochat's")
    parser.add_argument("--vocab", type=int, default=VOCABULARY, help="different tokens")
    parser.add_argument("--batch", type=int, default=16, help="samples")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens of a sample")
    parser.add_argument("--without", nargs="*", default=[], metavar="SYSTEM")
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks of each")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a block")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="show the N longest kernels of each"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
