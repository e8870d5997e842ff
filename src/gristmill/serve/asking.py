"""From what clients ask for to what engines are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gristmill.base.errors import UserError
from gristmill.generate.constraints import Constraint
from gristmill.generate.request import Request
from gristmill.serve.protocol import ConstraintSpec, Options, Prompt
from gristmill.serve.served import OpenedModel, ServedModel
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.encoding import ChatEncoder
from gristmill.web.refusals import bad_request, bad_value, unavailable

_LONG = 4096
"""Characters from which on text is encoded in another thread."""


async def encode_prompts(opened: OpenedModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The ids of prompts, of each at least one."""

    def encode() -> list[list[int]]:
        return [_encode(opened, prompt) for prompt in prompts]

    long = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > _LONG
    return await asyncio.to_thread(encode) if long else encode()


def _encode(opened: OpenedModel, prompt: Prompt) -> list[int]:
    tokenizer = opened.tokenizer
    if isinstance(prompt, str):
        return [*tokenizer.prefix, *tokenizer.encode(prompt)] or [tokenizer.end_of_text]
    require_ids(prompt, opened, param="prompt")
    return prompt


def require_ids(ids: Collection[int], opened: OpenedModel, *, param: str) -> None:
    """Refuse ids that are no tokens."""
    for id in ids:
        if not 0 <= id < opened.known:
            what = f"{param} has the token id {str(id)[:20]}, and ids go from 0 to"
            raise bad_request(f"{what} {opened.known - 1}", param=param)


async def encode_messages(
    opened: OpenedModel, messages: Sequence[Message], *, continues: bool
) -> list[int]:
    """The ids after which the answer begins, or goes on."""
    encoder = opened.encoder
    if encoder is None:
        what = "this model has no chat template, so it takes completions only"
        raise bad_request(what, param="model", code="no_chat_template")
    answer = messages[-1].content if continues else ""
    asked = messages[:-1] if continues else messages
    if not asked:
        raise bad_request("there is no message to answer", param="messages")
    try:
        # Another process renders templates.
        ids = await asyncio.to_thread(encoder.encode_prompt, asked)
    except UserError as error:
        raise bad_value(error, param="messages") from None
    return [*ids, *_begun_answer(encoder, answer)] if answer else ids


def _begun_answer(encoder: ChatEncoder, answer: str) -> list[int]:
    """The ids of the beginning of an answer, after what templates put before its words."""
    tokenizer, ids, rest = encoder.tokenizer, list[int](), encoder.lead
    for text, id in sorted(tokenizer.control_tokens.items(), key=lambda item: -len(item[0])):
        while rest.startswith(text):
            ids.append(id)
            rest = rest.removeprefix(text)
    return [*ids, *tokenizer.encode(rest + answer)]


async def find_constraint(
    served: ServedModel, spec: ConstraintSpec | None
) -> Callable[[], Any] | None:
    """What makes a matcher for each text; None if texts may have any form."""
    if spec is None:
        return None

    def build() -> Constraint:
        tokenizer = served.tokenizer
        if spec.kind == "json_object":
            return Constraint.json_object(tokenizer)
        if spec.kind == "json_schema":
            return Constraint.json_schema(spec.value, tokenizer)
        return Constraint.regex(spec.value, tokenizer)

    try:
        constraint = await asyncio.to_thread(build)
    except UserError as error:
        raise bad_value(error, param=spec.param) from None
    return constraint.matcher


def ends_of(served: ServedModel, options: Options, *, turns: frozenset[int]) -> frozenset[int]:
    """The ids that end a text; `turns` are those that end an answer. A control token is no text
    that could be found in what was written, so a stop string may name one."""
    require_ids(options.stop_ids, served.opened, param="stop_token_ids")
    named = served.tokenizer.control_tokens
    ends = frozenset({served.tokenizer.end_of_text}) | turns
    stops = frozenset(named[text] for text in options.stop if text in named)
    return options.stop_ids | stops | (frozenset() if options.ignore_ends else ends)


def make_request(
    served: ServedModel,
    ids: list[int],
    options: Options,
    *,
    tokens: int,
    sample: int,
    ends: frozenset[int],
    matcher: Callable[[], Any] | None,
    likeliest: int | None,
) -> Request:
    """What the engine is asked."""
    return Request(
        ids,
        tokens,
        options.sampling,
        sample=sample,
        ends=ends,
        log_probs=likeliest,
        matcher=None if matcher is None else matcher(),
    )


def require_room(served: ServedModel, count: int, *, param: str) -> None:
    """Refuse so many more texts if the queue is full; `param` is what asks for so many."""
    if count > served.most_pending:
        most = served.most_pending
        what = f"the request asks for {count} texts, and this server takes at most {most} at once"
        raise bad_request(what, param=param)
    if served.worker.pending + count > served.most_pending:
        what = "the server is busy: its queue is full; try again later"
        raise unavailable(what, status=429, code="queue_full")


def require_bias(served: ServedModel, options: Options) -> None:
    """Refuse a bias on ids that there are not."""
    require_ids(list(options.sampling.bias), served.opened, param="logit_bias")
