"""The Python files of this environment as a text to train on: one that no setting was chosen on.

    python benchmarks/python_text.py text
    gristmill prepare text/val.jsonl -t gpt2 -o tokens/val
    gristmill prepare text/train.jsonl -t gpt2 -o tokens/train
    python benchmarks/time_to_loss.py --data tokens/train --validation tokens/val ...

Equal files count once. The hash of a file decides where it stands, and one in fifty is kept for
validation, so that the same environment gives the same text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 200
"""Characters; shorter files are mostly lists of imports."""
HELD_OUT = 50
"""One of so many files is for validation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for train.jsonl and val.jsonl")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    texts = {hashlib.sha256(text.encode()).hexdigest(): text for text in read_files()}
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for digest in sorted(texts):
        parts["train" if int(digest[-8:], 16) % HELD_OUT else "val"].append(texts[digest])
    for name, part in parts.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
        size = sum(map(len, part)) / 1e6
        print(f"{folder / name}.jsonl: {len(part):,} files, {size:.1f} million characters")


def read_files() -> Iterator[str]:
    """The files of the standard library and of all packages."""
    packages = {path for path in sys.path if path.endswith("-packages")}
    for root in {sysconfig.get_path("stdlib"), *packages}:
        for path in Path(root).rglob("*.py"):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if len(text) >= SHORTEST:
                yield text


if __name__ == "__main__":
    main()
