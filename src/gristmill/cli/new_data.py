"""What `new` finds out about its sources: a token set that is there, or a text to prepare.

tokens/books                    a set, counted: nothing is left to prepare
tokens/books, with              the same, and its validation set
  tokens/books_train, _val
books/, 'web/*.jsonl', …        a text, whose tokens are estimated from a sample
openwebtext                     a corpus known by name, of the size that its table states
nothing                         a text that is not known yet
"""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.prepare_tokenizer import is_of_text, learnt_size
from gristmill.config.model import GPTConfig
from gristmill.hub.objects import scheme_of
from gristmill.plan.new_run import DataFacts, NewRun
from gristmill.text.estimate import TextEstimate, estimate_text
from gristmill.text.sources.corpora import Corpus, find_corpus
from gristmill.text.sources.datasets import is_dataset
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.text.tokenizers.training import character_tokenizer
from gristmill.text.tokenizers.vocabularies import has_gpt2
from gristmill.tokens.format import file_of
from gristmill.tokens.store import TokensNotFoundError, open_tokens

_NARROW = 256
"""Models up to this width would spend most of their time on GPT-2's vocabulary."""
_SMALL, _LARGE, _GPT2 = 4096, 32768, 50257
_BYTES_PER_TOKEN = 4.4
"""Of English with GPT-2's vocabulary, where no text is at hand."""
_BYTES = 257
_SPLITS = ("_train", "_val")


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


def find_data(sources: Sequence[str], tokenizer: str | None) -> NewData:
    """What the sources are."""
    if len(sources) == 1 and (found := _token_set(sources[0])) is not None:
        return _made(found, sources, tokenizer)
    if not sources:
        return TextToPrepare("first", sources, "tokens/text", tokenizer)
    name = name_of(sources[0])
    paths = f"tokens/{name}"
    if (found := _token_set(paths)) is not None:
        return _made(found, sources, tokenizer)
    corpus = find_corpus(sources[0]) if not Path(sources[0]).exists() else None
    if corpus is not None and len(sources) > 1:
        remedy = "prepare each on its own, then: gristmill tokens merge"
        raise UserError("a corpus is prepared on its own", where=sources[0], remedy=remedy)
    if corpus is not None:
        return CorpusToPrepare(name, sources, paths, tokenizer, corpus=corpus)
    return TextToPrepare(name, sources, paths, tokenizer, estimate=estimate_text(sources))


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
        ids = "nobody wrote down how many ids" if self.vocab is None else f"{self.vocab:,} ids"
        yield f"{self.paths}: {self.tokens:,} tokens, {ids}."
        if self.found:
            yield "This token set is there already, and is used as it is."

    def prepare(self, run: NewRun) -> list[str]:
        return []


def _token_set(name: str) -> TokenSet | None:
    """The set of this name, or of this name with its validation set; None if it is none."""
    if scheme_of(name) or is_dataset(name) or Path(name).is_file():
        return None
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


def _is_set(name: str) -> bool:
    if file_of(Path(name), ".json").is_file():
        return True
    if Path(name).exists():
        return False  # a folder or file of text, unless it says otherwise
    try:
        open_tokens(name)
    except TokensNotFoundError:
        return False
    return True


def _made(found: TokenSet, sources: Sequence[str], tokenizer: str | None) -> TokenSet:
    """A set that is there; `sources` are what was named."""
    if tokenizer is not None:
        what = f"{found.paths} is made already, and its tokenizer with it"
        raise UserError(what, where="--tokenizer", remedy="leave it out", exit=Exit.USAGE)
    return replace(found, sources=sources, found=_token_set(sources[0]) is None)


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
            yield "Nothing is known of the text: the size follows from the time."
            return
        files = f"{self.estimate.files:,} {'file' if self.estimate.files == 1 else 'files'}"
        if self.text_bytes is None or run.data.tokens is None:
            yield f"{files} of text, of a size that is not known before they are read."
            return
        yield (
            f"{format_bytes(self.text_bytes)} of text in {files}: about "
            f"{format_count(run.data.tokens)} tokens, estimated from a sample."
        )

    def prepare(self, run: NewRun) -> list[str]:
        assert isinstance(run.config.model, GPTConfig)
        tokenizer = self._choice(run.config.model).tokenizer
        text = shlex.join(self.sources) if self.sources else "TEXT…"
        return [f"gristmill prepare {text} {shlex.join(['-o', self.output, '-t', tokenizer])}"]

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
            return _gpt2() if here else _Choice(f"bpe:{size}", size, _BYTES_PER_TOKEN)
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
        yield f"{self.corpus.title}: {amount}; `prepare` downloads it."

    def _chosen(self, narrow: bool) -> _Choice:
        return _gpt2()
