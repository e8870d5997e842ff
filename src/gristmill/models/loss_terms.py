"""What the loss is: one record of its terms, and what each token has to predict.

To add a term to the loss, add a field to `LossTerms`, set it in `training_terms`, and compute it in
`loss.py` (plain operations) and `kernels/cross_entropy.py` (Triton). Nothing in between names it.

Shapes: B samples, T positions, N = B x T tokens, V rows of the head; S slices with R rows each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gristmill.base.units import Progress
from gristmill.config.schema import TrainConfig

MTP_PART = 2 / 3
"""The part of a run in which the token after the next one counts."""


class LossTerms(NamedTuple):
    """What the loss of a batch is, beside its targets. By default it is the plain sum of the
    cross-entropies of all tokens."""

    loss_weights_BT: torch.Tensor | None = None
    """The loss mask: how much each target counts; None if all count one."""
    scale: torch.Tensor | None = None
    """Factor of the loss that is differentiated; 1 if not given."""
    mtp_scale: torch.Tensor | None = None
    """Multi-token prediction: factor of the loss of the token after the next, in training only."""
    sampled: int | None = None
    """Sampled softmax: rows of the head that a slice of as many tokens is compared with, in
    training only."""
    cap: float | None = None
    """Soft cap of the logits, which the model itself sets."""
    by_sample: bool = False
    """Whether the losses of all samples are wanted, in shape (B), rather than their sum."""
    sources_B: torch.Tensor | None = None
    """The source of each sample, for sums by source; None if they are not wanted."""
    sources: int = 0
    """How many sources there are, if they are."""

    @property
    def totals(self) -> tuple[int, ...]:
        """The shape of the sums of a batch: a scalar, or the sum and then that of each source."""
        return (1 + self.sources,) if self.sources else ()

    def of_samples(self, samples: slice) -> LossTerms:
        """The same loss of some samples, with a single sum."""
        weights = None if self.loss_weights_BT is None else self.loss_weights_BT[samples]
        return self._replace(loss_weights_BT=weights, by_sample=False)


PLAIN_LOSS = LossTerms()


class TokenTargets(NamedTuple):
    """What each of N tokens has to predict."""

    targets_N: torch.Tensor
    """Ids, or their places among the rows of a slice in a sampled softmax."""
    mtp_targets_N: torch.Tensor | None = None
    """Second targets, for multi-token prediction."""
    mtp_factors_N: torch.Tensor | None = None
    """Factors of their gradients; zero where there is no second target."""
    rows_SR: torch.Tensor | None = None
    """Rows of the head for each of S slices, in a sampled softmax."""
    log_weights_SR: torch.Tensor | None = None
    """log w of each row, in nats; zero for targets."""

    def part(self, part: slice) -> TokenTargets:
        """The targets of some tokens, which have no rows of their own."""
        first_three = (None if one is None else one[part] for one in self[:3])
        return TokenTargets(*first_three)  # type: ignore[arg-type]


def training_terms(
    config: TrainConfig, progress: Progress, scale: torch.Tensor, *, mtp: bool = True
) -> LossTerms:
    """What the loss of the next step is. `mtp`: whether the token after the next one is at hand,
    which it is not where sequences are divided."""
    mtp_scale = None
    if config.mtp and mtp:
        done = progress.measured_in(config.until.unit) / config.until.amount
        mtp_scale = scale * (config.mtp * max(0.0, 1 - done / MTP_PART))
    return LossTerms(scale=scale, mtp_scale=mtp_scale, sampled=config.sampled_softmax)


def mtp_targets(tokens: TokenTargets, terms: LossTerms, *, borders: Iterable[int]) -> TokenTargets:
    """Multi-token prediction: a second target for each token, the one after the next, predicted
    from the same logits.

    With p the softmax of a token's logits, t and u its two targets and f and g their factors, the
    gradient of f (-log p_t) + g (-log p_u) is

        (f + g) p_v - f [v = t] - g [v = u]

    so it costs no more matrix work than one target. The second one of token n is the first one of
    token n + 1. Nothing is predicted over the `borders` of sequences, or of anything else that
    repeats every so many tokens. It shapes gradients only: losses are those of the next token.
    """
    assert terms.mtp_scale is not None
    targets_N, weights_N = tokens.targets_N, terms.loss_weights_BT
    count = targets_N.shape[0]
    following_N = torch.arange(1, count + 1, device=targets_N.device)
    factors_N = terms.mtp_scale.float().expand(count)
    for length in borders:
        factors_N = torch.where(following_N % length == 0, 0.0, factors_N)
    if weights_N is not None:
        # A target that does not count as the next one does not count as the second one either.
        factors_N = factors_N * weights_N * weights_N.roll(-1)
    return tokens._replace(mtp_targets_N=targets_N.roll(-1), mtp_factors_N=factors_N)


_OFFSET = 256
"""Added to ids in the chance of being drawn: bytes come first in most vocabularies, in no order."""
_BITS = 24
"""How many bits of the hash are used: as many as fp32 has digits."""


def sample_rows(targets_N: torch.Tensor, *, vocab: int, rows: int) -> TokenTargets:
    """Sampled softmax: which rows of the head each slice of `rows` tokens is compared with, and
    where among them targets are; the last slice may be shorter.

    A slice of R tokens has at most R distinct targets, usually far fewer. All of them are taken,
    and other rows v are drawn until there are R. Each drawn one has a weight w_v, so that

        Z = sum over targets exp(z_v)  +  sum over drawn w_v exp(z_v)

    has the normaliser of the full softmax as its expectation. Tokens with small ids are frequent in
    most vocabularies, so rows are drawn with chances q_v = 1 / (v + 256), by priority sampling: of
    the keys u_v / q_v, where u_v is uniform in (0, 1), the smallest are taken, and for the smallest
    key t that was not, w_v = max(1, 1 / (t q_v)). The u_v are hashes of the targets: a batch always
    draws the same rows, and a resumed run needs no state for it.
    """
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
    # Keys are positive, so -1 puts the targets of a slice before all rows that are drawn.
    keys_SV = keys_SV.scatter(1, targets_ST, -1.0)
    ordered_SV, rows_SV = keys_SV.sort(dim=1, stable=True)
    rows_SR, left_S1 = rows_SV[:, :rows], ordered_SV[:, rows, None]
    log_weights_SR = (inverse_chances_V[rows_SR] / left_S1).log().clamp(min=0.0)
    log_weights_SR = torch.where(ordered_SV[:, :rows] < 0, 0.0, log_weights_SR)
    places_SV = torch.zeros_like(rows_SV).scatter(1, rows_SV, every_V.expand(slices, -1))
    places_N = places_SV.gather(1, targets_ST).flatten()[:count]
    return TokenTargets(places_N, rows_SR=rows_SR, log_weights_SR=log_weights_SR)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """A hash of integers: the steps of SplitMix64, whose constants these are as signed numbers."""
    mixed = numbers * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ (mixed >> 31)
