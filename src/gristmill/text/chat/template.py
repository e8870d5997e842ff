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
the next day. Templates of others are rendered within limits: see `rendering`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json, sha256_text, write_atomic
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.rendering import (
    Refused,
    TemplateLimitError,
    TemplateSyntaxError,
    render,
    render_here,
)
from gristmill.text.tokenizers.library import CONFIG_FILE
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.text.tokenizers.vocabularies import TEMPLATE_FILE

OWN = ("plain", "chatml")
"""Templates that come with this program."""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_PLANES = (0xF0000, 0x100000)
"""Where the characters for private use begin, 65534 of each."""
_PRIVATE = re.compile(f"[{chr(_PLANES[0])}-{chr(0x10FFFF)}]")
_MOST_MESSAGES = 32_000
LARGEST = 2**20
"""Bytes of a template."""


class TemplatePiece(NamedTuple):
    """A piece of the text that a template gives."""

    text: str
    message: int | None
    """Which message these are the words of; None for the template's own."""


class TemplateRefusedError(Exception):
    """The template does not accept a conversation; says why."""


class TemplateRewritesError(Exception):
    """The template changes the words of a message."""


UnusableError = TemplateRefusedError | TemplateRewritesError


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
        (pieces,) = self.pieces_of([messages], add_generation_prompt=add_generation_prompt)
        if isinstance(pieces, Exception):
            raise pieces
        return pieces

    def pieces_of(
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool = False
    ) -> list[list[TemplatePiece] | UnusableError]:
        """The same of several conversations, which is faster, or why there is none."""
        results: dict[int, list[TemplatePiece] | UnusableError] = {}
        searches = {number: _search(messages) for number, messages in enumerate(conversations)}
        texts: dict[int, list[str] | None] = dict.fromkeys(searches)
        while texts:
            asked: dict[int, list[Sequence[Message]]] = {}
            for number, known in texts.items():
                try:
                    search = searches[number]
                    asked[number] = next(search) if known is None else search.send(known)
                except StopIteration as end:
                    results[number] = end.value
                except (TemplateRefusedError, TemplateRewritesError) as error:
                    results[number] = error
            rendered = iter(
                self._texts(
                    [messages for several in asked.values() for messages in several],
                    add_generation_prompt=add_generation_prompt,
                )
            )
            texts = {}
            for number, several in asked.items():
                now = [next(rendered) for _ in several]
                refused = next((text for text in now if isinstance(text, Refused)), None)
                if refused is None:
                    texts[number] = now
                else:
                    results[number] = TemplateRefusedError(str(refused))
        return [results[number] for number in searches]

    def _texts(
        self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool
    ) -> Sequence[str | Refused]:
        """What the template makes of some conversations."""
        calls = [
            {
                "messages": [
                    {"role": message.role, "content": message.content} for message in messages
                ],
                "add_generation_prompt": add_generation_prompt,
            }
            for messages in conversations
        ]
        try:
            # Our own need no limits, and no other process.
            compute = render_here if self.source in _own_sources() else render
            return compute(self.source, self.tokens, calls)
        except TemplateSyntaxError as error:
            raise DataError(str(error), where=self.name) from error
        except TemplateLimitError as error:
            raise DataError(
                f"this template cannot be used: {error}",
                where=self.name,
                remedy=f"choose another: {', '.join(OWN)}, or a file",
            ) from error


def _search(
    messages: Sequence[Message],
) -> Generator[list[Sequence[Message]], list[str], list[TemplatePiece]]:
    """Yields conversations to be rendered, gets their texts, and returns the pieces."""
    wanted, marked = yield [messages, _marked(messages)]
    for number, trimmed in enumerate(_trimmed(messages)):
        if number:
            (marked,) = yield [_marked(trimmed)]
        pieces = _between_sentinels(marked, trimmed)
        if pieces is not None and "".join(piece.text for piece in pieces) == wanted:
            return pieces
    # Trimmed in some other way: the words between are the same.
    stripped = [replace(message, content=message.content.strip()) for message in messages]
    text, marked = yield [stripped, _marked(stripped)]
    pieces = _between_sentinels(marked, stripped)
    if pieces is not None and "".join(piece.text for piece in pieces) == text:
        return pieces
    raise TemplateRewritesError


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages between two characters each that no message holds."""
    first = _free_plane(messages)
    return [
        replace(message, content=f"{chr(first + 2 * n)}{message.content}{chr(first + 2 * n + 1)}")
        for n, message in enumerate(messages)
    ]


def _between_sentinels(text: str, messages: Sequence[Message]) -> list[TemplatePiece] | None:
    """The pieces of a text that was rendered with sentinels; None if some were lost."""
    first = _free_plane(messages)
    last = first + 2 * len(messages)
    pieces, inside, begin = list[TemplatePiece](), None, 0
    for match in _PRIVATE.finditer(text):
        place, code = match.start(), ord(match[0])
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


@functools.cache
def _own_sources() -> frozenset[str]:
    files = (Path(__file__).with_name(f"{name}.jinja") for name in OWN)
    return frozenset(file.read_text(encoding="utf-8") for file in files)


def _trimmed(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """The messages as they are; then, if that changes any, with those of some roles trimmed."""
    yield messages
    loose = sorted(
        {message.role for message in messages if message.content != message.content.strip()}
    )
    for count in range(1, len(loose) + 1):
        for roles in itertools.combinations(loose, count):
            yield [
                replace(message, content=message.content.strip())
                if message.role in roles
                else message
                for message in messages
            ]


def _free_plane(messages: Sequence[Message]) -> int:
    """Where characters for sentinels begin that no message holds."""
    if len(messages) > _MOST_MESSAGES:
        raise TemplateRefusedError(f"more than {_MOST_MESSAGES} messages")
    taken = {
        ord(character) >> 16
        for message in messages
        for character in _PRIVATE.findall(message.content)
    }
    free = next((first for first in _PLANES if first >> 16 not in taken), None)
    if free is None:
        raise TemplateRefusedError("characters of both planes for private use")
    return free


# ------------------------------------------------------------------ choosing one


def choose_template(
    setting: str, tokenizer: Tokenizer, *, folders: Sequence[Path], where: str
) -> ChatTemplate:
    """The template that a setting names; "auto" looks for one in folders with tokenizers first."""
    if setting == "auto":
        for folder in folders:
            template = find_template(folder, tokenizer)
            if template is not None:
                return template
        has_chatml = all(token in tokenizer.control_tokens for token in _CHATML_TOKENS)
        setting = "chatml" if has_chatml else "plain"
    if setting in OWN:
        lacking = [token for token in _CHATML_TOKENS if token not in tokenizer.control_tokens]
        if setting == "chatml" and lacking:
            raise UserError(
                f"the tokenizer has no control token {' or '.join(lacking)}",
                where=where,
                remedy='use "plain", which needs none',
            )
        source = Path(__file__).with_name(f"{setting}.jinja").read_text(encoding="utf-8")
        return ChatTemplate(source, setting, tokenizer.named_tokens)
    try:
        source = _read_source(Path(setting))
    except (OSError, ValueError) as error:
        what = f"cannot read the template {setting!r}: {getattr(error, 'strerror', None) or error}"
        remedy = f"give a file in Jinja, or one of {', '.join(OWN)}"
        raise UserError(what, where=where, remedy=remedy) from error
    return ChatTemplate(source, setting, tokenizer.named_tokens)


def _read_source(file: Path) -> str:
    """The text of a file; a `ValueError` says why there is none."""
    with file.open("rb") as opened:
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError("larger than any template")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error


def find_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in the folder of a tokenizer, if there is one."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            source = _read_source(file)
        except ValueError as error:
            raise DataError(str(error), where=file) from error
        return ChatTemplate(source, str(file), tokenizer.named_tokens)
    file = folder / CONFIG_FILE
    settings = read_json(file) if file.is_file() else None
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(template, list):
        # Several, of which models name the usual one so.
        named = [
            entry
            for entry in template
            if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        template = named[0].get("template") if named else None
    return (
        ChatTemplate(template, str(file), tokenizer.named_tokens)
        if isinstance(template, str)
        else None
    )
