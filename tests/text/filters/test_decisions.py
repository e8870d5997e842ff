"""Decisions of datatrove 0.10 on 400 made pages, which ours must equal, and plain code for rules
that are computed in another way here."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.text.filters.build import FilterPlan, Filters
from gristmill.text.filters.document import TextDocument
from gristmill.text.filters.gopher import GopherRepetition, NGrams
from gristmill.text.filters.settings import GopherRepetitionSettings, parse_filters
from gristmill.text.filters.words import WordTable
from gristmill.text.sources.source import Reason

DECISIONS: dict[str, tuple[int, str, dict[str, int]]] = {
    "gopher-repetition": (
        0xBF27FA94A953D7EEF3DE96B5B7F7BFFEBF7FBF3F9AF7EBEFCFF7F9841C7C396797DEFF7F7BDF6EBD72DBF3BDEEFE7D29E4D1,
        "f69b4076064168c6",
        {
            "duplicate lines": 26,
            "characters of duplicate lines": 25,
            "characters of duplicate paragraphs": 18,
            "duplicate paragraphs": 15,
            "duplicate 9-grams": 10,
            "duplicate 8-grams": 7,
            "duplicate 6-grams": 7,
            "duplicate 7-grams": 4,
            "top 3-gram": 4,
            "duplicate 10-grams": 2,
            "top 4-gram": 1,
            "duplicate 5-grams": 1,
            "top 2-gram": 1,
        },
    ),
    "gopher-quality": (
        0x4EDD2688A080BCC802138EC74A1AA55112D112101A150EFC180B900804400469515B76E90589F61A1007B43198966B0B8880,
        "9f13381f631552ba",
        {
            "too few words with letters": 156,
            "too many lines that end with an ellipsis": 34,
            "too few words": 31,
            "too few stop words": 22,
            "words too short": 4,
            "too many #": 1,
        },
    ),
    "c4": (
        0xDBEFE7EF9D9EFF3FBE5EE7B3C7CFFFBFF35FFC1DFAE76DF1EAF7BFDDF1FFF767FAE7F7FF67DEFFEEEFA3FFBFADFA9ECFEDDF,
        "44d47483c2653af5",
        {"too few sentences": 55, "lorem ipsum": 25, "curly bracket": 15},
    ),
    "fineweb": (
        0x1325F894A91007E0F27E12B136D53EDCAF70353D9A62EBE587D5B984045C287787DEDD5C6B1F2EBC6293F3BDCCFE4D392491,
        "1d584108d275a07c",
        {
            "characters of duplicate lines": 137,
            "too few lines end with punctuation": 49,
            "too many short lines": 6,
        },
    ),
}
"""For each filter: which pages stay, as bits; a hash of the text that is left of them; how many
were dropped by each rule."""


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_are_those_of_datatrove(name: str, pages: list[str]) -> None:
    filters = Filters(FilterPlan(parse_filters([name])))
    values = [filters.judge(text, {}) for text in pages]
    bits, content, reasons = DECISIONS[name]
    kept = [value for value in values if isinstance(value, str)]
    assert Counter(
        value.value.partition(": ")[2] for value in values if isinstance(value, Reason)
    ) == Counter(reasons)
    assert sum(1 << n for n, value in enumerate(values) if isinstance(value, str)) == bits
    assert hashlib.sha256("\0".join(kept).encode()).hexdigest()[:16] == content


def test_filters_in_a_row_are_the_filters_one_by_one(pages: list[str]) -> None:
    names = ["gopher-repetition", "gopher-quality", "c4", "fineweb"]
    together = Filters(FilterPlan(parse_filters(["gopher,c4,fineweb"])))
    single = [Filters(FilterPlan(parse_filters([name]))) for name in names]
    for text in pages:
        value: Any = text
        for filters in single:
            value = filters.judge(value, {}) if isinstance(value, str) else value
        assert together.judge(text, {}) == value


# ------------------------------------------------------------------ plain code


def top_characters(words: Sequence[str], n: int) -> int:
    """All occurrences of the commonest n-gram, the first of several."""
    grams = [" ".join(words[place : place + n]) for place in range(len(words) - n + 1)]
    best, most = max(Counter(grams).items(), key=lambda item: item[1])
    return len(best) * most


def repeated_characters(words: Sequence[str], n: int) -> int:
    """N-grams that occurred before, from left to right without overlap."""
    seen, count, place = set(), 0, 0
    while place + n <= len(words):
        gram = "".join(words[place : place + n])
        if gram in seen:
            count, place = count + len(gram), place + n
        else:
            seen.add(gram)
            place += 1
    return count


# Few and short words, some of which are written together by others.
SPOKEN = st.lists(st.sampled_from("a b ab ba aab c cab abc".split()), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(words=SPOKEN, n=st.integers(1, 7), limit=st.floats(0.01, 0.99))
def test_n_grams(words: list[str], n: int, limit: float) -> None:
    document = TextDocument(" ".join(words), {}, WordTable())
    size = len(document.text)
    grams = NGrams(document)
    if n <= len(words):
        assert grams.top_exceeds(n, limit, size) == (top_characters(words, n) / size > limit)
    expected = repeated_characters(words, n) / size > limit
    hashes = grams.may_repeat([n]).get(n)
    assert (hashes is not None and grams.repeats_exceed(n, hashes, limit, size)) == expected


def test_limits_are_allowed() -> None:
    """A share that is as large as its limit is not above it."""
    words = [f"w{number}" for number in range(100, 190)]
    text = " ".join([*words, *words[:10]])
    share = repeated_characters(text.split(), 5) / len(text)
    assert 0.05 < share < 0.1
    for limit, kept in ((share, True), (share - 1e-9, False)):
        rule = GopherRepetition(GopherRepetitionSettings(top={}, duplicate={5: limit}))
        assert (rule(TextDocument(text, {}, WordTable())) is None) == kept
