"""Preparation: every line accounted for, end-of-text after each document, nothing half done."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.text import prepare as module
from gristmill.text.prepare import PrepareProgress, PrepareResult, prepare, prepare_documents
from gristmill.text.sources import Document, DocumentSplit, Dropped, Reason
from gristmill.text.tokenizers import ByteTokenizer, open_tokenizer, train_tokenizer
from gristmill.tokens.store import open_tokens, verify_tokens

BYTES = ByteTokenizer()


def run(sources: list[Path], output: Path, **options: Any) -> PrepareResult:
    return prepare([str(path) for path in sources], tokenizer=BYTES, output=output, **options)


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
    assert reader.info == result.info
    assert (result.tokens, result.text_bytes, result.info.text_bytes) == (8, 5, 5)
    assert result.info.tokenizer == BYTES.fingerprint
    assert verify_tokens(tmp_path / "out" / "set") == []
    assert open_tokenizer(tmp_path / "out" / "set.tokenizer").spec == BYTES.spec
    assert json.loads((tmp_path / "out" / "set.ledger.json").read_text()) == {
        "lines": 5,
        "kept": 3,
        "dropped": {"invalid json": 1, "missing key": 1},
        "first_dropped": [
            {"origin": f"{lines}:2", "reason": "invalid json"},
            {"origin": f"{lines}:4", "reason": "missing key"},
        ],
    }
    assert sorted(os.listdir(tmp_path / "out")) == [
        "set.bin", "set.json", "set.ledger.json", "set.starts", "set.tokenizer"
    ]  # fmt: skip


def test_without_end_of_text(lines: Path, tmp_path: Path) -> None:
    result = run([lines], tmp_path / "set", append_end_of_text=False)
    assert (result.tokens, result.info.documents) == (5, 3)


def test_key_and_split(lines: Path, tmp_path: Path) -> None:
    assert run([lines], tmp_path / "a", json_key="body").ledger.kept == 1
    text = tmp_path / "in.txt"
    text.write_text("a\nb\n\nc\n")
    assert run([text], tmp_path / "b", split=DocumentSplit.BLANK).info.documents == 2


def test_strict_stops_at_the_first_drop_and_leaves_nothing(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="invalid json") as caught:
        run([lines], tmp_path / "out" / "set", strict=True)
    assert caught.value.problems[0].where == f"{lines}:2"
    assert caught.value.exit is Exit.DATA
    assert os.listdir(tmp_path / "out") == []


def test_no_document_is_an_error_and_leaves_nothing(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in 5 lines .*4 missing key"):
        run([lines], tmp_path / "out" / "set", json_key="content")
    assert os.listdir(tmp_path / "out") == []


def test_an_existing_set_is_kept_unless_overwritten(lines: Path, tmp_path: Path) -> None:
    run([lines], tmp_path / "set")
    before = (tmp_path / "set.bin").read_bytes()
    with pytest.raises(UserError, match="already a token set"):
        run([lines], tmp_path / "set")
    with pytest.raises(UserError):
        run([lines], tmp_path / "set", overwrite=True, strict=True)
    assert (tmp_path / "set.bin").read_bytes() == before
    assert verify_tokens(tmp_path / "set") == []
    learnt = train_tokenizer(iter(["abab"]), vocab_size=258)
    prepare([str(lines)], tokenizer=learnt, output=tmp_path / "set", overwrite=True)
    assert open_tokens(tmp_path / "set").info.tokenizer == learnt.fingerprint
    assert open_tokenizer(tmp_path / "set.tokenizer").fingerprint == learnt.fingerprint


def test_the_source_is_not_replaced_by_the_manifest(tmp_path: Path) -> None:
    source = tmp_path / "corpus.json"
    source.write_text('{"text": "mine"}\n')
    with pytest.raises(UserError, match="another name"):
        run([source], tmp_path / "corpus", overwrite=True)
    assert source.read_text() == '{"text": "mine"}\n'


def test_limit(lines: Path, tmp_path: Path) -> None:
    result = run([lines], tmp_path / "set", limit=2)
    assert (result.ledger.lines, result.ledger.kept, result.info.documents) == (3, 2, 2)


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Any:
        yield Document("a", "here:1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_documents(interrupted(), tokenizer=BYTES, output=tmp_path / "set")
    assert os.listdir(tmp_path) == []


def test_progress_counts_bytes_on_disk(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_DOCUMENTS", 2)
    seen: list[PrepareProgress] = []
    run([lines], tmp_path / "set", progress=seen.append)
    assert [(state.documents, state.tokens) for state in seen] == [(2, 5), (3, 8)]
    assert seen[-1].bytes_done == seen[-1].bytes_total == lines.stat().st_size
    assert 0 <= seen[0].seconds <= seen[1].seconds


def test_progress_of_documents_counts_their_text(tmp_path: Path) -> None:
    seen: list[PrepareProgress] = []
    documents = [Document("é", "a:1"), Document("b", "a:2")]
    prepare_documents(documents, tokenizer=BYTES, output=tmp_path / "set", progress=seen.append)
    assert (seen[-1].bytes_done, seen[-1].bytes_total) == (3, None)


def test_only_the_first_hundred_places_are_kept(tmp_path: Path) -> None:
    items = [*(Dropped(Reason.WRONG_TYPE, f"a:{n}") for n in range(1, 300)), Document("x", "a:300")]
    ledger = prepare_documents(items, tokenizer=BYTES, output=tmp_path / "set").ledger
    assert ledger.dropped == {Reason.WRONG_TYPE: 299}
    assert [place.origin for place in ledger.places] == [f"a:{n}" for n in range(1, 101)]


ITEMS = st.lists(
    st.one_of(
        st.builds(Document, text=st.text(max_size=30), origin=st.just("a:1")),
        st.builds(Dropped, reason=st.sampled_from(Reason), origin=st.just("a:1")),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(items=ITEMS, limit=st.none() | st.integers(1, 10), batch=st.integers(1, 5))
def test_every_line_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory,
    items: list[Document | Dropped],
    limit: int | None,
    batch: int,
) -> None:
    items = [*items, Document("last", "a:1")] if limit is None else [Document("a", "a:1"), *items]
    output = tmp_path_factory.mktemp("out") / "set"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_BATCH_DOCUMENTS", batch)
        result = prepare_documents(items, tokenizer=BYTES, output=output, limit=limit)
    ledger = result.ledger
    read = items[: ledger.lines]
    offered = [item for item in read if isinstance(item, Document)]
    kept = [item.text for item in offered if item.text]
    reasons = Counter(item.reason for item in read if isinstance(item, Dropped))
    reasons[Reason.EMPTY_TEXT] += len(offered) - len(kept)
    assert ledger.dropped == {reason: count for reason, count in reasons.items() if count}
    assert ledger.lines == ledger.kept + sum(ledger.dropped.values())
    assert len(offered) == limit or read == items
    reader = open_tokens(output)
    ids = reader.read(0, len(reader)).tolist()
    assert BYTES.decode(ids) == "".join(text + "<|endoftext|>" for text in kept)
    assert reader.info.documents == ledger.kept == len(kept)
