"""Files of repositories by address: hf://datasets/owner/name/path."""

from __future__ import annotations

import gzip
import json
from typing import Any

import numpy as np

NAME = "someone/crawl"


def lines(word: str, count: int = 3000) -> bytes:
    return b"".join(json.dumps({"text": f"{word} {n}"}).encode() + b"\n" for n in range(count))


def crawl(word: str = "old") -> dict[str, bytes | str]:
    return {
        "README.md": "text\n",
        "data/a.jsonl": lines(f"{word} a"),
        "data/b.jsonl.gz": gzip.compress(lines("b"), mtime=0),
        "data/.hidden.jsonl": lines("hidden"),
        "other/c.jsonl": lines("c"),
    }


def prepare(*sources: str, output: str = "set") -> tuple[str, ...]:
    return ("prepare", *sources, "-o", output, "-t", "bytes", "--workers", "1")


def first(machine: Any, prefix: str = "set") -> str:
    ids = np.fromfile(machine.work / f"{prefix}.bin", dtype=np.uint16, count=40)
    return bytes(ids[: int(np.flatnonzero(ids == 256)[0])].astype(np.uint8)).decode()


def test_files_of_a_repository_are_read_at_a_commit(hub: Any, machine: Any) -> None:
    repository = hub.dataset(NAME, crawl())
    repository.tag("v1")
    repository.commit(crawl("new"))
    address = f"hf://datasets/{NAME}"
    made = machine.run(*prepare(f"{address}/data/*", "--json"))
    assert made.done
    ledger = json.loads(made.output)["ledgers"][0]
    assert ledger["kept"] == 6000 and first(machine) == "new a 0"
    commit = repository.branches["main"]
    for file in ("a.jsonl", "b.jsonl.gz"):
        assert hub.asked("GET", f"/resolve/{commit}/data/{file}", "bytes=0-")
    assert not hub.asked("/resolve/main/") and not hub.asked("hidden") and not hub.asked("c.jsonl")
    old, whole = machine.run_all(
        prepare(f"{address}@v1/data/a.jsonl", output="old"), prepare(address, output="whole")
    )
    assert old.done and first(machine, "old") == "old a 0" and whole.done
    assert (machine.work / "whole.bin").stat().st_size > (machine.work / "set.bin").stat().st_size


def test_a_broken_connection_is_resumed(hub: Any, machine: Any) -> None:
    hub.dataset(NAME, crawl())
    hub.cut("a.jsonl", times=1, after=30_000)
    made = machine.run(*prepare(f"hf://datasets/{NAME}/data/a.jsonl"))
    assert made.done and hub.asked("a.jsonl", "bytes=30000-")


def test_what_is_gated_needs_a_token_which_stays_secret(hub: Any, machine: Any) -> None:
    repository = hub.dataset(NAME, crawl(), gated=True)
    repository.commit({**crawl(), "data/t.parquet": b"PAR1 large files are kept elsewhere"})
    source = prepare(f"hf://datasets/{NAME}/data/a.jsonl")
    barred = machine.run(*source)
    assert barred.status == 65 and f"hf://datasets/{NAME}/data/a.jsonl" in barred.errors
    made = machine.run(*source, HF_TOKEN="hf_reader")
    assert made.done and "hf_reader" not in made.output + made.errors
    files = [file for file in machine.work.rglob("*") if file.is_file()]
    assert files and not any(b"hf_reader" in file.read_bytes() for file in files)


def test_what_is_not_there_says_so(hub: Any, machine: Any) -> None:
    hub.dataset(NAME, crawl())
    finished = machine.run_all(
        prepare("hf://datasets/no/such/a.jsonl"),
        prepare(f"hf://datasets/{NAME}/none.jsonl"),
        prepare(f"hf://datasets/{NAME}/*.parquet"),
        prepare(f"hf://datasets/{NAME}@v7/data/a.jsonl"),
        prepare("hf://datasets/"),
    )
    assert finished[0].fails("there is no dataset 'no/such' on Hugging Face")
    assert finished[1].fails(f"hf://datasets/{NAME}/none.jsonl: there is nothing at this address")
    assert finished[2].fails("no object matches")
    assert finished[3].fails("has no revision 'v7'")
    assert finished[4].fails("no file of a repository", "hf://datasets/OWNER/NAME/PATH")
