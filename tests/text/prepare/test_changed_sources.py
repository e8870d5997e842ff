"""Sources that change while a preparation is interrupted, and sources that are damaged."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app
from gristmill.text.prepare import prepare as module
from gristmill.text.prepare.prepare import PrepareResult, prepare
from gristmill.text.prepare.request import PartNumber, PrepareRequest, parse_holdout
from gristmill.text.sources.source import OnDamage, ReadOptions
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
FORMATS: dict[str, dict[str, Any]] = {
    "flat": {},
    "megatron": {"format": "megatron"},
    "llmc": {"format": "llmc", "shard_size": 700},
    "npy held out": {"format": "npy", "shard_size": 700, "holdout": parse_holdout("8,2", seed=3)},
    "two keys": {"options": ReadOptions(keys=("text", "more"), block_bytes=400)},
    "a part": {"part": PartNumber(2, 3)},
}
USUAL = ("flat", "npy held out", "two keys")
"""Formats that are not slow: what is written in parts, and what is read in parts."""
_times = itertools.count(1_700_000_000)


class CrashError(BaseException):
    """Stands for the end of the process."""


def write(path: Path, seed: int, count: int = 25) -> Path:
    """Lines of JSON; every version of a file has a time of its own."""
    chance = random.Random(seed)
    lines = []
    for n in range(count):
        text = "".join(chance.choices("abc é", k=chance.randrange(60)))
        value = {"text": f"{seed} {n} {text}", "more": text}
        lines.append("nonsense" if n % 13 == 5 else json.dumps(value))
    content = ("\n".join(lines) + "\n").encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    os.utime(path, (next(_times),) * 2)
    return path


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-12])
    os.utime(path, (next(_times),) * 2)


def run(sources: Path, output: Path, **options: Any) -> tuple[PrepareResult, list[str]]:
    notes: list[str] = []
    settings: dict[str, Any] = {"workers": 1, "save_every": 0}
    settings |= {"options": ReadOptions(block_bytes=400)} | options
    request = PrepareRequest([str(sources)], output / "set", BYTES, **settings)
    return prepare(request, note=notes.append), notes


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def crash(monkeypatch: pytest.MonkeyPatch, after: int, *arguments: Any, **options: Any) -> bool:
    """Run, and end at a flush; whether it came to that."""
    count = itertools.count()

    def flush(handle: int) -> None:
        if next(count) == after:
            raise CrashError

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", flush)
        try:
            run(*arguments, **options)
        except CrashError:
            return True
    return False


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number, name in enumerate(("b.jsonl", "c.jsonl.gz", "d.jsonl", "e.jsonl", "f.jsonl")):
        write(tmp_path / "in" / name, number)
    (tmp_path / "in" / "c2.jsonl").touch()
    return tmp_path / "in"


# ------------------------------------------------------------------ changed sources


@pytest.mark.parametrize(
    ("change", "options"),
    [
        pytest.param(
            *(change, options),
            id=f"{change}-{name}",
            # Every change with one format, and all formats with all changes together.
            marks=() if change == "several" or name == "flat" else pytest.mark.slow,
        )
        for change in ("replace", "add", "remove", "several")
        for name, options in FORMATS.items()
    ],
)
def test_the_work_on_unchanged_files_is_kept(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    change: str,
) -> None:
    flushes = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", flushes.append)
        run(corpus, tmp_path / "count", **options)
    # The last file is under way.
    assert crash(monkeypatch, int(0.85 * len(flushes)), corpus, tmp_path / "out", **options)
    if change in ("replace", "several"):
        write(corpus / "d.jsonl", 77, count=30)
    if change in ("add", "several"):
        write(corpus / "a.jsonl", 78)
    if change in ("remove", "several"):
        (corpus / "b.jsonl").unlink()
    result, notes = run(corpus, tmp_path / "out", **options)
    whole, _ = run(corpus, tmp_path / "whole", **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    if "part" not in options:
        assert "files are as before" in notes[0]
    # In another order, other documents are held out, and parts have other bounds.
    if not options.keys() & {"holdout", "part"} or (change == "replace" and "holdout" in options):
        assert result.new_text_bytes < 0.6 * whole.text_bytes


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_crashes_and_changes_in_turn(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    chance, crashes = random.Random(4), 0
    for attempt in range(12):
        crashes += crash(
            monkeypatch,
            chance.randrange(10, 60),
            corpus,
            tmp_path / "out",
            overwrite=True,
            **options,
        )
        name = chance.choice(("a", "b", "c", "d", "e", "f", "g"))
        path = corpus / f"{name}.jsonl"
        if path.exists() and chance.random() < 0.3:
            path.unlink()
        else:
            write(path, 100 + attempt, count=chance.randrange(1, 50))
    assert crashes > 8
    run(corpus, tmp_path / "out", overwrite=True, **options)
    run(corpus, tmp_path / "whole", **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_large_file_that_is_under_way_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in" / "a.jsonl", 1, count=10)
    write(tmp_path / "in" / "b.jsonl", 2, count=400)
    assert crash(monkeypatch, 300, tmp_path / "in", tmp_path / "out")
    write(tmp_path / "in" / "a.jsonl", 3, count=12)
    result, notes = run(tmp_path / "in", tmp_path / "out")
    assert notes == [
        "resuming an interrupted preparation: 1 files are as before, 1 changed and will be done "
        "again"
    ]
    assert result.new_text_bytes < 0.8 * result.text_bytes
    run(tmp_path / "in", tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_the_first_journal_comes_after_one_second(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saves = 0.0, []
    clock = types.SimpleNamespace(**vars(module.time) | {"monotonic": lambda: now})
    monkeypatch.setattr(module, "time", clock)
    journal = tmp_path / "out" / ".set.prepare.json"

    def tick(state: object) -> None:
        nonlocal now
        saves.append((now, journal.exists() and journal.stat().st_mtime_ns))
        now += 0.25

    request = PrepareRequest([str(corpus)], tmp_path / "out" / "set", BYTES, workers=1,
                             options=ReadOptions(block_bytes=200))  # fmt: skip
    prepare(request, progress=tick)
    first = next(when for when, found in saves if found)
    assert first == 1.0
    second = next(when for when, found in saves if found and found != dict(saves)[first])
    assert second == first + 5


# ------------------------------------------------------------------ damaged sources


def test_a_damaged_file_costs_itself_alone(corpus: Path, tmp_path: Path) -> None:
    write(corpus / "d.jsonl.gz", 5, count=4000)
    damage(corpus / "d.jsonl.gz")
    # Nothing was due to be saved yet.
    with pytest.raises(UserError) as caught:
        run(corpus, tmp_path / "out", save_every=1000)
    assert caught.value.exit is Exit.DATA
    (problem,) = caught.value.problems
    lines = readable_lines(corpus / "d.jsonl.gz")
    assert 3900 < lines < 4000
    assert problem.where == f"{corpus / 'd.jsonl.gz'}:{lines + 1}"
    assert problem.remedy is not None and "--on-damage skip" in problem.remedy
    write(corpus / "d.jsonl.gz", 6)
    result, notes = run(corpus, tmp_path / "out")
    assert "resuming" in notes[0]
    whole, _ = run(corpus, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert result.new_text_bytes < 0.7 * whole.text_bytes


def readable_lines(path: Path) -> int:
    """The lines of a compressed file before it ends too early."""
    lines = 0
    with gzip.open(path) as file, contextlib.suppress(EOFError):
        for _ in file:
            lines += 1
    return lines


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in USUAL else pytest.mark.slow)
        for name, options in FORMATS.items()
    ],
)
def test_damaged_files_are_skipped_and_named(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = {**options, "on_damage": OnDamage.SKIP}
    write(corpus / "d.jsonl.gz", 5, count=300)
    damage(corpus / "d.jsonl.gz")
    damage(corpus / "c.jsonl.gz")
    result, _ = run(corpus, tmp_path / "out", save_every=1000, **options)
    ledger = result.keys[0].ledger
    expected = files_of(tmp_path / "out")
    if "part" not in options:
        assert json.loads((tmp_path / "out" / result.keys[0].ledger_file.name).read_text())[
            "skipped"
        ] == {"damaged file": 2}
        names = [item.origin.rpartition(":")[0] for item in ledger.skipped_places]
        assert names == [str(corpus / "c.jsonl.gz"), str(corpus / "d.jsonl.gz")]
    # The same with several workers, and after kills at any moment.
    if "format" not in options:
        run(corpus, tmp_path / "workers", **{**options, "workers": 2})
        assert files_of(tmp_path / "workers") == expected
    for after in range(8, 400, 97):
        if not crash(monkeypatch, after, corpus, tmp_path / str(after), **options):
            break
        run(corpus, tmp_path / str(after), **options)
        assert files_of(tmp_path / str(after)) == expected
    if "holdout" in options or "part" in options:
        return
    # Nothing of the damaged files is in the set.
    for path in corpus.glob("*.gz"):
        path.unlink()
    run(corpus, tmp_path / "without", **options)
    ours, theirs = (files_of(tmp_path / name) for name in ("out", "without"))
    assert {name for name in ours if ours[name] != theirs[name]} == {
        name for name in ours if name.endswith(".ledger.json")
    }


def test_a_file_that_was_skipped_stops_the_work_if_so_requested(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(corpus / "c.jsonl.gz")
    skip = OnDamage.SKIP
    assert crash(monkeypatch, 40, corpus, tmp_path / "out", on_damage=skip)
    with pytest.raises(UserError, match="--on-damage skip"):
        run(corpus, tmp_path / "out")
    write(corpus / "c.jsonl.gz", 9)
    run(corpus, tmp_path / "out")
    run(corpus, tmp_path / "whole")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "workers"),
    [("c.jsonl.gz", 2), ("b.jsonl", 1), ("d.json", 1), ("d.parquet", 1), ("d.csv", 1)],
)
def test_a_file_that_may_not_be_read(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, workers: int
) -> None:
    (corpus / name).touch()
    real = Path.open

    def refused(self: Path, *arguments: Any, **options: Any) -> Any:
        # Tests may run as root, whom no permission stops.
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UserError, match=r":1: cannot be read: Permission denied\n *let your user"):
        run(corpus, tmp_path / "stop", workers=workers)
    result, _ = run(corpus, tmp_path / "out", on_damage=OnDamage.SKIP, workers=workers)
    ledger = result.keys[0].ledger
    assert [(one.origin, one.what) for one in ledger.skipped_places] == [
        (f"{corpus / name}:1", "cannot be read: Permission denied")
    ]
    assert ledger.kept > 0


def test_nothing_but_damaged_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl.gz", 1)
    damage(tmp_path / "in" / "a.jsonl.gz")
    with pytest.raises(UserError, match=r"no document was found in 0 lines \(1 damaged file\)"):
        run(tmp_path / "in", tmp_path / "out", on_damage=OnDamage.SKIP)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_line_skips_too(corpus: Path, tmp_path: Path) -> None:
    damage(corpus / "c.jsonl.gz")
    words = ["prepare", str(corpus), "-o", str(tmp_path / "set"), "-t", "bytes"]
    assert isinstance(CliRunner().invoke(app, words).exception, UserError)
    ended = CliRunner().invoke(app, [*words, "--on-damage", "skip"])
    assert ended.exit_code == 0, ended.output
    assert "skipped 1: damaged file" in ended.output
    assert f"{corpus / 'c.jsonl.gz'}:" in ended.output
