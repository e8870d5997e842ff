"""How fast token sets are merged: one thread for everything, and as `tokens merge` does it.

    python benchmarks/merge.py --gigabytes 1 --parts 8

Makes parts with random 16-bit ids in a temporary folder and merges them several times both ways, in
turn. "one thread" reads a piece, checks its ids, writes it and takes its checksum before it reads
the next; that is how it was done at first. The parts are in the page cache; the time includes
flushing the merged set to the disk, and "flush alone" says how long that takes by itself: it is the
time to write and flush the same number of bytes without reading, checking or hashing anything.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gristmill.base.process import usable_cores
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.format import NewSet, pieces
from gristmill.tokens.store import create_tokens, open_tokens

VOCABULARY, END, DOCUMENT = 50_257, 50_256, 1000
SPEC = {"type": "random", "fingerprint": "0"}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        tokens = round(options.gigabytes * 1e9 / 2 / options.parts)
        parts = [folder / f"part-{number}" for number in range(options.parts)]
        for number, part in enumerate(parts):
            make_set(part, tokens=tokens, seed=number)
        ways: dict[str, Callable[[Path], str]] = {
            "one thread": lambda output: merge_in_one_thread(parts, output, options.format),
            "several threads": lambda output: merge(parts, output, options.format),
            "flush alone": lambda output: flush(output, options.gigabytes),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        found = set()
        for _ in range(options.repeats):
            for way, act in ways.items():
                os.sync()
                began = time.perf_counter()
                content = act(folder / "merged")
                seconds[way].append(time.perf_counter() - began)
                found |= {content} if content else set()
                for file in folder.glob("merged*"):
                    file.unlink()
        assert len(found) == 1, "both ways must give the same content"
    count = f"{options.parts} parts, {options.gigabytes} GB, {options.format}"
    print(f"{count}, {usable_cores()} cores, SHA-256 {hash_rate() / 1e9:.2f} GB/s in one thread")
    for way, times in seconds.items():
        middle = statistics.median(times)
        rate = options.gigabytes / middle
        print(f"{way:<16} {middle:6.2f} s  {rate:5.2f} GB/s   {min(times):.2f} to {max(times):.2f}")
    once, several = (statistics.median(seconds[way]) for way in ("one thread", "several threads"))
    print(f"several threads are {once / several:.2f} times as fast")


def make_set(prefix: Path, *, tokens: int, seed: int) -> None:
    rng, starts = np.random.default_rng(seed), np.arange(0, 1_000_000, DOCUMENT)
    writer = create_tokens(NewSet(prefix, VOCABULARY, END, SPEC))
    for begin in range(0, tokens, 1_000_000):
        ids = rng.integers(0, VOCABULARY, min(1_000_000, tokens - begin), dtype=np.uint16)
        writer.append(ids, starts=starts[starts < len(ids)])
    writer.finish(text_bytes=0)


def merge_in_one_thread(parts: list[Path], output: Path, format: str) -> str:
    writer = create_tokens(NewSet(output, VOCABULARY, END, SPEC, format))
    for part in parts:
        reader = open_tokens(part)
        starts = reader.document_starts
        for begin, ids in pieces(reader):
            low, high = np.searchsorted(starts, [begin, begin + len(ids)])
            writer.append(ids, starts=starts[low:high] - begin)
    return writer.finish(text_bytes=0).fingerprint


def merge(parts: list[Path], output: Path, format: str) -> str:
    return convert_tokens(parts, output, format=format).fingerprint


def flush(output: Path, gigabytes: float) -> str:
    piece = bytes(4 << 20)
    with output.open("wb") as file:
        for _ in range(round(gigabytes * 1e9) // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return ""


def hash_rate() -> float:
    piece, found = bytes(64 << 20), hashlib.sha256()
    began = time.perf_counter()
    found.update(piece)
    return len(piece) / (time.perf_counter() - began)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--format", default="flat", choices=("flat", "megatron", "llmc", "npy"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to work, if not the folder for temporary files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
