"""What a task is: questions whose options a model scores, and what follows from the scores.

    MultipleChoice   several options, one of them right: which one is the likeliest?
    TextCompletion   one text and how it continues: does greedy decoding find it, how likely is it?

Options are pairs of context and continuation. They are encoded as lm-evaluation-harness does it, so
that scores can be compared: spaces at the end of a context belong to the continuation, and the
continuation's ids are those of the whole text that come after the context's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from gristmill.base.errors import UserError
from gristmill.evaluate.measures import Measure, mean, perplexity
from gristmill.evaluate.scoring import Continuation, Score
from gristmill.text.tokenizers.tokenizer import Tokenizer


class Task(Protocol):
    """Questions, and what follows from the scores of their options."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]:
        """Where the questions came from, and how they are asked."""
        ...

    def first(self, items: int) -> Task:
        """The same task with its first items only."""
        ...

    def questions(self, tokenizer: Tokenizer) -> list[list[Continuation]]:
        """The options of every question."""
        ...

    def measures(self, scores: Sequence[Sequence[Score]]) -> dict[str, Measure]: ...


class Option(NamedTuple):
    """A context and a continuation of it."""

    context: str
    continuation: str


@dataclass(frozen=True)
class MultipleChoice:
    """Questions with several options, one of which is right.

    `acc` takes the likeliest option, `acc_norm` the likeliest per character.
    """

    name: str
    options: list[list[Option]]
    gold: list[int]
    """The number of the right option."""
    lengths: list[list[int]]
    """Characters of each option."""
    facts: dict[str, Any]

    def first(self, items: int) -> MultipleChoice:
        options, gold, lengths = self.options[:items], self.gold[:items], self.lengths[:items]
        return replace(self, options=options, gold=gold, lengths=lengths)

    def questions(self, tokenizer: Tokenizer) -> list[list[Continuation]]:
        return encode_options(tokenizer, self.options)

    def measures(self, scores: Sequence[Sequence[Score]]) -> dict[str, Measure]:
        right, right_by_length = list[float](), list[float]()
        for options, gold, lengths in zip(scores, self.gold, self.lengths, strict=True):
            values = [one.log_prob for one in options]
            scaled = [value / length for value, length in zip(values, lengths, strict=True)]
            right.append(float(values.index(max(values)) == gold))
            right_by_length.append(float(scaled.index(max(scaled)) == gold))
        return {"acc": mean(right), "acc_norm": mean(right_by_length)}


@dataclass(frozen=True)
class TextCompletion:
    """Texts whose last words are to be predicted."""

    name: str
    options: list[Option]
    facts: dict[str, Any]

    def first(self, items: int) -> TextCompletion:
        return replace(self, options=self.options[:items])

    def questions(self, tokenizer: Tokenizer) -> list[list[Continuation]]:
        return encode_options(tokenizer, [[one] for one in self.options])

    def measures(self, scores: Sequence[Sequence[Score]]) -> dict[str, Measure]:
        first = [options[0] for options in scores]
        return {
            "acc": mean([float(one.greedy) for one in first]),
            "perplexity": perplexity([one.log_prob for one in first]),
        }


def encode_options(
    tokenizer: Tokenizer, questions: Sequence[Sequence[Option]]
) -> list[list[Continuation]]:
    """The ids of all options, after what the tokenizer puts before every text."""
    pairs = [_moved(option) for options in questions for option in options]
    contexts = sorted({pair.context for pair in pairs})
    lengths = dict(zip(contexts, map(len, tokenizer.encode_batch(contexts)), strict=True))
    whole = tokenizer.encode_batch([pair.context + pair.continuation for pair in pairs])
    prefix = list(tokenizer.prefix)
    found = iter(
        _continuation(prefix, ids, lengths[pair.context], pair, tokenizer)
        for pair, ids in zip(pairs, whole, strict=True)
    )
    return [[next(found) for _ in options] for options in questions]


def _continuation(
    prefix: list[int], ids: list[int], length: int, pair: Option, tokenizer: Tokenizer
) -> Continuation:
    if not length and not prefix:
        # Without a context, a new document begins.
        prefix = [tokenizer.end_of_text]
    if length >= len(ids):
        raise UserError(
            f"the tokenizer gives no ids to {pair.continuation!r} after {pair.context[-40:]!r}",
            where="evaluate",
            remedy="leave this task out for this model",
        )
    return Continuation((*prefix, *ids), len(prefix) + length)


def _moved(option: Option) -> Option:
    """The option with the spaces at the end of its context moved to the continuation."""
    context = option.context.rstrip()
    return Option(context, option.context[len(context) :] + option.continuation)
