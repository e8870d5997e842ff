"""Text of unknown origin, made fit for a terminal and a log.

File names, names of tasks, and what a model writes may hold escape sequences, which move a
terminal's cursor or change its title, and line ends, which forge lines of a log.
"""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """The text without characters that could control a terminal; line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        else character
        for character in text
    )


def on_one_line(text: str) -> str:
    """The text on one line: what cannot be printed is written as its escape sequence."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )
