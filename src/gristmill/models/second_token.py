"""A second target for each token: the one after the next, predicted from the same logits.

With p the softmax of a token's logits, t and u its two targets and f and g their factors, the
gradient of f (-log p_t) + g (-log p_u) is

    (f + g) p_v - f [v = t] - g [v = u]

so it costs no more matrix work than one target. The second one of token n is the first one of token
n + 1; the last token of a sequence has none. It shapes gradients only: losses are those of the next
token.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch


class SecondToken(NamedTuple):
    """The second targets of N tokens."""

    targets_N: torch.Tensor
    factors_N: torch.Tensor
    """Of their gradients; zero where there is no second target."""

    def part(self, part: slice) -> Self:
        return self._replace(targets_N=self.targets_N[part], factors_N=self.factors_N[part])


def second_token(
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    scale: torch.Tensor,
    *,
    every: tuple[int, ...],
) -> SecondToken:
    """From the first targets and their loss weights. Nothing is predicted over the borders of
    sequences, or of anything else that repeats `every` so many tokens."""
    count = targets_N.shape[0]
    following_N = torch.arange(1, count + 1, device=targets_N.device)
    factors_N = scale.float().expand(count)
    for length in every:
        factors_N = torch.where(following_N % length == 0, 0.0, factors_N)
    if weights_N is not None:
        # A target that does not count as the next one does not count as the second one either.
        factors_N = factors_N * weights_N * weights_N.roll(-1)
    return SecondToken(targets_N.roll(-1), factors_N)
