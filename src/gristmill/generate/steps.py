"""A step of an engine: logits of the sequences that decode, and a token drawn for each.

    join(slot, request)     a request gets a slot
    begin(slot, token)      its prompt is computed; the next step feeds its last id
    start(slots) -> Drawn   one or several steps are started
    leave(slot)

Steps may run ahead of who reads them. On a GPU several of them are started at once and none waits
for the host (`graphs.py`); here each is computed when it is started.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gristmill.generate.request import Request, TokenProbability
from gristmill.generate.sampling import (
    NOT_FINITE,
    Sampling,
    draw,
    penalised,
    seen_tokens,
    uniform_numbers,
)
from gristmill.models.decoding import Decoder


class Drawn(Protocol):
    """What is drawn by one or several steps."""

    @property
    def steps(self) -> int:
        """Tokens for each row."""

    def ids(self) -> Sequence[Sequence[int]]:
        """The ids drawn for each row; waits until they are there."""

    def probabilities(self) -> Sequence[Sequence[TokenProbability]]:
        """The probabilities of each row, if it asks for them."""


class Steps(ABC):
    """Computes the steps of an engine."""

    ahead = 0
    """Started steps that need not be read before the next is started."""

    @abstractmethod
    def join(self, slot: int, request: Request) -> None:
        """Take a request over."""

    @abstractmethod
    def begin(self, slot: int, *, token: int, length: int) -> None:
        """The slot holds `length` positions, and `token` is next; called again when its window has
        moved."""

    @abstractmethod
    def start(self, slots: Sequence[int]) -> Drawn:
        """Start the next steps of these slots."""

    @abstractmethod
    def leave(self, slot: int) -> None:
        """The request has ended."""


@dataclass
class _Row:
    """What is drawn next for a slot."""

    request: Request
    uniform: list[float]
    bias_V: torch.Tensor | None
    seen_V: torch.Tensor | None
    drawn: int = 0
    token: int = 0
    length: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the model's own likeliest token is next."""
        changed = self.bias_V is not None or self.seen_V is not None or self.request.matcher
        return self.request.sampling.temperature == 0 and not changed


@dataclass(frozen=True)
class _HostDrawn:
    """One token for each row."""

    drawn: list[list[int]]
    chances: list[list[TokenProbability]]
    steps = 1

    def ids(self) -> list[list[int]]:
        return self.drawn

    def probabilities(self) -> list[list[TokenProbability]]:
        return self.chances


class HostSteps(Steps):
    """Steps that are computed when they are started, and drawn on the CPU."""

    def __init__(self, decoder: Decoder, ids: int) -> None:
        """`ids`: how many can be drawn."""
        self._decoder, self._ids = decoder, ids
        self._rows: dict[int, _Row] = {}

    def join(self, slot: int, request: Request) -> None:
        sampling = request.sampling
        uniform = uniform_numbers(sampling.seed, request.sample, request.tokens).tolist()
        seen_V = seen_tokens(request.ids, self._ids) if sampling.penalises else None
        self._rows[slot] = _Row(request, uniform, bias_row(sampling, self._ids), seen_V)

    def begin(self, slot: int, *, token: int, length: int) -> None:
        row = self._rows[slot]
        row.token, row.length = token, length

    def leave(self, slot: int) -> None:
        del self._rows[slot]

    def start(self, slots: Sequence[int]) -> Drawn:
        rows = [self._rows[slot] for slot in slots]
        tokens, lengths = [row.token for row in rows], [row.length for row in rows]
        logits_RV = self._decoder.decode(slots, tokens, lengths)[:, : self._ids].float().cpu()
        # NaN is the smallest and the largest.
        least_R, most_R = logits_RV.aminmax(dim=1)
        finite = (least_R.isfinite() & most_R.isfinite()).tolist()
        greedy = any(row.is_plain for row in rows)
        likeliest = logits_RV.argmax(1).tolist() if greedy else [0] * len(rows)
        ids, chances = [], []
        for row, logits_V, usable, best in zip(rows, logits_RV, finite, likeliest, strict=True):
            id = NOT_FINITE
            if usable:
                id = best if row.is_plain else self._draw(row, logits_V)
            row.drawn, row.token, row.length = row.drawn + 1, max(id, 0), row.length + 1
            if row.seen_V is not None and id >= 0:
                row.seen_V[id] += 1
            ids.append([id])
            wanted = row.request.log_probs
            chances.append([] if wanted is None or id < 0 else [probability(logits_V, id, wanted)])
        return _HostDrawn(ids, chances)

    def _draw(self, row: _Row, logits_V: torch.Tensor) -> int:
        request = row.request
        adjusted_V = penalised(logits_V, request.sampling, row.seen_V)
        if row.bias_V is not None:
            adjusted_V = adjusted_V + row.bias_V
        if request.matcher is not None:
            allowed_V = request.allowed_ids()
            if not allowed_V.any():
                return NOT_FINITE
            adjusted_V = adjusted_V.masked_fill(~allowed_V, -torch.inf)
        return draw(adjusted_V, request.sampling, row.uniform[row.drawn])


def bias_row(sampling: Sampling, ids: int) -> torch.Tensor | None:
    """The bias of every id; None if there is none."""
    if not sampling.bias:
        return None
    bias_V = torch.zeros(ids)
    for id, bias in sampling.bias.items():
        bias_V[id] = bias
    return bias_V


def probability(logits_V: torch.Tensor, id: int, likeliest: int) -> TokenProbability:
    """The probability of an id, and of the likeliest ones."""
    log_probs_V = logits_V.log_softmax(0)
    values, ids = log_probs_V.topk(min(likeliest, len(log_probs_V)))
    pairs = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenProbability(id, float(log_probs_V[id]), pairs)
