"""Preparation: every line accounted for, end-of-text after each document, nothing half done."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import seal_of
from gristmill.cli.main import app
from gristmill.text.prepare import prepare as module
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.outputs import PreparedSet
from gristmill.text.prepare.prepare import PrepareResult, prepare, prepare_documents
from gristmill.text.prepare.request import PrepareRequest, parse_holdout
from gristmill.text.prepare.work_plan import PrepareProgress
from gristmill.text.sources.source import Document, DocumentSplit, Dropped, ReadOptions, Reason
from gristmill.text.tokenizers.tokenizer import ByteTokenizer, open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer
from gristmill.tokens.store import open_tokens, verify_tokens

BYTES = ByteTokenizer()


def run(sources: list[Path], output: Path, **settings: Any) -> PrepareResult:
    heard = {name: settings.pop(name) for name in ("progress", "note") if name in settings}
    settings.setdefault("tokenizer", BYTES)
    return prepare(PrepareRequest([str(path) for path in sources], output, **settings), **heard)


def ledger_of(result: PrepareResult) -> Ledger:
    assert len(result.keys) == 1
    return result.keys[0].ledger


def set_of(result: PrepareResult) -> PreparedSet:
    assert len(result.keys) == len(result.keys[0].sets) == 1
    return result.keys[0].sets[0]


def text_of(prefix: Path) -> str:
    reader = open_tokens(prefix)
    return BYTES.decode(reader.read(0, len(reader)).tolist())


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "ab"}\nnonsense\n{"text": "c"}\n{"body": "d"}\n{"text": "é"}\n')
    return path


def test_the_set_and_what_lies_beside_it(lines: Path, tmp_path: Path) -> None:
    result = run([lines], tmp_path / "out" / "set")
    reader = open_tokens(tmp_path / "out" / "set")
    assert reader.read(0, len(reader)).tolist() == [97, 98, 256, 99, 256, 0xC3, 0xA9, 256]
    assert reader.document_starts.tolist() == [0, 3, 5]
    assert reader.info == set_of(result).info
    assert (result.text_bytes, reader.info.text_bytes, result.encoder) == (5, 5, "bytes")
    assert reader.info.tokenizer == BYTES.fingerprint
    assert verify_tokens(tmp_path / "out" / "set") == []
    assert open_tokenizer(tmp_path / "out" / "set.tokenizer").spec == BYTES.spec
    ledger = json.loads((tmp_path / "out" / "set.ledger.json").read_text())
    assert ledger.pop("seal") == seal_of(ledger)
    assert ledger == {
        "lines": 5,
        "kept": 3,
        "dropped": {"invalid json": 1, "missing key": 1},
        "first_dropped": [
            {"origin": f"{lines}:2", "reason": "invalid json"},
            {"origin": f"{lines}:4", "reason": "missing key"},
        ],
        "skipped": {},
        "first_skipped": [],
    }
    assert sorted(os.listdir(tmp_path / "out")) == [
        "set.bin", "set.json", "set.ledger.json", "set.origins", "set.starts", "set.tokenizer"
    ]  # fmt: skip


def test_without_end_of_text(lines: Path, tmp_path: Path) -> None:
    info = set_of(run([lines], tmp_path / "set", append_end_of_text=False)).info
    assert (info.tokens, info.documents) == (5, 3)


def test_key_and_split(lines: Path, tmp_path: Path) -> None:
    assert ledger_of(run([lines], tmp_path / "a", options=ReadOptions(keys=("body",)))).kept == 1
    text = tmp_path / "in.txt"
    text.write_text("a\nb\n\nc\n")
    options = ReadOptions(split=DocumentSplit.BLANK)
    assert set_of(run([text], tmp_path / "b", options=options)).info.documents == 2


def test_several_keys_make_several_sets(lines: Path, tmp_path: Path) -> None:
    result = run([lines], tmp_path / "set", options=ReadOptions(keys=("text", "body")))
    text, body = result.keys
    assert (text.ledger.kept, body.ledger.kept) == (3, 1)
    assert (text.ledger.lines, body.ledger.lines) == (5, 5)
    assert text_of(tmp_path / "set_body") == "d<|endoftext|>"
    assert body.ledger_file == tmp_path / "set_body.ledger.json"
    assert (tmp_path / "set_text.tokenizer").is_dir()


def test_megatron_files_have_the_names_its_users_expect(lines: Path, tmp_path: Path) -> None:
    made = set_of(run([lines], tmp_path / "my-gpt2", format="megatron"))
    assert made.prefix == tmp_path / "my-gpt2_text_document"
    assert {path.name for path in tmp_path.glob("my-gpt2*")} == {
        "my-gpt2_text_document" + ending
        for ending in (".bin", ".idx", ".json", ".ledger.json", ".origins", ".tokenizer")
    }


def test_strict_stops_at_the_first_drop_and_leaves_nothing(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="invalid json") as caught:
        run([lines], tmp_path / "out" / "set", strict=True, save_every=0)
    assert caught.value.problems[0].where == f"{lines}:2"
    assert caught.value.exit is Exit.DATA
    assert os.listdir(tmp_path / "out") == []


def test_no_document_is_an_error_and_leaves_nothing(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in 5 lines .*4 missing key"):
        run([lines], tmp_path / "out" / "set", options=ReadOptions(keys=("content",)))
    assert os.listdir(tmp_path / "out") == []


def test_an_existing_set_is_kept_unless_overwritten(lines: Path, tmp_path: Path) -> None:
    run([lines], tmp_path / "set")
    before, files = (tmp_path / "set.bin").read_bytes(), sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match="already a token set"):
        run([lines], tmp_path / "set")
    assert sorted(os.listdir(tmp_path)) == files
    with pytest.raises(UserError):
        run([lines], tmp_path / "set", overwrite=True, strict=True)
    assert (tmp_path / "set.bin").read_bytes() == before
    assert verify_tokens(tmp_path / "set") == []
    learnt = train_tokenizer(iter(["abab"]), vocab_size=258)
    run([lines], tmp_path / "set", tokenizer=learnt, overwrite=True)
    assert open_tokens(tmp_path / "set").info.tokenizer == learnt.fingerprint
    assert open_tokenizer(tmp_path / "set.tokenizer").fingerprint == learnt.fingerprint


def test_the_source_is_not_replaced_by_the_manifest(tmp_path: Path) -> None:
    source = tmp_path / "corpus.json"
    source.write_text('{"text": "mine"}\n')
    with pytest.raises(UserError, match="another name"):
        run([source], tmp_path / "corpus", overwrite=True)
    assert source.read_text() == '{"text": "mine"}\n'


def test_an_interruption_of_documents_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Any:
        yield Document("a", "here:1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_documents(interrupted(), tokenizer=BYTES, output=tmp_path / "set")
    assert os.listdir(tmp_path) == []


def test_progress_counts_bytes_on_disk(lines: Path, tmp_path: Path) -> None:
    seen: list[PrepareProgress] = []
    options = ReadOptions(block_bytes=40)
    run([lines], tmp_path / "set", progress=seen.append, options=options, workers=1)
    assert [(state.documents, state.tokens) for state in seen] == [(2, 5), (3, 8)]
    assert seen[-1].bytes_done == seen[-1].bytes_total == lines.stat().st_size
    assert 0 <= seen[0].seconds <= seen[1].seconds


def test_only_the_first_hundred_places_are_kept(tmp_path: Path) -> None:
    items = [*(Dropped(Reason.WRONG_TYPE, f"a:{n}") for n in range(1, 300)), Document("x", "a:300")]
    ledger = ledger_of(prepare_documents(items, tokenizer=BYTES, output=tmp_path / "set"))
    assert ledger.dropped == {Reason.WRONG_TYPE: 299}
    assert [place.origin for place in ledger.places] == [f"a:{n}" for n in range(1, 101)]


REASONS = [Reason.EMPTY_TEXT, Reason.WRONG_TYPE]
ITEMS = st.lists(
    st.one_of(
        st.builds(Document, text=st.text(max_size=30), origin=st.just("a:1")),
        st.builds(Dropped, reason=st.sampled_from(REASONS), origin=st.just("a:1")),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(items=ITEMS, batch=st.integers(1, 5))
def test_every_line_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, items: list[Document | Dropped], batch: int
) -> None:
    items = [*items, Document("last", "a:1")]
    output = tmp_path_factory.mktemp("out") / "set"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_BATCH", batch)
        ledger = ledger_of(prepare_documents(items, tokenizer=BYTES, output=output))
    offered = [item for item in items if isinstance(item, Document)]
    kept = [item.text for item in offered if item.text]
    reasons = Counter(item.reason for item in items if isinstance(item, Dropped))
    reasons[Reason.EMPTY_TEXT] += len(offered) - len(kept)
    assert ledger.dropped == {reason: count for reason, count in reasons.items() if count}
    assert ledger.lines == len(items) == ledger.kept + sum(ledger.dropped.values())
    assert text_of(output) == "".join(text + "<|endoftext|>" for text in kept)
    assert open_tokens(output).info.documents == ledger.kept == len(kept)


# ------------------------------------------------------------------ documents held out


@pytest.fixture
def thousand(tmp_path: Path) -> Path:
    path = tmp_path / "thousand.jsonl"
    path.write_text("".join(json.dumps({"text": f"doc {n}"}) + "\n" for n in range(1000)))
    return path


def test_documents_held_out(thousand: Path, tmp_path: Path) -> None:
    holdout = parse_holdout("0.9,0.1", seed=7)
    made = run([thousand], tmp_path / "set", holdout=holdout).keys[0]
    train, val = (text_of(one.prefix).split("<|endoftext|>")[:-1] for one in made.sets)
    assert [one.prefix.name for one in made.sets] == ["set_train", "set_val"]
    assert 50 < len(val) < 150
    assert sorted(train + val) == sorted(f"doc {n}" for n in range(1000))
    assert train == sorted(train, key=lambda text: int(text[4:])), "the order is kept"
    assert made.ledger.kept == 1000
    again = run([thousand], tmp_path / "b" / "{split}", holdout=parse_holdout("9,1", seed=7))
    assert [one.prefix.name for one in again.keys[0].sets] == ["train", "val"]
    assert text_of(tmp_path / "b" / "val") == text_of(tmp_path / "set_val")
    assert again.keys[0].ledger_file == tmp_path / "b" / "all.ledger.json"
    other = run([thousand], tmp_path / "c", holdout=parse_holdout("9,1", seed=8))
    assert text_of(other.keys[0].sets[1].prefix) != text_of(tmp_path / "set_val")


def test_three_sets_and_an_empty_one(thousand: Path, tmp_path: Path) -> None:
    made = run([thousand], tmp_path / "set", holdout=parse_holdout("8,1,1", seed=1)).keys[0]
    assert [one.prefix.name for one in made.sets] == ["set_train", "set_val", "set_test"]
    assert sum(one.info.documents for one in made.sets) == 1000
    with pytest.raises(UserError, match="none of 1000 documents fell into this set") as caught:
        run([thousand], tmp_path / "x", holdout=parse_holdout("1e9,1", seed=1))
    assert caught.value.problems[0].where == str(tmp_path / "x_val")
    assert list(tmp_path.glob("*x*")) == []
    for wrong in ("", "1", "0,1", "a,b", "1,2,3,4", "-1,2"):
        with pytest.raises(UserError, match="does not divide"):
            parse_holdout(wrong, seed=0)


# ------------------------------------------------------------------ workers


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("format", ["flat", "megatron", "llmc", "npy"])
def test_the_output_is_the_same_for_any_number_of_workers(tmp_path: Path, format: str) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for n in range(3000):
            file.write("nonsense\n" if n % 97 == 5 else json.dumps({"text": f"{n} é" * 30}) + "\n")
    (tmp_path / "more").mkdir()
    for n in range(40):
        (tmp_path / "more" / f"{n:02}.txt").write_text(f"small file {n}\n" if n % 7 else "")
    learnt = train_tokenizer(iter(["small file 1 é 2 é 3 é " * 9]), vocab_size=270)
    results = []
    for workers, block in ((1, 1 << 20), (2, 3000), (3, 70_000)):
        folder = tmp_path / f"{workers}"
        options: dict[str, Any] = {"shard_size": 5000} if format in ("llmc", "npy") else {}
        run(
            [source, tmp_path / "more"],
            folder / "set",
            tokenizer=learnt,
            format=format,
            workers=workers,
            options=ReadOptions(block_bytes=block),
            **options,
        )
        results.append(files_of(folder))
    assert results[0] == results[1] == results[2]


def test_a_worker_that_ends_is_an_error_and_the_work_can_go_on(
    thousand: Path, tmp_path: Path
) -> None:
    def kill(state: PrepareProgress) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    options = ReadOptions(block_bytes=100)
    with pytest.raises(UserError, match="worker process ended"):
        run(
            [thousand],
            tmp_path / "out" / "set",
            workers=2,
            options=options,
            save_every=0,
            progress=kill,
        )
    assert not (tmp_path / "out" / "set.json").exists()
    notes: list[str] = []
    run([thousand], tmp_path / "out" / "set", workers=1, note=notes.append)
    assert "resuming" in notes[0]
    run([thousand], tmp_path / "whole" / "set")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def command(*words: object) -> str:
    result = CliRunner().invoke(app, ["prepare", *map(str, words), "--workers", "1"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    text = "ä" * 11 + "bc" * 10
    (tmp_path / "a.txt").write_text(text)
    output = ("-o", tmp_path / "{split}", "--no-append-eod")
    command(tmp_path / "a.txt", *output, "-t", "bytes", "--hold-out-end", 0.25)
    found = [np.fromfile(tmp_path / f"{name}.bin", "<u2") for name in ("train", "val")]
    cut = int(len(text) * 0.75)
    assert [bytes(ids.astype("u1")).decode() for ids in found] == [text[:cut], text[cut:]]
    # The characters are those of both sets.
    words = ("-o", tmp_path / "char", "-t", "characters", "--hold-out-end", 0.25)
    command(tmp_path / "a.txt", *words)
    for name in ("train", "val"):
        assert open_tokens(tmp_path / f"char_{name}").info.vocab_size == 5
        assert open_tokenizer(tmp_path / f"char_{name}.tokenizer").encode("cbä") == [1, 0, 2]


def test_a_tokenizer_is_learnt_from_the_text(tmp_path: Path) -> None:
    texts = [f"the mill number {n} grinds the corn of number {n + 1}" for n in range(40)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    command(*sorted(tmp_path.glob("*.txt")), "-o", tmp_path / "out", "-t", "bpe:300")
    learnt = train_tokenizer(iter(texts), vocab_size=300)
    assert open_tokens(tmp_path / "out").info.tokenizer == learnt.fingerprint
    assert open_tokenizer(tmp_path / "out.tokenizer").encode(texts[0]) == learnt.encode(texts[0])


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("a.txt", "--hold-out-end", "1"), "1 is no share of a text"),
        (("a.txt", "--hold-out-end", "nan"), "is no share of a text"),
        (("a.txt", "--hold-out-end", "0.1", "--split", "9,1"), "holds documents out already"),
        (("a.txt", "--hold-out-end", "0.1", "--part", "1/2"), "not divided into parts"),
        (("openwebtext", "--hold-out-end", "0.1"), "openwebtext has documents to hold out"),
        (("a.jsonl", "--hold-out-end", "0.1"), "only the end of a plain text file"),
        (("a.txt", "--hold-out-end", "0.1", "--documents", "line"), "only the end of a plain text"),
        (("a.txt", "-t", "characters", "--part", "1/2"), "made of the whole text"),
        (("a.txt", "-t", "bpe:300", "--parts", "2", "--engine", "local"), "tokenizer train"),
        (("-", "-t", "bpe:300"), "cannot be read twice"),
        (("a.txt", "-t", "bpe:30000"), "ask for at most"),
        (("a.txt", "-t", "bpe:9"), "too small"),
        (("-", "-t", "characters"), "cannot be read twice"),
    ],
)
def test_what_cannot_be_held_out_or_collected(
    words: tuple[str, ...], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    Path("a.jsonl").write_text('{"text": "some"}\n')
    tokenizer = () if "-t" in words else ("-t", "bytes")
    with pytest.raises(UserError, match=shown):
        command(*words, "-o", "out", *tokenizer)
    assert not list(tmp_path.glob("out*"))
