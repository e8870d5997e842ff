"""Training speed of a small GPT on the CPU: nanoGPT, transformers and ours.

    python benchmarks/speed.py --nanogpt PATH/TO/nanoGPT
    python benchmarks/speed.py --nanogpt PATH/TO/nanoGPT --activation gelu_tanh

By default all systems compute the GELU with the error function, nanoGPT's. With GPT-2's own, the
approximation with tanh, ours and transformers are to be compared: nanoGPT keeps the other.

`peers.py` says what each system does, `blocks.py` how blocks alternate, `same_function.py` how they
are seen to compute the same; `gpu_speed.py` measures the sizes of GPT-2 on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from blocks import Plan, describe, measure, report
from peers import GELUS, builders, numbers_of, text_of_run
from same_function import check_same_function

from gristmill.bench.measure import write_random_tokens
from gristmill.config.load import load_text
from gristmill.distributed.world import open_world


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = write_random_tokens(folder / "random", vocabulary=options.vocabulary)
        shape = {key: getattr(options, key) for key in ("layers", "heads", "width", "context")}
        lines = [f"{key} = {value}" for key, value in shape.items()]
        lines += [f'activation = "{options.activation}"', f"vocab = {options.vocabulary}"]
        text = text_of_run(
            model="\n".join(lines),
            tokens=tokens,
            batch=options.batch,
            runtime=f'device = "cpu"\nthreads = {options.threads}',
            compute=options.compute,
        )
        config = load_text(text, options.settings, place="benchmark")
        open_world(config.runtime)
        per_step = numbers_of(config).tokens_per_step
        plan = Plan(options.blocks, options.steps, device="cpu", tokens_per_step=per_step)
        describe(config, plan, title="CPU")
        ours = {"gristmill": config}
        check_same_function(ours, nanogpt=options.nanogpt)
        systems = builders(ours, nanogpt=options.nanogpt, tokens=tokens, folder=folder)
        report(config, measure(systems, config, plan), plan)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nanogpt", required=True, type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=9, help="measured blocks of each")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a block")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument(
        "--activation", choices=list(GELUS), default="gelu", help="nanoGPT always has gelu"
    )
    parser.add_argument("--compute", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("settings", nargs="*", metavar="A.B=C", help="further settings of ours")
    return parser.parse_args()


if __name__ == "__main__":
    main()
