"""A text to prepare as the data of `new`: its tokenizer, and how many tokens it has.

tokenizer     as asked for; else GPT-2's if it is on this machine, a small BPE for narrow models,
              and bytes for a text that is too short to train one
tokens        estimated from a sample of the text; for a corpus, from the size in a table

The choice depends on the width of the model, which in turn is chosen by the number of tokens. So a
choice is asked for several times, and kept.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.new_token_set import SPLITS
from gristmill.cli.prepare_tokenizer import is_of_text, learnt_size
from gristmill.config.model import GPTConfig
from gristmill.plan.new_run import DataFacts, NewRun
from gristmill.text.estimate import TextEstimate, largest_vocabulary
from gristmill.text.sources.corpora import Corpus
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.text.tokenizers.training import character_tokenizer
from gristmill.text.tokenizers.vocabularies import has_gpt2

_NARROW = 256
"""Width up to which a model would spend most of its time on GPT-2's vocabulary."""
_SMALL, _LARGE, _GPT2 = 4096, 32768, 50257
_BYTES_PER_TOKEN = 4.4
"""English text with GPT-2's vocabulary; used if there is no text to measure."""
_BYTES_PER_SMALL = 3.5
"""English text with a vocabulary of a few thousand ids."""
_BYTES = 257


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
            self.paths, self.validation = (f"{self.paths}{split}" for split in SPLITS)

    @property
    def text_bytes(self) -> int | None:
        return self.corpus.text_bytes

    @property
    def output(self) -> str:
        return self.paths.removesuffix(SPLITS[0])

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
