"""Datasets by name: streamed, or found in the cache; from a name to token files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.base.errors import Exit

BOOKS = "someone/books"


def texts(word: str, count: int = 40) -> list[str]:
    return [f"{word} {number}: the mill turns" for number in range(count)]


def parquet(rows: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), file)
    return file.getvalue()


def card(configs: dict[str, dict[str, str]]) -> str:
    """A README that names the files of each split of each config."""
    lines = ["---", "configs:"]
    for config, files in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, path in files.items():
            lines += [f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", "# A dataset", ""])


def books(word: str = "old") -> dict[str, bytes | str]:
    parts = {"train": "data/train-*", "test": "data/test-*"}
    rows = texts(word)
    return {
        "README.md": card({"default": parts}),
        "data/train-00000-of-00002.parquet": parquet(rows[:20]),
        "data/train-00001-of-00002.parquet": parquet(rows[20:]),
        "data/test-00000-of-00001.parquet": parquet(texts("test", 3)),
    }


def prepare(machine: Any, source: str, output: str = "set", *more: str, **options: Any) -> Any:
    words = (source, "-o", output, "-t", "bytes", "--workers", "1", *more)
    return machine.run("prepare", *words, **options)


def tokens(machine: Any, prefix: str = "set") -> list[str]:
    """The documents of a token set."""
    ids = np.fromfile(machine.work / f"{prefix}.bin", dtype=np.uint16)
    documents = np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


def fails(finished: Any, *parts: str) -> None:
    """One error in two lines, the second with the remedy, and nothing else."""
    assert finished.status == Exit.DATA, finished.errors
    assert finished.errors == finished.error + "\n", finished.errors
    assert len(finished.error.splitlines()) == 2
    for part in parts:
        assert part in finished.error


def test_a_corpus_by_name(hub: Any, machine: Any) -> None:
    parts = ("train", "validation", "test")
    configs = {
        config: {split: f"{config}/{split}-*" for split in parts}
        for config in ("wikitext-103-raw-v1", "wikitext-2-raw-v1")
    }
    files = {
        path.replace("*", "00000-of-00001.parquet"): parquet(texts(f"{config} {split}", 5))
        for config, paths in configs.items()
        for split, path in paths.items()
    }
    hub.dataset("Salesforce/wikitext", {"README.md": card(configs), **files})
    made = prepare(machine, "wikitext-2", "wiki")
    assert made.status == 0, made.errors
    assert tokens(machine, "wiki_train") == texts("wikitext-2-raw-v1 train", 5)
    assert tokens(machine, "wiki_val") == texts("wikitext-2-raw-v1 validation", 5)
    first, *others = made.errors.splitlines()
    assert first.startswith("wikitext-2: ")
    assert all(line.startswith(("  ", "hf:Salesforce/wikitext?")) for line in others)
    assert not hub.asked("103-raw-v1/", "GET")


def test_revisions(hub: Any, machine: Any) -> None:
    repository = hub.dataset(BOOKS, books())
    repository.tag("v1")
    old = repository.branches["main"]
    repository.commit(books("new"))
    for source, output, word in (
        (f"hf:{BOOKS}", "main", "new"),
        (f"hf:{BOOKS}@v1", "tag", "old"),
        (f"hf:{BOOKS}@{old}?split=train", "commit", "old"),
    ):
        made = prepare(machine, source, output)
        assert made.status == 0, made.errors
        assert tokens(machine, output) == texts(word)
    fails(
        prepare(machine, f"hf:{BOOKS}@v2"),
        f"hf:{BOOKS}@v2: the dataset '{BOOKS}' has no revision 'v2'; it has: main, v1",
    )


def test_configs_and_splits_are_named(hub: Any, machine: Any) -> None:
    configs = {name: {"train": f"{name}/*"} for name in ("small", "large")}
    files = {f"{name}/one.jsonl": json.dumps({"text": name}) + "\n" for name in configs}
    hub.dataset("someone/two", {"README.md": card(configs), **files})
    several = "it has several configs: the configs (subsets) are small, large"
    fails(prepare(machine, "hf:someone/two"), several, "hf:NAME?config=")
    missing = "there is no config 'huge': the configs (subsets) are small, large"
    fails(prepare(machine, "hf:someone/two?config=huge"), missing)
    missing = "there is no split 'dev': the splits are train"
    fails(prepare(machine, "hf:someone/two?config=small&split=dev"), missing)
    assert prepare(machine, "hf:someone/two?config=large").status == 0
    assert tokens(machine) == ["large"]


def test_an_old_name_leads_to_the_new_one(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    hub.move("datasets", "books", to=BOOKS)
    made = prepare(machine, "hf:books")
    assert made.status == 0, made.errors
    assert tokens(machine) == texts("old")
    assert made.errors == "hf:books: reading the column 'text'\n"


def test_gated_and_missing(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books(), gated=True)
    page = f"accept it at {hub.url}/datasets/{BOOKS}"
    fails(prepare(machine, f"hf:{BOOKS}"), f"the dataset '{BOOKS}' is gated", page)
    fails(prepare(machine, f"hf:{BOOKS}", HF_TOKEN="hf_stranger"), "your account has no access")
    assert prepare(machine, f"hf:{BOOKS}", HF_TOKEN="hf_reader").status == 0
    missing = "there is no dataset 'no/such' on Hugging Face"
    fails(prepare(machine, "hf:no/such"), missing, "hf:./folder")


def test_no_network(hub: Any, machine: Any) -> None:
    hub.close()
    source, how = f"hf:{BOOKS}", f"`hf download {BOOKS} --repo-type dataset`"
    fails(prepare(machine, source), "is not in the cache", "cannot be reached", how)
    offline = prepare(machine, source, HF_HUB_OFFLINE="1")
    fails(offline, "is not in the cache, and HF_HUB_OFFLINE is set", how)


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_is_resumed(hub: Any, machine: Any, reset: bool) -> None:
    hub.dataset(BOOKS, books())
    hub.cut("train-00001", times=1, after=100, reset=reset)
    made = prepare(machine, f"hf:{BOOKS}")
    assert made.status == 0, made.errors
    assert tokens(machine) == texts("old")


def test_too_many_requests(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    hub.refuse("/api/datasets/", times=2)
    made = prepare(machine, f"hf:{BOOKS}")
    assert made.status == 0, made.errors
    *notes, last = made.errors.splitlines()
    assert notes == ["Hugging Face: too many requests; trying again in 0.0s"] * 2
    assert last == f"hf:{BOOKS}: reading the column 'text'"
    assert prepare(machine, f"hf:{BOOKS}", "quiet", "--quiet").errors == ""


def test_what_was_downloaded_is_read_from_the_cache(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    machine.download(BOOKS)
    count = len(hub.asked("parquet"))
    assert prepare(machine, f"hf:{BOOKS}", "near").status == 0
    assert len(hub.asked("parquet")) == count
    offline = prepare(machine, f"hf:{BOOKS}", "offline", HF_HUB_OFFLINE="1")
    assert offline.status == 0 and len(offline.errors.splitlines()) == 1, offline.errors
    hub.close()
    assert prepare(machine, f"hf:{BOOKS}", "gone").status == 0
    assert tokens(machine, "near") == tokens(machine, "offline") == tokens(machine, "gone")
    assert tokens(machine, "near") == texts("old")


def test_a_part_in_the_cache_is_not_taken_for_all(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    machine.download(BOOKS, allow_patterns=["README.md", "data/train-00000*", "data/test*"])
    assert prepare(machine, f"hf:{BOOKS}").status == 0
    assert tokens(machine) == texts("old")
    hub.close()
    fails(
        prepare(machine, f"hf:{BOOKS}", "other"),
        "the cache lacks 1 of the dataset's files: data/train-00001-of-00002.parquet",
        f"hf download {BOOKS} --repo-type dataset",
    )


def test_from_the_hub_to_a_trained_model(hub: Any, machine: Any, model_files: Any) -> None:
    hub.dataset(BOOKS, books())
    hub.model("someone/tiny", model_files)
    made = machine.run(
        "prepare", f"hf:{BOOKS}", "-o", "tokens", "-t", "someone/tiny", "--workers", "1"
    )
    assert made.status == 0, made.errors
    run = machine.work / "run.toml"
    run.write_text(
        'name = "hub"\nfolder = "run"\n[model]\nstart = "someone/tiny@main"\n'
        '[data]\npaths = "tokens"\nsplit = "90,10"\n[train]\nuntil = "2 steps"\nbatch = 2\n'
        '[runtime]\ndevice = "cpu"\nthreads = 1\n'
    )
    trained = machine.run("train", str(run))
    assert trained.status == 0, trained.errors
    assert Path(machine.work / "run" / "checkpoints" / "step-00000002").is_dir()
