"""Answers requests for text: /v1/completions and /v1/chat/completions.

    stream    data: {… "delta": {"role": "assistant"}, "finish_reason": null}     in chats
              data: {… "delta": {"content": "Fl"}, "finish_reason": null}
              data: {… "delta": {}, "finish_reason": "stop"}                      for each choice
              data: {… "choices": [], "usage": {…}}                               if asked for
              data: [DONE]

A stream begins with the first token. So whatever is wrong before it has a status of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gristmill.serve.asking import (
    encode_messages,
    encode_prompts,
    ends_of,
    find_constraint,
    make_request,
    require_bias,
    require_room,
)
from gristmill.serve.choices import Answer, Choice, ChoiceDelta
from gristmill.serve.metrics import Metrics
from gristmill.serve.prompt_scores import prompt_probabilities
from gristmill.serve.protocol import (
    CompletionQuery,
    Options,
    Prompt,
    parse_chat,
    parse_completion,
    room,
)
from gristmill.serve.registry import Registry
from gristmill.serve.served import ServedModel
from gristmill.serve.token_texts import TokenEntry, prompt_entries
from gristmill.web.call import Call

ChoiceJson = Callable[[Choice, ChoiceDelta], dict[str, Any]]
"""A choice of an answer, or of a chunk of a stream."""


@dataclass(frozen=True)
class _Form:
    """How answers of a route look."""

    prefix: str
    """What their ids begin with."""
    whole: str
    chunk: str


COMPLETION = _Form("cmpl", "text_completion", "text_completion")
CHAT = _Form("chatcmpl", "chat.completion", "chat.completion.chunk")


class Texts:
    """Both routes."""

    def __init__(self, registry: Registry, metrics: Metrics) -> None:
        self._registry, self._metrics = registry, metrics

    @asynccontextmanager
    async def _answer(self, served: ServedModel) -> AsyncIterator[Answer]:
        """An answer whose slots are free when nobody waits for it any more."""
        answer = Answer(served.worker, self._metrics)
        try:
            yield answer
        finally:
            answer.cancel()

    # ------------------------------------------------------------------ completions

    async def complete(self, call: Call, body: dict[str, Any]) -> None:
        """/v1/completions."""
        query = parse_completion(body)
        options = query.options
        async with self._registry.borrow(options.model) as served:
            require_bias(served, options)
            prompts = await encode_prompts(served.opened, query.prompts)
            sizes = [_room(ids, served, options, param="prompt") for ids in prompts]
            matcher = await find_constraint(served, options.constraint)
            ends = ends_of(served, options, turns=frozenset())
            require_room(served, len(prompts) * query.best_of, param=_many(query))
            self._metrics.prompt_tokens += sum(map(len, prompts))
            echoed = await self._echoed(served, query, prompts)
            async with self._answer(served) as answer:
                for number, ids in enumerate(prompts):
                    for sample in range(query.best_of):
                        request = make_request(
                            served,
                            ids,
                            options,
                            tokens=max(1, sizes[number]),
                            sample=sample,
                            ends=ends,
                            matcher=matcher,
                            likeliest=_likeliest(query),
                        )
                        choice = Choice(
                            len(answer.choices),
                            served.texts,
                            request,
                            stop=options.stop,
                            echo=_echo(served, query.prompts[number], query),
                            echoed=echoed[number],
                        )
                        if sizes[number] == 0:
                            answer.add_finished(choice)
                        else:
                            answer.start(choice, request)
                writer = _Writer(call, served, options, COMPLETION, sum(map(len, prompts)))
                if options.stream:
                    await writer.stream(answer, _completion_chunk(served, options))
                    return
                await answer.whole()
                chosen = _best(answer.choices, query)
                await writer.whole(answer, chosen, _completion_choice(served, options))

    async def _echoed(
        self, served: ServedModel, query: CompletionQuery, prompts: Sequence[list[int]]
    ) -> list[list[TokenEntry]]:
        """The tokens of each prompt with their probabilities, if they are wanted."""
        likeliest = query.options.likeliest
        if not query.echo or likeliest is None:
            return [[] for _ in prompts]
        jobs = [
            served.worker.compute(
                prompt_probabilities(
                    served.model,
                    ids,
                    likeliest=likeliest,
                    known=served.known,
                    dtype=served.dtype,
                )
            )
            for ids in prompts
        ]
        parts = await asyncio.gather(*jobs)
        return [
            prompt_entries(served.texts, ids, (one for chunk in chunks for one in chunk))
            for ids, chunks in zip(prompts, parts, strict=True)
        ]

    # ------------------------------------------------------------------ chats

    async def chat(self, call: Call, body: dict[str, Any]) -> None:
        """/v1/chat/completions."""
        query = parse_chat(body)
        options = query.options
        async with self._registry.borrow(options.model) as served:
            require_bias(served, options)
            ids = await encode_messages(served.opened, query.messages, continues=query.continues)
            size = _room(ids, served, options, param="messages")
            matcher = await find_constraint(served, options.constraint)
            assert served.encoder is not None, "without one, the messages were refused"
            begun = query.continues and query.messages[-1].content
            ends = ends_of(served, options, turns=served.encoder.ends)
            require_room(served, options.n, param="n")
            self._metrics.prompt_tokens += len(ids)
            async with self._answer(served) as answer:
                for sample in range(options.n):
                    request = make_request(
                        served,
                        ids,
                        options,
                        tokens=size,
                        sample=sample,
                        ends=ends,
                        matcher=matcher,
                        likeliest=options.likeliest,
                    )
                    lead = "" if begun else served.encoder.lead_text
                    choice = Choice(sample, served.texts, request, stop=options.stop, lead=lead)
                    answer.start(choice, request)
                writer = _Writer(call, served, options, CHAT, len(ids))
                if options.stream:
                    await writer.stream(answer, _chat_chunk(served, options), role=True)
                    return
                await answer.whole()
                await writer.whole(answer, answer.choices, _chat_choice(served, options))


def _room(ids: list[int], served: ServedModel, options: Options, *, param: str) -> int:
    return room(length=len(ids), context=served.context, wanted=options.tokens, param=param)


def _many(query: CompletionQuery) -> str:
    """The field that asks for more texts than one."""
    if len(query.prompts) > 1:
        return "prompt"
    return "best_of" if query.best_of > query.options.n else "n"


def _likeliest(query: CompletionQuery) -> int | None:
    """The probabilities that are recorded: the best of several texts is found by them."""
    return 0 if query.best_of > query.options.n and query.options.likeliest is None else (
        query.options.likeliest
    )  # fmt: skip


def _echo(served: ServedModel, prompt: Prompt, query: CompletionQuery) -> str:
    if not query.echo:
        return ""
    return prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)


def _best(choices: Sequence[Choice], query: CompletionQuery) -> list[Choice]:
    """The `n` choices of each prompt whose tokens are the likeliest, in order."""
    best_of, n = query.best_of, query.options.n
    if best_of == n:
        return list(choices)
    best = list[Choice]()
    for start in range(0, len(choices), best_of):
        ranked = sorted(
            choices[start : start + best_of],
            key=lambda choice: -choice.log_prob / max(1, choice.tokens),
        )
        best += ranked[:n]
    for index, choice in enumerate(best):
        choice.index = index
    return best


# ------------------------------------------------------------------ the forms of answers


def _completion_choice(served: ServedModel, options: Options) -> ChoiceJson:
    def form(choice: Choice, piece: ChoiceDelta) -> dict[str, Any]:
        likeliest = options.likeliest
        return {
            "index": choice.index,
            "text": piece.text,
            "finish_reason": piece.finish,
            "logprobs": None
            if likeliest is None
            else served.texts.in_completion(piece.entries, likeliest),
        }

    return form


_completion_chunk = _completion_choice


def _chat_choice(served: ServedModel, options: Options) -> ChoiceJson:
    def form(choice: Choice, piece: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": piece.text},
            "finish_reason": piece.finish,
            "logprobs": None if options.likeliest is None else served.texts.in_chat(piece.entries),
        }

    return form


def _chat_chunk(served: ServedModel, options: Options) -> ChoiceJson:
    def form(choice: Choice, piece: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": {"content": piece.text} if piece.text else {},
            "finish_reason": piece.finish,
            "logprobs": served.texts.in_chat(piece.entries) if piece.entries else None,
        }

    return form


class _Writer:
    """Sends an answer, as a whole or as a stream."""

    def __init__(
        self, call: Call, served: ServedModel, options: Options, form: _Form, prompt_tokens: int
    ) -> None:
        self._call, self._options, self._form = call, options, form
        self._prompt_tokens = prompt_tokens
        self._head = {
            "id": f"{form.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": options.model or served.name,
            "seed": options.sampling.seed,
        }

    async def whole(self, answer: Answer, chosen: Sequence[Choice], form: ChoiceJson) -> None:
        """Send the answer when it is complete."""
        choices = [form(choice, choice.take()) for choice in chosen]
        value = {**self._head, "object": self._form.whole, "choices": choices}
        await self._call.reply_json({**value, "usage": self._usage(answer)})

    async def stream(self, answer: Answer, form: ChoiceJson, *, role: bool = False) -> None:
        """Send the answer as it comes; `role`: the first chunk of each choice says who speaks."""
        fresh = await answer.news()
        await self._call.begin_stream()
        if role:
            start = {"delta": {"role": "assistant"}, "finish_reason": None, "logprobs": None}
            choices = ({"index": choice.index, **start} for choice in answer.choices)
            await self._call.events([self._chunk([choice]) for choice in choices])
        while fresh:
            events = list[object]()
            for choice in fresh:
                piece = choice.take()
                if piece.text or piece.entries:
                    events.append(self._chunk([form(choice, piece._replace(finish=None))]))
                if piece.finish is not None:
                    events.append(self._chunk([form(choice, ChoiceDelta("", [], piece.finish))]))
            if events:
                await self._call.events(events)
            fresh = await answer.news()
        usage = [{**self._chunk([]), "usage": self._usage(answer)}]
        await self._call.end_stream([*usage] if self._options.include_usage else [])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self._form.chunk, "choices": choices}
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    def _usage(self, answer: Answer) -> dict[str, int]:
        prompt, generated = self._prompt_tokens, answer.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }
