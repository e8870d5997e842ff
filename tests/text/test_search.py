"""A phrase is found wherever it stands, whatever tokens it became."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.text import search
from gristmill.text.prepare.prepare import prepare_documents
from gristmill.text.search import excerpt, find_phrase
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer
from gristmill.tokens.store import open_tokens

WORDS = ["mill", "miller", "wheel", "grain", "über", "the", "🙂"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    dice = random.Random(5)
    return [
        dice.choice(["", " "]).join(dice.choices(WORDS, k=dice.randrange(1, 30))) for _ in range(60)
    ]


def tokenizers(texts: list[str], folder: Path) -> list[Tokenizer]:
    learned = train_tokenizer(iter([" ".join(texts)]), vocab_size=300)
    learned.save(folder / "bpe")
    return [open_tokenizer("bytes"), open_tokenizer(folder / "bpe")]


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_every_place_is_found(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(search, "PIECE", piece)
    for number, tokenizer in enumerate(tokenizers(texts, tmp_path)):
        prefix = tmp_path / f"set{number}"
        prepare_documents(
            [Document(text, "x:1") for text in texts], tokenizer=tokenizer, output=prefix
        )
        reader = open_tokens(prefix)
        for phrase in ("mill", "ller the", "über", "b", "🙂", "thethe", "nothing of this"):
            found = list(find_phrase(reader, tokenizer, phrase))
            content = phrase.encode()
            expected = [
                document
                for document, text in enumerate(texts)
                for at in range(len(text.encode()))
                if text.encode()[at : at + len(content)] == content
            ]
            assert [one.document for one in found] == expected, phrase
            for one in found:
                ids = reader.read(one.begin, one.end - one.begin).tolist()
                assert content in b"".join(map(tokenizer.token_bytes, ids))
                # The first and the last token have a part of it.
                for less in (ids[1:], ids[:-1]):
                    assert content not in b"".join(map(tokenizer.token_bytes, less))


def test_an_excerpt_stays_in_its_document(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("bytes")
    texts = ["before", "the wheel of the mill turns", "after"]
    documents = [Document(text, "x:1") for text in texts]
    prepare_documents(documents, tokenizer=tokenizer, output=tmp_path / "set")
    reader = open_tokens(tmp_path / "set")
    (one,) = find_phrase(reader, tokenizer, "the mill")
    assert excerpt(reader, tokenizer, one.begin, one.end, around=3) == "…of the mill tu…"
    assert excerpt(reader, tokenizer, one.begin, one.end, around=99).startswith("the wheel")


def test_nothing_cannot_be_looked_for(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("bytes")
    prepare_documents([Document("a", "x:1")], tokenizer=tokenizer, output=tmp_path / "set")
    with pytest.raises(UserError, match="some text"):
        list(find_phrase(open_tokens(tmp_path / "set"), tokenizer, ""))
