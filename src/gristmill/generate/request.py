"""What is asked of an engine, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch

from gristmill.base.errors import DataError
from gristmill.generate.sampling import Sampling

Finish = Literal["stop", "length", "cancelled", "error"]


class TokenProbability(NamedTuple):
    """How likely a token was by the model's own distribution, before penalties, bias and
    temperature."""

    id: int
    log_prob: float
    likeliest: tuple[tuple[int, float], ...]
    """The likeliest ids with their log-probabilities."""


class Matcher(Protocol):
    """What a text must match, such as a JSON schema."""

    def allowed(self) -> torch.Tensor:
        """Which ids may come next, (V,). Where a text may end, one that ends texts is among
        them."""

    def append(self, id: int) -> None:
        """The text goes on with this id."""

    @property
    def error(self) -> str | None:
        """Why no id may come next."""


@dataclass(frozen=True)
class Request:
    """What to continue, and how."""

    ids: Sequence[int]
    """At least one; at most the context."""
    tokens: int
    """To generate at most."""
    sampling: Sampling
    sample: int = 0
    """Which one of several continuations of the same prompt with the same seed."""
    ends: frozenset[int] = frozenset()
    """Ids that end a text. The id that did is the last of its ids."""
    log_probs: int | None = None
    """Record the log-probabilities of tokens, and of this many of the likeliest."""
    slides: bool = False
    """Whether it goes on when the context is full."""
    matcher: Matcher | None = None
    """What its text must match."""

    def allowed_ids(self) -> torch.Tensor:
        """Which ids may come next, for a request with a matcher: where one may that ends a text,
        all may."""
        assert self.matcher is not None
        allowed_V, ends = self.matcher.allowed(), list(self.ends)
        if ends and allowed_V[ends].any():
            allowed_V[ends] = True
        return allowed_V


@dataclass(eq=False)
class Generation:
    """A request that is being answered."""

    request: Request
    ids: list[int] = field(default_factory=list)
    """What was generated."""
    probabilities: list[TokenProbability] = field(default_factory=list)
    finish: Finish | None = None
    """How it ended."""
    shared: int = 0
    """Ids of the prompt that need not be computed."""
    taken: int = 0
    """Ids that `new_ids` has returned."""

    def new_ids(self) -> list[int]:
        """What was generated since the last call."""
        begin, self.taken = self.taken, len(self.ids)
        return self.ids[begin:]

    @property
    def length(self) -> int:
        """Ids of the prompt and of the text so far."""
        return len(self.request.ids) + len(self.ids)

    @property
    def error(self) -> str | None:
        """Why no token could be chosen."""
        if self.finish != "error":
            return None
        matcher = self.request.matcher
        if matcher is not None and matcher.error is not None:
            return f"the text cannot be matched any further: {matcher.error}"
        return "the model computes NaN or infinite logits, so it cannot choose a token"

    def require_token(self) -> None:
        """Refuse what no token could be chosen for."""
        if self.error is not None:
            raise DataError(self.error)
