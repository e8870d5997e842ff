"""Simple rules: how long a document is, in which language, with which words or expressions."""

from __future__ import annotations

import re

from gristmill.text.filters.document import TextDocument
from gristmill.text.filters.settings import (
    LanguageSettings,
    LengthSettings,
    RegexSettings,
    WordsSettings,
)
from gristmill.text.filters.web import read_list
from gristmill.text.languages import language_of
from gristmill.text.sources.source import Reason


class LengthFilter:
    """Keeps documents of a certain length."""

    def __init__(self, settings: LengthSettings) -> None:
        self._settings = settings

    def __call__(self, document: TextDocument) -> Reason | None:
        limits, text = self._settings, document.text
        if limits.min_characters is not None and len(text) < limits.min_characters:
            return Reason("length: too few characters")
        if limits.max_characters is not None and len(text) > limits.max_characters:
            return Reason("length: too many characters")
        if limits.min_words is None and limits.max_words is None:
            return None
        words = len(text.split())
        if limits.min_words is not None and words < limits.min_words:
            return Reason("length: too few words")
        if limits.max_words is not None and words > limits.max_words:
            return Reason("length: too many words")
        return None


class LanguageFilter:
    """Keeps documents in some languages."""

    def __init__(self, settings: LanguageSettings) -> None:
        self._languages = frozenset(settings.languages)
        self._min_letters = settings.min_letters

    def __call__(self, document: TextDocument) -> Reason | None:
        if self._min_letters:
            characters = "".join(document.text.split())
            letters = sum(map(str.isalpha, characters))
            if letters < self._min_letters * len(characters):
                return Reason("language: too few letters")
        language = language_of(document.text)
        return None if language in self._languages else Reason(f"language: {language}")


class WordsFilter:
    """Drops documents with words of a list, whole and in any case."""

    def __init__(self, settings: WordsSettings) -> None:
        listed = (*settings.words, *(read_list(settings.file) if settings.file else ()))
        # Longer phrases first: the first alternative that matches counts.
        words = sorted({re.escape(word.lower()) for word in listed}, key=len, reverse=True)
        self._found = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)") if words else None
        self._most = settings.max_count

    def __call__(self, document: TextDocument) -> Reason | None:
        if self._found is None:
            return None
        found = self._found.finditer(document.text.lower())
        if next((True for number, _ in enumerate(found, 1) if number > self._most), False):
            return Reason("words: listed words")
        return None


class RegexFilter:
    """Drops documents by expressions."""

    def __init__(self, settings: RegexSettings) -> None:
        self._drop = [re.compile(pattern) for pattern in settings.drop]
        self._keep = [re.compile(pattern) for pattern in settings.keep]

    def __call__(self, document: TextDocument) -> Reason | None:
        for pattern in self._drop:
            if pattern.search(document.text):
                return Reason(f"regex: {pattern.pattern}")
        if self._keep and not any(pattern.search(document.text) for pattern in self._keep):
            return Reason("regex: nothing to keep it for")
        return None
