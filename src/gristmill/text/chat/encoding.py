"""Conversations as ids, and which of them a model learns.

    <|im_start|> user \\n 6 x 7 ? <|im_end|> \\n <|im_start|> assistant \\n  42 <|im_end|> \\n
         0         0   0 0 0 0 0      0      0       0           0      0   1      1      0

Only what the template writes itself can become a control token: a message that spells one stays
plain text. The text between two control tokens is encoded as a whole, but cut where an answer
begins, since that is all that a model sees when it is asked for one. An answer counts in the loss,
and so does the control token by which the template ends it, with blanks before it. Nothing else
does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import UserError
from gristmill.text.chat.conversations import Message
from gristmill.text.chat.template import (
    ChatTemplate,
    TemplatePiece,
    TemplateRefusedError,
    TemplateRewritesError,
    UnusableError,
)
from gristmill.text.tokenizers.tokenizer import Tokenizer

_PROBE = tuple(Message(role, role) for role in ("user", "assistant", "user", "assistant"))
"""The shortest conversation with an answer at its end and one before."""


class ChatRun(NamedTuple):
    """Text to be encoded as a whole, or a control token."""

    text: str
    control: int | None
    loss_mask: bool


@dataclass(frozen=True)
class EncodedChat:
    """The ids of a conversation."""

    ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    """Which of them count in the loss."""


class ChatEncoder:
    """Conversations to ids, by a template and a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, where: str) -> None:
        """`where` names the setting or option that chose the template."""
        self.tokenizer, self.template = tokenizer, template
        words = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(map(re.escape, words))})")
        self.lead = ""
        """What a template puts between the prompt for an answer and its words, such as a space: a
        model has to write it."""
        self.prompts_alike = True
        """Whether the prompt for an answer is what comes before answers in a conversation."""
        self.ends = frozenset({tokenizer.end_of_text}) | self._probe(where)
        """The control tokens at which generation stops."""
        self.lead_text = self._controls.sub("", self.lead)
        """What the lead looks like in generated text, which shows no control tokens."""

    def runs(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> list[ChatRun]:
        """A conversation before its text is encoded."""
        pieces = self.template.pieces(messages, add_generation_prompt=add_generation_prompt)
        return self._runs(pieces, messages)

    def runs_of(
        self, conversations: Sequence[Sequence[Message]]
    ) -> list[list[ChatRun] | UnusableError]:
        """The same of several conversations, or why the template has no text for one."""
        return [
            pieces if isinstance(pieces, UnusableError) else self._runs(pieces, messages)
            for pieces, messages in zip(
                self.template.pieces_of(conversations), conversations, strict=True
            )
        ]

    def encode_runs(self, conversations: Sequence[Sequence[ChatRun]]) -> list[EncodedChat]:
        """The ids of several conversations, on all cores where the tokenizer can."""
        texts = [run.text for runs in conversations for run in runs if run.control is None]
        encoded = iter(self.tokenizer.encode_batch(texts))
        chats = []
        for runs in conversations:
            ids = [next(encoded) if run.control is None else [run.control] for run in runs]
            loss_mask = np.array([run.loss_mask for run in runs], np.bool_)
            chats.append(
                EncodedChat(
                    np.fromiter(itertools.chain.from_iterable(ids), np.int64),
                    loss_mask.repeat([len(part) for part in ids]),
                )
            )
        return chats

    def encode(self, messages: Sequence[Message]) -> EncodedChat:
        """The ids of one conversation."""
        return self.encode_runs([self.runs(messages)])[0]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids after which the next answer begins."""
        name = self.template.name
        try:
            runs = self.runs(messages, add_generation_prompt=True)
        except TemplateRefusedError as error:
            what = f"the template does not accept this conversation: {error}"
            raise UserError(what, where=name) from error
        except TemplateRewritesError as error:
            what = "the template rewrites the messages of this conversation"
            raise UserError(what, where=name) from error
        return [int(id) for id in self.encode_runs([runs])[0].ids]

    def _runs(self, pieces: Sequence[TemplatePiece], messages: Sequence[Message]) -> list[ChatRun]:
        runs, text, loss_mask = list[ChatRun](), "", False

        def flush() -> None:
            nonlocal text
            if text:
                runs.append(ChatRun(text, None, loss_mask))
            text = ""

        def add_control(token: str) -> None:
            flush()
            runs.append(ChatRun(token, self.tokenizer.control_tokens[token], loss_mask))

        for number, piece in enumerate(pieces):
            if piece.message is not None:
                answers = messages[piece.message].role == "assistant"
                if answers != loss_mask:
                    flush()
                text, loss_mask = text + piece.text, answers
                continue
            own, lead = self._without_lead(pieces[number : number + 2], messages)
            parts = self._controls.split(own)
            for place, part in enumerate(parts):
                if place % 2:
                    add_control(part)
                    loss_mask = False
                elif loss_mask and (part.strip() or place == len(parts) - 1):
                    # No control token ends this answer.
                    flush()
                    text, loss_mask = part, False
                else:
                    text += part
            if lead:
                flush()
                loss_mask = True
            for place, part in enumerate(self._controls.split(lead)):
                if place % 2:
                    add_control(part)
                else:
                    text += part
        flush()
        return runs

    def _without_lead(
        self, pieces: Sequence[TemplatePiece], messages: Sequence[Message]
    ) -> tuple[str, str]:
        """The template's own text, and the end of it that belongs to the answer after it."""
        own, *after = pieces
        answers = any(messages[piece.message or 0].role == "assistant" for piece in after)
        if not (self.lead and answers and own.text.endswith(self.lead)):
            return own.text, ""
        return own.text[: -len(self.lead)], self.lead

    def _probe(self, where: str) -> frozenset[int]:
        """How the template begins and ends answers, from a conversation that any accepts."""
        name = self.template.name
        try:
            pieces = self.template.pieces(_PROBE[:2])
            prompt = self.template.pieces(_PROBE[:1], add_generation_prompt=True)
            begin = "".join(piece.text for piece in prompt)
            place = next(n for n, piece in enumerate(pieces) if piece.message == 1)
            before = "".join(piece.text for piece in pieces[:place])
            self.prompts_alike = before.startswith(begin)
            self.lead = before.removeprefix(begin) if self.prompts_alike else ""
            runs = self.runs(_PROBE)
        except TemplateRefusedError as error:
            what = f"the template {name} does not render a question with its answer: {error}"
            raise UserError(what, where=where) from error
        except (TemplateRewritesError, StopIteration) as error:
            what = f"the template {name} rewrites messages, so their words cannot be told apart"
            raise UserError(what, where=where, remedy="use another template") from error
        last = (run for run, after in pairwise([*runs, None]) if not (after and after.loss_mask))
        ends = [run.control for run in last if run and run.loss_mask and run.control is not None]
        if len(ends) < 2:
            raise UserError(
                f"the template {name} ends answers with no control token of this tokenizer, so a "
                "model could not learn where to stop",
                where=where,
                remedy='end every answer with {{ eos_token }}, or use "plain"',
            )
        return frozenset(ends)


def turn_ends(tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """The control tokens by which a template ends answers; none if that cannot be told."""
    try:
        return ChatEncoder(tokenizer, template, where=template.name).ends
    except UserError:
        return frozenset()
