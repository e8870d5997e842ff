"""Cross-entropy of the next token, without ever holding the logits of all tokens.

For N tokens, hidden states h, head W and counting weights w, the loss is the sum

    sum_n  w_n (logsumexp(z_n) - z_n[target_n])      z_n = cap tanh(W h_n / cap), or W h_n

computed over slices of tokens. When gradients are wanted they are formed slice by slice in the same
pass, in the place of the logits: dW and dh are kept, the logits never are, and the work is the
three matrix products that the plain way needs too. The price: the scale of the loss has to be known
in the forward pass, which also lets fp16 gradients be scaled before they are rounded.

With the Triton kernel the logits stay in the format of the hidden states and are turned into their
gradient at once, computed in fp32; without it plain operations on fp32 logits do the same. The
whole is one opaque operator for the compiler.
"""

from __future__ import annotations

from typing import Any

import torch

from gristmill.models.spec import Loss

SLICE_BYTES = 2**31
"""Memory allowed for one slice's logits on a GPU."""
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
    cap: float | None = None,
    kernel: bool = False,
) -> Loss:
    """Loss summed over tokens; rows of the head from `vocab` on are padding and cannot be
    predicted. `kernel`: in Triton."""
    if scale is None:
        scale = torch.ones((), device=hidden_ND.device)
    scaled, total = _LinearCrossEntropy.apply(
        *(hidden_ND, head_VD, targets_N, weights_N, scale),
        *(vocab, cap, kernel, torch.is_grad_enabled()),
    )
    return Loss(scaled, total)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits softly held below a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def slice_length(rows: int, *, width: int, device: torch.device) -> int:
    """Tokens per slice, so that its logits of `width` bytes each fit the allowance."""
    allowance = CPU_SLICE_BYTES if device.type == "cpu" else SLICE_BYTES
    return max(64, allowance // (width * rows) // 64 * 64)


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
        cap: float | None,
        kernel: bool,
        wants_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, d_hidden, d_head = _sliced(
            *(hidden_ND, head_VD, targets_N, weights_N, scale),
            *(vocab, cap, kernel, wants_gradient),
        )
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(total)
        return total * scale, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        outer = gradients[0]
        nothing = (None,) * 7
        return d_hidden * outer.to(d_hidden.dtype), d_head * outer.to(d_head.dtype), *nothing


@torch.library.custom_op("gristmill::linear_cross_entropy", mutates_args=())
def _sliced(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    scale: torch.Tensor,
    vocab: int,
    cap: float | None,
    kernel: bool,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss and the scaled gradients of hidden states and head (empty if not wanted)."""
    device, dtype = hidden_ND.device, hidden_ND.dtype
    rows = head_VD.shape[0]
    head = head_VD.to(dtype)
    total = torch.zeros((), dtype=torch.float32, device=device)
    d_hidden = torch.empty_like(hidden_ND) if wants_gradient else hidden_ND.new_empty(0)
    d_head = torch.zeros_like(head_VD) if wants_gradient else head_VD.new_empty(0)
    step = slice_length(rows, width=dtype.itemsize if kernel else 4, device=device)
    compute = _triton_slice if kernel else _plain_slice
    for start in range(0, hidden_ND.shape[0], step):
        part = slice(start, start + step)
        weights = None if weights_N is None else weights_N[part].float()
        factors = None
        if wants_gradient:
            ones = torch.ones_like(targets_N[part], dtype=torch.float32)
            factors = scale.float() * (ones if weights is None else weights)
        logits = hidden_ND[part] @ head.T
        losses, d_logits = compute(logits, targets_N[part], factors, vocab, cap)
        total += losses.sum() if weights is None else (losses * weights).sum()
        if wants_gradient:
            torch.mm(d_logits, head, out=d_hidden[part])
            _add_product(d_head, d_logits, hidden_ND[part])
        del logits, d_logits  # before the next slice's are made
    return total, d_hidden, d_head


@_sliced.register_fake
def _(  # type: ignore[no-untyped-def]
    hidden_ND, head_VD, targets_N, weights_N, scale, vocab, cap, kernel, wants_gradient
):
    total = hidden_ND.new_empty((), dtype=torch.float32)
    if not wants_gradient:
        return total, hidden_ND.new_empty(0), head_VD.new_empty(0)
    return total, torch.empty_like(hidden_ND), torch.empty_like(head_VD)


def _triton_slice(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    factors_N: torch.Tensor | None,
    vocab: int,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from gristmill.models.kernels.cross_entropy import cross_entropy_

    losses = cross_entropy_(logits_NV, targets_N, factors_N, vocab=vocab, cap=cap)
    return losses, logits_NV


def _plain_slice(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    factors_N: torch.Tensor | None,
    vocab: int,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of one slice, and the gradient in the place of the logits where factors are given."""
    dtype, logits_NV = logits_NV.dtype, logits_NV.float()
    slope_NV = None
    if cap is not None:
        logits_NV = logits_NV.div_(cap).tanh_()
        slope_NV = 1 - logits_NV.square() if factors_N is not None else None
        logits_NV.mul_(cap)
    if vocab < logits_NV.shape[1]:
        logits_NV[:, vocab:] = -torch.inf
    picked_N1 = logits_NV.gather(1, targets_N[:, None])
    largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    sums_N1 = logits_NV.sub_(largest_N1).exp_().sum(dim=-1, keepdim=True)
    losses_N = (sums_N1.log() + largest_N1 - picked_N1)[:, 0]
    if factors_N is not None:
        factors_N1 = factors_N[:, None]
        logits_NV.mul_(factors_N1 / sums_N1)
        logits_NV.scatter_add_(1, targets_N[:, None], -factors_N1)
        if slope_NV is not None:
            logits_NV.mul_(slope_NV)
    return losses_N, logits_NV.to(dtype)


def _add_product(
    d_head_VD: torch.Tensor, d_logits_NV: torch.Tensor, hidden_ND: torch.Tensor
) -> None:
    """Add one slice's gradient to the head's, which may be in a wider format."""
    if d_logits_NV.dtype == d_head_VD.dtype:
        d_head_VD.addmm_(d_logits_NV.T, hidden_ND)
    else:
        d_head_VD += d_logits_NV.T @ hidden_ND
