"""How a conversation becomes text: templates in Jinja, as `transformers` calls them.

    chat_template.jinja        beside a tokenizer
    tokenizer_config.json      under "chat_template": older models
    plain, chatml              our own, in this folder

A template gives one text. Which parts of it are the words of a message is found by rendering twice,
once with every message between two characters for private use that no message holds:

    plainly            <|im_start|>user\\nHi<|im_end|>\\n
    with sentinels     <|im_start|>user\\n[Hi]<|im_end|>\\n

Both must be the same but for the sentinels. Templates that trim messages are tried with trimmed
ones; those that rewrite messages in any other way are refused, since nothing would say where the
words of a user end. The clock of templates stands still, so that a resumed run reads the same text
the next day.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json, sha256_text, write_atomic
from gristmill.text.chat.conversations import Message
from gristmill.text.tokenizers.hub import TEMPLATE_FILE
from gristmill.text.tokenizers.library import CONFIG_FILE
from gristmill.text.tokenizers.tokenizer import Tokenizer

OWN = ("plain", "chatml")
"""Templates that come with this program."""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_PLANES = (0xF0000, 0x100000)
"""Where the characters for private use begin, 65534 of each."""
_PRIVATE = re.compile(f"[{chr(_PLANES[0])}-{chr(0x10FFFF)}]")
_MOST_MESSAGES = 32_000
_TODAY = datetime(2024, 7, 26)
"""What templates are told if they ask: the day that those of Llama fall back to."""


class TemplatePiece(NamedTuple):
    """A piece of the text that a template gives."""

    text: str
    message: int | None
    """Which message these are the words of; None for the template's own."""


class TemplateRefusedError(Exception):
    """The template does not accept a conversation; says why."""


class TemplateRewritesError(Exception):
    """The template changes the words of a message."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the control tokens it may name."""

    source: str
    """In Jinja."""
    name: str
    """What messages call it."""
    tokens: Mapping[str, str]
    """The control tokens that a tokenizer names: bos_token, eos_token."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides the text of a conversation."""
        return sha256_text(json.dumps([self.source, dict(self.tokens)], sort_keys=True))

    def save(self, folder: Path) -> None:
        """Write it where this program and `transformers` look for it."""
        write_atomic(folder / TEMPLATE_FILE, self.source)

    def pieces(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> list[TemplatePiece]:
        """The text of a conversation, divided into the words of messages and the template's own;
        with the beginning of an answer, if one is to be generated."""
        prompt = {"add_generation_prompt": add_generation_prompt}
        wanted = self._render(messages, **prompt)
        for trimmed in _trimmed(messages):
            pieces = self._between_sentinels(trimmed, **prompt)
            if pieces is not None and "".join(piece.text for piece in pieces) == wanted:
                return pieces
        # Trimmed in some other way: the words between are the same.
        stripped = [replace(one, content=one.content.strip()) for one in messages]
        pieces = self._between_sentinels(stripped, **prompt)
        text = self._render(stripped, **prompt)
        if pieces is not None and "".join(piece.text for piece in pieces) == text:
            return pieces
        raise TemplateRewritesError

    def _between_sentinels(
        self, messages: Sequence[Message], **prompt: bool
    ) -> list[TemplatePiece] | None:
        """The pieces of a text that was rendered with sentinels; None if some were lost."""
        first = _free_plane(messages)
        marked = [
            replace(one, content=f"{chr(first + 2 * n)}{one.content}{chr(first + 2 * n + 1)}")
            for n, one in enumerate(messages)
        ]
        last = first + 2 * len(messages)
        pieces, inside, begin = list[TemplatePiece](), None, 0
        text = self._render(marked, **prompt)
        for found in _PRIVATE.finditer(text):
            place, code = found.start(), ord(found[0])
            if not first <= code < last:
                continue
            number, closes = divmod(code - first, 2)
            if inside != (number if closes else None):
                return None
            pieces.append(TemplatePiece(text[begin:place], inside))
            inside, begin = None if closes else number, place + 1
        if inside is not None:
            return None
        return [*pieces, TemplatePiece(text[begin:], None)]

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            text: str = self._compiled.render(
                messages=[{"role": one.role, "content": one.content} for one in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.tokens,
            )
            return text
        except DataError:
            raise
        except Exception as error:  # a template can raise anything
            raise TemplateRefusedError(str(error) or type(error).__name__) from error

    @functools.cached_property
    def _compiled(self) -> Any:
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            what = f"line {error.lineno}: not a Jinja template: {error.message}"
            raise DataError(what, where=self.name) from error


def _trimmed(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages as they are; then, if that changes any, with those of some roles trimmed."""
    yield messages
    loose = sorted({one.role for one in messages if one.content != one.content.strip()})
    for count in range(1, len(loose) + 1):
        for roles in itertools.combinations(loose, count):
            yield [
                replace(one, content=one.content.strip()) if one.role in roles else one
                for one in messages
            ]


def _free_plane(messages: Sequence[Message]) -> int:
    """Where characters for sentinels begin that no message holds."""
    if len(messages) > _MOST_MESSAGES:
        raise TemplateRefusedError(f"more than {_MOST_MESSAGES} messages")
    held = {ord(one) >> 16 for message in messages for one in _PRIVATE.findall(message.content)}
    free = next((first for first in _PLANES if first >> 16 not in held), None)
    if free is None:
        raise TemplateRefusedError("characters of both planes for private use")
    return free


@functools.cache
def _environment() -> Any:
    """Jinja as `transformers` sets it up, but for the clock."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Templates may mark answers for other trainers; the marks say nothing new here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # The filter of Jinja escapes for HTML.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


# ------------------------------------------------------------------ choosing one


def choose_template(
    setting: str, tokenizer: Tokenizer, *, folders: Sequence[Path], where: str
) -> ChatTemplate:
    """The template that a setting names; "auto" looks for one in folders with tokenizers first."""
    if setting == "auto":
        for folder in folders:
            found = find_template(folder, tokenizer)
            if found is not None:
                return found
        has_chatml = all(token in tokenizer.control_tokens for token in _CHATML_TOKENS)
        setting = "chatml" if has_chatml else "plain"
    if setting in OWN:
        lacking = [one for one in _CHATML_TOKENS if one not in tokenizer.control_tokens]
        if setting == "chatml" and lacking:
            raise UserError(
                f"the tokenizer has no control token {' or '.join(lacking)}",
                where=where,
                remedy='use "plain", which needs none',
            )
        source = Path(__file__).with_name(f"{setting}.jinja").read_text(encoding="utf-8")
        return ChatTemplate(source, setting, tokenizer.named_tokens)
    try:
        source = Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        what = f"cannot read the template {setting!r}: {why}"
        remedy = f"give a file in Jinja, or one of {', '.join(OWN)}"
        raise UserError(what, where=where, remedy=remedy) from error
    return ChatTemplate(source, setting, tokenizer.named_tokens)


def find_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in the folder of a tokenizer, if there is one."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError("not UTF-8 text", where=file) from error
        return ChatTemplate(source, str(file), tokenizer.named_tokens)
    file = folder / CONFIG_FILE
    settings = read_json(file) if file.is_file() else None
    found = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(found, list):
        # Several, of which models name the usual one so.
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return (
        ChatTemplate(found, str(file), tokenizer.named_tokens) if isinstance(found, str) else None
    )
