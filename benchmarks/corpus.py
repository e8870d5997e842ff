"""What preparing a corpus does to a small model: the same tokens of five domains, three times.

    python benchmarks/corpus.py work/ --pack train.jsonl.xz --pack-validation val.jsonl.xz \
        --code PYTHON/lib … --code-validation PACKAGE …

    as found   every source as it is, in proportion to its size
    cleaned    filtered, deduplicated, without what the validation text holds; again by size
    mixed      the same sets, with shares of their own that change over the run

Books, an encyclopedia, papers and pages are the sources of the pack, by their name in it; code is
every .py file of some folders, such as the libraries of several versions of Python, as a crawl of
repositories would find them: most files many times. The steps are the commands of the guide, and
all three runs have the same model, seed, tokens and validation text. What is there already is not
made again.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOMAINS = {
    "gutenberg": "books",
    "wikipedia_vital": "encyclopedia",
    "elife": "papers",
    "elife_digest": "papers",
    "openstax": "papers",
    "digitalgov": "pages",
    "mdn": "pages",
    "kubernetes_blog": "pages",
    "ethereum_org": "pages",
    "18f": "pages",
}
NAMES = ("books", "encyclopedia", "papers", "pages", "code")
FILTERS = {
    "books": ["--filter", "gopher-repetition"],
    "encyclopedia": ["--filter", "gopher"],
    # Gopher's rule on words with letters would drop the textbooks with formulas.
    "papers": ["--filter", "gopher-repetition"],
    "pages": ["--filter", "gopher,fineweb"],
    "code": ["--filter", "length=200"],
}
SHARES = (
    {"books": 0.3, "encyclopedia": 0.3, "papers": 0.15, "pages": 0.1, "code": 0.15},
    {"books": 0.1, "encyclopedia": 0.2, "papers": 0.25, "pages": 0.2, "code": 0.25},
)
RUN = """
name = "{name}"
preset = "modern-nano"

[model]
context = 128

[data]
{data}
validation = {{ {validation} }}
{stages}
[validate]
every = "{every} tokens"
windows = 160

{sets}
[train]
until = "{tokens} tokens"
batch = 32
"""


def gristmill(*words: object) -> str:
    command = [sys.executable, "-m", "gristmill", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stderr[-3000:]}")
    return ended.stdout


def packed(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield DOMAINS[row["src"]], {"text": row["text"], "source": row["src"]}


def code(folders: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).parts
            if {"site-packages", "test", "tests"}.isdisjoint(parts):
                text = file.read_text("utf-8", errors="ignore")
                yield "code", {"text": text, "source": str(Path(*parts))}


def dump(folder: Path, rows: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Write what a crawl would bring: a file of lines for each domain."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for domain, row in rows:
        if domain not in files:
            files[domain] = (folder / f"{domain}.jsonl").open("w", encoding="utf-8")
        files[domain].write(json.dumps(row) + "\n")
    for file in files.values():
        file.close()


def prepare(source: Path, output: Path, *options: object) -> dict[str, Any]:
    """Prepare a source, or read what an earlier run of this script printed about it."""
    told = output.with_suffix(".told.json")
    if not told.is_file():
        began = time.perf_counter()
        words = ["prepare", source, "-o", output, "--json", "--overwrite", *options]
        value = json.loads(gristmill(*words))
        told.write_text(json.dumps({**value, "wall": time.perf_counter() - began}))
    return dict(json.loads(told.read_text()))


def train(work: Path, name: str, data: str, tokens: int, stages: str = "") -> dict[str, float]:
    """The last validation losses of a run, by domain."""
    file, folder = work / f"{name}.toml", work / "runs" / name
    sets = "".join(
        f'[[validate.set]]\nname = "{domain}"\ndata = "{work}/validation/{domain}"\n\n'
        for domain in NAMES
    )
    # The main validation set is all domains in equal parts.
    main = ", ".join(f'"{work}/validation/{domain}" = 0.2' for domain in NAMES)
    every = tokens // 3
    file.write_text(
        RUN.format(
            name=name,
            data=data,
            validation=main,
            stages=stages,
            sets=sets,
            tokens=tokens,
            every=every,
        )
    )
    if not (folder / "metrics.jsonl").is_file():
        gristmill("train", file, f"folder={folder}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "validation"][-1]
    return {domain: found["loss"] for domain, found in last["sets"].items()}


def blend(folder: Path, told: dict[str, dict[str, Any]]) -> tuple[str, dict[str, float]]:
    """Sets in proportion to their size."""
    tokens = {name: told[name]["sets"][0]["tokens"] for name in NAMES}
    shares = {name: count / sum(tokens.values()) for name, count in tokens.items()}
    paths = ", ".join(f'"{folder}/{name}" = {share:.6f}' for name, share in shares.items())
    return f"paths = {{ {paths} }}", shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--pack-validation", type=Path, required=True)
    parser.add_argument("--code", type=Path, nargs="+", required=True)
    parser.add_argument("--code-validation", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, default=1_500_000)
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    raw, held_out, tokenizer = work / "raw", work / "held-out", work / "tokenizer"
    if not (raw / "code.jsonl").is_file():
        dump(held_out, packed(arguments.pack_validation))
        dump(held_out, code(arguments.code_validation))
        dump(raw, packed(arguments.pack))
        dump(raw, code(arguments.code))
    if not tokenizer.is_dir():
        gristmill("tokenizer", "train", raw, "-o", tokenizer, "-n", 8192, "--limit", 60_000_000)
    found, cleaned, against = {}, {}, list[object]()
    for name in NAMES:
        output = work / "validation" / name
        prepare(held_out / f"{name}.jsonl", output, "-t", tokenizer, "--dedup", "minhash")
        against += ["--against", output]
    for name in NAMES:
        source = raw / f"{name}.jsonl"
        found[name] = prepare(source, work / "found" / name, "-t", tokenizer)
        options = ["-t", tokenizer, *FILTERS[name], "--dedup", "minhash", *against]
        cleaned[name] = prepare(source, work / "cleaned" / name, *options)
    runs = {}
    data, shares = blend(work / "found", found)
    runs["as found"] = shares, train(work, "found", data, arguments.tokens)
    data, shares = blend(work / "cleaned", cleaned)
    runs["cleaned"] = shares, train(work, "cleaned", data, arguments.tokens)
    paths = ", ".join(f'"{work}/cleaned/{name}"' for name in NAMES)
    first, second = (
        ", ".join(f"{name} = {share}" for name, share in shares.items()) for shares in SHARES
    )
    stages = f"""
[[data.stage]]
to = 0.6
weights = {{ {first} }}

[[data.stage]]
gradual = true
weights = {{ {second} }}
"""
    data = f"paths = [{paths}]\nmax_epochs = 4"
    runs["mixed"] = SHARES[0], train(work, "mixed", data, arguments.tokens, stages)
    report(found, cleaned, runs)


def report(found: dict[str, Any], cleaned: dict[str, Any], runs: dict[str, Any]) -> None:
    print("| source | lines | kept | dropped | tokens | tokens kept | seconds |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for name in NAMES:
        ledger = cleaned[name]["ledgers"][0]
        reasons = ", ".join(f"{count:,} {why}" for why, count in ledger["dropped"].items())
        before, after = (told[name]["sets"][0]["tokens"] for told in (found, cleaned))
        print(
            f"| {name} | {ledger['lines']:,} | {ledger['kept']:,} | {reasons} | {before:,} | "
            f"{after:,} | {cleaned[name]['wall']:.1f} |"
        )
    print("\n| run | " + " | ".join(NAMES) + " | mean |")
    print("| --- |" + " ---: |" * (len(NAMES) + 1))
    for run, (shares, losses) in runs.items():
        print(f"| {run}: share | " + " | ".join(f"{shares[n]:.1%}" for n in NAMES) + " | |")
        mean = sum(losses[n] for n in NAMES) / len(NAMES)
        print(
            f"| {run}: loss | " + " | ".join(f"{losses[n]:.3f}" for n in NAMES) + f" | {mean:.3f} |"
        )


if __name__ == "__main__":
    main()
