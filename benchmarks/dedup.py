"""MinHash deduplication beside datatrove's: which planted near-duplicates are found, and how fast.

    python benchmarks/dedup.py TEXT.jsonl[.xz] --peer-python PYTHON

    gristmill    gristmill prepare --dedup minhash, bytes as tokens
    datatrove    MinhashDedupSignature, Buckets, Cluster and Filter, with its own settings (words in
                 runs of 5, 14 buckets of 8 hashes), one process for each core

Documents are pieces of the texts, of so many words. Of some a copy is planted, in which words were
replaced by others until the two share the given part of all runs of five words. Both programs read
JSON lines from start to end as commands of their own, and write token files or lines; ours runs
before and after datatrove's. A pair is found if not both of its documents stay. PYTHON is one with
datatrove, spacy, regex, orjson and an xxhash below 4.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gristmill.tokens.origins import open_origins

SIMILARITIES = (0.7, 0.8, 0.9)
SHINGLE = 5
FILES = 2
PUNCTUATION = string.punctuation + "\u201c\u201d\u2018\u2019\u2014\u2013"

DATATROVE = r"""
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

source, work, tasks, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = MinhashConfig()


def run(name, tasks, *steps):
    LocalPipelineExecutor(
        pipeline=list(steps), tasks=tasks, workers=workers, logging_dir=f"{work}/logs-{name}"
    ).run()


if __name__ == "__main__":
    run("sign", tasks, JsonlReader(source), MinhashDedupSignature(f"{work}/signed", config))
    run("buckets", config.num_buckets,
        MinhashDedupBuckets(f"{work}/signed", f"{work}/buckets", config=config))
    run("cluster", 1, MinhashDedupCluster(f"{work}/buckets", f"{work}/removed", config=config))
    run("filter", tasks, JsonlReader(source), MinhashDedupFilter(f"{work}/removed"),
        JsonlWriter(f"{work}/kept", compression=None))
"""


class Pair(NamedTuple):
    """Two documents that are similar, by their lines."""

    similarity: float
    original: int
    copy: int


class Outcome(NamedTuple):
    """What a program made of the documents."""

    seconds: float
    kept: set[int]


def texts_of(path: Path) -> Iterator[str]:
    file = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open()
    with file:
        for line in file:
            yield json.loads(line)["text"]


def pieces(path: Path, *, words: int, count: int) -> list[str]:
    """Pieces of the texts, a few of each."""
    result: list[str] = []
    for text in texts_of(path):
        found = text.split(" ")
        for begin in range(0, min(len(found) - words, 6 * words), words):
            result.append(" ".join(found[begin : begin + words]))
            if len(result) == count:
                return result
    return result


def similarity(one: str, other: str) -> float:
    """The part of all shingles that both have."""

    def shingles(text: str) -> set[tuple[str, ...]]:
        table = str.maketrans(dict.fromkeys(PUNCTUATION, " "))
        words = text.lower().translate(table).split()
        return {tuple(words[place : place + SHINGLE]) for place in range(len(words) - SHINGLE + 1)}

    first, second = shingles(one), shingles(other)
    return len(first & second) / len(first | second)


def changed(text: str, wanted: float, chance: random.Random) -> str:
    """A copy of a text with about this similarity: single words are replaced until it is there."""
    words = text.split(" ")
    places = list(range(2, len(words) - 2))
    chance.shuffle(places)
    low, high = 0, len(places)
    new = ["".join(chance.choices(string.ascii_lowercase, k=9)) for _ in places]

    def with_changes(count: int) -> str:
        copy = list(words)
        for place, word in zip(places[:count], new, strict=False):
            copy[place] = word
        return " ".join(copy)

    while low < high:
        middle = (low + high) // 2
        if similarity(text, with_changes(middle)) > wanted:
            low = middle + 1
        else:
            high = middle
    return with_changes(low)


def write_documents(folder: Path, arguments: argparse.Namespace) -> tuple[list[Pair], int]:
    """Write the documents into two files of lines; the planted pairs, and the bytes of text."""
    chance = random.Random(arguments.seed)
    texts = pieces(arguments.text, words=arguments.words, count=arguments.documents)
    chosen = iter(chance.sample(range(len(texts)), arguments.pairs * len(SIMILARITIES)))
    planted = []
    for wanted in SIMILARITIES:
        for _ in range(arguments.pairs):
            original = next(chosen)
            texts.append(changed(texts[original], wanted, chance))
            real = similarity(texts[original], texts[-1])
            planted.append((real, original, len(texts) - 1))
    order = list(range(len(texts)))
    chance.shuffle(order)
    line = {document: number for number, document in enumerate(order)}
    half = -(-len(texts) // FILES)
    for number in range(FILES):
        with (folder / f"{number}.jsonl").open("w") as file:
            for place in range(number * half, min((number + 1) * half, len(texts))):
                file.write(json.dumps({"id": str(place), "text": texts[order[place]]}) + "\n")
    pairs = [Pair(real, line[one], line[other]) for real, one, other in planted]
    return pairs, sum(len(text.encode()) for text in texts)


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)[:200]}\n{ended.stderr[-3000:]}")
    return time.perf_counter() - began


def ours(source: Path, work: Path, cores: int) -> Outcome:
    output = work / "set"
    seconds = timed(
        [sys.executable, "-m", "gristmill", "prepare", str(source), "-o", str(output), "-t",
         "bytes", "--dedup", "minhash", "--workers", str(cores)]
    )  # fmt: skip
    origins = open_origins(output)
    assert origins is not None
    first = {str(source / f"{number}.jsonl"): number for number in range(FILES)}
    lines = [len((source / f"{number}.jsonl").read_bytes().splitlines()) for number in range(FILES)]
    kept = set()
    for number in range(origins.documents):
        origin = origins.of(number)
        kept.add(sum(lines[: first[origin.source]]) + origin.line - 1)
    return Outcome(seconds, kept)


def theirs(source: Path, work: Path, cores: int, python: str) -> Outcome:
    script = work / "datatrove_peer.py"
    script.write_text(DATATROVE)
    seconds = timed([python, str(script), str(source), str(work), str(FILES), str(cores)])
    kept = set()
    for path in sorted((work / "kept").glob("*.jsonl")):
        kept |= {int(json.loads(line)["id"]) for line in path.read_text().splitlines()}
    return Outcome(seconds, kept)


def show(name: str, outcome: Outcome, pairs: list[Pair], size: int, documents: int) -> None:
    print(
        f"{name}: {outcome.seconds:.1f} s, {size / outcome.seconds / 1e6:.2f} MB of text/s, "
        f"{len(outcome.kept)} of {documents} documents stay"
    )
    for number, wanted in enumerate(SIMILARITIES):
        mine = pairs[number * len(pairs) // 3 : (number + 1) * len(pairs) // 3]
        found = sum(not {pair.original, pair.copy} <= outcome.kept for pair in mine)
        real = sum(pair.similarity for pair in mine) / len(mine)
        expected = sum(1 - (1 - pair.similarity**8) ** 14 for pair in mine) / len(mine)
        print(f"  similarity {wanted} (really {real:.3f}): {found} of {len(mine)} pairs found, "
              f"{found / len(mine):.4f}; expected {expected:.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--peer-python", help="a Python with datatrove; without it, ours alone")
    parser.add_argument("--documents", type=int, default=12000)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=1000, help="of each similarity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "in"
        source.mkdir()
        pairs, size = write_documents(source, arguments)
        documents = arguments.documents + len(pairs)
        print(f"{documents} documents, {size / 1e6:.1f} MB of text, {arguments.cores} cores")
        for folder in ("ours", "theirs", "again"):
            (Path(name) / folder).mkdir()
        mine = ours(source, Path(name) / "ours", arguments.cores)
        show("gristmill", mine, pairs, size, documents)
        if arguments.peer_python:
            peer = theirs(source, Path(name) / "theirs", arguments.cores, arguments.peer_python)
            show("datatrove", peer, pairs, size, documents)
            again = ours(source, Path(name) / "again", arguments.cores)
            print(f"gristmill once more: {again.seconds:.1f} s")
            mean = (mine.seconds + again.seconds) / 2
            print(f"datatrove takes {peer.seconds / mean:.1f} times as long")


if __name__ == "__main__":
    main()
