"""What clients ask for: the bodies of requests, read and checked before anything is computed.

Defaults are those of OpenAI's interface. Fields beyond it (`top_k`, `min_p`, `repetition_penalty`,
`stop_token_ids`, `ignore_eos`, `regex`, …) have the names that other servers have given them.
Fields that nobody knows are ignored, as clients expect; those whose effect this server lacks are
refused if they ask for it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gristmill.base.errors import UserError
from gristmill.generate.sampling import (
    LEAST_REPETITION,
    MOST_BIAS,
    MOST_REPETITION,
    MOST_TEMPERATURE,
    Sampling,
)
from gristmill.text.chat.conversations import Message
from gristmill.web.fields import Fields, require_text, shown
from gristmill.web.refusals import bad_request, bad_value

MOST_CHOICES = 16
"""The limit of `n` and `best_of`."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings, and their characters: every token is compared with all their beginnings."""
MOST_LIKELIEST = 20
"""The limit of `logprobs` and `top_logprobs`."""
MOST_TOKENS = 2**31
"""The limit of `min_tokens` and `top_k`; `max_tokens` is cut to what fits into the context."""
COMPLETION_TOKENS = 16
"""How long a completion is if nothing is said; an answer in a chat fills the context."""
MOST_MESSAGES = 4096
MOST_PROMPTS = 2048
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

Prompt = str | list[int]


@dataclass(frozen=True)
class ConstraintSpec:
    """The form that a text must have."""

    kind: Literal["regex", "json_schema", "json_object"]
    value: Any
    param: str
    """The field that asks for it."""


@dataclass(frozen=True)
class Options:
    """What all requests for text have in common."""

    model: str | None
    sampling: Sampling
    tokens: int | None
    """At most; None if not given."""
    n: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_ends: bool
    likeliest: int | None
    """Log-probabilities are wanted, and those of this many of the likeliest tokens."""
    stream: bool
    include_usage: bool
    constraint: ConstraintSpec | None


@dataclass(frozen=True)
class CompletionQuery:
    """The body of /v1/completions."""

    options: Options
    prompts: list[Prompt]
    echo: bool
    best_of: int


@dataclass(frozen=True)
class ChatQuery:
    """The body of /v1/chat/completions."""

    options: Options
    messages: list[Message]
    continues: bool
    """Whether the last message is the beginning of the answer."""


def parse_completion(body: dict[str, Any]) -> CompletionQuery:
    """Read the body of /v1/completions."""
    fields = Fields(body)
    if fields.text("suffix"):
        raise bad_request("suffix is not supported: the models continue texts", param="suffix")
    logprobs = fields.get("logprobs")
    if isinstance(logprobs, bool):  # as in chats
        likeliest = 0 if logprobs else None
    else:
        likeliest = fields.integer("logprobs", low=0, high=MOST_LIKELIEST)
    tokens = fields.integer("max_tokens", low=0)
    options = _parse_options(
        fields, tokens=COMPLETION_TOKENS if tokens is None else tokens, likeliest=likeliest
    )
    best_of = fields.integer("best_of", low=1, high=MOST_CHOICES) or options.n
    if best_of < options.n:
        raise bad_request(f"best_of must be at least n, which is {options.n}", param="best_of")
    if best_of > options.n and options.stream:
        raise bad_request("best_of cannot be streamed: it is known at the end", param="best_of")
    echo = fields.boolean("echo")
    return CompletionQuery(options, _parse_prompts(fields), echo, best_of)


def parse_chat(body: dict[str, Any]) -> ChatQuery:
    """Read the body of /v1/chat/completions."""
    fields = Fields(body)
    likeliest = fields.integer("top_logprobs", low=0, high=MOST_LIKELIEST)
    if not fields.boolean("logprobs"):
        if likeliest:
            raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
        likeliest = None
    else:
        likeliest = likeliest or 0
    tokens = fields.integer("max_completion_tokens", low=1)
    if tokens is None:
        tokens = fields.integer("max_tokens", low=1)
    _refuse_tools(fields)
    messages = parse_messages(fields)
    continues = fields.boolean("continue_final_message")
    if continues and messages[-1].role != "assistant":
        what = "continue_final_message needs a last message by the assistant"
        raise bad_request(what, param="continue_final_message")
    options = _parse_options(fields, tokens=tokens, likeliest=likeliest)
    return ChatQuery(options, messages, continues)


def parse_messages(fields: Fields) -> list[Message]:
    """The messages of a conversation."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.wrong("messages", "an array with at least one message")
    if len(messages) > MOST_MESSAGES:
        what = f"there are {len(messages)} messages, and at most {MOST_MESSAGES} are taken"
        raise bad_request(what, param="messages")
    return [_parse_message(one, f"messages[{number}]") for number, one in enumerate(messages)]


def _parse_message(value: object, place: str) -> Message:
    if not isinstance(value, dict):
        raise bad_request(f"{place} must be an object", param=place)
    fields = Fields(value, inside=place)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(
            _parse_part(part, f"{place}.content[{number}]") for number, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise fields.wrong("content", "a string or an array of texts")
    return Message(_ROLES[role], require_text(content, param=fields.name("content")))


def _parse_part(value: object, place: str) -> str:
    text = value.get("text") if isinstance(value, dict) and value.get("type") == "text" else None
    if not isinstance(text, str):
        what = f'{place} must be {{"type": "text", "text": "…"}}: the models read text only'
        raise bad_request(what, param=place)
    return text


def _refuse_tools(fields: Fields) -> None:
    """Tools that a model may use are left unused; one that it has to use is refused."""
    for key in ("tool_choice", "function_call"):
        if fields.get(key) not in (None, "none", "auto"):
            raise bad_request(f"{key} is not supported: the models call no tools", param=key)


def _parse_prompts(fields: Fields) -> list[Prompt]:
    """One prompt or several, each a text or ids."""
    given = fields.get("prompt")
    if isinstance(given, str) or _are_ids(given):
        given = [given]
    if not isinstance(given, list) or not given:
        raise fields.wrong("prompt", "a string, an array of token ids, or an array of such prompts")
    if len(given) > MOST_PROMPTS:
        what = f"there are {len(given)} prompts, and at most {MOST_PROMPTS} are taken"
        raise bad_request(what, param="prompt")
    for number, prompt in enumerate(given):
        if isinstance(prompt, str):
            require_text(prompt, param=f"prompt[{number}]")
        elif not _are_ids(prompt):
            what = f"prompt[{number}] must be a string or an array of at least one token id"
            raise bad_request(what, param="prompt")
    return given


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)


def parse_ids(fields: Fields, key: str) -> list[int]:
    """A list of token ids, which may be empty."""
    value = fields.get(key)
    if not isinstance(value, list) or not all(type(id) is int for id in value):
        raise fields.wrong(key, "an array of token ids")
    return value


# ------------------------------------------------------------------ what both have


def _parse_options(fields: Fields, *, tokens: int | None, likeliest: int | None) -> Options:
    if fields.integer("min_tokens", low=0, high=MOST_TOKENS):
        raise bad_request("min_tokens is not supported", param="min_tokens")
    stream = fields.boolean("stream")
    stream_options = fields.object("stream_options")
    return Options(
        model=fields.text("model"),
        sampling=_parse_sampling(fields),
        tokens=tokens,
        n=fields.integer("n", low=1, high=MOST_CHOICES) or 1,
        stop=_parse_stop(fields),
        stop_ids=frozenset(parse_ids(fields, "stop_token_ids"))
        if fields.has("stop_token_ids")
        else frozenset(),
        ignore_ends=fields.boolean("ignore_eos"),
        likeliest=likeliest,
        stream=stream,
        include_usage=stream and stream_options.boolean("include_usage"),
        constraint=_parse_constraint(fields),
    )


def _parse_sampling(fields: Fields) -> Sampling:
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    numbers = {
        "temperature": fields.number("temperature", low=0, high=MOST_TEMPERATURE),
        "top_p": fields.number("top_p", low=0, high=1),
        "min_p": fields.number("min_p", low=0, high=1),
        "repetition_penalty": fields.number(
            "repetition_penalty", low=LEAST_REPETITION, high=MOST_REPETITION
        ),
        "presence_penalty": fields.number("presence_penalty", low=-2, high=2),
        "frequency_penalty": fields.number("frequency_penalty", low=-2, high=2),
    }
    chosen: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if chosen.get("top_p") == 0:
        raise fields.wrong("top_p", "above 0")
    top_k = fields.integer("top_k", low=-1, high=MOST_TOKENS)
    chosen["top_k"] = max(0, top_k or 0)  # -1 is what others call all
    chosen["seed"] = secrets.randbits(32) if seed is None else seed % 2**64
    chosen["bias"] = _parse_bias(fields)
    try:
        return Sampling(**{"temperature": 1.0, **chosen})
    except UserError as error:
        where = (error.problems[0].where or "").removeprefix("--").replace("-", "_")
        raise bad_value(error, param=where) from None


def _parse_bias(fields: Fields) -> dict[int, float]:
    given, bias = fields.get("logit_bias"), {}
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise fields.wrong("logit_bias", "an object from ids to numbers")
    for id, value in given.items():
        if not (id.isascii() and id.isdigit() and len(id) < 10):
            what = f"the keys of logit_bias must be token ids, not {id[:20]!r}"
            raise bad_request(what, param="logit_bias")
        if type(value) not in (int, float) or not -MOST_BIAS <= value <= MOST_BIAS:
            bounds = f"from -{MOST_BIAS:g} to {MOST_BIAS:g}"
            what = f"the values of logit_bias must be numbers {bounds}, not {shown(value)}"
            raise bad_request(what, param="logit_bias")
        bias[int(id)] = float(value)
    return bias


def _parse_stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise fields.wrong("stop", "a string or an array of strings")
    if len(stop) > MOST_STOPS:
        raise bad_request(f"stop has at most {MOST_STOPS} strings, not {len(stop)}", param="stop")
    if any(len(one) > LONGEST_STOP for one in stop):
        raise bad_request(f"a stop string has at most {LONGEST_STOP} characters", param="stop")
    return tuple(require_text(one, param="stop") for one in stop if one)


def _parse_constraint(fields: Fields) -> ConstraintSpec | None:
    specs = [
        *(
            ConstraintSpec("regex", fields.text(key), key)
            for key in ("regex", "guided_regex")
            if fields.has(key)
        ),
        *(
            ConstraintSpec("json_schema", fields.get(key), key)
            for key in ("guided_json",)
            if fields.has(key)
        ),
        *_parse_response_format(fields),
    ]
    if len(specs) > 1:
        what = f"{specs[0].param} and {specs[1].param} cannot be combined"
        raise bad_request(what, param=specs[1].param)
    return specs[0] if specs else None


def _parse_response_format(fields: Fields) -> Sequence[ConstraintSpec]:
    given = fields.object("response_format")
    kind = given.get("type")
    if not fields.has("response_format") or kind == "text":
        return ()
    if kind == "json_object":
        return (ConstraintSpec("json_object", None, "response_format"),)
    if kind != "json_schema":
        raise given.wrong("type", "text, json_object or json_schema")
    outer = given.object("json_schema")
    schema = outer.get("schema")
    if not isinstance(schema, dict):
        raise outer.wrong("schema", "an object")
    return (ConstraintSpec("json_schema", schema, "response_format"),)


def room(*, length: int, context: int, wanted: int | None, param: str) -> int:
    """How many tokens may be generated after a prompt of so many: more than fit are cut. The last
    one takes no room, since nothing comes after it."""
    if length > context:
        what = f"the prompt has {length} tokens, and the model's context is {context}"
        raise bad_request(what, param=param, code="context_length_exceeded")
    return int(min(math.inf if wanted is None else wanted, context + 1 - length))
