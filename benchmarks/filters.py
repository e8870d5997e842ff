"""Filters of `gristmill prepare` beside datatrove's: are the decisions equal, and how fast?

    python benchmarks/filters.py TEXT.jsonl --peer-python PYTHON

Both judge the same documents with the same four filters (Gopher's repetition and quality, C4,
FineWeb) on one core: each filter by itself on every document, C4's text compared too, and then all
four in FineWeb's order, as a pipeline would, until one drops the document. Both run at the same
time, and seconds are those of their processes.

The documents are made from TEXT.jsonl (objects with a "text", maybe compressed with xz): pieces of
its texts of 20 to 2,000 words, two fifths of them with what web pages have: menus, lists, repeated
lines and phrases, notices, addresses, lost marks and blanks. PYTHON has datatrove and spacy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ORDER = ("gopher-repetition", "gopher-quality", "c4", "fineweb")
MENU = (
    "Home", "About us", "Contact", "Sign in", "Read more...", "Share this", "Copyright © 2024",
    "Terms of use", "This site uses cookies.", "Please enable JavaScript.", "[edit]", "• First",
    "- Second", "Lorem ipsum dolor sit amet.", "{ color: red; }", "http://www.example.com/a-b?c=d",
    "Price: $19.99 (US$20) #sale #new", "e.g. Dr. Smith's 5km run at 10a.m. :-)", "don't can't I'm",
    "Вход", "ログイン", "Überblick", "…", "\u00a0", "wow!!! so good!?", "1 2 3 4 5 6 7 8 9 10",
)  # fmt: skip


def pieces(path: Path, generator: random.Random) -> Iterator[str]:
    """Texts cut at the ends of lines or between words."""
    opened = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open()
    with opened as lines:
        for line in lines:
            text, place = json.loads(line)["text"], 0
            while place < len(text):
                size = int(6 * 20 * 100 ** (generator.random() ** 3))
                end = text.find("\n" if generator.random() < 0.7 else " ", place + size)
                end = len(text) if end < 0 else end
                if piece := text[place:end].strip():
                    yield piece
                place = end


def spoiled(text: str, generator: random.Random) -> str:
    """A text with some of what web pages have."""
    lines = text.split("\n")
    for _ in range(generator.randrange(1, 5)):
        match generator.randrange(8):
            case 0:
                lines[generator.randrange(len(lines) + 1) :] = generator.choices(MENU, k=6)
            case 1:
                lines += generator.choices(lines, k=generator.randrange(1, 4))
            case 2:
                words = text.split()
                phrase = " ".join(words[: generator.randrange(2, 14)])
                lines.append(". ".join([phrase] * generator.randrange(2, 12)))
            case 3:
                lines = [line.rstrip(".") for line in lines]
            case 4:
                lines = [part for line in lines for part in line.split(". ")]
            case 5:
                lines = [line.replace(" ", "  ", 9).replace(", ", " , ") for line in lines]
            case 6:
                lines.insert(0, generator.choice(MENU))
            case 7:
                marks = generator.choice(["#", "...", "…", "- ", "• ", "|", "\t"])
                lines = [
                    marks + line if generator.random() < 0.5 else line + marks for line in lines
                ]
    return "\n".join(lines)


def documents(path: Path, count: int) -> Iterator[str]:
    generator = random.Random(1)
    for number, piece in enumerate(pieces(path, generator)):
        if number == count:
            return
        yield spoiled(piece, generator) if generator.random() < 0.4 else piece


# ------------------------------------------------------------------ the two sides

Judge = Callable[[str], str | None]
"""The text that is left, or None."""


def ours() -> dict[str, Judge]:
    from gristmill.text.filters.build import FilterPlan, Filters
    from gristmill.text.filters.settings import parse_filters
    from gristmill.text.sources.source import Reason

    def judge(names: str) -> Judge:
        filters = Filters(FilterPlan(parse_filters([names])))

        def kept(text: str) -> str | None:
            value = filters.judge(text, {})
            return None if isinstance(value, Reason) else value

        return kept

    return {name: judge(name) for name in (*ORDER, ",".join(ORDER))}


def peers() -> dict[str, Judge]:
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    built = dict(
        zip(
            ORDER,
            (
                GopherRepetitionFilter(),
                GopherQualityFilter(),
                C4QualityFilter(),
                FineWebQualityFilter(),
            ),
            strict=True,
        )
    )

    def judge(names: tuple[str, ...]) -> Judge:
        def kept(text: str) -> str | None:
            document = Document(text=text, id="")
            alive = all(built[name].filter(document) is True for name in names)
            return document.text if alive else None

        return kept

    return {**{name: judge((name,)) for name in ORDER}, ",".join(ORDER): judge(ORDER)}


def run(side: str, source: Path, output: Path) -> None:
    """Judge all documents, and write the seconds and a hash of what is left of each."""
    texts = [json.loads(line) for line in source.open(encoding="utf-8")]
    result = {}
    for name, judge in (ours() if side == "ours" else peers()).items():
        judge("Rules and tables are read at the first document. " * 20)
        began = time.process_time()
        left = [judge(text) for text in texts]
        seconds = time.process_time() - began
        hashes = [
            "" if text is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            for text in left
        ]
        result[name] = {"seconds": seconds, "left": hashes}
    output.write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--documents", type=int, default=5000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "documents.jsonl")
        with source.open("w", encoding="utf-8") as file:
            words = 0
            for text in documents(arguments.text, arguments.documents):
                words += len(text.split())
                file.write(json.dumps(text) + "\n")
        running = []
        for side, python in (("ours", sys.executable), ("peer", arguments.peer_python)):
            output = Path(folder, f"{side}.json")
            command = [python, __file__, "--side", side, source, output]
            # Side by side, so that what else the machine does slows both.
            running.append((subprocess.Popen(command), output))
        assert [process.wait() for process, _ in running] == [0, 0], "a side failed"
        results = [json.loads(output.read_text()) for _, output in running]
    mine, theirs = results
    print(f"{arguments.documents:,} documents, {words:,} words")
    print(f"{'':<46} {'kept':>7} {'differ':>7} {'ours':>9} {'datatrove':>10} {'ratio':>7}")
    for name in mine:
        left, its_left = mine[name]["left"], theirs[name]["left"]
        differ = sum(one != other for one, other in zip(left, its_left, strict=True))
        seconds, its_seconds = mine[name]["seconds"], theirs[name]["seconds"]
        print(
            f"{name:<46} {sum(map(bool, left)):>7,} {differ:>7,} {seconds:>8.2f}s "
            f"{its_seconds:>9.2f}s {its_seconds / seconds:>6.1f}x"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        run(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
