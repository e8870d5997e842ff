"""Rules for text of web pages: C4's (Raffel et al. 2020), FineWeb's own (Penedo et al. 2024), and
lists of addresses.

    c4        line by line: sentences stay, menus and notices go; pages with few sentences go too
    fineweb   shares of lines that end as sentences do, that are short, that occur again
    url       the address of the page, by domain, beginning or word

The decisions of c4 and fineweb are datatrove's for English; so is the text that c4 leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gristmill.base.errors import UserError
from gristmill.text.filters.document import TextDocument, Verdict
from gristmill.text.filters.english import code_points, english, tables
from gristmill.text.filters.gopher import repeated
from gristmill.text.filters.settings import WHERE, C4Settings, FineWebSettings, UrlSettings
from gristmill.text.sources.source import Reason

C4 = "c4"
FINEWEB = "fineweb"
URL = "url"
_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_ENDS = (".", "?", "!", '"', "'")
_POLICY = (
    "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies",
    "use cookies",
)  # fmt: skip


class C4Quality:
    """Removes lines that are no sentences; drops pages that have few or are no text."""

    def __init__(self, settings: C4Settings) -> None:
        self._settings = settings

    def __call__(self, document: TextDocument) -> Verdict:
        kept = list[str]()
        for line in self._candidates(document.text.splitlines()):
            lowered = line.lower()
            if self._settings.lorem_ipsum and "lorem ipsum" in lowered:
                return Reason(f"{C4}: lorem ipsum")
            if self._settings.javascript and "javascript" in lowered:
                continue
            if self._settings.curly_bracket and "{" in line:
                return Reason(f"{C4}: curly bracket")
            if self._settings.policy and any(words in lowered for words in _POLICY):
                continue
            kept.append(line)
        if not self._enough_sentences(kept):
            return Reason(f"{C4}: too few sentences")
        text = "\n".join(kept).strip()
        return None if text == document.text else text

    def _candidates(self, lines: Sequence[str]) -> Iterator[str]:
        """Lines that look like sentences, without citations."""
        limits = self._settings
        for line in map(str.strip, lines):
            words = line.split()
            if (
                limits.max_word
                and len(line) > limits.max_word
                and any(len(word) > limits.max_word for word in words)
            ):
                continue
            if limits.remove_citations and "[" in line:
                line = _CITATION.sub("", line)
            if limits.terminal_punctuation and (not line.endswith(_ENDS) or line.endswith("...")):
                continue
            if len(words) >= limits.min_line_words:
                yield line

    def _enough_sentences(self, lines: Sequence[str]) -> bool:
        """Every line is one sentence at least, so most documents need no counting."""
        wanted = self._settings.min_sentences - len(lines)
        if sum(english().most_sentences(line) - 1 for line in lines) < wanted:
            return False
        for line in lines:
            if wanted <= 0:
                break
            wanted -= english().sentences(line, enough=wanted + 1) - 1
        return wanted <= 0


class FineWeb:
    """Drops lists, menus and what repeats itself."""

    def __init__(self, settings: FineWebSettings) -> None:
        self._settings = settings
        self._ends = tuple(map(chr, code_points(tables()["quality"]["ends"])))

    def __call__(self, document: TextDocument) -> Reason | None:
        rule = self._broken_rule(document)
        return Reason(f"{FINEWEB}: {rule}") if rule else None

    def _broken_rule(self, document: TextDocument) -> str | None:
        limits, text = self._settings, document.text
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return "no text"
        ended = sum(line.endswith(self._ends) for line in lines)
        if ended / len(lines) < limits.min_ended_lines:
            return "too few lines end with punctuation"
        short = sum(len(line) <= limits.short_line for line in lines)
        if short / len(lines) > limits.max_short_lines:
            return "too many short lines"
        newlines = text.count("\n")
        again = repeated(lines).characters
        if again / (len(text) - newlines) > limits.max_duplicate_characters:
            return "characters of duplicate lines"
        # A piece between blanks is one word at least.
        if newlines / len(text.split()) > limits.max_newlines and (
            newlines / len(document.words) > limits.max_newlines
        ):
            return "too many line ends"
        return None


class UrlFilter:
    """Drops pages of some addresses."""

    def __init__(self, settings: UrlSettings) -> None:
        self._key = settings.key
        listed = (*settings.blocked, *(read_list(settings.file) if settings.file else ()))
        self._blocked = frozenset(map(_normal, listed))
        self._words = tuple(word.lower() for word in settings.words)

    def __call__(self, document: TextDocument) -> Reason | None:
        address = document.fields.get(self._key)
        if address is None:
            return Reason(f"{URL}: no address")
        if any(beginning in self._blocked for beginning in _beginnings(_normal(address))):
            return Reason(f"{URL}: blocked address")
        if self._words and any(word in address.lower() for word in self._words):
            return Reason(f"{URL}: blocked word")
        return None


def _normal(address: str) -> str:
    """host/path of an address, without www."""
    address = address.strip()
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host = (parts.hostname or "").removeprefix("www.")
    except ValueError:
        return address.lower()
    return f"{host}{parts.path}".rstrip("/")


def _beginnings(address: str) -> Iterator[str]:
    """The domain of an address and those above it, then longer and longer paths."""
    host, _, path = address.partition("/")
    labels = host.split(".")
    hosts = [".".join(labels[place:]) for place in range(len(labels))]
    yield from hosts
    for name in hosts if path else ():
        beginning = name
        for part in path.split("/"):
            beginning = f"{beginning}/{part}"
            yield beginning


def read_list(file: str) -> Iterator[str]:
    """The lines of a file, without empty ones and those that begin with #."""
    try:
        with Path(file).open(encoding="utf-8") as lines:
            for line in map(str.strip, lines):
                if line and not line.startswith("#"):
                    yield line
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read this list: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, where=f"{WHERE}: {file}") from error
