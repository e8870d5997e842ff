"""What `prepare` is asked for by name: corpora, the tokenizer of a text's own characters, and the
sets that become of one command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes
from gristmill.cli.progress import ProgressLine

if TYPE_CHECKING:
    from gristmill.text.prepare.request import PrepareRequest
    from gristmill.text.sources.corpora import Corpus
    from gristmill.text.tokenizers.tokenizer import Tokenizer

CHARACTERS = "characters"
"""The tokenizer that is made of the text itself."""


def find_corpus(sources: Sequence[str]) -> Corpus | None:
    """The corpus that is asked for by its name, if one is."""
    from gristmill.text.sources import corpora

    named = [name for name in sources if not Path(name).exists() and corpora.find_corpus(name)]
    if named and len(sources) > 1:
        raise UserError(
            "a corpus known by name is prepared on its own",
            where=named[0],
            remedy="prepare each on its own, then: gristmill tokens merge",
        )
    return corpora.find_corpus(named[0]) if named else None


def fetch_corpus(corpus: Corpus, request: PrepareRequest, quiet: bool) -> str:
    """Tell about a corpus and download its file if it has one; what is read then."""
    from gristmill.text.sources import corpora

    if not quiet:
        typer.echo(corpora.describe(corpus), err=True)
    corpora.check_disk(corpus, output=request.output)
    with ProgressLine("downloading", quiet=quiet) as line:
        return corpora.fetch_corpus(
            corpus, progress=lambda done, total: line.update(done, total, format_bytes(done))
        )


def sets_of(
    request: PrepareRequest, corpus: Corpus | None, hold_out_end: float | None
) -> list[tuple[PrepareRequest, int | None]]:
    """The preparations that a command asks for, each with the bytes of text it will read, if they
    are known: two, if train and val are not documents of the same source."""
    from gristmill.text.prepare.request import split_name

    def named(split: str, **changes: Any) -> tuple[PrepareRequest, None]:
        output = Path(split_name(str(request.output), split))
        return replace(request, output=output, **changes), None

    if hold_out_end is not None:
        cut = 1 - hold_out_end
        return [
            named(split, options=replace(request.options, portion=portion))
            for split, portion in (("train", (0.0, cut)), ("val", (cut, 1.0)))
        ]
    if corpus and corpus.validation and not request.holdout:
        # The corpus has a validation set of its own.
        own = corpus.source(corpus.validation)
        return [named("train"), named("val", sources=[own])]
    return [(request, corpus.text_bytes if corpus else None)]


def check_hold_out_end(
    share: float | None, *, split: str | None, corpus: Corpus | None, in_parts: bool
) -> None:
    """Refuse a share that is none, or that is not alone."""
    if share is None:
        return
    what, remedy = "", "leave one of the two out"
    if not 0 < share < 1:
        what, remedy = (
            f"{share:g} is no share of a text",
            "give one above 0 and below 1, such as 0.1",
        )
    elif split is not None:
        what = "--split holds documents out already"
    elif corpus and corpus.dataset:
        what, remedy = f"{corpus.name} has documents to hold out", "leave it out"
    elif in_parts:
        what, remedy = "a plain text file is not divided into parts", "prepare it as a whole"
    if what:
        raise UserError(what, where="--hold-out-end", remedy=remedy, exit=Exit.USAGE)


def characters_of(request: PrepareRequest, in_parts: bool) -> Tokenizer:
    """The tokenizer of the characters in the text that is to be prepared."""
    from gristmill.text.prepare.parts import WHOLE
    from gristmill.text.sources.reading import SourceReader
    from gristmill.text.sources.source import Document
    from gristmill.text.tokenizers.training import character_tokenizer

    if in_parts or request.part != WHOLE:
        what = "the characters are those of the whole text, and a part reads only some of it"
        raise UserError(what, where="--tokenizer", remedy="leave out --part, --parts and --engine")
    reader = SourceReader(request.sources, request.options)
    if not reader.repeatable:
        what = "the characters are collected first, and a pipe cannot be read twice"
        raise UserError(what, where="--tokenizer", remedy="give files")
    return character_tokenizer(item.text for item in reader if isinstance(item, Document))
