"""A rank file becomes a byte-level BPE with the ids of tiktoken."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.text.tokenizers import vocabularies
from gristmill.text.tokenizers.library import BpeTokenizer
from gristmill.text.tokenizers.tokenizer import END_OF_TEXT, open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer
from gristmill.text.tokenizers.vocabularies import ENCODINGS, from_ranks, read_ranks

TEXT = (
    "the mill grinds grain, 12345 678 times; it's HE'LL don't\n\n  and the wheel\r\n turns  /// "
    "naïve café Zürich 磨坊 磨面 мельница мелет зерно 🌾🌾 \u00a0\u2003 \t\t x = f(y)\n    z\n"
)
TRICKY = st.text(st.sampled_from("aAsSlLtTvV'' \n\r\t\u00a01²٣é磨🌾/.ſǅ\u0301"))


def small_ranks() -> dict[bytes, int]:
    """The bytes in an order of their own, then what a BPE of the text has learnt."""
    learnt = train_tokenizer(iter([TEXT] * 5), vocab_size=380)
    order = random.Random(3).sample(range(256), 256)
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    return ranks | {learnt.token_bytes(id): id for id in range(256, 379)}


RANKS = small_ranks()


def opened(
    ranks: Mapping[bytes, int], *, pattern: str | None = None, special: Mapping[str, int]
) -> BpeTokenizer:
    inner = from_ranks(ranks, pattern=pattern, special=special)
    return BpeTokenizer(inner, end_of_text=END_OF_TEXT)


def write(path: Path, ranks: Mapping[bytes, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    )


@pytest.fixture(scope="module")
def tiktoken_tables() -> dict[str, dict[str, Any]]:
    """What tiktoken says of each encoding, and which file it would fetch."""
    openai = pytest.importorskip("tiktoken_ext.openai_public")

    def note(url: str, expected_hash: str) -> dict[str, str]:
        return {"url": url, "sha256": expected_hash}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai, "load_tiktoken_bpe", note)
        return {name: getattr(openai, name)() for name in ENCODINGS}


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_table_is_tiktoken_s(name: str, tiktoken_tables: dict[str, Any]) -> None:
    ours, theirs = ENCODINGS[name], tiktoken_tables[name]
    assert dict(ours.special) == theirs["special_tokens"]
    url, sha256 = f"{vocabularies.URL}{ours.ranks}.tiktoken", vocabularies.SHA256[ours.ranks]
    assert theirs["mergeable_ranks"] == {"url": url, "sha256": sha256}


@pytest.fixture(scope="module")
def both(tiktoken_tables: dict[str, Any]) -> dict[str, tuple[BpeTokenizer, Any]]:
    """Our tokenizer and tiktoken's for each encoding, with small ranks."""
    tiktoken = pytest.importorskip("tiktoken")
    special = {END_OF_TEXT: 425}
    return {
        name: (
            opened(RANKS, pattern=encoding.pattern, special=special),
            tiktoken.Encoding(
                name,
                pat_str=tiktoken_tables[name]["pat_str"],
                mergeable_ranks=RANKS,
                special_tokens=special,
            ),
        )
        for name, encoding in ENCODINGS.items()
    }


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | TRICKY)
@example(text=TEXT)
@example(text="\n  \n x \n")
@example(text=" \n\n")
@example(text="a<|endoftext|>b")
def test_ids_are_tiktoken_s(both: dict[str, tuple[BpeTokenizer, Any]], text: str) -> None:
    for name, (ours, theirs) in both.items():
        assert ours.encode(text) == theirs.encode_ordinary(text), name
        assert ours.decode(ours.encode(text)) == text


def test_ids_control_tokens_and_holes(both: dict[str, tuple[BpeTokenizer, Any]]) -> None:
    ours, theirs = both["cl100k_base"]
    assert (ours.size, ours.end_of_text) == (theirs.n_vocab, 425) == (426, 425)
    assert [ours.token_bytes(rank) for rank in RANKS.values()] == list(RANKS)
    assert ours.token_bytes(425) == b""
    assert ours.lossless and not any(id in ours.encode("<|unused_420|>") for id in range(379, 426))


def test_a_token_that_no_merge_makes_is_found_as_a_whole_word() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"bc": 256, b"abcd": 257, b"xy": 258}
    ours = opened(ranks, pattern=ENCODINGS["cl100k_base"].pattern, special={END_OF_TEXT: 259})
    theirs = tiktoken.Encoding(
        "odd", pat_str=r"[^\r\n\p{L}\p{N}]?\p{L}+|\s", mergeable_ranks=ranks, special_tokens={}
    )
    for text in ("abcd", "abcde", "xabcd", "xyxy"):
        assert ours.encode(text) == theirs.encode_ordinary(text)
    assert ours.encode("abcd") == [257]


def test_the_merges_are_those_that_were_learnt() -> None:
    learnt = train_tokenizer(iter([TEXT] * 5), vocab_size=380)
    ranks = {learnt.token_bytes(id): id for id in range(379)}
    ours = opened(ranks, special={END_OF_TEXT: 379})
    merges = [json.loads(str(each.definition))["model"]["merges"] for each in (ours, learnt)]
    assert merges[0] == merges[1] and len(merges[0]) == 379 - 256
    assert ours.encode(TEXT) == learnt.encode(TEXT)


def test_rank_files_are_read_with_care(tmp_path: Path) -> None:
    path = tmp_path / "small.tiktoken"
    write(path, RANKS)
    assert read_ranks(path) == RANKS
    path.write_bytes(path.read_bytes() + b"not a line\n")
    with pytest.raises(UserError, match=r"small\.tiktoken:380.*not a line of a rank file"):
        read_ranks(path)
    write(path, {token: rank for token, rank in RANKS.items() if token != b"q"})
    with pytest.raises(UserError, match="lacks 1 of the 256 bytes"):
        read_ranks(path)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An encoding `small`, and the places where its file may be: our cache and tiktoken's."""
    write(tmp_path / "small.tiktoken", RANKS)
    digest = hashlib.sha256((tmp_path / "small.tiktoken").read_bytes()).hexdigest()
    table = {"small": vocabularies.Encoding("small", None, {END_OF_TEXT: 425})}
    monkeypatch.setitem(vocabularies.SHA256, "small", digest)
    monkeypatch.setattr(vocabularies, "ENCODINGS", table)
    monkeypatch.setattr("gristmill.text.tokenizers.tokenizer.ENCODINGS", table)
    monkeypatch.setattr(vocabularies, "package_folder", lambda *names: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    own = tmp_path / "cache" / "gristmill" / "tiktoken" / "small.tiktoken"
    sha1 = hashlib.sha1(f"{vocabularies.URL}small.tiktoken".encode()).hexdigest()
    return own, tmp_path / "tiktoken" / sha1


def test_encodings_are_opened_by_name(places: tuple[Path, Path], tmp_path: Path) -> None:
    own, theirs = places
    with pytest.raises(UserError, match="not on this machine") as caught:
        open_tokenizer("small")
    assert str(own) in str(caught.value)
    write(theirs, {**RANKS, b"another": 424})
    with pytest.raises(UserError, match="not on this machine"):
        open_tokenizer("small")
    write(theirs, RANKS)
    assert open_tokenizer("tiktoken:small").spec == open_tokenizer("small").spec
    open_tokenizer("small").save(tmp_path / "saved")
    theirs.unlink()
    write(own, RANKS)
    assert open_tokenizer("small").spec == open_tokenizer(tmp_path / "saved").spec
    write(own, {**RANKS, b"another": 424})
    with pytest.raises(UserError, match="not the file that OpenAI publishes"):
        open_tokenizer("small")
