"""Training speed and memory of GPT-2 on a GPU: nanoGPT, transformers and ours.

    python benchmarks/gpu_speed.py --nanogpt PATH/TO/nanoGPT --size 124M 350M 774M 1.5B
    python benchmarks/gpu_speed.py --nanogpt PATH/TO/nanoGPT --ours --ours 'train.recompute="full"'
    python benchmarks/gpu_speed.py --nanogpt PATH/TO/nanoGPT --device cpu --size nano --batch 4

`peers.py` says what each system does, `blocks.py` how blocks alternate, `same_function.py` how they
are seen to compute the same. Memory is that of a whole step: weights, moments, activations
and gradients. `--ours` may be given several times, each time with the settings of one variant of
ours, and with none for ours as it is. `--kernels 20` shows where the time of a step goes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from blocks import Plan, as_json, describe, measure, report
from peers import GELUS, builders, numbers_of, text_of_run
from same_function import check_same_function

from gristmill.bench.measure import GPT2_VOCABULARY, write_random_tokens
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.distributed.world import open_world

PRESETS = {
    "nano": "gpt2-nano",
    "124M": "gpt2-small",
    "350M": "gpt2-medium",
    "774M": "gpt2-large",
    "1.5B": "gpt2-xl",
}
BATCHES = {"nano": 64, "124M": 64, "350M": 32, "774M": 16, "1.5B": 8}


def main() -> None:
    options = parse()
    results = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        tokens = write_random_tokens(folder / "random", vocabulary=GPT2_VOCABULARY)
        for size in options.size:
            configs = variants(options, size=size, tokens=tokens)
            results[size] = compare(options, configs, size=size, tokens=tokens, folder=folder)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def compare(
    options: argparse.Namespace,
    configs: dict[str, RunConfig],
    *,
    size: str,
    tokens: Path,
    folder: Path,
) -> dict[str, object]:
    """Measure and print all systems at one size."""
    config = next(iter(configs.values()))
    open_world(config.runtime, tf32=config.precision.tf32)
    plan = Plan(
        blocks=options.blocks,
        steps=options.steps,
        device=options.device,
        tokens_per_step=numbers_of(config).tokens_per_step,
        kernels=options.kernels,
    )
    describe(config, plan, title=size)
    check_same_function(configs, nanogpt=options.nanogpt)
    systems = builders(configs, nanogpt=options.nanogpt, tokens=tokens, folder=folder)
    chosen = {name: build for name, build in systems.items() if name not in options.without}
    found = measure(chosen, config, plan)
    report(config, found, plan)
    print(flush=True)
    return as_json(found)


def variants(options: argparse.Namespace, *, size: str, tokens: Path) -> dict[str, RunConfig]:
    """Ours by name: as it is, or with the settings that were asked for."""
    text = f'preset = "{PRESETS[size]}"\n' + text_of_run(
        model=f"bias = {str(options.bias).lower()}\n"
        f'activation = "{options.activation}"\nvocab = {GPT2_VOCABULARY}',
        tokens=tokens,
        batch=options.batch or BATCHES[size],
        runtime=f'device = "{options.device}"\nthreads = {options.threads}\n'
        f"deterministic = {str(options.deterministic).lower()}",
        compute=options.compute or ("bf16" if options.device == "cuda" else "fp32"),
    )
    found = {}
    for words in options.ours or [[]]:
        settings = [word for word in words if word]
        found[" ".join(["gristmill", *settings])] = load_text(text, settings, place="benchmark")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nanogpt", required=True, type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--size", nargs="+", choices=list(PRESETS), default=["124M"])
    batches = ", ".join(f"{batch} for {size}" for size, batch in BATCHES.items())
    parser.add_argument("--batch", type=int, help=f"samples; if not given, {batches}")
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--ours", nargs="*", action="append", metavar="A.B=C", help="settings of a variant of ours"
    )
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="SYSTEM", help="leave these out"
    )
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks of each")
    parser.add_argument("--steps", type=int, default=20, help="timed steps in a block")
    parser.add_argument(
        "--kernels", type=int, default=0, metavar="N", help="show the N longest kernels of each"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--activation", choices=list(GELUS), default="gelu", help="nanoGPT always has gelu"
    )
    parser.add_argument(
        "--compute", choices=["bf16", "fp32"], help="if not given, bf16 on CUDA, fp32 on the CPU"
    )
    parser.add_argument("--deterministic", action="store_true", help="for all, on CUDA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write all figures here too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
