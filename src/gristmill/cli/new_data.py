"""What `new` finds out about its sources: a token set that is there, or a text to prepare.

tokens/books                    a set, counted: nothing is left to prepare
tokens/books, with              the same, and its validation set
  tokens/books_train, _val
tokens/books.bin                the set of which this is a file
books/, 'web/*.jsonl', …        a text, whose tokens are estimated from a sample
openwebtext                     a corpus known by name, of the size that its table states
nothing                         a text that is not known yet

A text that was prepared before under the name that it would get is not prepared again; a set of
that name whose documents come from other files is left alone, and the new one gets a number. What
is neither text nor tokens, such as a run file, is refused with what to do with it.
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
"""Models up to this width would spend most of their time on GPT-2's vocabulary."""
_SMALL, _LARGE, _GPT2 = 4096, 32768, 50257
_BYTES_PER_TOKEN = 4.4
"""Of English with GPT-2's vocabulary, where no text is at hand."""
_BYTES_PER_SMALL = 3.5
"""The same with a few thousand ids."""
_BYTES = 257
_SPLITS = ("_train", "_val")
_MOST_MANIFEST = 2**24
"""Bytes; that of a set of a hundred thousand files has less."""
_ID_FILES = (".bin", ".idx", ".npy", ".ds")
"""Endings of files of ids."""
_SET_FILES = (LEDGER_FILE, ".json", ".bin", ".idx", ".starts", ORIGINS_FILE)
"""Endings of files of a set with a manifest."""


class NewData(Protocol):
    """The data of a new run."""

    @property
    def name(self) -> str:
        """For the run."""
        ...

    @property
    def sources(self) -> Sequence[str]:
        """As they were given."""
        ...

    @property
    def paths(self) -> str:
        """The token set that the run reads."""
        ...

    @property
    def validation(self) -> str | None: ...

    @property
    def has_tokenizer(self) -> bool:
        """Whether there will be one beside the token set."""
        ...

    def facts(self, model: GPTConfig) -> DataFacts:
        """What a model of some size would read."""
        ...

    def told(self, run: NewRun) -> Iterator[str]:
        """About the data, in sentences."""
        ...

    def prepare(self, run: NewRun) -> list[str]:
        """The commands that make the token set."""
        ...


def find_data(sources: Sequence[str], tokenizer: str | None, key: str | None = None) -> NewData:
    """What the sources are; `key` holds the text of JSON and tables."""
    if not sources:
        return TextToPrepare("first", sources, "tokens/text", tokenizer, key)
    for source in sources:
        _require_data(source)
    sets = [_token_set(source) for source in sources]
    if sets[0] is not None and len(sources) == 1:
        return _made(sets[0], tokenizer)
    for source, found in zip(sources, sets, strict=True):
        _require_text(source, found, alone=len(sources) == 1)
    name = _free_name(name_of(sources[0]), sources)
    paths = f"tokens/{name}"
    if (found := _token_set(paths)) is not None:
        return replace(_made(found, tokenizer), sources=sources, found=True)
    corpus = find_corpus(sources[0]) if not Path(sources[0]).exists() else None
    if corpus is not None:
        return CorpusToPrepare(name, sources, paths, tokenizer, corpus=corpus)
    estimate = estimate_text(sources, ReadOptions((key,)) if key else None)
    return TextToPrepare(name, sources, paths, tokenizer, key, estimate)


def _require_data(source: str) -> None:
    """Refuse what is neither text nor tokens, though it could be read as text."""
    path = Path(source)
    if path.is_file() and path.suffix == ".toml":
        remedy = f"train it: gristmill train {shlex.quote(source)}"
        raise DataError("this is a run file, not text", where=source, remedy=remedy)
    if RunFolder(path).settings.is_file():
        remedy = f"resume it: gristmill train {shlex.quote(source)}"
        raise DataError("this is a run folder, not text", where=source, remedy=remedy)
    if path.is_file() and path.suffix in _ID_FILES and _token_set(source) is None:
        stem = path.with_suffix("")
        words = ["convert", source, "--from", "flat", "--format", "flat"]
        command = shlex.join(["gristmill", "tokens", *words, "-o", f"tokens/{stem.name}"])
        raise DataError(
            "these are plain ids, which do not say how they are stored",
            where=source,
            remedy=f"if they are nanoGPT's: {command}, then give tokens/{stem.name}",
        )
    if path.is_dir() and _token_set(source) is None and (sets := _sets_in(path)):
        what, remedy = "this folder holds token sets", f"name one of them: {', '.join(sets)}"
        raise DataError(what, where=source, remedy=remedy)


def _require_text(source: str, found: TokenSet | None, *, alone: bool) -> None:
    """Refuse one of several sources with which the others cannot be prepared."""
    if found is not None:
        what = "this is a token set, to which no text or other set can be added here"
        remedy = "prepare the text on its own, then: gristmill tokens merge"
        raise UserError(what, where=source, remedy=remedy, exit=Exit.USAGE)
    if not alone and not Path(source).exists() and find_corpus(source) is not None:
        what = "a corpus is prepared on its own"
        remedy = "prepare each on its own, then: gristmill tokens merge"
        raise UserError(what, where=source, remedy=remedy, exit=Exit.USAGE)


def _free_name(name: str, sources: Sequence[str]) -> str:
    """The name, with a number if a token set of this name is of another text."""
    for number in itertools.count(2):
        found = _token_set(f"tokens/{name}")
        if found is None or _is_of(found.paths, sources):
            break
        name = f"{name.removesuffix(f'-{number - 1}')}-{number}"
    return name


def _is_of(paths: str, sources: Sequence[str]) -> bool:
    """Whether some of a set's documents come from these sources, as far as is known."""
    origins = open_origins(Path(paths))
    if origins is None or any(scheme_of(one) or is_dataset(one) for one in sources):
        return True
    if find_corpus(sources[0]) is not None and not Path(sources[0]).exists():
        return True
    there = {os.path.realpath(one.name) for one in find_sources(sources, ReadOptions()).sources}
    return any(os.path.realpath(one) in there for one in origins.sources)


def name_of(source: str) -> str:
    """A name for a run and a token set, from that of its text."""
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
    """Tokens that are there."""

    name: str
    sources: Sequence[str]
    paths: str
    validation: str | None
    tokens: int
    vocab: int | None
    has_tokenizer: bool
    found: bool = False
    """Whether nobody named it: it has the name that the token set of the text would get."""

    def facts(self, model: GPTConfig) -> DataFacts:
        return DataFacts(self.vocab or model.vocab or _GPT2, self.tokens)

    def told(self, run: NewRun) -> Iterator[str]:
        size = "unknown size" if self.vocab is None else f"{self.vocab:,}"
        yield f"{self.paths}: {self.tokens:,} tokens, with a vocabulary of {size}."
        if self.found:
            yield "The text was prepared before; these tokens are used as they are."

    def prepare(self, run: NewRun) -> list[str]:
        return []


def _token_set(name: str) -> TokenSet | None:
    """The set of this name, or of this name with its validation set; None if it is none."""
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
    """The name of the set to which a file belongs; else the name itself."""
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
        # Beside a text there may be JSON of the same name that is something else.
        return not path.exists() or _describes_tokens(manifest)
    if path.is_file() and path.suffix not in _ID_FILES:
        return False
    if path.is_dir() and {file.suffix for file in path.iterdir()} - set(_ID_FILES):
        return False  # a folder of text
    try:
        open_tokens(name)
    except TokensNotFoundError:
        if not path.exists() and file_of(path, ".bin").is_file():
            raise  # its files are there, but cannot be read like this
        return False
    return True


def _sets_in(folder: Path) -> list[str]:
    files = sorted(file for file in folder.glob("*.json") if _describes_tokens(file))
    return [str(file.with_suffix("")) for file in files]


def _describes_tokens(file: Path) -> bool:
    """Whether a file is a manifest, which is small; a text in JSON may be of any size."""
    return file.is_file() and file.stat().st_size <= _MOST_MANIFEST and is_manifest(file)


def _made(found: TokenSet, tokenizer: str | None) -> TokenSet:
    """A set that is there."""
    if tokenizer is not None:
        what = f"{found.paths} is made already, and its tokenizer with it"
        raise UserError(what, where="--tokenizer", remedy="leave it out", exit=Exit.USAGE)
    return found


# ------------------------------------------------------------------ a text


@dataclass(frozen=True)
class _Choice:
    """A tokenizer as `prepare -t` takes it."""

    tokenizer: str
    vocab: int
    bytes_per_token: float


@dataclass
class TextToPrepare:
    """A text, or one that nothing is known of."""

    name: str
    sources: Sequence[str]
    paths: str
    tokenizer: str | None
    key: str | None = None
    """Of the text, in JSON and tables; `prepare`'s own if not given."""
    estimate: TextEstimate | None = None
    validation: str | None = None
    has_tokenizer: bool = True
    _choices: dict[bool, _Choice] = field(default_factory=dict)

    def facts(self, model: GPTConfig) -> DataFacts:
        choice, size = self._choice(model), self.text_bytes
        return DataFacts(
            choice.vocab, None if size is None else round(size / choice.bytes_per_token)
        )

    @property
    def text_bytes(self) -> int | None:
        return None if self.estimate is None else self.estimate.text_bytes

    def told(self, run: NewRun) -> Iterator[str]:
        if self.estimate is None:
            yield "No text is given, so the size of the model follows from the time alone."
            return
        files = f"{self.estimate.files:,} {'file' if self.estimate.files == 1 else 'files'}"
        if self.text_bytes is None or run.data.tokens is None:
            yield f"{files} of text; how much it is will be known when it has been read."
            return
        yield (
            f"{format_bytes(self.text_bytes)} of text in {files}: about "
            f"{format_count(run.data.tokens)} tokens, estimated from a sample."
        )

    def prepare(self, run: NewRun) -> list[str]:
        assert isinstance(run.config.model, GPTConfig)
        tokenizer = self._choice(run.config.model).tokenizer
        # A name that begins with a dash would be read as an option.
        named = [f"./{one}" if one.startswith("-") else one for one in self.sources]
        text = shlex.join(named) if named else "TEXT…"
        keys = ["--json-key", self.key] if self.key else []
        options = [*keys, "-o", self.output, "-t", tokenizer]
        return [f"gristmill prepare {text} {shlex.join(options)}"]

    @property
    def output(self) -> str:
        """What the sets are called together."""
        return self.paths

    def _choice(self, model: GPTConfig) -> _Choice:
        narrow = model.width <= _NARROW
        if narrow not in self._choices:
            asked = self.tokenizer
            self._choices[narrow] = self._chosen(narrow) if asked is None else self._asked(asked)
        return self._choices[narrow]

    def _chosen(self, narrow: bool) -> _Choice:
        """GPT-2's where it is at hand, but a small one for narrow models; of a text that is too
        short for any, its bytes."""
        if self.estimate is None:
            size = _SMALL if narrow else _LARGE
            here = not narrow and has_gpt2()
            each = _BYTES_PER_SMALL if narrow else _BYTES_PER_TOKEN
            return _gpt2() if here else _learnt(size, each)
        if not narrow and has_gpt2():
            return self._asked("gpt2")
        learnt = self.estimate.learnt(_SMALL if narrow else _LARGE)
        return _Choice("bytes", _BYTES, 1.0) if learnt is None else _learnt(*learnt)

    def _asked(self, name: str) -> _Choice:
        if not is_of_text(name):
            opened = open_tokenizer(name)
        elif (size := learnt_size(name)) is not None:
            found = None if self.estimate is None else self.estimate.learnt(size)
            return _Choice(name, size, _BYTES_PER_TOKEN if found is None else found[1])
        elif self.estimate is None:
            what = "the characters of a text are known only with the text"
            raise UserError(what, where="--tokenizer", remedy="name the text", exit=Exit.USAGE)
        else:
            opened = character_tokenizer(self.estimate.sample)
        each = _BYTES_PER_TOKEN
        if self.estimate is not None:
            each = self.estimate.bytes_per_token(opened)
        return _Choice(name, opened.size, each)


def _gpt2() -> _Choice:
    return _Choice("gpt2", _GPT2, _BYTES_PER_TOKEN)


def _learnt(size: int, each: float) -> _Choice:
    return _Choice(f"bpe:{size}", size, each)


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

    def told(self, run: NewRun) -> Iterator[str]:
        size = self.text_bytes
        amount = "of unknown size" if size is None else f"about {format_bytes(size)} of text"
        yield f"{self.corpus.title} ({amount}). `prepare` downloads it."

    def _chosen(self, narrow: bool) -> _Choice:
        """GPT-2's can be had, since the corpus is downloaded too."""
        if not narrow:
            return _gpt2()
        size = largest_vocabulary(self.text_bytes, most=_SMALL)
        return _Choice("bytes", _BYTES, 1.0) if size is None else _learnt(size, _BYTES_PER_SMALL)
