"""Faults while text is prepared, damage to token files, and hostile text."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_kit import (
    DAMAGE,
    ERRORS,
    WRITES,
    Operations,
    Verdict,
    count_operations,
    die,
    fresh,
    gristmill,
    refuse,
    sha256,
)
from fault_training import RUN, write_text

from gristmill.base.errors import Exit

PREPARE = ("prepare", "text", "-o", "out/tokens", "--tokenizer", "bytes")


def write_corpus(folder: Path, *, files: int = 4, documents: int = 400) -> None:
    """JSON lines in several files."""
    fresh(folder)
    for number in range(files):
        rng = random.Random(number)
        lines = (
            json.dumps({"text": " ".join(rng.choices(["mill", "corn", "flour", "water"], k=60))})
            for _ in range(documents)
        )
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")


def products(folder: Path) -> dict[str, str]:
    """The bytes of the token files in a folder; journals and locks are not among them."""
    return {
        str(path.relative_to(folder)): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".bin", ".idx", ".npy")
    }


def content_of(file: Path) -> object:
    """What a file says: of JSON the values, however they are spaced."""
    content = file.read_bytes() if file.exists() else None
    if content is not None and file.suffix == ".json":
        with contextlib.suppress(ValueError):
            return json.loads(content)
    return content


@dataclass(frozen=True)
class KilledPreparations:
    """SIGKILL at random moments and at file operations, a refusing disk: the same command then
    yields the same bytes."""

    name: str = "preparing killed, or refused by the disk"
    count: int = 140

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        write_corpus(folder / "text")
        words = (*PREPARE, "--split", "90,10", "--workers", "1")
        two = (*PREPARE, "--split", "90,10", "--workers", "2")
        out = folder / "out"
        out.mkdir()
        total = count_operations(folder, *words)
        reference = products(out)
        began = time.monotonic()
        fresh(out)
        gristmill(folder, *two)
        duration = time.monotonic() - began
        for number in range(count):
            fresh(out)
            kind = number % 3
            if kind == 0:
                after = rng.uniform(0, duration)
                fault, used = f"killed after {after:.3f} s", two
                ended = gristmill(folder, *used, after=after)
            else:
                at, why = rng.randrange(total), rng.choice(list(ERRORS))
                act = die if kind == 1 else refuse(ERRORS[why])
                names = Operations().names if kind == 1 else WRITES
                fault = f"{'killed' if kind == 1 else why} at operation {at} of {total}"
                used = words
                ended = gristmill(folder, *used, before=Operations(names, at=at, act=act).install)
            again = ended if ended.code == 0 else gristmill(folder, *used)
            # Refused, if everything was in place before the kill.
            done = again.code == 0 or (again.code == Exit.REFUSED and "already" in again.output)
            expected = ended.code in (0, -signal.SIGKILL, int(Exit.STORAGE))
            yield Verdict(
                fault,
                lost="" if done else f"the same command ends with {again.code}",
                different="" if not done or products(out) == reference else "other bytes",
                unclear=again.unclear or ("" if expected else ended.unclear or f"{ended.code}"),
            )


@dataclass(frozen=True)
class DamagedTokenFiles:
    """Any damage to token files, their manifests and indices is found by `tokens verify`, and that
    to ids by training too."""

    name: str = "damaged token files"
    count: int = 240

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        write_text(folder / "text.txt")
        plain = ("prepare", "text.txt", "--tokenizer", "bytes", "--documents", "line")
        for layout in ("flat", "megatron"):
            words = ("-o", f"whole/{layout}/tokens", "--format", layout)
            made = gristmill(folder, *plain, *words)
            assert made.code == 0, made.output
        (folder / "run.toml").write_text(RUN.format(steps=12))
        for number in range(count):
            layout = ("flat", "megatron")[number % 2]
            broken = folder / "tokens"
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(folder / "whole" / layout, broken)
            names = [path for path in sorted(broken.iterdir()) if path.is_file()]
            ids = [path for path in names if path.suffix == ".bin"]
            trains = number % 4 == 0
            file = rng.choice(ids if trains else names)
            before = content_of(file)
            how = rng.choice(DAMAGE)(file, rng)
            if content_of(file) == before:
                continue
            fault = f"{layout} {file.name}: {how}, {'train' if trains else 'verify'}"
            shutil.rmtree(folder / "victim", ignore_errors=True)
            paths = f"data.paths={broken / 'tokens'}"
            command = (
                ("train", "run.toml", paths) if trains else ("tokens", "verify", "tokens/tokens")
            )
            ended = gristmill(folder, *command)
            yield Verdict(fault, noticed=ended.code != 0, unclear=ended.unclear)


@dataclass(frozen=True)
class HostileText:
    """Files that no tool expects: every line is kept or counted, or the command refuses."""

    name: str = "hostile text"
    count: int = 100

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        for _ in range(count):
            fresh(folder)
            name, write = rng.choice(list(HOSTILE.items()))
            kept = write(folder, rng)
            ended = gristmill(folder, *PREPARE)
            lost = ""
            if ended.code == 0:
                lost = _ledger_fault(folder, kept)
            elif kept is not None:
                lost = f"refused with status {ended.code}: {ended.output.strip()[-200:]}"
            yield Verdict(name, lost=lost, unclear=ended.unclear)


@dataclass(frozen=True)
class UnreadableText:
    """Some files cannot be read, or not to their end: with `--on-damage skip` all others are
    prepared and these are named; without it, the command says which one and ends."""

    name: str = "text that cannot be read"
    count: int = 60

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        for _ in range(count):
            fresh(folder)
            write_corpus(folder / "text", documents=20)
            bad = rng.choice(sorted((folder / "text").iterdir()))
            how, spoil = rng.choice(list(UNREADABLE.items()))
            bad, before = spoil(bad, rng)
            skips = rng.random() < 0.5
            words = (*PREPARE, "--workers", "1", "--on-damage", "skip" if skips else "stop")
            ended = gristmill(folder, *words, before=before)
            named = str(bad.relative_to(folder)) in ended.output
            lost = ""
            if skips:
                lost = _ledger_fault(folder, 60) if ended.code == 0 else f"status {ended.code}"
            elif ended.code != Exit.DATA:
                lost = f"status {ended.code}, not {int(Exit.DATA)}"
            fault = f"{how}, {'skip' if skips else 'stop'}"
            yield Verdict(fault, noticed=named, lost=lost, unclear=ended.unclear)


def _forbidden(file: Path, rng: random.Random) -> tuple[Path, Callable[[], None]]:
    """A file that may not be read; root may read all, so the refusal is made up."""

    def install() -> None:
        real = Path.open

        def refused(self: Path, *arguments: Any, **options: Any) -> Any:
            if self.name == file.name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
            return real(self, *arguments, **options)

        Path.open = refused  # type: ignore[method-assign]

    return file, install


def _cut(file: Path, rng: random.Random) -> tuple[Path, None]:
    """A compressed file without its end."""
    whole = gzip.compress(file.read_bytes())
    file.unlink()
    cut = file.with_name(f"{file.name}.gz")
    cut.write_bytes(whole[: rng.randrange(20, len(whole))])
    return cut, None


def _expanding(file: Path, rng: random.Random) -> tuple[Path, None]:
    """A small file that decompresses to a line above the limit."""
    file.unlink()
    bomb = file.with_name(f"{file.name}.gz")
    with gzip.open(bomb, "wb", compresslevel=1) as out:
        for _ in range(300):
            out.write(bytes(1 << 20))
    return bomb, None


UNREADABLE: dict[str, Callable[[Path, random.Random], tuple[Path, Callable[[], None] | None]]] = {
    "a file without permission": _forbidden,
    "a cut gzip": _cut,
    "a line of 300 MiB in gzip": _expanding,
}


def _ledger_fault(folder: Path, kept: int | None) -> str:
    """What is wrong with the counts of a preparation."""
    check = gristmill(folder, "tokens", "verify", "out/tokens")
    if check.code:
        return f"verify: {check.output.strip()[-200:]}"
    counts = json.loads((folder / "out" / "tokens.ledger.json").read_text())
    found = counts["kept"]
    if counts["lines"] != found + sum(counts["dropped"].values()):
        return "lines are not accounted for"
    return "" if kept is None or found == kept else f"kept {found} documents, not {kept}"


def _json_lines(folder: Path, rng: random.Random) -> int:
    """Good lines and broken ones, which are told apart by the standard library."""
    good = json.dumps({"text": "the mill turns"}).encode()
    broken = [
        b'{"text": "cut',
        b'{"text": 5}',
        b'{"other": "x"}',
        b"[]",
        b"null",
        b'"text"',
        b'{"text": "\xff\xfe"}',
        b'{"text": null}',
        b"{" * 5000,
        b'{"text": "a"} trailing',
    ]
    lines = [rng.choice([good, good, rng.choice(broken)]) for _ in range(60)]
    (folder / "text").mkdir()
    (folder / "text" / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return sum(line == good for line in lines)


def _files(write: Callable[[random.Random], dict[str, bytes]]) -> Callable[..., None]:
    def make(folder: Path, rng: random.Random) -> None:
        (folder / "text").mkdir()
        for name, content in write(rng).items():
            (folder / "text" / name).write_bytes(content)

    return make


HOSTILE: dict[str, Callable[[Path, random.Random], int | None]] = {
    "broken JSON lines": _json_lines,
    "random bytes as text": _files(lambda rng: {"a.txt": rng.randbytes(5000)}),
    "random bytes as JSON": _files(lambda rng: {"a.jsonl": rng.randbytes(5000)}),
    "random bytes as Parquet": _files(lambda rng: {"a.parquet": b"PAR1" + rng.randbytes(900)}),
    "random bytes as gzip": _files(lambda rng: {"a.txt.gz": b"\x1f\x8b" + rng.randbytes(900)}),
    "random bytes as zstd": _files(lambda rng: {"a.txt.zst": rng.randbytes(900)}),
    "cut gzip": _files(
        lambda rng: {"a.txt.gz": gzip.compress(b"the mill " * 999)[: rng.randrange(20, 60)]}
    ),
    "UTF-16": _files(lambda rng: {"a.txt": ("the mill turns " * 50).encode("utf-16")}),
    "NUL and control bytes": _files(
        lambda rng: {"a.txt": bytes(rng.randrange(32) for _ in range(4000))}
    ),
    "one long line": _files(lambda rng: {"a.jsonl": b'{"text": "' + b"mill " * 300_000 + b'"}'}),
    "deep JSON": _files(lambda rng: {"a.jsonl": b'{"text": ' + b"[" * 100_000}),
    "an empty file": _files(lambda rng: {"a.txt": b"", "b.txt": b"the mill turns"}),
    "only empty files": _files(lambda rng: {"a.txt": b"", "b.jsonl": b"\n\n"}),
    "CSV without end": _files(lambda rng: {"a.csv": b'text\n"the mill ' + b"turns\n" * 2000}),
    "special tokens": _files(lambda rng: {"a.txt": b"<|endoftext|>" * 500}),
    "many formats": _files(
        lambda rng: {"a.txt": b"mill", "b.jsonl": b'{"text": "x"}\n', "c.csv": b"text\nmill\n"}
    ),
}


GROUPS = (KilledPreparations(), DamagedTokenFiles(), HostileText(), UnreadableText())
