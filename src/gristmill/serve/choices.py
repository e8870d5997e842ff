"""The texts that one request is answered with, as they come.

    Worker ──News──> Choice.add ──> text, tokens ──take()──> a chunk of a stream, or the whole

A `Choice` is one of `n` texts. What has come and has not been taken is joined, so a client that
reads slowly gets fewer and larger chunks, and never makes anybody wait.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from gristmill.generate.request import Request
from gristmill.generate.text import TextWriter
from gristmill.serve.metrics import Metrics
from gristmill.serve.token_texts import Offsets, TokenEntry, TokenTexts, probability_entry
from gristmill.serve.worker import News, Ticket, Worker
from gristmill.web.refusals import RefusalError, defect

FinishReason = Literal["stop", "length"]


class ChoiceDelta(NamedTuple):
    """What was added to a choice since it was last sent."""

    text: str
    entries: list[TokenEntry]
    finish: FinishReason | None


class Choice:
    """One of the texts."""

    def __init__(
        self,
        index: int,
        texts: TokenTexts,
        request: Request,
        *,
        stop: Sequence[str] = (),
        lead: str = "",
        echo: str = "",
        echoed: Sequence[TokenEntry] = (),
    ) -> None:
        """`lead` is what a chat template puts before the words of an answer; `echo` comes before
        the text, with its tokens."""
        self.index = index
        self.finish: FinishReason | None = None
        self.failure: RefusalError | None = None
        self.tokens = 0
        self.log_prob = 0.0
        """Summed over the tokens."""
        self._ends = request.ends
        self._writer = TextWriter(texts.tokenizer, ends=request.ends, stop=stop)
        self._offsets = Offsets(texts, len(echo))
        self._lead, self._held_lead, self._written = lead, "", len(echo)
        self._text = echo
        """Not yet taken."""
        self._entries = list[TokenEntry]()
        """Tokens whose text is not out yet: it may become a stop string."""
        self._ready = list(echoed)

    @property
    def ended(self) -> bool:
        """Whether nothing will come."""
        return self.finish is not None or self.failure is not None

    def add(self, news: News) -> None:
        """Take over what was drawn."""
        for id, probability in itertools.zip_longest(news.ids, news.probabilities):
            if id is None:
                break
            self.tokens += 1
            if probability is not None:
                self.log_prob += probability.log_prob
                if id not in self._ends:
                    offset = self._offsets.after(id)
                    self._entries.append(probability_entry(probability, offset))
            self._write(self._writer.add(id))
            if self._writer.finished:
                self.finish = "stop"
                break
        if news.finish == "error":
            self.failure = defect() if news.defect else RefusalError(500, str(news.error))
        elif self.finish is None and news.finish is not None:
            self._write(self._writer.rest())
            self.finish = "stop" if self._writer.finished else "length"
            if self.finish == "length":
                self._ready, self._entries = [*self._ready, *self._entries], []

    def _write(self, text: str) -> None:
        """Text that is final."""
        if self._lead:
            text = self._held_lead + text
            if len(text) < len(self._lead) and self._lead.startswith(text):
                self._held_lead = text
                return
            words = text.removeprefix(self._lead)
            self._written += len(text) - len(words)
            text, self._lead, self._held_lead = words, "", ""
        self._text += text
        self._written += len(text)
        out = 0
        while out < len(self._entries) and self._entries[out].offset < self._written:
            out += 1
        self._ready += self._entries[:out]
        del self._entries[:out]

    def take(self) -> ChoiceDelta:
        """What was added since the last call."""
        piece = ChoiceDelta(self._text, self._ready, self.finish)
        self._text, self._ready = "", []
        return piece


class Answer:
    """All texts of a request."""

    def __init__(self, worker: Worker, metrics: Metrics) -> None:
        self.choices = list[Choice]()
        self._worker, self._metrics = worker, metrics
        self._tickets = list[Ticket]()
        self._changed = asyncio.Event()
        self._fresh = dict[Choice, None]()
        self._begun = time.perf_counter()
        self._unfinished = 0

    def start(self, choice: Choice, request: Request) -> None:
        """Ask for one of the texts."""
        last: float | None = None
        self.choices.append(choice)
        self._unfinished += 1

        def deliver(news: News) -> None:
            nonlocal last
            now = time.perf_counter()
            if news.ids:
                self._metrics.token_times(now - (last or self._begun), len(news.ids), last is None)
                last = now
            before = choice.tokens
            try:
                choice.add(news)
            except Exception:
                choice.failure = defect()
                raise
            finally:
                self._metrics.generated += choice.tokens - before
                if choice.ended:
                    self._unfinished -= 1
                    self._worker.cancel(ticket)
                self._fresh[choice] = None
                self._changed.set()

        ticket = self._worker.submit(request, deliver)
        self._tickets.append(ticket)

    def add_finished(self, choice: Choice) -> None:
        """A text for which nothing is generated."""
        choice.finish = "length"
        self.choices.append(choice)
        self._fresh[choice] = None
        self._changed.set()

    async def news(self) -> list[Choice]:
        """Wait for something new: the choices that have it. Nothing if all have ended."""
        if not self._fresh and self._unfinished:
            await self._changed.wait()
        self._changed.clear()
        fresh, self._fresh = list(self._fresh), {}
        for choice in fresh:
            if choice.failure is not None:
                raise choice.failure
        return fresh

    async def whole(self) -> None:
        """Wait until all have ended."""
        while await self.news():
            pass

    def cancel(self) -> None:
        """Nobody waits any more."""
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    @property
    def tokens(self) -> int:
        """The number of generated tokens, over all texts."""
        return sum(choice.tokens for choice in self.choices)
