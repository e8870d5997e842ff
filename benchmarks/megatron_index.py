"""Time to build Megatron's sample order: ours beside megatron-core's own, in one process.

    python benchmarks/megatron_index.py --documents 10000000

Needs an environment that has both packages. Lengths are drawn from a log-normal distribution. Both
sides build the document, sample and shuffle index from the same lengths and seed, in turns, so that
a noisy machine disturbs both alike; the arrays are compared, and the best time of each is given.
Ratios above 1 mean that ours is faster. The blend is Megatron's greedy one over five sets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from megatron.core.datasets import gpt_dataset, helpers

from gristmill.data import megatron_order
from gristmill.data.blend import fused_here, greedy_by_weight

WEIGHTS = [0.4, 0.25, 0.2, 0.1, 0.05]


def main() -> None:
    options = parse()
    draw = np.random.default_rng(0)
    spread = draw.lognormal(np.log(options.median), 1.2, options.documents)
    lengths = np.minimum(spread.astype(np.int32) + 1, 1_000_000)
    tokens = int(lengths.sum(dtype=np.int64))
    samples = round(options.epochs * tokens / options.sequence)
    epochs = megatron_order.plan_epochs(tokens, sequence=options.sequence, samples=samples)
    print(
        f"{options.documents:,} documents, {tokens:,} tokens, {epochs.number} epochs, "
        f"{epochs.samples:,} samples of {options.sequence} + 1"
    )
    rows, length = range(len(lengths)), options.sequence
    numbers = np.arange(len(lengths), dtype=np.int32)
    documents = megatron_order.document_index(rows, epochs, np.random.RandomState(1))
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "document": (
            lambda: megatron_order.document_index(rows, epochs, np.random.RandomState(1)),
            lambda: gpt_dataset._build_document_index(
                numbers, epochs.number, np.random.RandomState(1), epochs.last_separate
            ),
        ),
        "sample": (
            lambda: megatron_order.sample_index(
                lengths, documents, sequence=length, samples=epochs.samples
            ),
            lambda: helpers.build_sample_idx(
                lengths, documents, length, epochs.number, tokens, True, True
            ),
        ),
        "shuffle": (
            lambda: megatron_order.shuffle_index(epochs, np.random.RandomState(1)),
            lambda: gpt_dataset._build_shuffle_index(
                epochs.first_samples, epochs.samples, np.random.RandomState(1)
            ),
        ),
    }
    print(f"{'index':<12}{'ours s':>10}{'theirs s':>10}{'ratio':>8}")
    totals = np.zeros(2)
    for name, (ours, theirs) in cases.items():
        totals += report(name, ours, theirs, rounds=options.rounds)
    line("total", *totals)
    report("blend", lambda: our_blend(samples), lambda: their_blend(samples), rounds=options.rounds)


def report(
    name: str, ours: Callable[[], Any], theirs: Callable[[], Any], *, rounds: int
) -> np.ndarray:
    best = np.full(2, np.inf)
    for _ in range(rounds):
        results = []
        for side, build in enumerate((ours, theirs)):
            started = time.perf_counter()
            results.append(build())
            best[side] = min(best[side], time.perf_counter() - started)
        assert np.array_equal(*results), f"the {name} index differs"
    line(name, *best)
    return best


def line(name: str, ours: float, theirs: float) -> None:
    print(f"{name:<12}{ours:>10.3f}{theirs:>10.3f}{theirs / ours:>8.2f}", flush=True)


def our_blend(samples: int) -> np.ndarray:
    return greedy_by_weight(WEIGHTS, size=samples, fused=fused_here())


def their_blend(samples: int) -> np.ndarray:
    sets, numbers = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
    helpers.build_blending_indices(sets, numbers, WEIGHTS, len(WEIGHTS), samples, False)
    return sets


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--median", type=int, default=250, help="tokens of the median document")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
