"""Datasets by name: streamed, or found in the cache; from a name to token files."""

from __future__ import annotations

import io
import json
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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


def prepare(source: str, output: str = "set", *more: str) -> tuple[str, ...]:
    return ("prepare", source, "-o", output, "-t", "bytes", "--workers", "1", *more)


def tokens(machine: Any, prefix: str = "set") -> list[str]:
    """The documents of a token set."""
    ids = np.fromfile(machine.work / f"{prefix}.bin", dtype=np.uint16)
    documents = np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


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
    made = machine.run(*prepare("wikitext-2", "wiki"))
    assert made.done
    assert tokens(machine, "wiki_train") == texts("wikitext-2-raw-v1 train", 5)
    assert tokens(machine, "wiki_val") == texts("wikitext-2-raw-v1 validation", 5)
    first, *others = made.notes
    assert first.startswith("wikitext-2: ")
    assert all(line.startswith(("  ", "hf:Salesforce/wikitext?")) for line in others)
    assert not hub.asked("103-raw-v1/", "GET")


def test_revisions(hub: Any, machine: Any) -> None:
    repository = hub.dataset(BOOKS, books())
    repository.tag("v1")
    old = repository.branches["main"]
    repository.commit(books("new"))
    sources = {
        "main": (f"hf:{BOOKS}", "new"),
        "tag": (f"hf:{BOOKS}@v1", "old"),
        "commit": (f"hf:{BOOKS}@{old}?split=train", "old"),
    }
    *made, unknown = machine.run_all(
        *(prepare(source, output) for output, (source, _) in sources.items()),
        prepare(f"hf:{BOOKS}@v2"),
    )
    assert all(one.done for one in made)
    for output, (_, word) in sources.items():
        assert tokens(machine, output) == texts(word)
    missing = f"the dataset '{BOOKS}' has no revision 'v2'; it has: main, v1"
    assert unknown.fails(f"error: hf:{BOOKS}@v2: {missing}")


def test_configs_and_splits_are_named(hub: Any, machine: Any) -> None:
    configs = {name: {"train": f"{name}/*"} for name in ("small", "large")}
    files = {f"{name}/one.jsonl": json.dumps({"text": name}) + "\n" for name in configs}
    hub.dataset("someone/two", {"README.md": card(configs), **files})
    source = "hf:someone/two"
    several, no_config, no_split, made = machine.run_all(
        prepare(source),
        prepare(f"{source}?config=huge"),
        prepare(f"{source}?config=small&split=dev"),
        prepare(f"{source}?config=large"),
    )
    there_are = "the configs (subsets) are small, large"
    assert several.fails(f"it has several configs: {there_are}", "hf:NAME?config=")
    assert no_config.fails(f"there is no config 'huge': {there_are}")
    assert no_split.fails("there is no split 'dev': the splits are train")
    assert made.done and tokens(machine) == ["large"]


def test_a_program_is_not_run(hub: Any, machine: Any) -> None:
    repository = hub.dataset("someone/made", {"made.py": "raise SystemExit('this was run')"})
    repository.commit(
        {"default/train/0000.parquet": parquet(texts("made"))}, branch="refs/convert/parquet"
    )
    program, copy = machine.run_all(
        prepare("hf:someone/made"), prepare("hf:someone/made@refs/convert/parquet")
    )
    assert program.fails("made by a program, which is not run", "hf:someone/made@refs/convert")
    assert copy.done and tokens(machine) == texts("made")


def test_an_old_name_leads_to_the_new_one(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    hub.move("datasets", "books", to=BOOKS)
    made = machine.run(*prepare("hf:books"))
    assert made.done and tokens(machine) == texts("old")
    assert made.notes == ["hf:books: reading the column 'text'"]


def test_gated_and_missing(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books(), gated=True)
    source = f"hf:{BOOKS}"
    gated, missing = machine.run_all(prepare(source), prepare("hf:no/such"))
    page = f"accept it at {hub.url}/datasets/{BOOKS}"
    assert gated.fails(f"error: {source}: the dataset '{BOOKS}' is gated", page)
    assert missing.fails("there is no dataset 'no/such' on Hugging Face", "hf:./folder")
    stranger = machine.run(*prepare(source), HF_TOKEN="hf_stranger")
    assert stranger.fails("your account has no access")
    assert machine.run(*prepare(source), HF_TOKEN="hf_reader").done


def test_no_network(hub: Any, machine: Any) -> None:
    hub.close()
    source, how = f"hf:{BOOKS}", f"`hf download {BOOKS} --repo-type dataset`"
    gone = machine.run(*prepare(source))
    assert gone.fails("is not in the cache", "cannot be reached", how)
    offline = machine.run(*prepare(source), HF_HUB_OFFLINE="1")
    assert offline.fails("is not in the cache, and HF_HUB_OFFLINE is set", how)


def test_the_remedy_without_network_gets_only_what_is_wanted(hub: Any, machine: Any) -> None:
    hub.close()
    sample = "hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include README.md"
    corpus, same, other = machine.run_all(
        prepare("fineweb-edu-10bt"),
        prepare("hf:HuggingFaceFW/fineweb-edu?config=sample-10BT"),
        prepare("hf:HuggingFaceFW/fineweb-edu?config=sample-99BT"),
    )
    for finished in (corpus, same):
        assert finished.fails(f"run `{sample} --include 'sample/10BT/*'`")
    assert other.fails("this is all of it; --include takes only the files of 'sample-99BT'")


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_connection_is_resumed(hub: Any, machine: Any, reset: bool) -> None:
    hub.dataset(BOOKS, books())
    hub.cut("train-00001", times=1, after=100, reset=reset)
    made = machine.run(*prepare(f"hf:{BOOKS}"))
    assert made.done and hub.faults[0].times == 0
    assert tokens(machine) == texts("old")
    assert made.notes[-1] == "Hugging Face: no answer; trying again in 1.0s"


def test_too_many_requests(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    hub.refuse("/api/datasets/", times=2)
    made, quiet = machine.run_all(
        prepare(f"hf:{BOOKS}"), prepare(f"hf:{BOOKS}", "other", "--quiet")
    )
    wait = "Hugging Face: too many requests; trying again in 0.0s"
    assert made.done and made.notes == [wait, f"hf:{BOOKS}: reading the column 'text'"]
    assert quiet.done and quiet.errors == ""


def test_what_was_downloaded_is_read_from_the_cache(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    machine.download(BOOKS)
    count = len(hub.asked("parquet"))
    source = f"hf:{BOOKS}"
    assert machine.run(*prepare(source, "near")).done
    assert len(hub.asked("parquet")) == count
    offline = machine.run(*prepare(source, "offline"), HF_HUB_OFFLINE="1")
    assert offline.done and offline.notes == [f"{source}: reading the column 'text'"]
    hub.close()
    assert machine.run(*prepare(source, "gone")).done
    for part in ("config", "split"):
        assert machine.run(*prepare(f"{source}?{part}=x")).fails(f"there is no {part} 'x': the ")
    for output in ("near", "offline", "gone"):
        assert tokens(machine, output) == texts("old")


def test_a_part_in_the_cache_is_not_taken_for_all(hub: Any, machine: Any) -> None:
    hub.dataset(BOOKS, books())
    machine.download(BOOKS, allow_patterns=["README.md", "data/train-00000*", "data/test*"])
    assert machine.run(*prepare(f"hf:{BOOKS}")).done
    assert tokens(machine) == texts("old")
    hub.close()
    assert machine.run(*prepare(f"hf:{BOOKS}", "other")).fails(
        "the cache lacks 1 of the dataset's files: data/train-00001-of-00002.parquet",
        f"`hf download {BOOKS} --repo-type dataset --include README.md --include 'data/*.parquet'`",
    )


def test_one_config_in_the_cache_is_enough(hub: Any, machine: Any) -> None:
    configs = {name: {"train": f"{name}/*"} for name in ("all", "sample")}
    files = {f"{name}/{n}.parquet": parquet(texts(name, 3)) for name in configs for n in (1, 2)}
    hub.dataset(BOOKS, {"README.md": card(configs), **files})
    machine.download(BOOKS, allow_patterns=["README.md", "sample/*"])
    hub.close()
    whole, part = machine.run_all(
        prepare(f"hf:{BOOKS}?config=sample"), prepare(f"hf:{BOOKS}?config=all", "other")
    )
    assert whole.done and tokens(machine) == texts("sample", 3) * 2
    assert part.fails(f"the dataset '{BOOKS}' is not in the cache")


def test_from_the_hub_to_a_trained_model(hub: Any, machine: Any, model_files: Any) -> None:
    hub.dataset(BOOKS, books())
    hub.model("someone/tiny", model_files)
    run = machine.work / "run.toml"
    run.write_text(
        'name = "hub"\nfolder = "run"\n[model]\nstart = "someone/tiny@main"\n'
        '[data]\npaths = "tokens"\nsplit = "90,10"\n[train]\nuntil = "2 steps"\nbatch = 2\n'
        '[runtime]\ndevice = "cpu"\nthreads = 1\n'
    )
    words = ("-o", "tokens", "-t", "someone/tiny", "--workers", "1")
    made, trained = machine.run_all(("prepare", f"hf:{BOOKS}", *words), ("train", str(run)))
    assert made.done and trained.done
    assert (machine.work / "run" / "checkpoints" / "step-00000002").is_dir()
    hub.close()
    shutil.rmtree(machine.home / "huggingface")
    evaluated = machine.run("evaluate", "run", "--device", "cpu")
    assert evaluated.done and "perplexity" in evaluated.output
