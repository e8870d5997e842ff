"""Lines and paragraphs of a document, and the document without some."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.text.dedup.signatures import Unit
from gristmill.text.dedup.units import unit_texts, units_of, without

UNITS: tuple[Unit, ...] = ("line", "paragraph")


def left(text: str, unit: Unit, *gone: int) -> str:
    spans = units_of(text, unit, min_length=0)
    return without(text, spans, np.isin(np.arange(len(spans)), gone))


@pytest.mark.parametrize(
    ("text", "gone", "expected"),
    [
        ("a\nb\nc\n", (1,), "a\nc\n"),
        ("a\nb\nc\n", (0,), "b\nc\n"),
        ("a\nb\nc\n", (2,), "a\nb\n"),
        ("a\nb\nc", (1, 2), "a"),
        ("a\n\nb\n\n\nc\n", (1,), "a\n\nc\n"),
        ("if x:\n    y\n    z\n", (1,), "if x:\n    z\n"),
        ("a\nb", (0, 1), ""),
        ("  a  \n b \n", (0,), " b \n"),
    ],
)
def test_without_lines(text: str, gone: tuple[int, ...], expected: str) -> None:
    assert left(text, "line", *gone) == expected


@pytest.mark.parametrize(
    ("text", "gone", "expected"),
    [
        ("One\nof two lines.\n\nTwo.\n\nThree.\n", (1,), "One\nof two lines.\n\nThree.\n"),
        ("One\nof two lines.\n\nTwo.\n\nThree.\n", (0,), "Two.\n\nThree.\n"),
        ("One.\n \nTwo.\n\t\n\nThree.", (2,), "One.\n \nTwo."),
        ("One.\n\nTwo.\n", (0, 1), ""),
    ],
)
def test_without_paragraphs(text: str, gone: tuple[int, ...], expected: str) -> None:
    assert left(text, "paragraph", *gone) == expected


def test_short_units_are_not_compared() -> None:
    text = "}\n  }\nlong enough\n"
    assert unit_texts(text, units_of(text, "line", min_length=2)) == ["long enough"]
    spans = units_of(text, "line", min_length=2)
    assert without(text, spans, np.array([True])) == "}\n  }\n"


@given(st.text(st.sampled_from("ab \n\t"), max_size=40), st.randoms(), st.sampled_from(UNITS))
def test_what_stays_is_what_was_not_removed(text: str, chance: Random, unit: Unit) -> None:
    spans = units_of(text, unit, min_length=0)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if unit == "line":
        assert unit_texts(text, spans) == lines
    gone = np.array([chance.random() < 0.4 for _ in spans], np.bool_)
    rest = without(text, spans, gone)
    kept = [unit for unit, off in zip(unit_texts(text, spans), gone, strict=True) if not off]
    found = unit_texts(rest, units_of(rest, unit, min_length=0))
    assert found == kept
    if not gone.any() and spans:
        assert rest == text
    if kept:
        assert re.search(r"\s*$", rest)[0] == re.search(r"\s*$", text)[0]  # type: ignore[index]
