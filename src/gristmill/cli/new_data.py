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

import glob
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.prepare_tokenizer import is_of_text, learnt_size
from gristmill.config.model import GPTConfig
from gristmill.hub.objects import scheme_of
from gristmill.plan.new_run import DataFacts, NewRun
from gristmill.text.estimate import TextEstimate, estimate_text, largest_vocabulary
from gristmill.text.sources.corpora import Corpus, find_corpus
from gristmill.text.sources.datasets import is_dataset
from gristmill.text.sources.reading import find_sources
from gristmill.text.sources.source import ReadOptions
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.text.tokenizers.training import character_tokenizer
from gristmill.text.tokenizers.vocabularies import has_gpt2
from gristmill.tokens.format import LEDGER_FILE, file_of, is_manifest
from gristmill.tokens.origins import ORIGINS_FILE, open_origins
from gristmill.tokens.store import TokensNotFoundError, open_tokens
from gristmill.track.folder import RunFolder

_NARROW = 256
"""Width up to which a model would spend most of its time on GPT-2's vocabulary."""
_SMALL, _LARGE, _GPT2 = 4096, 32768, 50257
_BYTES_PER_TOKEN = 4.4
"""English text with GPT-2's vocabulary; used if there is no text to measure."""
_BYTES_PER_SMALL = 3.5
"""English text with a vocabulary of a few thousand ids."""
_BYTES = 257
_SPLITS = ("_train", "_val")
_MAX_MANIFEST = 2**24
"""Bytes; the manifest of a hundred thousand files is smaller."""
_ID_FILES = (".bin", ".idx", ".npy", ".ds")
"""File name endings of token ids."""
_SET_FILES = (LEDGER_FILE, ".json", ".bin", ".idx", ".starts", ORIGINS_FILE)
"""File name endings of a token set with a manifest."""


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
    sets = [_token_set(source) for source in sources]
    if sets[0] is not None and len(sources) == 1:
        return _without_tokenizer_option(sets[0], tokenizer)
    for source, token_set in zip(sources, sets, strict=True):
        _require_text(source, token_set, alone=len(sources) == 1)
    name = _free_name(name_of(sources[0]), sources)
    paths = f"tokens/{name}"
    if (prepared := _token_set(paths)) is not None:
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
    if path.is_file() and path.suffix in _ID_FILES and _token_set(source) is None:
        stem = path.with_suffix("")
        arguments = ["convert", source, "--from", "flat", "--format", "flat"]
        command = shlex.join(["gristmill", "tokens", *arguments, "-o", f"tokens/{stem.name}"])
        raise DataError(
            "this file holds plain token ids without a description of their format",
            where=source,
            remedy=f"if it is from nanoGPT: {command}, then use tokens/{stem.name}",
        )
    if path.is_dir() and _token_set(source) is None and (sets := _sets_in(path)):
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
        existing = _token_set(f"tokens/{name}")
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


# ------------------------------------------------------------------ a token set


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
        return DataFacts(self.vocab or model.vocab or _GPT2, self.tokens)

    def summary(self, run: NewRun) -> Iterator[str]:
        size = "unknown size" if self.vocab is None else f"{self.vocab:,}"
        yield f"{self.paths}: {self.tokens:,} tokens, with a vocabulary of {size}."
        if self.reused:
            yield "The text was already prepared; this token set is used."

    def prepare(self, run: NewRun) -> list[str]:
        return []


def _token_set(name: str) -> TokenSet | None:
    """The token set of this name, with its validation set if there is one; None without a set."""
    if scheme_of(name) or is_dataset(name):
        return None
    name = _prefix(name)
    train, held_out = (f"{name}{split}" for split in _SPLITS)
    if not _is_set(name) and _is_set(train):
        name = train
    if not _is_set(name):
        return None
    stem = name.removesuffix(_SPLITS[0])
    held_out = f"{stem}{_SPLITS[1]}" if stem != name else ""
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
    if path.is_file() and path.suffix not in _ID_FILES:
        return False
    if path.is_dir() and {file.suffix for file in path.iterdir()} - set(_ID_FILES):
        return False  # a folder of text
    try:
        open_tokens(name)
    except TokensNotFoundError:
        if not path.exists() and file_of(path, ".bin").is_file():
            raise  # its files exist but are not readable as they are
        return False
    return True


def _sets_in(folder: Path) -> list[str]:
    files = sorted(file for file in folder.glob("*.json") if _describes_tokens(file))
    return [str(file.with_suffix("")) for file in files]


def _describes_tokens(file: Path) -> bool:
    """Whether a file is a manifest. Large files are not: they may be a text in JSON."""
    return file.is_file() and file.stat().st_size <= _MAX_MANIFEST and is_manifest(file)


def _without_tokenizer_option(token_set: TokenSet, tokenizer: str | None) -> TokenSet:
    """The token set; refuses --tokenizer, since an existing set has its tokenizer."""
    if tokenizer is not None:
        what = f"the tokenizer of {token_set.paths} cannot change: the token set already exists"
        raise UserError(what, where="--tokenizer", remedy="leave it out", exit=Exit.USAGE)
    return token_set


# ------------------------------------------------------------------ a text


@dataclass(frozen=True)
class _TokenizerChoice:
    """A tokenizer as `prepare -t` takes it, with the size of its tokens."""

    tokenizer: str
    vocab: int
    bytes_per_token: float


@dataclass
class TextToPrepare:
    """A text to prepare; `estimate` is None if no source is given."""

    name: str
    sources: Sequence[str]
    paths: str
    tokenizer: str | None
    key: str | None = None
    """The key of the text in JSON and tables; None is the default of `prepare`."""
    estimate: TextEstimate | None = None
    validation: str | None = None
    has_tokenizer: bool = True
    _choices: dict[bool, _TokenizerChoice] = field(default_factory=dict)

    def facts(self, model: GPTConfig) -> DataFacts:
        choice, size = self._choice(model), self.text_bytes
        return DataFacts(
            choice.vocab, None if size is None else round(size / choice.bytes_per_token)
        )

    @property
    def text_bytes(self) -> int | None:
        return None if self.estimate is None else self.estimate.text_bytes

    def summary(self, run: NewRun) -> Iterator[str]:
        if self.estimate is None:
            yield "No text is given, so the size of the model follows from the time alone."
            return
        files = f"{self.estimate.files:,} {'file' if self.estimate.files == 1 else 'files'}"
        if self.text_bytes is None or run.data.tokens is None:
            yield f"{files} of text; `prepare` will count its tokens."
            return
        yield (
            f"{format_bytes(self.text_bytes)} of text in {files}: about "
            f"{format_count(run.data.tokens)} tokens, estimated from a sample."
        )

    def prepare(self, run: NewRun) -> list[str]:
        assert isinstance(run.config.model, GPTConfig)
        tokenizer = self._choice(run.config.model).tokenizer
        # A leading dash would make the path an option.
        paths = [f"./{source}" if source.startswith("-") else source for source in self.sources]
        text = shlex.join(paths) if paths else "TEXT…"
        keys = ["--json-key", self.key] if self.key else []
        options = [*keys, "-o", self.output, "-t", tokenizer]
        return [f"gristmill prepare {text} {shlex.join(options)}"]

    @property
    def output(self) -> str:
        """The name that `prepare -o` takes."""
        return self.paths

    def _choice(self, model: GPTConfig) -> _TokenizerChoice:
        narrow = model.width <= _NARROW
        if narrow not in self._choices:
            name = self.tokenizer
            self._choices[narrow] = self._default(narrow) if name is None else self._named(name)
        return self._choices[narrow]

    def _default(self, narrow: bool) -> _TokenizerChoice:
        """GPT-2's tokenizer if it is on this machine, a small BPE for narrow models, and bytes for
        a text that is too short to train one."""
        if self.estimate is None:
            size = _SMALL if narrow else _LARGE
            bytes_per_token = _BYTES_PER_SMALL if narrow else _BYTES_PER_TOKEN
            use_gpt2 = not narrow and has_gpt2()
            return _gpt2() if use_gpt2 else _bpe(size, bytes_per_token)
        if not narrow and has_gpt2():
            return self._named("gpt2")
        trained = self.estimate.train_bpe(_SMALL if narrow else _LARGE)
        return _TokenizerChoice("bytes", _BYTES, 1.0) if trained is None else _bpe(*trained)

    def _named(self, name: str) -> _TokenizerChoice:
        """The tokenizer that the user asked for."""
        if not is_of_text(name):
            opened = open_tokenizer(name)
        elif (size := learnt_size(name)) is not None:
            trained = None if self.estimate is None else self.estimate.train_bpe(size)
            return _TokenizerChoice(name, size, _BYTES_PER_TOKEN if trained is None else trained[1])
        elif self.estimate is None:
            what = "a character tokenizer needs the text"
            raise UserError(what, where="--tokenizer", remedy="name the text", exit=Exit.USAGE)
        else:
            opened = character_tokenizer(self.estimate.sample)
        bytes_per_token = _BYTES_PER_TOKEN
        if self.estimate is not None:
            bytes_per_token = self.estimate.bytes_per_token(opened)
        return _TokenizerChoice(name, opened.size, bytes_per_token)


def _gpt2() -> _TokenizerChoice:
    return _TokenizerChoice("gpt2", _GPT2, _BYTES_PER_TOKEN)


def _bpe(size: int, bytes_per_token: float) -> _TokenizerChoice:
    return _TokenizerChoice(f"bpe:{size}", size, bytes_per_token)


@dataclass
class CorpusToPrepare(TextToPrepare):
    """A corpus known by name."""

    corpus: Corpus = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.corpus.validation or self.corpus.held_out is not None:
            self.paths, self.validation = (f"{self.paths}{split}" for split in _SPLITS)

    @property
    def text_bytes(self) -> int | None:
        return self.corpus.text_bytes

    @property
    def output(self) -> str:
        return self.paths.removesuffix(_SPLITS[0])

    def summary(self, run: NewRun) -> Iterator[str]:
        size = self.text_bytes
        amount = "of unknown size" if size is None else f"about {format_bytes(size)} of text"
        yield f"{self.corpus.title} ({amount}). `prepare` downloads it."

    def _default(self, narrow: bool) -> _TokenizerChoice:
        """GPT-2's tokenizer can be downloaded, as the corpus is."""
        if not narrow:
            return _gpt2()
        size = largest_vocabulary(self.text_bytes, limit=_SMALL)
        return (
            _TokenizerChoice("bytes", _BYTES, 1.0) if size is None else _bpe(size, _BYTES_PER_SMALL)
        )
