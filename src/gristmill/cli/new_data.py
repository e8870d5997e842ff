"""The sources of `new`: an existing token set, or a text to prepare.

tokens/books                    a token set: its tokens are counted, nothing is left to prepare
tokens/books, with              the same with a validation set
  tokens/books_train, _val
tokens/books.bin                the token set to which the file belongs
books/, 'web/*.jsonl', …        a text, whose tokens are estimated from a sample
openwebtext                     a corpus known by name, whose size is in a table
no source                       a text that is not known yet

If the text was already prepared under its default name, that token set is used. A token set of that
name from other files is left alone, and the new one gets a number. Paths that are neither text nor
tokens, such as a run file, are refused with a remedy.
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.cli.new_text import CorpusToPrepare, TextToPrepare
from gristmill.cli.new_token_set import ID_FILES, TokenSet, find_token_set, name_of, sets_in
from gristmill.config.model import GPTConfig
from gristmill.hub.objects import scheme_of
from gristmill.plan.new_run import DataFacts, NewRun
from gristmill.text.estimate import estimate_text
from gristmill.text.sources.corpora import find_corpus
from gristmill.text.sources.datasets import is_dataset
from gristmill.text.sources.reading import find_sources
from gristmill.text.sources.source import ReadOptions
from gristmill.tokens.origins import open_origins
from gristmill.track.folder import RunFolder


class NewData(Protocol):
    """The data of a new run."""

    @property
    def name(self) -> str:
        """The name of the run."""
        ...

    @property
    def sources(self) -> Sequence[str]:
        """The sources on the command line."""
        ...

    @property
    def paths(self) -> str:
        """The token set of the run."""
        ...

    @property
    def validation(self) -> str | None: ...

    @property
    def has_tokenizer(self) -> bool:
        """Whether the token set has a tokenizer, or will have one."""
        ...

    def facts(self, model: GPTConfig) -> DataFacts:
        """Vocabulary and number of tokens for a model."""
        ...

    def summary(self, run: NewRun) -> Iterator[str]:
        """Sentences about the data."""
        ...

    def prepare(self, run: NewRun) -> list[str]:
        """The commands that prepare the token set."""
        ...


def find_data(sources: Sequence[str], tokenizer: str | None, key: str | None = None) -> NewData:
    """Classify the sources; `key` names the text in JSON and tables."""
    if not sources:
        return TextToPrepare("first", sources, "tokens/text", tokenizer, key)
    for source in sources:
        _require_data(source)
    sets = [find_token_set(source) for source in sources]
    if sets[0] is not None and len(sources) == 1:
        return _without_tokenizer_option(sets[0], tokenizer)
    for source, token_set in zip(sources, sets, strict=True):
        _require_text(source, token_set, alone=len(sources) == 1)
    name = _free_name(name_of(sources[0]), sources)
    paths = f"tokens/{name}"
    if (prepared := find_token_set(paths)) is not None:
        prepared = _without_tokenizer_option(prepared, tokenizer)
        return replace(prepared, sources=sources, reused=True)
    corpus = find_corpus(sources[0]) if not Path(sources[0]).exists() else None
    if corpus is not None:
        return CorpusToPrepare(name, sources, paths, tokenizer, corpus=corpus)
    estimate = estimate_text(sources, ReadOptions((key,)) if key else None)
    return TextToPrepare(name, sources, paths, tokenizer, key, estimate)


def _require_data(source: str) -> None:
    """Refuse paths that could be read as text, but are something else."""
    path = Path(source)
    if path.is_file() and path.suffix == ".toml":
        remedy = f"train it: gristmill train {shlex.quote(source)}"
        raise DataError("this is a run file, not text", where=source, remedy=remedy)
    if RunFolder(path).settings.is_file():
        remedy = f"resume it: gristmill train {shlex.quote(source)}"
        raise DataError("this is a run folder, not text", where=source, remedy=remedy)
    if path.is_file() and path.suffix in ID_FILES and find_token_set(source) is None:
        stem = path.with_suffix("")
        arguments = ["convert", source, "--from", "flat", "--format", "flat"]
        command = shlex.join(["gristmill", "tokens", *arguments, "-o", f"tokens/{stem.name}"])
        raise DataError(
            "this file holds plain token ids without a description of their format",
            where=source,
            remedy=f"if it is from nanoGPT: {command}, then use tokens/{stem.name}",
        )
    if path.is_dir() and find_token_set(source) is None and (sets := sets_in(path)):
        what, remedy = "this folder holds token sets", f"name one of them: {', '.join(sets)}"
        raise DataError(what, where=source, remedy=remedy)


def _require_text(source: str, token_set: TokenSet | None, *, alone: bool) -> None:
    """Refuse a source that cannot be prepared together with the others."""
    if token_set is not None:
        what = "this is a token set, which cannot be combined with other sources here"
        remedy = "prepare the text separately, then: gristmill tokens merge"
        raise UserError(what, where=source, remedy=remedy, exit=Exit.USAGE)
    if not alone and not Path(source).exists() and find_corpus(source) is not None:
        what = "a corpus must be prepared separately"
        remedy = "prepare each source separately, then: gristmill tokens merge"
        raise UserError(what, where=source, remedy=remedy, exit=Exit.USAGE)


def _free_name(name: str, sources: Sequence[str]) -> str:
    """The name, with a number if the token set of this name is from another text."""
    for number in itertools.count(2):
        existing = find_token_set(f"tokens/{name}")
        if existing is None or _comes_from(existing.paths, sources):
            break
        name = f"{name.removesuffix(f'-{number - 1}')}-{number}"
    return name


def _comes_from(paths: str, sources: Sequence[str]) -> bool:
    """Whether documents of a token set come from these sources, as far as is known."""
    origins = open_origins(Path(paths))
    if origins is None or any(scheme_of(source) or is_dataset(source) for source in sources):
        return True
    if find_corpus(sources[0]) is not None and not Path(sources[0]).exists():
        return True
    found = find_sources(sources, ReadOptions()).sources
    files = {os.path.realpath(source.name) for source in found}
    return any(os.path.realpath(origin) in files for origin in origins.sources)


def _without_tokenizer_option(token_set: TokenSet, tokenizer: str | None) -> TokenSet:
    """The token set; refuses --tokenizer, since an existing set has its tokenizer."""
    if tokenizer is not None:
        what = f"the tokenizer of {token_set.paths} cannot change: the token set already exists"
        raise UserError(what, where="--tokenizer", remedy="leave it out", exit=Exit.USAGE)
    return token_set
