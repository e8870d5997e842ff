"""The tokenizer of `prepare`: one that is there, or one that is made of the text itself."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from gristmill.base.errors import UserError
from gristmill.text.prepare.request import WHOLE, PrepareRequest
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import Document
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer, open_tokenizer_files
from gristmill.text.tokenizers.training import character_tokenizer, train_tokenizer

_CHARACTERS = "characters"
_LEARNT = re.compile(r"bpe:([0-9]+)")
_MOST_LEARNT = 2**28
"""Bytes of text from which a tokenizer is learnt; more would hardly change it."""


def is_of_text(tokenizer: str) -> bool:
    """Whether a tokenizer is made of the text itself; a file or folder takes precedence."""
    named = tokenizer == _CHARACTERS or learnt_size(tokenizer) is not None
    return named and not Path(tokenizer).exists()


def learnt_size(tokenizer: str) -> int | None:
    """The ids of a tokenizer that is to be learnt from the text, such as bpe:4096."""
    match = _LEARNT.fullmatch(tokenizer)
    return None if match is None else int(match[1])


def open_named(
    name: str, vocab: Path | None, merges: Path | None, end_of_text: str | None, *, quiet: bool
) -> Tokenizer:
    """The tokenizer of a name, or of the two files of a BPE."""
    if vocab and merges:
        opened = open_tokenizer_files(vocab, merges, end_of_text=end_of_text)
    elif vocab or merges:
        raise UserError(
            "a vocabulary and its merges belong together",
            where="--vocab-file" if vocab else "--merge-file",
            remedy="give both, or a tokenizer with -t",
        )
    else:
        opened = open_tokenizer(name, end_of_text=end_of_text)
    if not opened.lossless and not quiet:
        what = "this tokenizer is not lossless: decoding may not give the same text"
        typer.echo(f"note: {what}", err=True)
    return opened


def tokenizer_of_text(name: str, request: PrepareRequest, in_parts: bool) -> Tokenizer:
    """The tokenizer that is made of the text that is to be prepared."""
    if in_parts or request.part != WHOLE:
        what = f"{name} is made of the whole text, and a part reads only some of it"
        remedy = "leave out --part, --parts and --engine, or: gristmill tokenizer train"
        raise UserError(what, where="--tokenizer", remedy=remedy)
    reader = SourceReader(request.sources, request.options)
    if not reader.repeatable:
        what = f"{name} is made of the text first, and a pipe cannot be read twice"
        raise UserError(what, where="--tokenizer", remedy="give files")
    texts = (item.text for item in reader if isinstance(item, Document))
    size = learnt_size(name)
    if size is None:
        return character_tokenizer(texts)
    return train_tokenizer(texts, vocab_size=size, limit=_MOST_LEARNT)
