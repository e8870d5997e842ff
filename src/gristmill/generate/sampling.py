"""How the next token is drawn.

    logits -> penalties, bias -> / temperature -> top-k -> top-p -> min-p -> one token

A token is drawn by inverting the distribution at a uniform number: the first token in the order of
the vocabulary up to which there is more than that share of probability. A request's uniform numbers
come from its seed alone, on the CPU and in advance, so its text does not depend on the device's
generator or on other requests.

Rows are computed independently of each other. `kernels.py` has the same for GPUs.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gristmill.base.errors import UserError

MOST_BIAS = 100.0
"""Bias on a logit, at most: 100 makes a token certain, -100 impossible."""
MOST_TEMPERATURE = 100.0
"""All tokens are about as likely with it, and so are they above."""
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0
"""In fp32, logits times or divided by much more than that would no longer be finite."""
NOT_FINITE = -1
"""What is drawn where no id can be: from logits that are not finite, or if none is allowed."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int = 50
    """Draw from this many of the most likely tokens; 0 allows all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability."""
    seed: int = 1337
    min_p: float = 0.0
    """Draw from tokens that have at least this share of the most likely one's probability."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that are in the prompt or the text so far, and
    multiplies the negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the text so far."""
    frequency_penalty: float = 0.0
    """The same, times how often they are."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of some ids."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MOST_TEMPERATURE:
            what = f"the temperature must be from 0 to {MOST_TEMPERATURE:g}, not {self.temperature}"
            raise UserError(what, where="--temperature", remedy="for example 0.8")
        if self.top_k < 0:
            raise UserError("top-k must be 0 (all) or more", where="--top-k")
        if not 0 < self.top_p <= 1:
            raise UserError("top-p must be above 0 and at most 1", where="--top-p")
        if not 0 <= self.seed < 2**64:
            raise UserError("the seed must be from 0 to 2^64 - 1", where="--seed")
        if not 0 <= self.min_p <= 1:
            raise UserError("min-p must be from 0 to 1", where="--min-p")
        if not LEAST_REPETITION <= self.repetition_penalty <= MOST_REPETITION:
            bounds = f"from {LEAST_REPETITION:g} to {MOST_REPETITION:g}"
            what = f"the repetition penalty must be {bounds}; 1 is none"
            raise UserError(what, where="--repetition-penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                what = f"the {name.replace('_', ' ')} must be from -2 to 2"
                raise UserError(what, where=f"--{name.replace('_', '-')}")
        for bias in self.bias.values():
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                what = f"a bias must be from -{MOST_BIAS:g} to {MOST_BIAS:g}, not {bias}"
                raise UserError(what, where="logit_bias")

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens there were."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)


def uniform_numbers(seed: int, sample: int, count: int) -> torch.Tensor:
    """The numbers in [0, 1) by which the tokens of one sample of a request are drawn. A longer
    series begins with a shorter one."""
    digest = hashlib.sha256(f"{seed}:{sample}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.rand(count, generator=generator)


def penalised(
    logits_V: torch.Tensor, sampling: Sampling, seen_V: torch.Tensor | None
) -> torch.Tensor:
    """The logits of one row with its penalties; `seen_V` is how often each token is in the text so
    far, plus `PROMPT` for those of the prompt."""
    if seen_V is None:
        return logits_V
    count_V = seen_V % PROMPT
    factor = sampling.repetition_penalty
    repeated_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
    logits_V = torch.where(seen_V > 0, repeated_V, logits_V)
    penalty_V = (count_V > 0) * sampling.presence_penalty + count_V * sampling.frequency_penalty
    return logits_V - penalty_V


PROMPT = 1 << 20
"""Marks a token of the prompt in counts of tokens; larger than any count."""


def seen_tokens(prompt: Sequence[int], vocab: int) -> torch.Tensor:
    """Counts of tokens at the beginning of a text."""
    seen_V = torch.zeros(vocab, dtype=torch.int32)
    seen_V[[id for id in set(prompt) if id < vocab]] = PROMPT
    return seen_V


def draw(logits_V: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """One id from fp32 logits, penalties and bias included."""
    peak = logits_V.amax()
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    ids: torch.Tensor | None = None
    if 0 < sampling.top_k < len(logits_V):
        logits_V, ids = logits_V.topk(sampling.top_k)
    # The likeliest becomes 0, so that the smallest temperature gives no infinity.
    temperature = max(sampling.temperature, torch.finfo(torch.float32).tiny)
    weights_V = ((logits_V - peak) / temperature).exp()
    if sampling.top_p < 1:
        ordered_V, places_V = weights_V.sort(descending=True, stable=True)
        before_V = ordered_V.cumsum(0) - ordered_V
        dropped_V = before_V >= sampling.top_p * ordered_V.sum()
        dropped_V[0] = False  # the product may be 0
        weights_V[places_V[dropped_V]] = 0.0
    if sampling.min_p > 0:
        weights_V = weights_V * (weights_V >= sampling.min_p)
    if ids is not None:
        ids, order = ids.sort()
        weights_V = weights_V[order]
    sums_V = weights_V.cumsum(0)
    chosen = int(torch.searchsorted(sums_V, sums_V[-1] * uniform, right=True))
    if chosen == len(sums_V):
        # Rounding must not lead behind the last token that may be drawn.
        chosen = int(weights_V.nonzero()[-1])
    return chosen if ids is None else int(ids[chosen])
