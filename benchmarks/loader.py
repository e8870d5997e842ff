"""What the loader costs: CPU time a token in each order, and its share of a step.

    python benchmarks/loader.py --gigabytes 2

Makes a synthetic set of 16-bit ids in a temporary folder, with documents of about 1000 tokens
(and 100 for the case of short ones), and reads it through the real loader. "reader" is the CPU time
of the thread that reads ahead; "blocked" is the time that the training thread spends in asking for
the next step while it computes for as long as a step would take. Both are shown as nanoseconds a
token and as shares of the time that a token takes at the given speed. The token set is in the
page cache: what a disk costs is not measured.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from gristmill.base.units import Progress
from gristmill.config.schema import DataConfig
from gristmill.data.build import OrderSpec, build_rules, build_stream
from gristmill.data.dataset import open_data
from gristmill.data.loader import Loader
from gristmill.tokens.format import NewSet
from gristmill.tokens.store import create_tokens

VOCABULARY, END = 50_257, 50_256


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        long, short = Path(name) / "long", Path(name) / "short"
        tokens = round(options.gigabytes * 1e9 / 2)
        make_set(long, tokens=tokens, document=1000)
        make_set(short, tokens=tokens // 10, document=100)
        both = {str(long): 0.9, str(short): 0.1}
        cases: dict[str, dict[str, object]] = {
            "shuffled": {"paths": str(long)},
            "random": {"paths": str(long), "order": "random"},
            "sequential": {"paths": str(long), "order": "sequential"},
            "megatron": {"paths": str(long), "order": "megatron"},
            "megatron, short documents": {"paths": str(short), "order": "megatron"},
            "blend, shuffled": {"paths": both},
            "blend, megatron": {"paths": both, "order": "megatron"},
            "documents masked": {"paths": str(long), "documents": "masked"},
            "megatron's masks": {
                "paths": str(long),
                "order": "megatron",
                "reset_attention": True,
                "reset_positions": True,
                "mask_end_of_text": True,
            },
        }
        print(
            f"{options.gigabytes} GB, {options.batch} samples of {options.sequence} in "
            f"{options.accumulate} parts, at {options.speed:,} tokens a second"
        )
        print(f"{'':<28}{'open s':>8}{'reader ns':>11}{'share':>9}{'blocked ns':>12}{'share':>9}")
        for case, settings in cases.items():
            measure(case, DataConfig.model_validate(settings), options)


def make_set(prefix: Path, *, tokens: int, document: int) -> None:
    draw = np.random.default_rng(0)
    writer = create_tokens(
        NewSet(
            prefix,
            vocab_size=VOCABULARY,
            end_of_text=END,
            tokenizer={"type": "none", "fingerprint": "none"},
        )
    )
    piece = 1 << 22
    for begin in range(0, tokens, piece):
        count = min(piece, tokens - begin)
        starts = np.unique(draw.integers(1, count, max(1, count // document)))
        ids = draw.integers(0, END, count, dtype=np.uint16)
        ids[starts - 1] = END
        writer.append(ids, starts=np.concatenate([[0], starts]).astype(np.int64))
    writer.finish()


def measure(name: str, config: DataConfig, options: argparse.Namespace) -> None:
    started = time.perf_counter()
    train = open_data(config, sequence=options.sequence).train
    spec = OrderSpec(options.sequence, 1234, options.steps * options.batch, cache=None)
    stream = build_stream(config, train, spec)
    rules = build_rules(config, end_of_text=END)
    micro_batch = options.batch // options.accumulate
    loader = Loader(stream, micro_batch, options.accumulate, rules=rules, vocab=VOCABULARY)
    loader.step_batches(0)
    opened = time.perf_counter() - started
    tokens = loader.batch * options.sequence
    reader = reader_seconds(loader, options.steps) / options.steps / tokens
    blocked = blocked_seconds(loader, options.steps, pause=tokens / options.speed)
    blocked = blocked / options.steps / tokens
    print(
        f"{name:<28}{opened:>8.2f}{1e9 * reader:>11.2f}{reader * options.speed:>9.3%}"
        f"{1e9 * blocked:>12.3f}{blocked * options.speed:>9.4%}",
        flush=True,
    )


def reader_seconds(loader: Loader, steps: int) -> float:
    """CPU time of reading steps, as the thread does it."""
    started = time.thread_time()
    for step in range(1, steps + 1):
        loader.step_batches(step * loader.batch)
    return time.thread_time() - started


def blocked_seconds(loader: Loader, steps: int, *, pause: float) -> float:
    """Time spent in asking for steps that were read ahead while the trainer was busy."""
    batches = loader.starting_at(Progress())
    next(batches)
    waited = 0.0
    for _ in range(steps):
        time.sleep(min(pause, 0.05))
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
    batches.close()
    return waited


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--speed", type=int, default=500_000, help="tokens a second")
    parser.add_argument("--folder", help="where the temporary folder is made")
    return parser.parse_args()


if __name__ == "__main__":
    main()
