"""Text that must match a regular expression or a JSON schema (the extra `constrain`).

llguidance compiles the form and says, after every token, which ones may come next. A text is
complete only where the form allows it to end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gristmill.base.errors import UserError, optional
from gristmill.text.tokenizers.tokenizer import Tokenizer

LARGEST = 2**16
"""Characters of a form."""
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python writes it. Where blanks may be anywhere, weak models write little else."""


class Constraint:
    """A form that texts must have."""

    def __init__(self, grammar: str, tokenizer: Tokenizer, *, where: str) -> None:
        library = _library()
        if len(grammar) > LARGEST:
            what = f"this form has {len(grammar)} characters, more than {LARGEST}"
            raise UserError(what, where=where)
        self._tokenizer, self._grammar = _known_tokens(tokenizer), grammar
        self._ids = tokenizer.size
        problem = library.LLMatcher.validate_grammar(grammar, self._tokenizer)
        if problem:
            raise UserError(f"this form cannot be used: {_reason(problem)}", where=where)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Tokenizer, *, where: str = "--regex") -> Constraint:
        """Texts that a regular expression matches as a whole."""
        return cls(_library().LLMatcher.grammar_from_regex(pattern), tokenizer, where=where)

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | str,
        tokenizer: Tokenizer,
        *,
        where: str = "--json-schema",
    ) -> Constraint:
        """JSON that a schema describes."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise UserError(f"this schema is not JSON: {error}", where=where) from error
        if not isinstance(parsed, dict):
            raise UserError("a schema must be a JSON object", where=where)
        grammar = _library().LLMatcher.grammar_from_json_schema(text, overrides=_JSON_FORM)
        return cls(grammar, tokenizer, where=where)

    @classmethod
    def json_object(cls, tokenizer: Tokenizer) -> Constraint:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, tokenizer)

    def matcher(self) -> ConstraintMatcher:
        """What one text is matched with."""
        matcher = _library().LLMatcher(self._tokenizer, self._grammar, log_level=0)
        return ConstraintMatcher(matcher, self._ids)


def _reason(problem: str) -> str:
    """The line of a message that says what is wrong; of an expression it is not the first."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    found = (line.removeprefix("error:").strip() for line in lines if line.startswith("error:"))
    return next(found, lines[0])


class ConstraintMatcher:
    """Says what may come next in one text. After an error nothing may."""

    def __init__(self, matcher: Any, ids: int) -> None:
        self._matcher, self._ids = matcher, ids

    def allowed(self) -> torch.Tensor:
        """Which ids may come next."""
        if self._matcher.is_error():
            return torch.zeros(self._ids, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._ids].astype(bool))

    def append(self, id: int) -> None:
        """The text goes on with this id."""
        self._matcher.consume_token(id)

    @property
    def error(self) -> str | None:
        """Why nothing may come next, such as a form that takes too long to match."""
        return self._matcher.get_error() or None


class _Tokens:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = tokenizer.encode
        self.eos_token_id, self.bos_token_id = tokenizer.end_of_text, None
        controls = {id: text.encode() for text, id in tokenizer.control_tokens.items()}
        self.special_token_ids = sorted(controls)
        self.tokens = [
            controls[id] if id in controls else tokenizer.token_bytes(id)
            for id in range(tokenizer.size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


@dataclass(frozen=True)
class _Known:
    """The tokens of the tokenizer that was used last: reading all of them takes a moment."""

    fingerprint: str
    tokens: Any


_known: _Known | None = None


def _known_tokens(tokenizer: Tokenizer) -> Any:
    global _known
    known = _known  # another thread may replace it
    if known is None or known.fingerprint != tokenizer.fingerprint:
        library = _library()
        wrapped = library.TokenizerWrapper(_Tokens(tokenizer))
        tokens = library.LLTokenizer(wrapped, n_vocab=tokenizer.size)
        known = _known = _Known(tokenizer.fingerprint, tokens)
    return known.tokens


@lru_cache
def _library() -> Any:
    return optional("llguidance", extra="constrain", purpose="text that must match a form")
