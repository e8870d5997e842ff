"""The head with two of its three matrix products in fp8, for training.

    logits   = s_h s_W  h8 W8^T                 h8, W8: e4m3      logits: bf16
    d_h      = s_g s_W  g8 W8                   g8: e5m2          d_h: bf16
    d_W     += g^T h                            bf16              d_W: fp32

    s_h = max|h| / 448   s_W = max|W| / 448     on the device, for each slice and for each call
    s_g = 2^-13 max|f|                          f: factors of the rows' gradients, in all

The scale s_g adapts to the batch size and the loss weights, so small factors lose no gradients.
The gradient of the head stays in bf16: fp8 would need both operands transposed, which costs as much
as it gains. Gradients accumulate in fp32; the logits, sums of a few hundred to a few thousand
products, accumulate in the tensor cores.

Measured on an H200, GPT-2 124M: 613k instead of 584k tokens/s, 5 % (`docs/log.md`).

Given up: one scale per matrix. A single outlier costs all other numbers their low digits.
"""

from __future__ import annotations

from typing import Self

import torch

from gristmill.models.kernels.cross_entropy import cross_entropy_
from gristmill.models.kernels.fp8 import E5M2, MULTIPLE, Fp8, product, quantised
from gristmill.models.loss_terms import LossTerms, TokenTargets

SHIFT = 2.0**13
"""The largest scaled gradient of a slice; e5m2 goes up to seven times as much."""


class Fp8Head:
    """The head in fp8, for one call."""

    def __init__(self, head_VD: torch.Tensor, terms: LossTerms, *, vocab: int) -> None:
        assert not any(size % MULTIPLE for size in head_VD.shape), "checked with the settings"
        self.head_VD = quantised(head_VD)
        self.head_DV = Fp8(self.head_VD.values.T.contiguous(), self.head_VD.scale)
        self.terms, self.vocab = terms, vocab
        self.places: slice | torch.Tensor = slice(head_VD.shape[0])
        self.log_weights_R: torch.Tensor | None = None

    def sampled(self, rows_R: torch.Tensor, log_weights_R: torch.Tensor) -> Self:
        self.places, self.log_weights_R = rows_R, log_weights_R
        return self

    def losses(
        self,
        hidden_ND: torch.Tensor,
        tokens: TokenTargets,
        factors_N: torch.Tensor | None,
        d_hidden_ND: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert factors_N is not None and d_hidden_ND is not None, "for training only"
        logits_NV = product(quantised(hidden_ND), self.head_VD, dtype=torch.bfloat16, fast=True)
        more_N = tokens.mtp_factors_N
        all_N = factors_N if more_N is None else factors_N + more_N
        largest = all_N.abs().amax().clamp(min=2.0**-100)  # all factors may be zero
        copy_NV = Fp8(torch.empty_like(logits_NV, dtype=E5M2), largest / SHIFT)
        losses_N = cross_entropy_(
            *(logits_NV, tokens, factors_N, self.terms),
            vocab=self.vocab,
            copy=copy_NV,
            log_weights_V=self.log_weights_R,
        )
        d_hidden_ND.copy_(product(copy_NV, self.head_DV, dtype=torch.bfloat16, fast=False))
        return losses_N, logits_NV
