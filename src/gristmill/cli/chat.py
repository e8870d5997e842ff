"""`generate --chat`: a model answers, once or as long as somebody asks."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from gristmill.base.errors import UserError
from gristmill.cli.models import ask, write_text

if TYPE_CHECKING:
    from gristmill.checkpoint.model import LoadedModel
    from gristmill.generate import ChatGenerator
    from gristmill.text.chat.encoding import ChatEncoder


def converse(
    loaded: LoadedModel,
    prompt: str | None,
    system: str | None,
    template: str | None,
    *,
    cached: bool,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Answer a prompt, that on standard input, or those that are typed one after the other.
    `options` are those of `ChatGenerator.ask`."""
    from gristmill.generate import ChatGenerator

    encoder = _open_encoder(loaded, template)
    chat = ChatGenerator(loaded.model, encoder, system=system, cached=cached)
    if prompt is None and _is_terminal():
        typer.echo("Type a message; an empty line or Ctrl-D ends.")
        told = False
        while line := ask():
            _answer(chat, line, as_json=as_json, options=options)
            if chat.forgotten and not told:
                told = True
                note = "note: the conversation is longer than the model's context; the oldest "
                typer.echo(note + "messages are forgotten", err=True)
        return
    if prompt is None or prompt == "-":
        # The line end belongs to the terminal or to echo, not to the message.
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise UserError("there is no message to answer", where="PROMPT")
    _answer(chat, prompt, as_json=as_json, options=options)


def _open_encoder(loaded: LoadedModel, template: str | None) -> ChatEncoder:
    """The template that is asked for, or the model's own."""
    from gristmill.checkpoint.model import chat_template
    from gristmill.text.chat.encoding import ChatEncoder
    from gristmill.text.chat.template import OWN, choose_template

    if template is not None:
        found = choose_template(template, loaded.tokenizer, folders=(), where="--template")
        return ChatEncoder(loaded.tokenizer, found, where="--template")
    own = chat_template(loaded)
    if own is None:
        raise UserError(
            "this model has no chat template: it was not trained on conversations",
            where=str(loaded.run or loaded.origin),
            remedy=f"choose one with --template {'|'.join(OWN)}|FILE, or leave --chat out",
        )
    return ChatEncoder(loaded.tokenizer, own, where=own.name)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _answer(chat: ChatGenerator, question: str, *, as_json: bool, options: dict[str, Any]) -> None:
    answers = chat.ask(question, **options)
    if not as_json and options["samples"] == 1:
        write_text("", answers)
        return
    texts = [""] * options["samples"]
    for number, text in answers:
        texts[number] += text
    for number, text in enumerate(texts, start=1):
        if as_json:
            typer.echo(json.dumps({"prompt": question, "text": text}, ensure_ascii=False))
        else:
            typer.echo(f"--- {number} of {len(texts)}\n{text}")
