"""An existing token set as the data of `new`: what its name, or a file of it, stands for.

tokens/books                    the set itself
tokens/books, with              the training set, with its validation set
  tokens/books_train, _val
tokens/books.bin                the set to which the file belongs

A folder of text, or a JSON file beside a text of the same name, is not taken for a set.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.config.model import GPTConfig
from gristmill.hub.objects import scheme_of
from gristmill.plan.new_run import DataFacts, NewRun
from gristmill.text.sources.datasets import is_dataset
from gristmill.tokens.format import LEDGER_FILE, file_of, is_manifest
from gristmill.tokens.origins import ORIGINS_FILE
from gristmill.tokens.store import TokensNotFoundError, open_tokens

SPLITS = ("_train", "_val")
"""What the names of a training and a validation set end with."""
ID_FILES = (".bin", ".idx", ".npy", ".ds")
"""File name endings of token ids."""
_SET_FILES = (LEDGER_FILE, ".json", ".bin", ".idx", ".starts", ORIGINS_FILE)
"""File name endings of a token set with a manifest."""
_ASSUMED = 50257
"""The vocabulary of a set that does not state its own: GPT-2's."""
_MAX_MANIFEST = 2**24
"""Bytes; the manifest of a hundred thousand files is smaller."""


@dataclass(frozen=True)
class TokenSet:
    """An existing token set."""

    name: str
    sources: Sequence[str]
    paths: str
    validation: str | None
    tokens: int
    vocab: int | None
    has_tokenizer: bool
    reused: bool = False
    """Whether the user named a text, and it has the default name of that text's token set."""

    def facts(self, model: GPTConfig) -> DataFacts:
        return DataFacts(self.vocab or model.vocab or _ASSUMED, self.tokens)

    def summary(self, run: NewRun) -> Iterator[str]:
        size = "unknown size" if self.vocab is None else f"{self.vocab:,}"
        yield f"{self.paths}: {self.tokens:,} tokens, with a vocabulary of {size}."
        if self.reused:
            yield "The text was already prepared; this token set is used."

    def prepare(self, run: NewRun) -> list[str]:
        return []


def find_token_set(name: str) -> TokenSet | None:
    """The token set of this name, with its validation set if there is one; None without a set."""
    if scheme_of(name) or is_dataset(name):
        return None
    name = _prefix(name)
    train, held_out = (f"{name}{split}" for split in SPLITS)
    if not _is_set(name) and _is_set(train):
        name = train
    if not _is_set(name):
        return None
    stem = name.removesuffix(SPLITS[0])
    held_out = f"{stem}{SPLITS[1]}" if stem != name else ""
    reader = open_tokens(name)
    info = reader.info
    return TokenSet(
        name_of(stem),
        (name,),
        name,
        held_out if held_out and _is_set(held_out) else None,
        info.tokens,
        info.vocab_size,
        Path(f"{name}.tokenizer").is_dir(),
    )


def _prefix(name: str) -> str:
    """The name of the token set to which a file belongs; else the name itself."""
    path = Path(name)
    for ending in _SET_FILES:
        stem = name.removesuffix(ending)
        if stem != name and path.is_file() and _describes_tokens(file_of(Path(stem), ".json")):
            return stem
    return name


def _is_set(name: str) -> bool:
    path = Path(name)
    manifest = file_of(path, ".json")
    if manifest.is_file():
        # A JSON file next to a text of the same name may be something else.
        return not path.exists() or _describes_tokens(manifest)
    if path.is_file() and path.suffix not in ID_FILES:
        return False
    if path.is_dir() and {file.suffix for file in path.iterdir()} - set(ID_FILES):
        return False  # a folder of text
    try:
        open_tokens(name)
    except TokensNotFoundError:
        if not path.exists() and file_of(path, ".bin").is_file():
            raise  # its files exist but are not readable as they are
        return False
    return True


def sets_in(folder: Path) -> list[str]:
    """The token sets of a folder."""
    files = sorted(file for file in folder.glob("*.json") if _describes_tokens(file))
    return [str(file.with_suffix("")) for file in files]


def _describes_tokens(file: Path) -> bool:
    """Whether a file is a manifest. Large files are not: they may be a text in JSON."""
    return file.is_file() and file.stat().st_size <= _MAX_MANIFEST and is_manifest(file)


def name_of(source: str) -> str:
    """The default name of the run and token set of a text."""
    if scheme_of(source) or is_dataset(source):
        last = re.split(r"[/:]", re.split(r"[?@]", source)[0].rstrip("/"))[-1]
    else:
        path = Path(source)
        if glob.has_magic(path.name) and not path.exists():
            path = path.parent
        path = path.resolve()
        last = path.name if path.is_dir() else path.name.partition(".")[0]
    if glob.has_magic(last):
        last = ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._") or "text"
