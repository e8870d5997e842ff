"""Tokenizers of every kind are learnt alike from the same text, and lose nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.text.tokenizers.kinds import TokenizerKind, WordPattern
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.text.tokenizers.training import character_tokenizer, train_tokenizer

WORDS = "the mill grinds grain and water turns the wheel while it's raining; don't stop 1234 é ü\n"
KINDS = list(TokenizerKind)


def corpus() -> list[str]:
    source = random.Random(0)
    return [" ".join(source.choices(WORDS.split(" "), k=50)) for _ in range(40)]


TRAINED = train_tokenizer(iter(corpus()), vocab_size=310)
LEARNT = {kind: train_tokenizer(iter(corpus()), vocab_size=265, kind=kind) for kind in KINDS}


def test_training_is_deterministic_and_of_the_size_asked_for() -> None:
    again = train_tokenizer(iter(corpus()), vocab_size=310)
    assert again.spec == TRAINED.spec
    assert (TRAINED.size, TRAINED.end_of_text) == (310, 309)
    assert sorted(TRAINED.token_bytes(id) for id in range(256)) == [bytes([b]) for b in range(256)]
    assert len(TRAINED.encode(" the water")) == 2
    other = train_tokenizer(iter(corpus()), vocab_size=300)
    assert other.fingerprint != TRAINED.fingerprint


def test_training_splits_as_gpt2_does() -> None:
    tokenizer = train_tokenizer(iter(["don't stop now, it's 42 degrees"] * 9), vocab_size=279)
    longest = max((tokenizer.token_bytes(id) for id in range(tokenizer.size)), key=len)
    assert longest == b" degrees"
    assert b"'t" in [tokenizer.token_bytes(id) for id in range(tokenizer.size)]


def test_training_reports_progress() -> None:
    seen: list[int] = []
    train_tokenizer(iter(["abab é", "abab"]), vocab_size=258, progress=seen.append)
    assert seen == [7, 11]


def test_too_little_text_says_what_can_be_reached() -> None:
    with pytest.raises(UserError, match="at most 258 tokens") as caught:
        train_tokenizer(iter(["abab"]), vocab_size=1000)
    assert caught.value.exit is Exit.DATA
    assert train_tokenizer(iter(["abab"]), vocab_size=258).size == 258
    with pytest.raises(UserError, match="257 or more"):
        train_tokenizer(iter(["abab"]), vocab_size=256)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.text())
@example(text="a" * 1000 + " " * 1000)
@example(text="hello <|endoftext|> [UNK] <unk> ##ing ▁")
@example(text="".join(map(chr, range(0x250))))
@example(text=" \r\n\t \u2028 \x00\ufeff\U0010ffff ")
def test_every_kind_gives_text_back(kind: TokenizerKind, text: str) -> None:
    tokenizer = LEARNT[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.lossless
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.end_of_text not in ids


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_of_the_size_asked_for_and_comes_back(
    kind: TokenizerKind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = LEARNT[kind]
    assert (tokenizer.size, tokenizer.end_of_text) == (265, 264)
    assert tokenizer.token_bytes(264) == b""
    assert tokenizer.spec["type"] == f"byte-level-{kind.value}"
    folder = tmp_path_factory.mktemp(kind.value)
    tokenizer.save(folder)
    again = open_tokenizer(folder)
    assert again.spec == tokenizer.spec and again.lossless
    assert again.encode_batch(corpus()) == tokenizer.encode_batch(corpus())
    # Fewer ids than bytes: it has learnt something.
    assert len(tokenizer.encode(WORDS)) < len(WORDS.encode())


@pytest.mark.parametrize("kind", [TokenizerKind.BPE, TokenizerKind.WORDPIECE])
def test_the_same_text_gives_the_same_tokenizer(kind: TokenizerKind) -> None:
    again = train_tokenizer(iter(corpus()), vocab_size=265, kind=kind)
    assert again.fingerprint == LEARNT[kind].fingerprint


def test_a_unigram_has_one_order() -> None:
    tokenizer = LEARNT[TokenizerKind.UNIGRAM]
    unseen = [tokenizer.encode(character)[0] for character in "QXZ"]
    assert unseen == sorted(unseen)


def test_patterns_cut_numbers_and_letters_differently() -> None:
    text = ["12345 12345 helloWORLD"] * 9

    def learnt(pattern: WordPattern, size: int) -> set[bytes]:
        tokenizer = train_tokenizer(iter(text), vocab_size=size, pattern=pattern)
        assert tokenizer.lossless
        return {tokenizer.token_bytes(id) for id in range(256, tokenizer.size)}

    assert b"12345" in learnt(WordPattern.GPT2, 271)
    four = learnt(WordPattern.GPT4, 269)
    assert b"123" in four and b"1234" not in four and any(b"oW" in token for token in four)
    assert not any(b"oW" in token for token in learnt(WordPattern.GPT4O, 268))


def test_a_limit_ends_the_reading() -> None:
    taken: list[int] = []

    def texts() -> list[str]:
        return ["abab", "abab", "cdcd", "cdcd"]

    train_tokenizer(iter(texts()), vocab_size=258, limit=5, progress=taken.append)
    assert taken == [4, 8]


def test_min_count() -> None:
    text = ["ab ab ab cd cd"]
    assert train_tokenizer(iter(text), vocab_size=260, min_count=2).size == 260
    with pytest.raises(UserError, match="at most 258"):
        train_tokenizer(iter(text), vocab_size=262, min_count=3)
    with pytest.raises(UserError, match="no meaning for unigram"):
        train_tokenizer(iter(text), vocab_size=262, min_count=3, kind=TokenizerKind.UNIGRAM)


def test_a_wordpiece_takes_the_longest_token_first() -> None:
    texts = ["ab ab ab ab bcd bcd bcd abc"] * 5
    learnt = train_tokenizer(iter(texts), vocab_size=262, kind=TokenizerKind.WORDPIECE)
    tokens = {learnt.token_bytes(id) for id in range(learnt.size)}
    first = max((token for token in tokens if b"abcd".startswith(token)), key=len)
    assert len(first) > 1
    assert learnt.token_bytes(learnt.encode("abcd")[0]) == first


def test_the_characters_of_a_text(tmp_path: Path) -> None:
    text = "b\na é\U0001f642 <|endoftext|>\r\tb"
    tokenizer = character_tokenizer([text, "zz"])
    known = sorted({*text, "z"})
    assert tokenizer.encode(text) == [known.index(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.size, tokenizer.end_of_text) == (len(known) + 2, len(known) + 1)
    assert [tokenizer.token_bytes(id) for id in range(len(known))] == [c.encode() for c in known]
    # Another character is not lost, but not known either.
    assert tokenizer.encode("aQb") == [known.index("a"), len(known), known.index("b")]
    tokenizer.save(tmp_path)
    assert open_tokenizer(tmp_path).spec == tokenizer.spec
    assert open_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)
    with pytest.raises(UserError, match="no characters"):
        character_tokenizer([""])
