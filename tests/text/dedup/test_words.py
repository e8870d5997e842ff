"""Words of texts, against a plain version that makes strings of them."""

from __future__ import annotations

import re
import unicodedata

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.text.dedup.words import words_of

_NO_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af]"
)


def plain_words(text: str) -> list[str]:
    """The same words as strings."""
    letters = "".join(c for c in text if unicodedata.category(c) not in ("Mn", "Cf"))
    number = re.compile(r"\d+(?:[.,\u060c\u066b]\d+)*")
    result, inside = [], ""
    for character in number.sub("0", letters):
        category = unicodedata.category(character)[0]
        if category not in "LNM":
            character = " "
        if character == " " or _NO_SPACES.match(character):
            result.append(inside)
            inside = ""
            if character != " ":
                result.append(character)
            continue
        folded = unicodedata.normalize("NFD", character.lower())
        inside += "".join(c for c in folded if unicodedata.category(c) != "Mn")
    return [word for word in [*result, inside] if word]


def named(texts: list[str]) -> list[list[int]]:
    words = words_of(texts)
    hashes, result = words.hashes.tolist(), []
    for count in words.counts.tolist():
        result.append(hashes[:count])
        hashes = hashes[count:]
    assert not hashes
    return result


SIGNS = "abéEÉ\u0301ßĲ 019.,٣\u066b-_'\n中文かกЖж🙂½\u00ad\u200d"
LETTERS = st.text(st.sampled_from(SIGNS), max_size=30)


@settings(deadline=None, max_examples=150)
@given(st.lists(LETTERS, min_size=1, max_size=6))
@example(["Prices rose by 1,250.75 % - Čapek's", "prices RISE: 3, 4. 5,6"])
@example(["", "...", "1", "1.", ".1", "1..2", "1,2,3.4"])
def test_the_words_of_a_plain_version(texts: list[str]) -> None:
    known: dict[str, int] = {}
    for text, hashes in zip(texts, named(texts), strict=True):
        words = plain_words(text)
        assert len(words) == len(hashes), (text, words)
        for word, number in zip(words, hashes, strict=True):
            assert known.setdefault(word, number) == number
    assert len(set(known.values())) == len(known)


def test_a_word_is_the_same_wherever_it_stands() -> None:
    # Beyond the piece in which sums are formed, and across its end.
    text = "alpha beta " * 9000 + "gamma"
    (hashes,) = named([text])
    assert len(hashes) == 18001 and len(set(hashes)) == 3
    assert [hashes[0], hashes[1], hashes[-1]] == named(["alpha beta gamma"])[0]
    for shift in range(40):
        moved = named(["x" * shift + " " + "word " * 7000])[0]
        assert set(moved[1 if shift else 0 :]) == set(named(["word"])[0])


def test_a_long_word_counts_by_its_beginning() -> None:
    first, second, third = named(["a" * 64 + "b" * 50_000, "a" * 64, "a" * 63 + "b"])
    assert first == second != third
    assert words_of([]).counts.tolist() == []
