"""Deduplication of a whole preparation: what stays, what is counted, and kills at any place."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.text.dedup.signatures import SignatureSettings
from gristmill.text.prepare import signing
from gristmill.text.prepare.dedup_request import DedupRequest
from gristmill.text.prepare.prepare import PrepareResult, prepare
from gristmill.text.prepare.request import PrepareRequest, parse_holdout
from gristmill.text.sources.source import OnDamage, ReadOptions
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens.origins import open_origins
from gristmill.tokens.store import open_tokens, verify_tokens

BYTES = ByteTokenizer()
EXACT = DedupRequest(SignatureSettings())
MINHASH = DedupRequest(SignatureSettings("minhash"))


class CrashError(BaseException):
    """Stands for the end of the process."""


def documents(seed: int, count: int = 120) -> list[str]:
    """Texts, some of them equal, and some of them nearly."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghij", k=7)) for _ in range(300)]
    texts = [" ".join(chance.choices(words, k=chance.randrange(1, 60))) for _ in range(count)]
    for text in chance.choices(texts, k=count // 2):
        changed = text.split()
        if chance.random() < 0.5:
            changed[chance.randrange(len(changed))] = "changed"
        texts.append(" ".join(changed))
    chance.shuffle(texts)
    return texts


def write(folder: Path, texts: Sequence[str]) -> Path:
    """The same texts in lines, in compressed lines, and several on a line."""
    folder.mkdir(parents=True)
    third = len(texts) // 3
    lines = [json.dumps({"text": text, "title": text[:9]}) for text in texts]
    lines.insert(3, "nonsense")
    (folder / "a.jsonl").write_text("\n".join(lines[: third + 1]) + "\n")
    packed = "\n".join(lines[third + 1 : 2 * third + 1]).encode()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(packed))
    (folder / "c.json").write_text("[" + ",  ".join(lines[2 * third + 1 :]) + "]")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in", documents(1))


def run(source: Path, output: Path, dedup: DedupRequest = EXACT, **options: Any) -> PrepareResult:
    told = {name: options.pop(name) for name in ("note", "deduplicating") if name in options}
    settings: dict[str, Any] = {"workers": 1, "options": ReadOptions(block_bytes=1500)} | options
    return prepare(PrepareRequest([str(source)], output, BYTES, dedup=dedup, **settings), **told)


def texts_of(prefix: Path) -> list[str]:
    reader = open_tokens(prefix)
    ends = [*reader.document_starts.tolist()[1:], len(reader)]
    begins = reader.document_starts.tolist()
    return [
        BYTES.decode(reader.read(begin, end - begin - 1).tolist())
        for begin, end in zip(begins, ends, strict=True)
    ]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[place : place + 5]) for place in range(max(len(words) - 4, 1))}


def test_the_first_of_equal_documents_stays(source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "out" / "set")
    texts = documents(1)
    assert texts_of(tmp_path / "out" / "set") == list(dict.fromkeys(texts))
    ledger = result.keys[0].ledger
    dropped = {reason.value: count for reason, count in ledger.dropped.items()}
    again = len(texts) - len(set(texts))
    assert dropped == {"invalid json": 1, "duplicate": again}
    assert ledger.lines == len(texts) + 1 == ledger.kept + again + 1
    first = next(item for item in ledger.places if item.reason.value == "duplicate")
    name, number = first.origin.rsplit(":", 1)
    line = Path(name).read_text().split("\n")[int(number) - 1]
    assert first.reason.sample == json.loads(line)["text"][:80]
    assert not list((tmp_path / "out").glob(".*"))
    assert verify_tokens(tmp_path / "out" / "set") == []
    # The line of each document that stays.
    lines: dict[str, str] = {}
    for name in ("a.jsonl", "b.jsonl.gz"):
        content = (source / name).read_bytes()
        content = gzip.decompress(content) if name.endswith("gz") else content
        for number, line in enumerate(content.decode().split("\n"), 1):
            if line.startswith("{"):
                lines.setdefault(json.loads(line)["text"], f"{source / name}:{number}")
    origins = open_origins(tmp_path / "out" / "set")
    assert origins is not None
    for number, text in enumerate(texts_of(tmp_path / "out" / "set")):
        expected = lines.get(text, f"{source / 'c.json'}:1")
        assert str(origins.of(number)) == expected


def test_near_duplicates(source: Path, tmp_path: Path) -> None:
    ledger = run(source, tmp_path / "set", MINHASH).keys[0].ledger
    kept, texts = texts_of(tmp_path / "set"), documents(1)
    dropped = {reason.value: count for reason, count in ledger.dropped.items()}
    assert dropped["near duplicate"] > 5 and dropped["duplicate"] > 5
    similar = 0
    for one, other in itertools.combinations(map(shingles, kept), 2):
        similar = max(similar, len(one & other) / len(one | other))
    assert similar < 0.9
    # Whatever was dropped is similar to something before it.
    position = {text: texts.index(text) for text in texts}
    stays = set(kept)
    for text in set(texts) - stays:
        mine = shingles(text)
        before = texts[: position[text]]
        assert any(len(mine & shingles(b)) / len(mine | shingles(b)) > 0.4 for b in before)


@pytest.mark.parametrize("dedup", [EXACT, MINHASH], ids=["exact", "minhash"])
def test_workers_blocks_and_memory_do_not_matter(
    source: Path, tmp_path: Path, dedup: DedupRequest
) -> None:
    run(source, tmp_path / "one" / "set", dedup)
    small = DedupRequest(dedup.settings, memory=300_000)
    options = ReadOptions(block_bytes=4000)
    run(source, tmp_path / "two" / "set", small, workers=2, options=options)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_keys_and_splits(source: Path, tmp_path: Path) -> None:
    options = ReadOptions(keys=("text", "title"), block_bytes=1500)
    holdout = parse_holdout("7,3", seed=5)
    run(source, tmp_path / "set", EXACT, options=options, holdout=holdout)
    texts = documents(1)
    for key, values in (("text", texts), ("title", [text[:9] for text in texts])):
        sets = [texts_of(tmp_path / f"set_{split}_{key}") for split in ("train", "val")]
        assert sorted(sets[0] + sets[1]) == sorted(set(values))
        # A later preparation can be held against one of both alone.
        for split, others in zip(("train", "val"), sets[::-1], strict=True):
            old = DedupRequest(EXACT.settings, (tmp_path / f"set_{split}_{key}",))
            keys = ReadOptions(keys=(key,))
            notes: list[str] = []
            output = tmp_path / f"left-{split}-{key}"
            run(source, output, old, options=keys, note=notes.append)
            assert sorted(texts_of(output)) == sorted(others) and not notes


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_lines_and_paragraphs(tmp_path: Path, unit: Any) -> None:
    between = "\n" if unit == "line" else "\n\n"
    parts = [["one", "two", "three"], ["two", "four"], ["three ", "two"], ["five", "one", "five"]]
    content = "<|>".join(between.join(units) for units in parts)
    (tmp_path / "a.txt").write_text(content)
    request = DedupRequest(SignatureSettings("exact", unit))
    options = ReadOptions(separator="<|>", block_bytes=9)
    result = run(tmp_path / "a.txt", tmp_path / "out" / "set", request, options=options)
    assert texts_of(tmp_path / "out" / "set") == [between.join(parts[0]), "four", "five"]
    ledger = result.keys[0].ledger
    assert {reason.value: count for reason, count in ledger.dropped.items()} == {
        "nothing but duplicates": 1
    }
    written = json.loads((tmp_path / "out" / "set.ledger.json").read_text())
    assert written["removed"] == {f"duplicate {unit}": 3}
    assert [item["origin"][-2:] for item in written["first_removed"]]
    longer = DedupRequest(SignatureSettings("exact", unit, min_length=4))
    run(tmp_path / "a.txt", tmp_path / "long" / "set", longer, options=options)
    assert texts_of(tmp_path / "long" / "set")[1:3] == [between.join(parts[1]), "two"]


def test_strict_is_about_faults(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gives no document: invalid json"):
        run(source, tmp_path / "set", strict=True)
    path = source / "a.jsonl"
    path.write_text(path.read_text().replace("nonsense\n", ""))
    assert run(source, tmp_path / "set", strict=True).keys[0].ledger.dropped.total() > 5


def test_a_damaged_source_stands_for_nothing(source: Path, tmp_path: Path) -> None:
    """What a file holds that is left out is no duplicate elsewhere."""
    path = source / "b.jsonl.gz"
    (source / "0.jsonl.gz").write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"0\.jsonl\.gz:\d+: cannot read any further"):
        run(source, tmp_path / "out" / "set")
    run(source, tmp_path / "out" / "set", on_damage=OnDamage.SKIP)
    (source / "0.jsonl.gz").unlink()
    run(source, tmp_path / "other" / "set")
    assert texts_of(tmp_path / "out" / "set") == texts_of(tmp_path / "other" / "set")


def crash_at(call: int, real: Callable[..., Any]) -> Callable[..., Any]:
    count = itertools.count()

    def maybe(*arguments: Any, **options: Any) -> Any:
        if next(count) == call:
            raise CrashError
        return real(*arguments, **options)

    return maybe


@pytest.mark.parametrize(("function", "steps"), [("fsync", 60), ("replace", 8)])
def test_a_crash_at_any_write_or_rename(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, steps: int
) -> None:
    options: dict[str, Any] = {"save_every": 0, "options": ReadOptions(block_bytes=2500)}
    if function == "replace":
        options["save_every"] = 60
    run(source, tmp_path / "whole" / "set", MINHASH, **options)
    expected = files_of(tmp_path / "whole")
    real, chance, call, crashes = getattr(os, function), random.Random(0), 0, 0
    while True:
        folder = tmp_path / str(call)
        with monkeypatch.context() as patched:
            patched.setattr(os, function, crash_at(call, real))
            try:
                run(source, folder / "set", MINHASH, **options)
                break
            except CrashError:
                crashes += 1
        run(source, folder / "set", MINHASH, **options)
        assert files_of(folder) == expected
        call += 1 if call < 3 else chance.randrange(2, steps)
    assert crashes > 4


def test_signing_resumes_where_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = signing.sign_batch

    def sign(batch: Any, settings: Any) -> Any:
        seen.extend(f"{located.source.name}:{located.block.begin}" for located in batch)
        if len(seen) in stops:
            raise CrashError
        return real(batch, settings)

    monkeypatch.setattr(signing, "sign_batch", sign)
    stops: list[int] = []
    run(source, tmp_path / "whole" / "set", save_every=0)
    every = list(seen)
    assert len(every) > 9 and len(set(every)) == len(every)
    seen.clear()
    stops = [3, 9, 10]
    for _ in stops:
        with pytest.raises(CrashError):
            run(source, tmp_path / "out" / "set", save_every=0)
    run(source, tmp_path / "out" / "set", save_every=0)
    # What was under way is read again, and nothing before it.
    assert [place for place, _ in itertools.groupby(seen)] == every
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "out")


def test_grouping_resumes_where_it_was(source: Path, tmp_path: Path) -> None:
    done: list[str] = []

    def stop_at(name: str) -> Callable[[Any], None]:
        def told(state: Any) -> None:
            if state.what == name:
                raise CrashError
            done.append(state.what)

        return told

    for name in ("comparing bucket 5 of 14", "joining groups", ""):
        try:
            run(source, tmp_path / "out" / "set", MINHASH, deduplicating=stop_at(name))
        except CrashError:
            continue
    steps = [name for name in done if name != signing.SIGNING]
    assert len(steps) == len(set(steps)) == 16
    run(source, tmp_path / "whole" / "set", MINHASH)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "out")


def test_sources_that_change_meanwhile(source: Path, tmp_path: Path) -> None:
    """What was encoded of a source stays, unless other documents of it are duplicates now."""
    for change in ("a.jsonl", "c.json"):
        output = tmp_path / change / "set"

        def stop(state: Any) -> None:
            if state.documents > 60:
                raise CrashError

        request = PrepareRequest(
            [str(source)], output, BYTES, dedup=EXACT, workers=1, save_every=0,
            options=ReadOptions(block_bytes=1500),
        )  # fmt: skip
        with pytest.raises(CrashError):
            prepare(request, progress=stop)
        path = source / change
        path.write_text(path.read_text().replace("a", "e"))
        prepare(request)
        expected = tmp_path / f"fresh-{change}"
        run(source, expected / "set")
        assert files_of(tmp_path / change) == files_of(expected)


def test_another_command_does_not_resume(source: Path, tmp_path: Path) -> None:
    def stop(state: Any) -> None:
        if state.done > 3000:
            raise CrashError

    with pytest.raises(CrashError):
        run(source, tmp_path / "set", deduplicating=stop, save_every=0)
    with pytest.raises(UserError, match="differs in: compared"):
        run(source, tmp_path / "set", MINHASH)
    run(source, tmp_path / "set", MINHASH, overwrite=True)
    with pytest.raises(UserError, match="already a token set"):
        run(source, tmp_path / "set", MINHASH)
    run(source, tmp_path / "set", overwrite=True)
    assert not list(tmp_path.glob(".set*"))
    assert (tmp_path / "set.signatures").exists()
    prepare(PrepareRequest([str(source)], tmp_path / "set", BYTES, overwrite=True, workers=1))
    assert not (tmp_path / "set.signatures").exists()


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    handle = os.open(pipe, os.O_RDWR)
    os.write(handle, b'{"text": "x"}\n')
    with pytest.raises(UserError, match="a pipe can be read once"):
        run(pipe, tmp_path / "set")
    os.close(handle)
