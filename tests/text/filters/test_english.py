"""English words and sentences, as spaCy's blank tokenizer divides them: what it gave for these."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.text.filters.english import english
from gristmill.text.filters.words import WordTable

DIVIDED = {
    "(don't,": "( do n't ,",
    "It\u2019s Mr. Smith's.": "It \u2019s Mr. Smith 's .",
    "U.S.A. vs. e.g. i.e.": "U.S.A. vs. e.g. i.e.",
    "well-known ex-wife's": "well - known ex - wife 's",
    "5km/h. 10% $5.00 US$20 20€": "5 km/h . 10 % $ 5.00 US$ 20 20 €",
    "and/or-else (and/or) b/c": "and/or - else ( and/or ) b / c",
    "see http://foo.com/a-b). me@x.org www.y.co.uk,": (
        "see http://foo.com/a-b ) . me@x.org www.y.co.uk ,"
    ),
    "10a.m. 7pm 12:30 1.5 3+4 x=y": "10 a.m. 7 pm 12:30 1.5 3 + 4 x = y",
    "wow!!! so... …… what?! «yes»": "wow ! ! ! so ... … … what ? ! « yes »",
    "a:) b:-( :) ;-) <3 8)": "a :) b:- ( :) ;-) <3 8)",
    "100°C. in 30°f. outside": "100 ° C . in 30 ° f . outside",
    "naïve_word snake_case CamelCase lower.Upper": (
        "naïve_word snake_case CamelCase lower . Upper"
    ),
    "東京。Привет,мир!": "東京。Привет , мир !",
    "cannot gonna dont I'ma y'all": "can not gon na do nt I 'm a y' all",
}


@pytest.mark.parametrize("text", DIVIDED)
def test_words(text: str) -> None:
    assert " ".join(english().words_of(text)) == DIVIDED[text]


def test_blanks_are_words_unless_single_spaces() -> None:
    assert english().words_of(" a  b\n\nc \td ") == [" ", "a", " ", "b", "\n\n", "c", "\t", "d"]
    assert english().words_of("a  ") == ["a", " "]
    # A smiley is one only if no blank stands in it.
    assert english().words_of("b: ) b:)") == ["b", ":", ")", "b", ":)"]


@given(st.text(alphabet=st.sampled_from("aZ0 .,:;()'\u2019-\n/!\"$°é中"), max_size=60))
def test_no_character_is_lost(text: str) -> None:
    words = english().words_of(text)
    assert "".join(words).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("No end", 1),
        ("Mr. Smith of the U.S. came at 3.15 p.m. today", 1),
        ('What?! Really... yes. (No.) "Stop." he said.', 5),
        ("", 1),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert english().sentences(text) == count
    assert english().sentences(text, enough=2) == min(count, 2)
    # Counting by stretches of words gives what counting at once gives.
    assert english().sentences(f"{'word ' * 500}. {text}") == count + (text != "")


def test_numbers_stand_for_words(pages: list[str]) -> None:
    table, known = WordTable(), english()
    for text in pages[:50]:
        words = [table.words[number] for number in table.numbers_of(text)]
        assert words == [word for word in known.words_of(text) if not word.isspace()]
    facts = table.facts
    assert facts.lengths[: len(table.words)].tolist() == [len(word) for word in table.words]
    plain = dict(zip(table.words, facts.plain_lengths.tolist(), strict=False))
    assert (plain["the"], plain["."], plain["#"], plain["東京"]) == (3, 0, 0, 2)
    letters = dict(zip(table.words, facts.has_letter.tolist(), strict=False))
    assert letters["the"] and not letters["."] and not letters["3.14"]


def test_a_table_that_was_emptied_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.text.filters.words._MOST_PIECES", 3)
    table = WordTable()
    for text in ("a b c d e", "f g h a", "i j"):
        numbers = table.numbers_of(text)
        assert [table.words[number] for number in numbers] == text.split()
        assert table.facts.lengths[numbers].tolist() == [1] * len(text.split())
