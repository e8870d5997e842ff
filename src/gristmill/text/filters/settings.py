"""Settings of filters: which there are, and what each may be told.

    --filter gopher,c4,fineweb        by their names, with the settings of their authors
    --filter language=English         with the value of their main setting
    --filter filters.toml             the tables of a file, in their order:

        [gopher-quality]
        min_words = 30

        [url]
        file = "blocked.txt"

A setting that is not given has its default. All problems of a file are told together.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field, ValidationError, field_validator, model_validator

from gristmill.base.errors import Problem, UserError
from gristmill.config.settings import Settings
from gristmill.text.languages import CODES, known_languages

WHERE = "--filter"
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Length = Annotated[int, Field(ge=1, le=50, strict=False)]
ByWords = dict[Length, Share]
_SUFFIX = ".toml"


class FilterSettings(Settings):
    """What the settings of all filters have in common."""

    main: ClassVar[str | None] = None
    """The setting that NAME=VALUE gives."""
    files: ClassVar[tuple[str, ...]] = ()
    """Settings that name a file, whose content decides too."""

    @property
    def fields_read(self) -> tuple[str, ...]:
        """Keys of a row that are read beside its texts."""
        return ()


class LengthSettings(FilterSettings):
    """Keeps documents of a certain length."""

    main = "min_characters"
    min_characters: Count | None = None
    max_characters: Count | None = None
    min_words: Count | None = None
    """Words are what blanks divide."""
    max_words: Count | None = None

    @model_validator(mode="after")
    def _some_bound(self) -> LengthSettings:
        if not self.model_fields_set:
            raise ValueError("no bound is given, so nothing would be dropped: length=200, for one")
        return self


class LanguageSettings(FilterSettings):
    """Keeps documents in some languages, guessed from letters and the commonest words."""

    main = "languages"
    languages: Texts
    """Such as English or en, Japanese, or Cyrillic for a script."""
    min_letters: Share = 0.0
    """The least share of letters among all characters but blanks."""

    @field_validator("languages", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("languages")
    @classmethod
    def _known(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        known = {name.lower(): name for name in known_languages()} | CODES
        for value in values:
            if value.lower() not in known:
                raise ValueError(
                    f"{value!r} is not known; there are {', '.join(known_languages())}"
                )
        return tuple(known[value.lower()] for value in values)


class GopherQualitySettings(FilterSettings):
    """Drops what is unlike running text; 0 turns a rule off."""

    min_words: Count = 50
    """Words that are not symbols."""
    max_words: Count = 100_000
    min_mean_word: Annotated[float, Field(ge=0)] = 3
    """The mean length of words that are not symbols."""
    max_mean_word: Annotated[float, Field(ge=0)] = 10
    max_symbols: Annotated[float, Field(ge=0)] = 0.1
    """The most # for each word, and the most ellipses."""
    max_bullet_lines: Share = 0.9
    """The share of lines that begin with a bullet."""
    max_ellipsis_lines: Share = 0.3
    """The share of lines that end with an ellipsis."""
    min_words_with_letters: Share = 0.8
    """The share of words with a letter."""
    min_stop_words: Count = 2
    """How many different stop words there must be."""
    stop_words: Texts = ("the", "be", "to", "of", "and", "that", "have", "with")


class GopherRepetitionSettings(FilterSettings):
    """Drops what says the same again and again; 0 turns a rule off."""

    max_lines: Share = 0.3
    """The share of lines that occurred before."""
    max_paragraphs: Share = 0.3
    max_line_characters: Share = 0.2
    """The share of characters that are in such lines."""
    max_paragraph_characters: Share = 0.2
    top: ByWords = Field(default={2: 0.2, 3: 0.18, 4: 0.16})
    """By number of words: the share of characters in the commonest phrase of so many."""
    duplicate: ByWords = Field(default={5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10})
    """By number of words: the share of characters in phrases that occurred before."""


class C4Settings(FilterSettings):
    """Keeps the lines of a page that are sentences, and drops pages with few of them."""

    remove_citations: bool = True
    """Removes [1], [edit] and [citation needed]."""
    terminal_punctuation: bool = True
    """Keeps lines that end with . ? ! or a quotation mark, and not with an ellipsis."""
    min_sentences: Count = 5
    min_line_words: Count = 3
    max_word: Count = 1000
    """Removes lines with a word of more characters; 0 turns this off."""
    lorem_ipsum: bool = True
    """Drops pages with a placeholder text."""
    curly_bracket: bool = True
    """Drops pages with a {."""
    javascript: bool = True
    """Removes lines that name JavaScript."""
    policy: bool = True
    """Removes lines on cookies, privacy and terms of use."""


class FineWebSettings(FilterSettings):
    """FineWeb's own rules on lines."""

    min_ended_lines: Share = 0.12
    """The share of lines that end with a mark that ends a sentence."""
    max_short_lines: Share = 0.67
    """The share of short lines."""
    short_line: Count = 30
    """The most characters of a short line."""
    max_duplicate_characters: Share = 0.01
    """The share of characters in lines that occurred before."""
    max_newlines: Annotated[float, Field(ge=0)] = 0.3
    """The most line ends for each word."""


class WordsSettings(FilterSettings):
    """Drops documents with words of a list."""

    main = "file"
    files = ("file",)
    file: str | None = None
    """A file with a word or phrase on each line."""
    words: Texts = ()
    max_count: Count = 0
    """How many of them a document may have."""

    @model_validator(mode="after")
    def _some_words(self) -> WordsSettings:
        if not self.file and not self.words:
            raise ValueError("there are no words: give a file or words")
        return self


def _patterns(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
    return values


class RegexSettings(FilterSettings):
    """Drops documents by regular expressions of Python, searched in the whole text."""

    drop: Texts = ()
    """Drops a document in which one of these is found."""
    keep: Texts = ()
    """Drops a document in which none of these is found."""
    _valid = field_validator("drop", "keep")(_patterns)

    @model_validator(mode="after")
    def _some_pattern(self) -> RegexSettings:
        if not self.drop and not self.keep:
            raise ValueError("there is no expression: give drop or keep")
        return self


class UrlSettings(FilterSettings):
    """Drops documents by the address of their page, which another key of the row holds."""

    main = "file"
    files = ("file",)
    file: str | None = None
    """A file with a domain or the beginning of an address on each line: example.com,
    example.com/news; subdomains are included."""
    blocked: Texts = ()
    """The same without a file."""
    words: Texts = ()
    """Drops an address with one of these words in it."""
    key: str = "url"
    """The key or column that holds the address."""

    @model_validator(mode="after")
    def _some_list(self) -> UrlSettings:
        if not self.file and not self.blocked and not self.words:
            raise ValueError("nothing is blocked: give a file, blocked or words")
        return self

    @property
    def fields_read(self) -> tuple[str, ...]:
        return (self.key,)


class OwnSettings(FilterSettings):
    """Calls a function of yours with each document."""

    main = "function"
    function: str
    """file.py:function or module:function. It is called with a dictionary that holds the text and
    the fields of a row. True keeps the document; False or a reason, a string, drops it; a
    dictionary with another text changes it."""
    fields: Texts = ()
    """Keys of the row that it gets beside the text, where these hold text."""

    @field_validator("function")
    @classmethod
    def _two_names(cls, value: str) -> str:
        file, _, name = value.rpartition(":")
        if not file or not name.isidentifier():
            raise ValueError("write file.py:function or module:function")
        return value

    @property
    def fields_read(self) -> tuple[str, ...]:
        return self.fields


SETTINGS: Mapping[str, type[FilterSettings]] = {
    "url": UrlSettings,
    "language": LanguageSettings,
    "length": LengthSettings,
    "gopher-repetition": GopherRepetitionSettings,
    "gopher-quality": GopherQualitySettings,
    "c4": C4Settings,
    "fineweb": FineWebSettings,
    "words": WordsSettings,
    "regex": RegexSettings,
    "own": OwnSettings,
}
GROUPS: Mapping[str, tuple[str, ...]] = {"gopher": ("gopher-repetition", "gopher-quality")}
"""Names for several filters."""
NamedFilter: TypeAlias = tuple[str, FilterSettings]


def parse_filters(given: Sequence[str]) -> tuple[NamedFilter, ...]:
    """The filters that the words of a command line name, in their order."""
    filters: list[NamedFilter] = []
    for word in (word.strip() for entry in given for word in entry.split(",")):
        if not word:
            raise UserError("the name of a filter is empty", where=WHERE, remedy=_there_are())
        filters += _of_file(Path(word)) if word.endswith(_SUFFIX) else _of_word(word)
    names = [name for name, _ in filters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        what = f"the filter {twice} is given twice"
        raise UserError(what, where=WHERE, remedy="give each once, in the order you want")
    return tuple(filters)


def _of_word(word: str) -> Iterator[NamedFilter]:
    name, equals, value = word.partition("=")
    for single in GROUPS.get(name, (name,)):
        if single not in SETTINGS:
            raise UserError([_unknown(name, f"{WHERE} {word}")])
        settings = SETTINGS[single]
        if equals and settings.main is None:
            what, remedy = f"{name} takes no value", f"write its settings into a file: [{single}]"
            raise UserError(what, where=f"{WHERE} {word}", remedy=remedy)
        given: Any = int(value) if value.isdigit() else value
        table = {str(settings.main): given} if equals else {}
        yield single, _validated(settings, table, f"{WHERE} {word}", single)


def _of_file(path: Path) -> list[NamedFilter]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the file of filters: {error.strerror}", where=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not valid TOML: {error}", where=path) from error
    if not tables:
        what = "the file names no filter"
        raise UserError(what, where=path, remedy=f"write a table for each. {_there_are()}")
    filters, problems = list[NamedFilter](), list[Problem]()
    for name, table in tables.items():
        if name not in SETTINGS:
            both = " and ".join(f"[{single}]" for single in GROUPS.get(name, ()))
            where = f"{path}: {name}"
            problems.append(
                Problem(f"{name} is a group of filters", where, f"write {both}")
                if both
                else _unknown(name, where)
            )
        elif not isinstance(table, dict):
            problems.append(Problem("must be a table", f"{path}: {name}", f"write [{name}]"))
        else:
            try:
                filters.append((name, _validated(SETTINGS[name], table, str(path), name)))
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(problems)
    return filters


def _validated(
    settings: type[FilterSettings], table: Mapping[str, Any], place: str, name: str
) -> FilterSettings:
    """The settings of a table, or all that is wrong with it."""
    try:
        return settings.model_validate(table)
    except ValidationError as error:
        problems = []
        for details in error.errors():
            path = ".".join(map(str, (name, *details["loc"])))
            what = details["msg"][0].lower() + details["msg"][1:]
            remedy = None
            match details["type"]:
                case "extra_forbidden":
                    known = list(settings.model_fields)
                    near = difflib.get_close_matches(str(details["loc"][-1]), known, n=1)
                    what = "there is no such setting"
                    listed = near or known
                    remedy = f"did you mean {near[0]}?" if near else f"it has: {', '.join(listed)}"
                case "missing":
                    what = "this setting is required"
                case "value_error":
                    what = str(details["ctx"]["error"])
                case _:
                    what += f" (it is {details['input']!r})"
            problems.append(Problem(what, f"{place}: {path}", remedy))
        raise UserError(problems) from None


def _unknown(name: str, where: str) -> Problem:
    names = [*SETTINGS, *GROUPS]
    near = difflib.get_close_matches(name, names, n=2)
    remedy = f"did you mean {' or '.join(near)}?" if near else _there_are()
    return Problem(f"there is no filter {name!r}", where, remedy)


def _there_are() -> str:
    names = [*SETTINGS, *GROUPS]
    return f"there are {', '.join(names)}, and FILE{_SUFFIX} with their settings"
