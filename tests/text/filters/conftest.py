"""Texts as web pages have them, made from a number."""

from __future__ import annotations

import random

import pytest

COMMON = (
    "the of and to in is that it was for on are with as his they be at this have from or had by "
    "not but what all were when we there can an your which their said if do will each about how "
    "up out them then she many some so these would other into has more her two like him see time "
    "could no make than first been its who now people my made over did down only way find use may "
    "water long little very after words called just where most know don't can't I'm it's"
).split()
ODD = (
    "U.S. Dr. e.g. 10km $5.00 3.14 well-known and/or example.com http://example.com/a-b?c=d :-) "
    "7p.m. O'Neil naïve café 東京 Привет ... … # ## [1] [edit] — '90s rock'n'roll ° 'cause (:)"
).split()
MENU = (
    "Home", "About us", "Read more...", "• one", "- two", "We say lorem ipsum here.", "A { b } c.",
    "This site uses cookies.", "You need JavaScript to read on.",
)  # fmt: skip


def page(number: int) -> str:
    """A text; the same number gives the same text."""
    chance = random.Random(number)
    vocabulary = chance.sample(COMMON, chance.randrange(12, len(COMMON)))
    vocabulary += chance.sample(ODD, int(12 * chance.random() ** 2))
    lines: list[str] = []
    for _ in range(chance.randrange(1, 9)):
        words = chance.choices(vocabulary, k=chance.randrange(1, 80))
        line = ""
        for word in words:
            line += word + chance.choice((*" " * 12, ", ", ". ", "  ", "? "))
        lines.append(line.strip() + chance.choice((".", ".", "!", "", '"', "…", " [12]")))
    for _ in range(chance.randrange(3)):
        if chance.random() < 0.5:
            lines.append(chance.choice(lines))
        else:
            lines.insert(chance.randrange(len(lines)), chance.choice(MENU))
    return chance.choice(("\n", "\n", "\n\n")).join(lines)


@pytest.fixture(scope="session")
def pages() -> list[str]:
    return [page(number) for number in range(400)]
