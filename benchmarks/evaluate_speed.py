"""Scoring tasks: lm-evaluation-harness's own Hugging Face model beside ours, examples/s.

    pip install 'gristmill[eval,hf]' accelerate
    python benchmarks/evaluate_speed.py MODEL --lambada FILE --hellaswag FILE --items 200
    python benchmarks/evaluate_speed.py MODEL … --device cuda --precision bf16 --items 2000

MODEL is a Hugging Face folder or name; `--random DIR` first writes GPT-2 124M with random weights,
and the tokenizer of that folder, which takes the same time. Without files, the tasks come from the
Hub. Both sides get the same requests through the same method, `LM.loglikelihood`, which tokenizes
and scores them; so both lists of answers must agree, and the script checks that they do. The peer
runs with several batch sizes, and the fastest counts. Rounds alternate between the two.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

TOLERANCE = {"fp32": 2e-2, "bf16": 4.0}
"""How far log-likelihoods of whole texts may be apart: in bf16 logits have three digits."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a Hugging Face folder or name; written if --random is given")
    parser.add_argument("--random", metavar="TOKENIZER", type=Path)
    parser.add_argument("--lambada", type=Path)
    parser.add_argument("--hellaswag", type=Path)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="fp32", choices=tuple(TOLERANCE))
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 128])
    options = parser.parse_args()
    if options.random is not None:
        write_random(Path(options.model), options.random)
    kind = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(f"{options.model} in {options.precision} on {kind}, torch {torch.__version__}")
    ours, theirs = our_model(options), their_model(options)
    for name in ("lambada", "hellaswag"):
        requests = make_requests(name, getattr(options, name), items=options.items)
        compare(name, requests, ours=ours, theirs=theirs, options=options)


def write_random(folder: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def make_requests(name: str, file: Path | None, *, items: int) -> list[Any]:
    """What the harness asks a model: a pair of texts for each option of each question."""
    from lm_eval.api.instance import Instance

    from gristmill.evaluate.questions import BUILT_IN

    options: list[Any] = BUILT_IN[name](file).first(items).options  # type: ignore[attr-defined]
    pairs = [(number, one) for number, item in enumerate(options)
             for one in ([item] if isinstance(item[0], str) else item)]  # fmt: skip
    return [
        Instance("loglikelihood", {}, tuple(pair), number, (name, number, 1))
        for number, pair in pairs
    ]


def our_model(options: argparse.Namespace) -> Any:
    from gristmill.checkpoint.model import open_model
    from gristmill.evaluate.harness import language_model
    from gristmill.strategies.precision import DTYPES

    loaded = open_model(options.model, device=torch.device(options.device))
    loaded.model.compute = DTYPES[options.precision]
    return language_model(loaded, None)


def their_model(options: argparse.Namespace) -> Any:
    from lm_eval.models.huggingface import HFLM

    dtype = {"fp32": "float32", "bf16": "bfloat16"}[options.precision]
    return HFLM(pretrained=options.model, device=options.device, dtype=dtype, batch_size=8)


def compare(
    name: str, requests: list[Any], *, ours: Any, theirs: Any, options: argparse.Namespace
) -> None:
    items = len({request.idx for request in requests})

    def with_batch(size: int) -> Callable[[], list[Any]]:
        def score() -> list[Any]:
            theirs.batch_size_per_gpu = size
            return quietly(lambda: theirs.loglikelihood(requests))

        return score

    sides = {f"lm-eval, batch {size}": with_batch(size) for size in options.batches}
    sides["gristmill"] = lambda: ours.loglikelihood(requests)
    answers = {side: score() for side, score in sides.items()}  # also the warm-up
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, score in sides.items():
            began = time.perf_counter()
            score()
            seconds[side].append(time.perf_counter() - began)
    rates = {side: items / median(times) for side, times in seconds.items()}
    print(f"\n{name}: {items} items, {len(requests)} requests")
    for side, rate in rates.items():
        print(f"  {side:<20} {rate:>10.1f} items/s")
    best = max(rate for side, rate in rates.items() if side != "gristmill")
    print(f"  ratio to the fastest {rates['gristmill'] / best:>9.2f}")
    check(answers["gristmill"], answers[f"lm-eval, batch {options.batches[0]}"], options.precision)


def quietly(act: Callable[[], list[Any]]) -> list[Any]:
    with contextlib.redirect_stderr(io.StringIO()):
        return act()


def check(ours: list[Any], theirs: list[Any], precision: str) -> None:
    apart = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
    same = sum(a[1] == b[1] for a, b in zip(ours, theirs, strict=True))
    print(f"  log-likelihoods differ by at most {apart:.2g}; {same} of {len(ours)} greedy alike")
    if apart > TOLERANCE[precision]:
        sys.exit(f"they do not compute the same: {apart}")


if __name__ == "__main__":
    main()
