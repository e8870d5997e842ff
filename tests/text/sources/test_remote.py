"""Text from stores elsewhere: read as local files of the same names would be."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.text.prepare.all_parts import prepare_in_parts
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import Holdout, PartNumber, PrepareRequest
from gristmill.text.sources.reading import find_sources
from gristmill.text.sources.source import OnDamage, ReadOptions
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens.convert import convert_tokens

SIGNED = "?X-Amz-Signature=0123abcd&X-Amz-Expires=60"


def lines(name: str, count: int, *, length: int = 40) -> bytes:
    rng = random.Random(name)
    rows = [{"text": f"{name} {n} " + rng.randbytes(n % length).hex()} for n in range(count)]
    rows[1] = {"other": "no text here"}
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(name: str, count: int) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = arrow.table({"id": list(range(count)), "text": [f"{name} {n}" for n in range(count)]})
    sink = arrow.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=100)
    return bytes(sink.getvalue())


def feather(name: str) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    sink = arrow.BufferOutputStream()
    table = arrow.table({"text": [f"{name} {n}" for n in range(50)]})
    with arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return bytes(sink.getvalue())


def corpus() -> dict[str, bytes]:
    """Files of all kinds."""
    return {
        "crawl/a.jsonl": lines("a", 9000),
        "crawl/b.jsonl.gz": gzip.compress(lines("b", 2000), mtime=0),
        "crawl/c.parquet": parquet("c", 350),
        "crawl/d.arrow": feather("d"),
        "crawl/e.csv": b"title,text\n"
        + b"".join(b'%d,"cell ""%d"""\n' % (n, n) for n in range(99)),
        "crawl/f.json": b'[{"text": "one"}, "two", {"text": ""}]',
        "crawl/g.json.gz": gzip.compress(lines("g", 50), mtime=0),
        "crawl/h.txt": "a whole file: grüße\r\n".encode(),
        "crawl/plain-by-name.jsonl": gzip.compress(lines("p", 30), mtime=0),
    }


@pytest.fixture
def both(store: Any, tmp_path: Path) -> list[str]:
    """The same files here and in the store; the paths of the local ones."""
    for name, content in corpus().items():
        file = tmp_path / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        store.put(f"box/{name}", content)
    return sorted(str(file) for file in (tmp_path / "files" / "crawl").iterdir())


def request(sources: list[str], output: Path, **options: Any) -> PrepareRequest:
    options = {"workers": 1, "options": ReadOptions(block_bytes=1 << 16), **options}
    return PrepareRequest(sources, output, ByteTokenizer(), **options)


def content(prefix: Path) -> dict[str, bytes]:
    return {ending: Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".starts")}


def ledger(prefix: Path, base: str) -> str:
    return Path(f"{prefix}.ledger.json").read_text().replace(base, "BASE/").partition('"seal"')[0]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("web", 1), ("web", 2), ("s3", 1), pytest.param("gs", 1, marks=pytest.mark.slow)],
)
def test_objects_give_what_local_files_give(
    store: Any, both: list[str], tmp_path: Path, kind: str, workers: int
) -> None:
    if kind != "web":
        pytest.importorskip({"s3": "s3fs", "gs": "gcsfs.core"}[kind])
    base = f"{store.url}/box/" if kind == "web" else f"{kind}://box/"
    names = [f"{base}{Path(file).relative_to(tmp_path / 'files')}" for file in both]
    sources = names if kind == "web" else [f"{base}crawl/"]
    here, there = tmp_path / "here", tmp_path / "there"
    prepare(request([str(tmp_path / "files")], here))
    result = prepare(request(sources, there, workers=workers))
    assert content(here) == content(there)
    assert ledger(here, f"{tmp_path}/files/") == ledger(there, base)
    assert result.keys[0].ledger.kept > 11_000
    found = find_sources(sources, ReadOptions()).sources
    assert [source.name for source in found] == names


@pytest.mark.parametrize("holdout", [None, Holdout((0.9, 0.1), 7)])
def test_parts_of_objects_are_the_whole(
    store: Any, both: list[str], tmp_path: Path, holdout: Holdout | None
) -> None:
    names = [f"{store.url}/box/crawl/{Path(file).name}" for file in both[:5]]
    whole = request(names, tmp_path / "whole", holdout=holdout)
    prepare(whole)
    parts = [replace(whole, output=tmp_path / "cut", part=PartNumber(n, 3)) for n in (1, 2, 3)]
    for part in parts:
        prepare(part)
        assert prepare(part).new_text_bytes == 0, "done already"
    for split in whole.splits:
        merged = tmp_path / f"merged-{split}"
        convert_tokens([part.prefix("text", split) for part in parts], merged)
        assert content(merged) == content(whole.prefix("text", split))


def test_a_broken_preparation_resumes(store: Any, tmp_path: Path) -> None:
    names = [store.put(f"{name}.jsonl", lines(name, 6000)) for name in "abc"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    prepare(request(names, whole))
    asked = request(names, broken, save_every=0.0)
    # The server goes away while the last file is read.
    seen: list[str] = []

    def leave(path: str) -> None:
        seen.append(path)
        if seen.count("/c.jsonl") > 3:
            store.cut(path, after=0)

    store.on_request = leave
    store.requests.clear()
    with pytest.raises(UserError, match="tried 6 times in a row"):
        prepare(asked)
    store.on_request, store.faults = lambda path: None, []
    store.requests.clear()
    notes: list[str] = []
    prepare(asked, note=notes.append)
    assert content(broken) == content(whole)
    assert any("documents were done" in note for note in notes)
    assert not [ask for ask in store.asked("/a.jsonl") if not ask.endswith(("=0-0", "-131071"))]


def test_an_object_that_changes_is_done_again_and_no_other(store: Any, tmp_path: Path) -> None:
    names = [store.put(f"{name}.jsonl.gz", gzip.compress(lines(name, 20000))) for name in "ab"]
    asked = request(names, tmp_path / "set", save_every=0.0, on_damage=OnDamage.SKIP)
    new, seen = gzip.compress(lines("new", 20000)), []

    def replace_b(path: str) -> None:
        seen.append(path)
        if seen.count("/b.jsonl.gz") == 3:
            store.put("b.jsonl.gz", new)

    store.on_request = replace_b
    # Not even with --on-damage skip is it left out: it is not damaged.
    with pytest.raises(UserError, match="changed while it was being read"):
        prepare(asked)
    notes: list[str] = []
    prepare(asked, note=notes.append)
    assert any("1 files are as before, 1 changed" in note for note in notes), notes
    prepare(request(names, tmp_path / "fresh"))
    assert content(tmp_path / "set") == content(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["c.parquet", "d.arrow", "b.jsonl.gz"])
def test_a_lost_network_is_no_damage(store: Any, tmp_path: Path, name: str) -> None:
    url = store.put(name, corpus()[f"crawl/{name}"])
    asked = request([url], tmp_path / "set", on_damage=OnDamage.SKIP)
    seen: list[str] = []

    def fail(path: str) -> None:
        seen.append(path)
        if len(seen) > 1:
            store.cut(path, after=0)

    store.on_request = fail
    with pytest.raises(UserError, match="cannot be reached"):
        prepare(asked)


def test_damage_is_still_damage(store: Any, tmp_path: Path) -> None:
    good = store.put("good.jsonl", lines("good", 20))
    bad = store.put("bad.jsonl.gz", gzip.compress(lines("bad", 20000))[:-500])
    with pytest.raises(UserError, match=r"bad.jsonl.gz:\d+: cannot read any further"):
        prepare(request([good, bad], tmp_path / "set"))
    result = prepare(request([good, bad], tmp_path / "skip", on_damage=OnDamage.SKIP))
    assert result.keys[0].ledger.kept == 19
    assert result.keys[0].ledger.skipped_places[0].origin.startswith(bad)


def test_what_is_secret_is_written_nowhere(store: Any, tmp_path: Path) -> None:
    store.put("a.jsonl", lines("a", 9000))
    url = f"{store.url}/a.jsonl{SIGNED}".replace("http://", "http://user:hunter2@")
    output = tmp_path / "sets" / "signed"
    asked = request([url], output, save_every=0.0)
    store.on_request = lambda path: store.cut(path, after=0) if len(store.requests) > 3 else None
    with pytest.raises(UserError) as caught:
        prepare(asked)
    texts = [str(caught.value).encode()]
    texts += [file.read_bytes() for file in output.parent.rglob("*") if file.is_file()]
    assert len(texts) > 3
    store.on_request, store.faults = lambda path: None, []
    # Signed anew, it is the same file.
    notes: list[str] = []
    result = prepare(replace(asked, sources=[f"{url}&Again=1"]), note=notes.append)
    assert any("documents were done" in note for note in notes)
    assert result.keys[0].ledger.places[0].origin == f"{store.url}/a.jsonl?…:2"
    texts += [file.read_bytes() for file in output.parent.rglob("*") if file.is_file()]
    texts += [str(result).encode(), "".join(notes).encode()]
    for text in texts:
        assert b"hunter2" not in text and b"0123abcd" not in text
    # Parts are commands, which others can see.
    with pytest.raises(UserError, match="holds a password or a signature") as caught:
        prepare_in_parts(replace(asked, output=tmp_path / "p"), 2, None, attempts=1, listener=None)  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_a_killed_command_resumes_from_the_store(store: Any, tmp_path: Path) -> None:
    names = [store.put(f"{n}.jsonl.gz", gzip.compress(lines(str(n), 9000))) for n in range(4)]
    whole = tmp_path / "whole"
    prepare(request(names, whole))
    output = tmp_path / "killed"
    words = [sys.executable, "-m", "gristmill", "prepare", *names, "-o", str(output)]
    words += ["-t", "bytes", "--workers", "1"]
    # The last file comes slowly, so that the journal has time to be written.
    store.hang("3.jsonl.gz", 60, times=1)
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        journal = output.with_name(".killed.prepare.json")
        while len(store.asked("/3.jsonl.gz")) < 1:
            time.sleep(0.02)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    store.faults.clear()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert content(output) == content(whole) and not journal.exists()
