"""Generates token ids, and text: prefill, then one position at a time with the model's cache, if it
has one.

    window   the last `context` ids: what the model sees; when full, its older half is dropped

The window depends on positions only. So decoding sees the same ids with and without a cache, and
greedy decoding gives the same ids. The engine knows nothing about text; `TextGenerator` adds a
tokenizer, and `ChatGenerator` a template and the conversation so far.

Shapes: B samples, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gristmill.base.errors import DataError, UserError
from gristmill.models.spec import CausalLM
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 50
    """Draw from this many of the most likely tokens; 0 allows all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability."""
    seed: int = 1337

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            what = f"the temperature must be 0 or more, not {self.temperature}"
            raise UserError(what, where="--temperature", remedy="for example 0.8")
        if self.top_k < 0:
            raise UserError("top-k must be 0 (all) or more", where="--top-k")
        if not 0 < self.top_p <= 1:
            raise UserError("top-p must be above 0 and at most 1", where="--top-p")
        if not 0 <= self.seed < 2**64:
            raise UserError("the seed must be from 0 to 2^64 - 1", where="--seed")


class Engine:
    """Continues sequences of ids with one model."""

    def __init__(self, model: CausalLM, *, cached: bool = True, ids: int | None = None) -> None:
        """`ids` limits what can be drawn, for a model with more ids than its tokenizer."""
        self.model, self.cached, self.ids = model, cached, ids or model.vocab

    @torch.inference_mode()
    def stream(
        self, prompts: Sequence[list[int]], *, tokens: int, sampling: Sampling
    ) -> Iterator[list[int]]:
        """Yield the next id of each prompt, `tokens` times; all prompts have the same length."""
        assert prompts[0], "the caller begins with an end-of-text id if there is nothing else"
        was_training = self.model.training
        self.model.eval()
        device = self.model.device
        generator = torch.Generator(device).manual_seed(sampling.seed)
        ids_BT = torch.tensor(prompts, device=device)
        cache = self.model.new_cache() if self.cached else None
        window = 0
        try:
            for _ in range(tokens):
                start = window_start(ids_BT.shape[1], self.model.config.context)
                seen = 0
                if cache is not None:
                    if start != window:
                        cache.clear()
                        window = start
                    seen = cache.length
                new_BT = ids_BT[:, start + seen :]
                last_B = torch.arange(1, len(prompts) + 1, device=device) * new_BT.shape[1] - 1
                logits_BV = self.model(new_BT, cache=cache, logits_at_N=last_B)
                assert isinstance(logits_BV, torch.Tensor)
                next_B = draw(logits_BV[:, : self.ids], sampling, generator)
                ids_BT = torch.cat((ids_BT, next_B[:, None]), dim=1)
                yield next_B.tolist()
        finally:
            self.model.train(was_training)


def window_start(length: int, context: int) -> int:
    """The first of `length` ids that is in the window."""
    if length <= context:
        return 0
    half = max(1, context // 2)
    return -(-(length - context) // half) * half


def draw(logits_BV: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """One id per row. Refuses logits that are not finite, which have no most likely id."""
    logits_BV = logits_BV.float()
    if not logits_BV.isfinite().all():
        raise DataError("the model computes NaN or infinite logits, so it cannot choose a token")
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    # The likeliest becomes 0, so that the smallest temperature gives no infinity.
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)
    logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / temperature
    if 0 < sampling.top_k < logits_BV.shape[1]:
        least = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, -torch.inf)
    probabilities_BV = logits_BV.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, places = probabilities_BV.sort(descending=True, dim=-1)
        ordered[ordered.cumsum(dim=-1) - ordered >= sampling.top_p] = 0.0
        probabilities_BV = torch.zeros_like(ordered).scatter_(1, places, ordered)
    return torch.multinomial(probabilities_BV, 1, generator=generator)[:, 0]


@dataclass
class _Draft:
    """One sample that is being generated."""

    ids: list[int] = field(default_factory=list)
    yielded: int = 0
    """Characters already yielded."""
    finished: bool = False


class TextGenerator:
    """Continues text: an engine with a tokenizer and stop strings, whose text is streamed."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        cached: bool = True,
        ends: Collection[int] = (),
    ) -> None:
        """`ends` are control tokens that end a text besides end-of-text."""
        self.engine = Engine(model, cached=cached, ids=tokenizer.size)
        self.tokenizer = tokenizer
        self.ends = {tokenizer.end_of_text, *ends}
        self._controls = frozenset(tokenizer.control_tokens.values())

    def stream(
        self,
        prompt: str | list[int],
        *,
        tokens: int,
        sampling: Sampling,
        samples: int = 1,
        stop: Sequence[str] = (),
    ) -> Iterator[tuple[int, str]]:
        """Yield (sample, new text); a sample ends at a token that ends texts, before a stop string,
        or when full. The prompt is text, before which comes what the tokenizer puts before every
        text, or ids."""
        if isinstance(prompt, str):
            prompt = [*self.tokenizer.prefix, *self.tokenizer.encode(prompt)]
        ids = prompt or [self.tokenizer.end_of_text]
        yield from self._stream([ids] * samples, tokens=tokens, sampling=sampling, stop=stop)

    def complete(
        self, prompts: Sequence[list[int]], *, tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> list[str]:
        """The whole continuations of several prompts of the same length, given as ids."""
        texts = [""] * len(prompts)
        for number, piece in self._stream(prompts, tokens=tokens, sampling=sampling, stop=stop):
            texts[number] += piece
        return texts

    def _stream(
        self, prompts: Sequence[list[int]], *, tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> Iterator[tuple[int, str]]:
        drafts = [_Draft() for _ in prompts]
        # A control token is no text that could be found in what was written.
        named = self.tokenizer.control_tokens
        ends = self.ends | {named[word] for word in stop if word in named}
        for next_ids in self.engine.stream(prompts, tokens=tokens, sampling=sampling):
            for number, (draft, next_id) in enumerate(zip(drafts, next_ids, strict=True)):
                if not draft.finished:
                    yield number, self._extend(draft, next_id, ends, stop)
            if all(draft.finished for draft in drafts):
                return
        for number, draft in enumerate(drafts):
            if not draft.finished:
                yield number, self.tokenizer.decode(draft.ids)[draft.yielded :]

    def texts(self, prompt: str | list[int], *, samples: int = 1, **options: Any) -> list[str]:
        """The whole continuations; `options` are those of `stream`."""
        texts = [""] * samples
        for number, piece in self.stream(prompt, samples=samples, **options):
            texts[number] += piece
        return texts

    def _extend(
        self, draft: _Draft, next_id: int, ends: Collection[int], stop: Sequence[str]
    ) -> str:
        """Append an id and return the text that is final now; control tokens are no text."""
        if next_id in ends:
            draft.finished = True
        elif next_id not in self._controls:
            draft.ids.append(next_id)
        text = self.tokenizer.decode(draft.ids)
        cut = min((text.find(word) for word in stop if word in text), default=-1)
        if cut >= 0:
            draft.finished = True
            text = text[:cut]
        elif not draft.finished:
            # Hold back an incomplete character and a possible beginning of a stop string.
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
            text = text[: len(text) - _stop_prefix(text, stop)]
        new = text[draft.yielded :]
        draft.yielded = max(draft.yielded, len(text))
        return new


def _stop_prefix(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    lengths = (n for word in stop for n in range(1, len(word)) if text.endswith(word[:n]))
    return max(lengths, default=0)


class ChatGenerator:
    """Answers messages, and remembers the conversation as far as it fits into the context."""

    def __init__(
        self,
        model: CausalLM,
        encoder: ChatEncoder,
        *,
        system: str | None = None,
        cached: bool = True,
    ) -> None:
        self.encoder, self.context = encoder, model.config.context
        self.generator = TextGenerator(model, encoder.tokenizer, cached=cached, ends=encoder.ends)
        self.messages = [] if system is None else [Message("system", system)]
        self.forgotten = 0
        """Messages that no longer fit."""

    def ask(
        self,
        question: str,
        *,
        tokens: int,
        sampling: Sampling,
        samples: int = 1,
        stop: Sequence[str] = (),
    ) -> Iterator[tuple[int, str]]:
        """Yield (sample, new text) of the answer; of several answers, the first one counts for what
        comes after."""
        self.messages.append(Message("user", question))
        prompt = self._prompt(tokens)
        written = [""] * samples
        for number, text in self.generator.stream(
            prompt,
            tokens=min(tokens, self.context - len(prompt)),
            sampling=sampling,
            samples=samples,
            stop=stop,
        ):
            before = self._words(written[number])
            written[number] += text
            yield number, self._words(written[number])[len(before) :]
        self.messages.append(Message("assistant", self._words(written[0])))

    def _words(self, written: str) -> str:
        """An answer without what the template puts before its words."""
        lead = self.encoder.lead_text
        return "" if lead.startswith(written) else written.removeprefix(lead)

    def _prompt(self, tokens: int) -> list[int]:
        """The ids of the conversation, without its oldest turns if there is no room for them and an
        answer; the system message stays."""
        room = min(tokens, self.context // 4)
        while True:
            ids = self.encoder.encode_prompt(self.messages)
            if len(ids) + room <= self.context:
                return ids
            first = int(self.messages[0].role == "system")
            turns = (n for n, one in enumerate(self.messages) if one.role == "user" and n > first)
            second = next(turns, None)
            if second is None:
                if len(ids) < self.context:
                    return ids
                raise UserError(
                    f"this message is {len(ids)} tokens long, and the model's context is "
                    f"{self.context}",
                    where="PROMPT",
                    remedy="shorten it",
                )
            self.forgotten += second - first
            del self.messages[first:second]
