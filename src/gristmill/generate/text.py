"""Text from an engine: a tokenizer, stop strings, conversations.

`TextWriter` turns the ids of one sample into text as they come, `TextGenerator` continues texts,
and `ChatGenerator` answers messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from gristmill.base.errors import UserError
from gristmill.generate.constraints import Constraint
from gristmill.generate.engine import Engine
from gristmill.generate.request import Generation, Request
from gristmill.generate.sampling import Sampling
from gristmill.models.decoding import affordable_slots
from gristmill.models.spec import CausalLM
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.text.tokenizers.tokenizer import Tokenizer

MOST_SLOTS = 64
"""Sequences that are continued at once; those behind them wait."""
CAPACITY_STEP = 1024
"""An engine for less than the context has room for a multiple of so many ids."""
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Bytes of UTF-8; what is incomplete after more ids is no character."""


class TextWriter:
    """The text of one sample, as its ids come."""

    def __init__(
        self, tokenizer: Tokenizer, *, ends: Collection[int], stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer, self._ends, self._stop = tokenizer, ends, stop
        self._controls = frozenset(tokenizer.control_tokens.values())
        self._ids = list[int]()
        """The last ids whose text is known, and those behind them. Some tokenizers decode an id in
        another way at the beginning of a text."""
        self._known = 0
        """How many of them have text that is known."""
        self._held = ""
        """Text that could be the beginning of a stop string."""
        self.finished = False
        """Whether a stop string or an id that ends texts was met."""

    def add(self, id: int) -> str:
        """The text that is final with this id. A control token is no text."""
        assert not self.finished, "nothing comes after the end"
        if id in self._ends:
            self.finished = True
            return self.rest()
        if id in self._controls:
            return ""
        self._ids.append(id)
        return self._stopped(self._new_text(final=False))

    def rest(self) -> str:
        """The text that was held back, at the end."""
        text = self._stopped(self._new_text(final=True)) + self._held
        self._held = ""
        return text

    def _new_text(self, *, final: bool) -> str:
        """What the ids add to the text; nothing while its last character is incomplete."""
        before = self._tokenizer.decode(self._ids[: self._known])
        text = self._tokenizer.decode(self._ids)
        new = len(self._ids) - self._known
        if text.endswith(HALF_CHARACTER) and new < LONGEST_CHARACTER and not final:
            return ""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return text[len(before) :]

    def _stopped(self, new: str) -> str:
        """New text up to a stop string, without what could be the beginning of one."""
        text = self._held + new
        cut = min((text.find(word) for word in self._stop if word in text), default=-1)
        if cut >= 0:
            self.finished, self._held = True, ""
            return text[:cut]
        held = 0 if self.finished else _stop_prefix(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _stop_prefix(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    if not text or not stop:
        return 0
    last, held = text[-1], 0
    for word in stop:
        # Only a beginning that ends in the last character can be one.
        end = word.find(last)
        while 0 <= end < len(word) - 1:
            if end >= held and text.endswith(word[: end + 1]):
                held = end + 1
            end = word.find(last, end + 1)
    return held


class TextGenerator:
    """Continues texts with a model."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        *,
        cached: bool = True,
        ends: Collection[int] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """`ends` are control tokens that end a text besides end-of-text; `dtype` as for
        `Engine`."""
        self.model, self.tokenizer = model, tokenizer
        self.ends = {tokenizer.end_of_text, *ends}
        self._cached, self._dtype = cached, dtype
        self._engine: Engine | None = None

    def stream(
        self,
        prompt: str | list[int],
        *,
        tokens: int,
        sampling: Sampling,
        samples: int = 1,
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Yield (sample, new text); a sample ends at a token that ends texts, before a stop string,
        or when full. The prompt is text, before which comes what the tokenizer puts before every
        text, or ids."""
        ids = self.prompt_ids(prompt)
        requests = [
            Request(
                ids,
                tokens,
                sampling,
                sample=sample,
                ends=self.ends_with(stop),
                slides=True,
                matcher=None if constraint is None else constraint.matcher(),
            )
            for sample in range(samples)
        ]
        yield from self._stream(requests, stop)

    def complete(
        self, prompts: Sequence[list[int]], *, tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> Iterator[tuple[int, str]]:
        """The whole continuations of several prompts, given as ids, with their numbers, in the
        order in which they end."""
        ends = self.ends_with(stop)
        requests = [Request(ids, tokens, sampling, ends=ends, slides=True) for ids in prompts]
        texts = [""] * len(prompts)
        for number, piece in self._stream(requests, stop, finished := set[int]()):
            texts[number] += piece
            if number in finished:
                yield number, texts[number]

    def texts(self, prompt: str | list[int], *, samples: int = 1, **options: Any) -> list[str]:
        """The whole continuations; `options` are those of `stream`."""
        texts = [""] * samples
        for number, piece in self.stream(prompt, samples=samples, **options):
            texts[number] += piece
        return texts

    def prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """The ids of a prompt, of which there is at least one."""
        if isinstance(prompt, str):
            prompt = [*self.tokenizer.prefix, *self.tokenizer.encode(prompt)]
        return prompt or [self.tokenizer.end_of_text]

    def ends_with(self, stop: Sequence[str]) -> frozenset[int]:
        """The ids that end a text. A control token is no text that could be found in what was
        written."""
        named = self.tokenizer.control_tokens
        return frozenset(self.ends | {named[word] for word in stop if word in named})

    def _stream(
        self, requests: Sequence[Request], stop: Sequence[str], finished: set[int] | None = None
    ) -> Iterator[tuple[int, str]]:
        """Yield (number of a request, new text); numbers are added to `finished` before their last
        text."""
        engine = self._engine_for(requests)
        numbers, writers = dict[Generation, int](), dict[Generation, TextWriter]()
        for number, request in enumerate(requests):
            generation = engine.submit(request)
            numbers[generation] = number
            writers[generation] = TextWriter(self.tokenizer, ends=request.ends, stop=stop)
        try:
            while engine.busy:
                for generation in engine.step():
                    generation.require_token()
                    writer, text = writers[generation], ""
                    for id in generation.new_ids():
                        text += writer.add(id)
                        if writer.finished:
                            break
                    if writer.finished:
                        engine.cancel(generation)
                    elif generation.finish is not None:
                        text += writer.rest()
                    if generation.finish is not None and finished is not None:
                        finished.add(numbers[generation])
                    yield numbers[generation], text
        finally:
            for generation in numbers:
                engine.cancel(generation)

    def _engine_for(self, requests: Sequence[Request]) -> Engine:
        """An engine with room for these requests, as many of them at once as memory allows."""
        context = self.model.config.context
        needed = max(len(request.ids) + request.tokens for request in requests)
        capacity = min(context, -(-needed // CAPACITY_STEP) * CAPACITY_STEP)
        engine = self._engine
        if (
            engine is None
            or engine.capacity < capacity
            or engine.decoder.slots < min(len(requests), MOST_SLOTS)
        ):
            dtype = self._dtype or self.model.compute
            self._engine = engine = None  # its memory first
            slots = affordable_slots(
                self.model, min(len(requests), MOST_SLOTS), capacity=capacity, dtype=dtype
            )
            engine = Engine(
                self.model,
                slots=slots,
                capacity=capacity,
                ids=self.tokenizer.size,
                dtype=dtype,
                cached=self._cached,
            )
            self._engine = engine
        return engine


class ChatGenerator:
    """Answers messages, and remembers the conversation as far as it fits into the context."""

    def __init__(
        self,
        model: CausalLM,
        encoder: ChatEncoder,
        *,
        system: str | None = None,
        cached: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.encoder, self.context = encoder, model.config.context
        self.generator = TextGenerator(
            model, encoder.tokenizer, cached=cached, ends=encoder.ends, dtype=dtype
        )
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
        constraint: Constraint | None = None,
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
            constraint=constraint,
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
            turns = (
                n for n, message in enumerate(self.messages) if message.role == "user" and n > first
            )
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
