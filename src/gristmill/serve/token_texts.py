"""Tokens and their probabilities as clients see them.

A token may be a part of a character. In chats it then has its `bytes`, and a text with U+FFFD. In
completions, which have no place for bytes, its text is `bytes:\\xe2\\x80`, so that different tokens
never look the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gristmill.generate.request import TokenProbability
from gristmill.text.tokenizers.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenEntry(NamedTuple):
    """A token, how likely it was, and where its text begins."""

    id: int
    log_prob: float | None
    """None for the first token of a prompt, before which there is nothing."""
    likeliest: tuple[tuple[int, float], ...]
    offset: int


class TokenTexts:
    """The texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._controls = {id: text for text, id in tokenizer.control_tokens.items()}

    def bytes_of(self, id: int) -> bytes:
        """What a token stands for; a control token is what it is called."""
        control = self._controls.get(id)
        return self.tokenizer.token_bytes(id) if control is None else control.encode()

    def text_of(self, id: int) -> str:
        """For people: parts of characters are U+FFFD."""
        return self.bytes_of(id).decode(errors="replace")

    def unique_text_of(self, id: int) -> str:
        """For programs: parts of characters are spelled."""
        content = self.bytes_of(id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    # ------------------------------------------------------------------ as JSON

    def in_completion(self, entries: Sequence[TokenEntry], likeliest: int) -> dict[str, Any]:
        """The `logprobs` of a choice in /v1/completions."""
        return {
            "tokens": [self.unique_text_of(entry.id) for entry in entries],
            "token_logprobs": [_finite(entry.log_prob) for entry in entries],
            "top_logprobs": [self._top(entry, likeliest) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenEntry, likeliest: int) -> dict[str, float | None] | None:
        """The likeliest tokens and this one."""
        if entry.log_prob is None or not likeliest:
            return None
        own = (entry.id, entry.log_prob)
        return {
            self.unique_text_of(id): _finite(log_prob)
            for id, log_prob in dict((*entry.likeliest, own)).items()
        }

    def in_chat(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """The `logprobs` of a choice in /v1/chat/completions."""
        return {
            "content": [
                {
                    **self._chat_token(entry.id, entry.log_prob),
                    "top_logprobs": [self._chat_token(*pair) for pair in entry.likeliest],
                }
                for entry in entries
            ]
        }

    def _chat_token(self, id: int, log_prob: float | None) -> dict[str, Any]:
        content = self.bytes_of(id)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": _finite(log_prob), "bytes": list(content)}


def _finite(log_prob: float | None) -> float | None:
    return None if log_prob is None else max(log_prob, LEAST)


class Offsets:
    """Where in a text each token begins, in characters, from the bytes of those before it. One that
    begins within a character begins where the character does."""

    def __init__(self, texts: TokenTexts, start: int = 0) -> None:
        self._texts, self._characters = texts, start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def after(self, id: int) -> int:
        """Where this token begins, if it comes next."""
        offset = self._characters
        self._characters += len(self._decoder.decode(self._texts.tokenizer.token_bytes(id)))
        return offset


def prompt_entries(
    texts: TokenTexts, ids: Sequence[int], probabilities: Iterable[TokenProbability]
) -> list[TokenEntry]:
    """The tokens of a prompt; `probabilities` are those from the second one on."""
    offsets = Offsets(texts)
    first = TokenEntry(ids[0], None, (), offsets.after(ids[0]))
    return [first, *(probability_entry(one, offsets.after(one.id)) for one in probabilities)]


def probability_entry(token: TokenProbability, offset: int) -> TokenEntry:
    """A token of which there is a probability."""
    return TokenEntry(token.id, token.log_prob, token.likeliest, offset)
