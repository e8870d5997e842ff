"""Sampled softmax: which rows of the head a slice of tokens is compared with.

A slice of R tokens has at most R distinct targets, usually far fewer. All of them are taken, and
other rows v are drawn until there are R. Each drawn one has a weight w_v, so that

    Z = sum over targets exp(z_v)  +  sum over drawn w_v exp(z_v)

has the normaliser of the full softmax as its expectation. Tokens with small ids are frequent in
most vocabularies, so rows are drawn with chances q_v = 1 / (v + 256), by priority sampling: of the
keys u_v / q_v, where u_v is uniform in (0, 1), the smallest are taken, and for the smallest key t
that was not, w_v = max(1, 1 / (t q_v)). The u_v are hashes of the targets: a batch always draws the
same rows, and a resumed run needs no state for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_OFFSET = 256
"""Of ids in the chance of being drawn: bytes come first in most vocabularies, in no order."""
_BITS = 24
"""Of the hash that are used: as many as fp32 has digits."""


class SampledRows(NamedTuple):
    """The rows of the head for S slices of R tokens, of which the last may be shorter."""

    rows_SR: torch.Tensor
    log_weights_SR: torch.Tensor
    """log w of each row, in nats; zero for targets."""
    targets_N: torch.Tensor
    """Where the target of each token is among the rows of its slice."""


def sample_rows(targets_N: torch.Tensor, *, vocab: int, rows: int) -> SampledRows:
    """Rows for all tokens, in slices of `rows` tokens."""
    assert rows < vocab, "the caller uses all of them"
    count, device = targets_N.shape[0], targets_N.device
    slices = -(-count // rows)
    padding_P = targets_N[-1:].expand(slices * rows - count)
    targets_ST = torch.cat((targets_N, padding_P)).view(slices, rows)
    every_V = torch.arange(vocab, device=device)
    digests_S1 = _mixed(targets_ST + vocab * every_V[:rows]).sum(dim=1, keepdim=True)
    bits_SV = _mixed(every_V + digests_S1) & (2**_BITS - 1)
    inverse_chances_V = (every_V + _OFFSET).float()
    keys_SV = (bits_SV + 0.5) * 2.0**-_BITS * inverse_chances_V
    keys_SV = keys_SV.scatter(1, targets_ST, -1.0)
    ordered_SV, rows_SV = keys_SV.sort(dim=1, stable=True)
    rows_SR, left_S1 = rows_SV[:, :rows], ordered_SV[:, rows, None]
    log_weights_SR = (inverse_chances_V[rows_SR] / left_S1).log().clamp(min=0.0)
    log_weights_SR = torch.where(ordered_SV[:, :rows] < 0, 0.0, log_weights_SR)
    places_SV = torch.zeros_like(rows_SV).scatter(1, rows_SV, every_V.expand(slices, -1))
    return SampledRows(rows_SR, log_weights_SR, places_SV.gather(1, targets_ST).flatten()[:count])


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """A hash of integers: the steps of SplitMix64, whose constants these are as signed numbers."""
    mixed = numbers * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ (mixed >> 31)
