"""The data commands of the systems that people come from, with small files in place of downloads.

Each test does with `gristmill prepare` what one of their guides does, and looks at the files that
the guide promises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gristmill.base.errors import UserError
from gristmill.cli.main import app
from gristmill.text.sources.corpora import Corpus
from gristmill.text.tokenizers.kinds import TokenizerKind
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer

TEXTS = [
    f"Document {n}: the quick brown fox jumps over the lazy dog, {n * n} times." for n in range(300)
]


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_loose_json(path: str, texts: list[str]) -> None:
    lines = [
        json.dumps({"src": "here", "text": text, "type": "Eng", "id": str(n), "title": "Part"})
        for n, text in enumerate(texts)
    ]
    Path(path).write_text("\n".join(lines) + "\n")


def write_gpt2_files() -> None:
    """A small vocabulary under the names of the guides."""
    definition = json.loads(train_tokenizer(iter(TEXTS), vocab_size=400).definition or "")
    Path("gpt2-vocab.json").write_text(
        json.dumps(definition["model"]["vocab"] | {"<|endoftext|>": 399})
    )
    merges = "".join(" ".join(pair) + "\n" for pair in definition["model"]["merges"])
    Path("gpt2-merges.txt").write_text("#version: 0.2\n" + merges)


def documents(prefix: str) -> Iterator[np.ndarray]:
    """The sequences of a Megatron set, by its index alone."""
    index = Path(f"{prefix}.idx").read_bytes()
    count = int(np.frombuffer(index, "<u8", count=1, offset=18)[0])
    lengths = np.frombuffer(index, "<i4", count=count, offset=34)
    begins = np.frombuffer(index, "<i8", count=count, offset=34 + 4 * count)
    ids = np.fromfile(f"{prefix}.bin", "<u2")
    for begin, length in zip(begins, lengths, strict=True):
        yield ids[begin // 2 : begin // 2 + length]


def test_megatron_deepspeed_my_gpt2() -> None:
    write_loose_json("my-corpus.json", TEXTS)
    write_gpt2_files()
    run("prepare", "my-corpus.json", "-o", "my-gpt2", "--format", "megatron", "--append-eod",
        "--vocab-file", "gpt2-vocab.json", "--merge-file", "gpt2-merges.txt")  # fmt: skip
    tokenizer = open_tokenizer("my-gpt2_text_document.tokenizer")
    for text, ids in zip(TEXTS, documents("my-gpt2_text_document"), strict=True):
        assert ids[-1] == tokenizer.end_of_text == 399
        assert tokenizer.decode(ids[:-1].tolist()) == text


def test_megatron_deepspeed_merge_of_three_parts() -> None:
    write_gpt2_files()
    files = ("--vocab-file", "gpt2-vocab.json", "--merge-file", "gpt2-merges.txt")
    write_loose_json("all.json", TEXTS)
    run("prepare", "all.json", "-o", "all", "--format", "megatron", *files)
    prefixes = []
    for part in (1, 2, 3):
        write_loose_json(f"p{part}.json", TEXTS[100 * part - 100 : 100 * part])
        name = f"meg-gpt2-oscar-en-500-p{part}"
        run("prepare", f"p{part}.json", "-o", name, "--format", "megatron", *files)
        prefixes.append(f"{name}_text_document")
    run("tokens", "merge", *prefixes, "-o", "meg-gpt2_oscar_text_document")
    for ending in (".bin", ".idx", ".ledger.json"):
        merged = Path("meg-gpt2_oscar_text_document" + ending).read_bytes()
        assert merged == Path("all_text_document" + ending).read_bytes()


def test_megatron_deepspeed_pretrained_tokenizer_ends_a_document_once() -> None:
    write_loose_json("c4_en_train.jsonl", TEXTS)
    train_tokenizer(iter(TEXTS), vocab_size=400, kind=TokenizerKind.UNIGRAM).save(Path("t5-like"))
    run("prepare", "c4_en_train.jsonl", "-o", "c4_en_train", "--format", "megatron",
        "-t", "t5-like", "--workers", 2, "--append-eod")  # fmt: skip
    end = open_tokenizer("t5-like").end_of_text
    for ids in documents("c4_en_train_text_document"):
        assert (ids == end).sum() == 1
        assert ids[-1] == end


def test_a_seed_without_documents_held_out() -> None:
    write_loose_json("a.json", TEXTS)
    for source in ("a.json", "wikitext-2"):
        with pytest.raises(UserError, match="a seed chooses"):
            run("prepare", source, "-o", "a", "-t", "bytes", "--seed", 3)


def test_only_one_of_two_vocabulary_files() -> None:
    write_loose_json("a.json", TEXTS)
    with pytest.raises(UserError, match="belong together"):
        run("prepare", "a.json", "-o", "a", "--vocab-file", "gpt2-vocab.json")


def save_dataset(folder: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS, "url": [""] * len(TEXTS)})
    rows.to_parquet(f"{folder}/data.parquet")


def test_decentralized_gpt2_openwebtext(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    save_dataset("owt")
    corpus = Corpus(
        name="openwebtext", title="small", homepage="-", licence="-", dataset="./owt",
        split="train", documents=len(TEXTS), held_out=0.01, seed=2357, split_as_published=True,
    )  # fmt: skip
    monkeypatch.setattr("gristmill.text.sources.corpora.find_corpus", lambda name: corpus)
    shown = run("prepare", "openwebtext", "-o", "data/openwebtext/{split}", "-t", "bytes")
    assert shown.index("licence") < shown.index("tokens in")
    expected = datasets.Dataset.from_dict({"text": TEXTS}).train_test_split(
        test_size=0.01, seed=2357, shuffle=True
    )
    for name, other in (("train", "train"), ("val", "test")):
        ids = np.fromfile(f"data/openwebtext/{name}.bin", "<u2")
        ends = np.flatnonzero(ids == 256)
        texts = [bytes(part[part < 256].astype("u1")).decode() for part in np.split(ids, ends + 1)]
        assert sorted(texts[:-1]) == sorted(expected[other]["text"])


def test_xla_gpt2_fineweb() -> None:
    save_dataset("fineweb")
    run("prepare", "hf:./fineweb", "-o", "fineweb_10BT/{split}/fineweb", "-t", "bytes",
        "--format", "npy", "--shard-size", 5000, "--split", "9,1", "--seed", 7)  # fmt: skip
    shards = sorted(Path("fineweb_10BT/train").glob("*.npy"))
    arrays = [np.load(path) for path in shards]
    assert [path.name for path in shards[:2]] == ["fineweb_000001.npy", "fineweb_000002.npy"]
    assert {array.dtype.name for array in arrays} == {"uint16"}
    assert {len(array) for array in arrays[:-1]} == {5000}
    assert 0 < len(arrays[-1]) <= 5000
    assert list(Path("fineweb_10BT/val").glob("*.npy"))
    assert Path("fineweb_10BT/fineweb.ledger.json").is_file()
    assert sorted(path.name for path in Path("fineweb_10BT").iterdir()) == [
        "fineweb.ledger.json", "train", "val"
    ]  # fmt: skip


def test_several_keys_and_the_list_of_corpora() -> None:
    write_loose_json("a.json", TEXTS)
    run("prepare", "a.json", "-o", "a", "-t", "bytes", "--json-key", "text", "--json-key", "title")
    assert Path("a_text.bin").is_file() and Path("a_title.bin").is_file()
    listed = run("prepare", "--corpora")
    for words in ("openwebtext", "fineweb-edu-10bt", "wikitext-103", "pile-10k", "licence"):
        assert words in listed
