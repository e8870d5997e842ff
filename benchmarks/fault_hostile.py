"""Files that were made to harm: models, tokenizers, templates, task files, run folders; and kills
while a GGUF file is written.

Whatever a file holds, the command that reads it ends by itself, in bounded memory, with a status
that is documented, and nothing outside of where it writes is touched. Nothing that a file names is
run.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from fault_kit import (
    ERRORS,
    WRITES,
    Ended,
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
from tokenizers import decoders, models, pre_tokenizers, trainers

from gristmill.base.errors import Exit

MEMORY = 8 * 2**30
"""Bytes of address space of a command; torch alone takes some."""
TRAIN = ("train", "run.toml", "folder=run")
SECRET = "nobody may change this\n"


def bounded() -> None:
    """Called in the child: a command that asks for more memory fails."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def judged(fault: str, ended: Ended, folder: Path, *, refused: bool = True) -> Verdict:
    """A file that was made to harm is refused if there is nothing else that it could be."""
    harmed = [name for name in ("HARM", "victim/HARM") if (folder / name).exists()]
    return Verdict(
        fault,
        noticed=ended.code != 0 or not refused,
        different=f"it ran: {harmed}" if harmed else "",
        unclear=ended.unclear or ("killed" if ended.code < 0 else ""),
    )


# ------------------------------------------------------------------ checkpoints


def _shared(kind: bytes, levels: int, width: int) -> bytes:
    code = b"(" + b"N" * width + kind + b"q\x00"
    return code + (b"0(" + b"h\x00" * width + kind + b"q\x00") * levels


def _deep(rng: random.Random) -> bytes:
    depth = rng.randrange(200, 50_000)
    return rng.choice([b"(" * depth + b"l" * depth, b"N" + b"\x85" * depth])


def _called(rng: random.Random) -> bytes:
    module, name = rng.choice(
        [("os", "system"), ("builtins", "eval"), ("subprocess", "call"), ("torch", "load")]
    )
    return f"c{module}\n{name}\n(S'touch HARM'\ntR".encode()


PICKLES: dict[str, Callable[[random.Random], bytes]] = {
    "shared tuples as a key": lambda rng: (
        b"}" + _shared(b"t", rng.randrange(10, 60), rng.randrange(2, 60)) + b"I1\ns"
    ),
    "shared lists": lambda rng: _shared(b"l", rng.randrange(20, 60), rng.randrange(2, 20)),
    "deep values": _deep,
    "a call": _called,
    "a list in itself": lambda rng: b"]q\x00h\x00a",
    "a long number": lambda rng: b"\x8b" + struct.pack("<i", 9000) + rng.randbytes(9000),
    "random instructions": lambda rng: bytes(rng.choices(b"]}()lts0a.eNRbq\x85h\x00", k=400)),
}


@dataclass(frozen=True)
class HarmfulCheckpoints:
    """Pickles of every shape, as the arguments, the weights or the whole of nanoGPT's file."""

    name: str = "made to harm: checkpoints to import"
    count: int = 60

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        for _ in range(count):
            fresh(folder)
            name, make = rng.choice(list(PICKLES.items()))
            where = rng.choice(["model_args", "model", "n_layer", "all"])
            key = {"n_layer": "model_args"}.get(where, where).encode()
            code = make(rng)
            if where == "n_layer":
                code = b"}X\x07\x00\x00\x00n_layer" + code + b"s"
            if where != "all":
                other = b"model" if key == b"model_args" else b"model_args"
                code = b"}" + _text(key) + code + b"s" + _text(other) + b"}s"
            with zipfile.ZipFile(folder / "ckpt.pt", "w") as archive:
                archive.writestr("x/data.pkl", b"\x80\x02" + code + b".")
                archive.writestr("x/byteorder", "little")
            ended = gristmill(folder, "import", "ckpt.pt", "-o", "out", before=bounded)
            yield judged(f"{name} as {where}", ended, folder)


def _text(word: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word


# ------------------------------------------------------------------ tokenizers


def definition() -> dict[str, Any]:
    """A small byte-level BPE."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the mill grinds corn"] * 3, trainer)
    found: dict[str, Any] = json.loads(inner.to_str())
    return found


def _replacing(rng: random.Random) -> dict[str, Any]:
    pattern = rng.choice([{"Regex": "."}, {"String": "a"}, {"Regex": ""}])
    content = "a" * rng.choice([10, 1000, 100_000])
    rule = {"type": "Replace", "pattern": pattern, "content": content}
    rules = [rule] * rng.randrange(4, 30)
    return {"type": "Sequence", "normalizers": rules, "decoders": rules}


def _split(rng: random.Random) -> dict[str, Any]:
    pattern = rng.choice(["(a+)+$", "(a|aa)+$", "(.*)*x", "(?:a*)*b", "(((", "a{1,99999}{1,99999}"])
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _values(value: Any) -> Iterator[tuple[Any, Any]]:
    """All places of a JSON value, as a container and a key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in list(items):
        yield value, key
        if isinstance(one, dict | list):
            yield from _values(one)


def _mutate(value: dict[str, Any], rng: random.Random) -> str:
    """Some value becomes another one."""
    small = {**value, "model": {**value["model"], "vocab": {}, "merges": []}}
    places = list(_values(small))
    where, key = rng.choice(places)
    other = rng.choice([None, -1, 2**32 - 1, 2**63, 1e308, "", "\0", [], {}, True, "a" * 9999])
    if where is small:
        where = value
    elif where is small["model"]:
        where = value["model"]
    where[key] = other
    return f"{key} = {str(other)[:20]!r}"


def _rules(value: dict[str, Any], rng: random.Random) -> str:
    part = rng.choice(["normalizer", "decoder"])
    value[part] = _replacing(rng)
    return f"a {part} that makes text longer"


def _ids(value: dict[str, Any], rng: random.Random) -> str:
    large = rng.choice([2**24, 2**28, 2**31, 2**32 - 1])
    value["model"]["vocab"]["zz"] = large
    return f"the id {large}"


def _charsmap(value: dict[str, Any], rng: random.Random) -> str:
    text = rng.choice(["AAAA", "/////w==", "!", "", "BAAAAP////8=", "A" * 4000])
    value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": text}
    return f"the charsmap {text[:20]!r}"


def _pattern(value: dict[str, Any], rng: random.Random) -> str:
    rules = [_split(rng), value["pre_tokenizer"]]
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": rules}
    return f"the pattern {rules[0]['pattern']['Regex']}"


@dataclass(frozen=True)
class HarmfulTokenizers:
    """Rules that multiply text, ids of billions, patterns without end, mutated values: text is
    prepared, or the tokenizer is refused."""

    name: str = "made to harm: tokenizers"
    count: int = 60

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        made = json.dumps(definition())
        for _ in range(count):
            fresh(folder)
            (folder / "text.txt").write_text(("a" * 50 + "! the mill\n") * 5)
            value = json.loads(made)
            fault = rng.choice([_mutate, _mutate, _rules, _ids, _charsmap, _pattern])(value, rng)
            (folder / "tokenizer").mkdir()
            (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(value))
            words = ("prepare", "text.txt", "-o", "out/x", "--tokenizer", "tokenizer")
            ended = gristmill(folder, *words, before=bounded)
            # A panic is printed by the library itself, before our own error.
            clear = ended.code in (0, 65, 78) and "Traceback" not in ended.output
            unclear = "" if clear else ended.unclear or f"status {ended.code}"
            yield Verdict(fault, unclear=unclear)


# ------------------------------------------------------------------ models, templates, tasks

TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 3000000000 }}",
    "{{ 9 ** 999999999 }}",
    "{{ 'a'.zfill(9999999999) }}",
    "{{ 'a' | center(9999999999) }}",
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% for a in range(9999) %}{{ 'abcdefghij' * 9999 }}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch HARM') }}",
    "{% include '/etc/passwd' %}",
    "{{ (" * 3000,
    "\ud800{{ messages }}",
)
TASKS = (
    "doc_to_text: !function code.run",
    "class: !function code.Run",
    "doc_to_text: !!python/object/apply:os.system ['touch HARM']",
    "metric_list: [{metric: ./code.py}]",
    "dataset_path: ./code.py",
    "unsafe_code: true",
    "include: other.yaml",
    "include: task.yaml",
    "metadata: &a [*a]",
    "metadata: " + "[" * 5000,
)
DEVICES: dict[str, Callable[[Path, Path], None]] = {
    "a link to itself": lambda file, _: file.symlink_to(file.name),
    "a link to nowhere": lambda file, _: file.symlink_to("nowhere"),
    "a link to /dev/zero": lambda file, _: file.symlink_to("/dev/zero"),
    "a pipe": lambda file, _: os.mkfifo(file),
    "a folder": lambda file, _: file.mkdir(),
    "a link to another file": lambda file, victim: file.symlink_to(victim),
}


@dataclass(frozen=True)
class HarmfulRunFolders:
    """Any file of a run folder is a link, a pipe, a device or a folder: every command that reads
    the run ends by itself, and what a link points to outside stays as it is."""

    name: str = "made to harm: links and devices in run folders"
    count: int = 90

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        run = make_model(folder)
        shutil.copytree(run, folder / "whole", symlinks=True)
        names = sorted(
            path.relative_to(run)
            for path in run.rglob("*")
            if path.is_file() and path.name not in (".lock", "report.html")
        )
        words = (
            ("report", "run"),
            ("generate", "run", "The", "--tokens", "2"),
            ("evaluate", "run", "--limit", "64"),
            ("export", "run", "exported"),
            (*TRAIN, "train.until=10 steps"),
        )
        victim = fresh(folder / "victim") / "secret.txt"
        for number in range(count):
            shutil.rmtree(run)
            shutil.rmtree(folder / "exported", ignore_errors=True)
            shutil.copytree(folder / "whole", run, symlinks=True)
            victim.write_text(SECRET)
            name, (what, make) = rng.choice(names), rng.choice(list(DEVICES.items()))
            command = words[number % len(words)]
            (run / name).unlink()
            make(run / name, victim)
            ended = gristmill(folder, *command, before=bounded)
            verdict = judged(f"{command[0]}: {name} is {what}", ended, folder, refused=False)
            lost = "" if victim.read_text() == SECRET else "a file outside was changed"
            yield Verdict(verdict.fault, lost=lost, unclear=verdict.unclear)


@dataclass(frozen=True)
class HarmfulTemplates:
    """Templates that loop or write without end, or reach for Python."""

    name: str = "made to harm: chat templates"
    count: int = 13

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        make_model(folder)
        first = rng.randrange(len(TEMPLATES))
        for number in range(first, first + count):
            source = TEMPLATES[number % len(TEMPLATES)]
            (folder / "bad.jinja").write_bytes(source.encode(errors="surrogatepass"))
            words = ("generate", "run", "Hi", "--chat", "--template", "bad.jinja", "--tokens", "2")
            yield judged(source[:40], gristmill(folder, *words, before=bounded), folder)


@dataclass(frozen=True)
class HarmfulTasks:
    """Task files of lm-evaluation-harness that name code, in a run file and on the command line."""

    name: str = "made to harm: task files"
    count: int = 12

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        make_model(folder)
        (folder / "code.py").write_text("open('HARM', 'w')\n")
        (folder / "other.yaml").write_text("doc_to_text: !function code.run\n")
        for number in range(count):
            source = TASKS[number % len(TASKS)]
            (folder / "task.yaml").write_text(f"task: hostile\n{source}\n")
            words: tuple[str, ...] = ("evaluate", "run", "--tasks", "task.yaml")
            if number % 2:
                words = (*TRAIN, "train.until=8 steps", "evaluate.every=1 steps")
                words = (*words, 'evaluate.tasks=["task.yaml"]')
            ended = gristmill(folder, *words, before=bounded)
            yield judged(f"{words[0]}: {source[:60]}", ended, folder)


@dataclass(frozen=True)
class KilledExports:
    """SIGKILL at random moments and at file operations, a refusing disk: there is no file or a
    whole one, and the same command then gives the same bytes."""

    name: str = "GGUF export killed, or refused by the storage"
    count: int = 60

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        make_model(folder, tokenizer=json.dumps(definition()))
        words, file = ("export", "run", "out/model.gguf"), folder / "out" / "model.gguf"
        out = fresh(folder / "out")
        total = count_operations(folder, *words)
        reference, began = sha256(file), time.monotonic()
        fresh(out)
        gristmill(folder, *words)
        duration = time.monotonic() - began
        for number in range(count):
            fresh(out)
            kind = number % 3
            if kind == 0:
                after = rng.uniform(0, duration)
                fault, ended = f"killed after {after:.3f} s", gristmill(folder, *words, after=after)
            else:
                at, why = rng.randrange(total), rng.choice(list(ERRORS))
                act = die if kind == 1 else refuse(ERRORS[why])
                names = Operations().names if kind == 1 else WRITES
                fault = f"{'killed' if kind == 1 else why} at operation {at} of {total}"
                ended = gristmill(folder, *words, before=Operations(names, at=at, act=act).install)
            partial = file.exists() and sha256(file) != reference
            again = ended if file.exists() else gristmill(folder, *words)
            whole = file.exists() and sha256(file) == reference
            expected = ended.code in (0, -signal.SIGKILL, int(Exit.STORAGE))
            yield Verdict(
                fault,
                lost="a part of a file has its name" if partial else "",
                different="" if whole else "other bytes, or none",
                unclear="" if expected else ended.unclear or again.unclear or f"{ended.code}",
            )


STRANGE = ("NaN", "1e999", "-Infinity", "1" * 400, "true", "null", '"\\u001b[2J"', "[]", "{}", "-1")


@dataclass(frozen=True)
class StrangeRecords:
    """Values of records, results and states that are no such values: the report leaves them out."""

    name: str = "strange values in what a report reads"
    count: int = 100

    def faults(self, folder: Path, rng: random.Random, count: int) -> Iterator[Verdict]:
        run = make_model(folder)
        files = [*run.glob("*.json"), *(run / "evals").glob("*.json"), run / "metrics.jsonl"]
        whole = {file: file.read_text() for file in files}
        for _ in range(count):
            for file, content in whole.items():
                file.write_text(content)
            file = rng.choice(files)
            lines = whole[file].splitlines() if file.suffix == ".jsonl" else [whole[file]]
            number = rng.randrange(len(lines))
            value = json.loads(lines[number])
            where, key = rng.choice(list(_values(value)))
            strange = rng.choice(STRANGE)
            where[key] = "STRANGE"
            lines[number] = json.dumps(value).replace('"STRANGE"', strange)
            file.write_text("\n".join(lines) + "\n")
            ended = gristmill(folder, "report", "run", before=bounded)
            raw = "an escape sequence is printed" if "\x1b" in ended.output else ""
            lost = "" if ended.code == 0 else f"no report: {ended.output.strip()[-200:]}"
            fault = f"{file.name}: {key} = {strange[:20]}"
            yield Verdict(fault, lost=lost, unclear=ended.unclear or raw)


def make_model(folder: Path, *, tokenizer: str | None = None) -> Path:
    """A run of a few steps, with an evaluation in it."""
    write_text(folder / "text.txt")
    name = "bytes"
    if tokenizer is not None:
        name = "tokenizer"
        (fresh(folder / name) / "tokenizer.json").write_text(tokenizer)
    words = ("prepare", "text.txt", "-o", "tokens", "--tokenizer", name, "--documents", "line")
    (folder / "run.toml").write_text(RUN.format(steps=6))
    for more in (words, TRAIN, ("evaluate", "run", "--limit", "64")):
        made = gristmill(folder, *more)
        assert made.code == 0, made.output
    return folder / "run"


GROUPS = (
    HarmfulCheckpoints(),
    HarmfulTokenizers(),
    HarmfulTemplates(),
    HarmfulTasks(),
    HarmfulRunFolders(),
    StrangeRecords(),
    KilledExports(),
)
