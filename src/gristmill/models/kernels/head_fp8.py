"""The head and its loss with all three matrix products in fp8, for training.

    logits   = s_h s_W  h8 W8^T                 h8, W8: e4m3      logits: bf16
    d_h      = s_g s_W  g8 W8                   g8: e5m2          d_h: bf16
    d_W     += s_g s_h  g8^T h8                                   d_W: fp32

    s_h = max|h| / 448   s_W = max|W| / 448     on the device, for each slice and for each call
    g8  = 2^13 (w_n / w) (p - [target])         w_n: weights of rows, w: the largest of them
    s_g = 2^-13 w x scale of the loss

The scale of the loss and the size of the weights are kept out of g8, so that no gradient is lost
because a batch is large or rows count little. Sums are in fp32 where gradients are formed; the
logits, sums of a few hundred to a few thousand products, leave that to the tensor cores.

Given up: one scale serves a whole matrix. A single number far above the rest costs all others their
low digits.
"""

from __future__ import annotations

import torch

from gristmill.models.kernels.cross_entropy_fp8 import SHIFT, gradient, losses_and_log_sums
from gristmill.models.kernels.fp8 import MULTIPLE, product, quantised


class Fp8Head:
    """The head of one call in fp8, and what it does with slices of tokens."""

    def __init__(
        self, head_VD: torch.Tensor, *, scale: torch.Tensor, vocab: int, cap: float | None
    ) -> None:
        assert not any(size % MULTIPLE for size in head_VD.shape), "the rules saw to that"
        self.head = quantised(head_VD)
        self.scale = scale
        self.vocab, self.cap = vocab, cap

    def losses(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        weights_N: torch.Tensor | None,
        *,
        d_hidden_ND: torch.Tensor | None,
        d_head_VD: torch.Tensor | None,
    ) -> torch.Tensor:
        """Losses of a slice, unweighted; its gradients are written to the hidden states' and added
        to the head's."""
        assert d_hidden_ND is not None and d_head_VD is not None, "for training only"
        head, hidden = self.head, quantised(hidden_ND)
        logits_NV = product(
            *(hidden.rows_MN, head.rows_MN),
            scales=(hidden.scale, head.scale),
            dtype=torch.bfloat16,
            fast=True,
        )
        losses_N, log_sums_N = losses_and_log_sums(
            logits_NV, targets_N, vocab=self.vocab, cap=self.cap
        )
        factors_N, scale = self._factors(losses_N, weights_N)
        d_logits = gradient(
            *(logits_NV, targets_N, log_sums_N, factors_N),
            vocab=self.vocab,
            cap=self.cap,
            scale=scale,
        )
        del logits_NV  # their memory serves the products
        d_hidden_ND.copy_(
            product(
                *(d_logits.rows_MN, head.turned_NM),
                scales=(d_logits.scale, head.scale),
                dtype=torch.bfloat16,
                fast=False,
            )
        )
        d_head_VD += product(
            *(d_logits.turned_NM, hidden.turned_NM),
            scales=(d_logits.scale, hidden.scale),
            dtype=torch.float32,
            fast=False,
        )
        return losses_N

    def _factors(
        self, losses_N: torch.Tensor, weights_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of the rows, none above 2^13, and what the gradient then counts for."""
        if weights_N is None:
            return torch.full_like(losses_N, SHIFT), self.scale / SHIFT
        largest = weights_N.abs().amax().clamp(min=2.0**-40)  # all rows may count nothing
        return weights_N * (SHIFT / largest), self.scale * (largest / SHIFT)
