"""Cross-entropy of the next token, without ever holding the logits of all tokens.

For N tokens, hidden states h, head W and counting weights w, the loss is the sum

    sum_n  w_n (logsumexp(W h_n) - (W h_n)[target_n])

computed over slices of tokens. When gradients are wanted they are formed slice by slice in the same
pass, from the softmax in place of the logits: dW and dh are kept, the logits never are, and the
work is the three matrix products that the plain way needs too. The price: the scale of the loss
has to be known in the forward pass, which also lets fp16 gradients be scaled before they are
rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.models.spec import Loss

SLICE_BYTES = 2**30
"""Memory allowed for one slice's fp32 logits on a GPU."""
CPU_SLICE_BYTES = 8 * 2**20
"""The same on the CPU, where a slice should stay in the cache."""


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    *,
    vocab: int,
    scale: torch.Tensor | None = None,
) -> Loss:
    """Loss summed over tokens; rows of the head from `vocab` on are padding and cannot be
    predicted."""
    if scale is None:
        scale = torch.ones((), device=hidden_ND.device)
    scaled, total = _LinearCrossEntropy.apply(
        hidden_ND, head_VD, targets_N, weights_N, scale, vocab, torch.is_grad_enabled()
    )
    return Loss(scaled, total)


def slice_length(rows: int, device: torch.device) -> int:
    """Tokens per slice, so that its fp32 logits fit the allowance."""
    allowance = CPU_SLICE_BYTES if device.type == "cpu" else SLICE_BYTES
    return max(64, allowance // (4 * rows))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        head_VD: torch.Tensor,
        targets_N: torch.Tensor,
        weights_N: torch.Tensor | None,
        scale: torch.Tensor,
        vocab: int,
        wants_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _compute_dtype(hidden_ND)
        head = head_VD.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        d_hidden = torch.empty_like(hidden_ND) if wants_gradient else None
        d_head = torch.zeros_like(head_VD) if wants_gradient else None
        step = slice_length(head_VD.shape[0], hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for start in range(0, hidden_ND.shape[0], step):
                part = slice(start, start + step)
                hidden = hidden_ND[part].to(dtype)
                weights = None if weights_N is None else weights_N[part].float()
                logits = (hidden @ head.T).float()
                loss, sums_N1 = _slice_loss(logits, targets_N[part], weights, vocab)
                total += loss
                if d_hidden is not None and d_head is not None:
                    _slice_gradient(logits, sums_N1, targets_N[part], weights, scale)
                    _add_gradients(logits.to(dtype), hidden, head, d_hidden[part], d_head)
                del logits  # before the next slice's are made
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(total)
        return total * scale, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        outer = gradients[0]
        return d_hidden * outer.to(d_hidden.dtype), d_head * outer, None, None, None, None, None


def _slice_loss(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of one slice; leaves exp(logit - largest) in the place of the logits.

    Also returns the sum of those, so that the gradient needs no second exponential.
    """
    if vocab < logits_NV.shape[1]:
        logits_NV[:, vocab:] = -torch.inf
    picked_N1 = logits_NV.gather(1, targets_N[:, None])
    largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    sums_N1 = logits_NV.sub_(largest_N1).exp_().sum(dim=-1, keepdim=True)
    losses_N = (sums_N1.log() + largest_N1 - picked_N1)[:, 0]
    return (losses_N.sum() if weights_N is None else (losses_N * weights_N).sum()), sums_N1


def _slice_gradient(
    exponentials_NV: torch.Tensor,
    sums_N1: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    scale: torch.Tensor,
) -> None:
    """Put the scaled gradient of the summed loss into the memory of the logits."""
    factor_N1 = scale.float().expand_as(sums_N1)
    if weights_N is not None:
        factor_N1 = factor_N1 * weights_N[:, None]
    exponentials_NV.mul_(factor_N1 / sums_N1)
    exponentials_NV.scatter_add_(1, targets_N[:, None], -factor_N1)


def _add_gradients(
    d_logits_NV: torch.Tensor,
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    d_hidden_ND: torch.Tensor,
    d_head_VD: torch.Tensor,
) -> None:
    """Carry one slice's gradient on to its hidden states and add it to the head's."""
    d_hidden_ND.copy_(d_logits_NV @ head_VD)
    if d_logits_NV.dtype == d_head_VD.dtype:
        d_head_VD.addmm_(d_logits_NV.T, hidden_ND)
    else:
        d_head_VD += d_logits_NV.T @ hidden_ND


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
