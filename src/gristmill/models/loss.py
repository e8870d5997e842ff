"""Cross-entropy of the next token, without ever holding the logits of all tokens.

For N tokens, hidden states h, head W and counting weights w, the loss is the sum

    sum_n  w_n (logsumexp(z_n) - z_n[target_n])      z_n = cap tanh(W h_n / cap), or W h_n

computed over slices of tokens. When gradients are wanted they are formed slice by slice in the same
pass, in the place of the logits: dW and dh are kept, the logits never are, and the work is the
three matrix products that the plain way needs too. The price: the scale of the loss has to be known
in the forward pass, which also lets fp16 gradients be scaled before they are rounded.

With the Triton kernel the logits stay in the format of the hidden states and are turned into their
gradient at once, computed in fp32; without it plain operations on fp32 logits do the same. The
products may be in fp8 where gradients are wanted (`kernels/head_fp8.py`); a loss that is only
measured never is. The whole is one opaque operator for the compiler.

The head's rows may be divided among processes. Each forms its part of the logits, and only three
numbers a token are exchanged: the largest, the sum of exponentials, and the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gristmill.models.spec import Loss, ShardComm

SLICE_BYTES = 2**31
"""Memory allowed for one slice's logits on a GPU."""
CPU_SLICE_BYTES = 16 * 2**20
"""The same on the CPU, where a slice should stay in the cache."""
SLICE_TOKENS, CPU_SLICE_TOKENS = 64, 256
"""The least tokens of a slice, on a GPU and on the CPU: products of fewer rows are slow."""


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
    fp8: bool = False,
    comm: ShardComm | None = None,
    first: int = 0,
) -> Loss:
    """Loss summed over tokens; rows of the head from `vocab` on are padding and cannot be
    predicted. `kernel`: in Triton. `fp8`: matrix products in fp8 (in Triton too) if there will be
    gradients. `comm`, `first`: to the processes that have other rows of the head, and the number
    of the first row here; plain operations compute what is divided."""
    if scale is None:
        scale = torch.ones((), device=hidden_ND.device)
    others = None if comm is None or comm.single else comm
    scaled, total = _LinearCrossEntropy.apply(
        *(hidden_ND, head_VD, targets_N, weights_N, scale),
        *(vocab, cap, kernel, fp8, torch.is_grad_enabled(), others, first),
    )
    return Loss(scaled, total)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits softly held below a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def slice_length(rows: int, *, width: int, device: torch.device) -> int:
    """Tokens per slice, so that its logits of `width` bytes each fit the allowance."""
    cpu = device.type == "cpu"
    allowance = CPU_SLICE_BYTES if cpu else SLICE_BYTES
    least = CPU_SLICE_TOKENS if cpu else SLICE_TOKENS
    return max(least, allowance // (width * rows) // 64 * 64)


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
        fp8: bool,
        wants_gradient: bool,
        comm: ShardComm | None,
        first: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = (hidden_ND, head_VD, targets_N, weights_N, scale)
        if comm is None:
            total, d_hidden, d_head = _sliced(*tensors, vocab, cap, kernel, fp8, wants_gradient)
        else:
            half = head_VD.to(hidden_ND.dtype)
            head = _PlainHead(half, vocab, cap, comm=comm, first=first)
            total, d_hidden, d_head = _over_slices(head, *tensors, 4, wants_gradient)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(total)
        return total * scale, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        outer = gradients[0]
        nothing = (None,) * 10
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
    fp8: bool,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss and the scaled gradients of hidden states and head (empty if not wanted)."""
    dtype = hidden_ND.dtype
    width = dtype.itemsize if kernel or fp8 else 4
    head: _Head = (
        _fp8_head(head_VD, dtype, vocab, cap)
        if fp8 and wants_gradient
        else _PlainHead(head_VD.to(dtype), vocab, cap, kernel)
    )
    return _over_slices(
        head, hidden_ND, head_VD, targets_N, weights_N, scale, width, wants_gradient
    )


def _over_slices(
    head: _Head,
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    scale: torch.Tensor,
    width: int,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, slice by slice; a logit takes `width` bytes."""
    device = hidden_ND.device
    total = torch.zeros((), dtype=torch.float32, device=device)
    d_hidden = torch.empty_like(hidden_ND) if wants_gradient else hidden_ND.new_empty(0)
    # Sums over slices are formed in fp32, whatever the head's own format.
    d_head = torch.zeros(head_VD.shape if wants_gradient else 0, dtype=torch.float32, device=device)
    scale = scale.float()
    step = slice_length(head_VD.shape[0], width=width, device=device)
    for start in range(0, hidden_ND.shape[0], step):
        part = slice(start, start + step)
        hidden, targets = hidden_ND[part], targets_N[part]
        ones = torch.ones_like(targets, dtype=torch.float32)
        weights = ones if weights_N is None else weights_N[part].float()
        if wants_gradient:
            losses, d_logits = head.losses(hidden, targets, scale * weights, d_hidden[part])
            _add_product(d_head, d_logits, hidden)
            del d_logits  # the next slice's take their place
        else:
            losses, _ = head.losses(hidden, targets, None, None)
        total += (losses * weights).sum()
    return total, d_hidden, d_head.to(head_VD.dtype)


@_sliced.register_fake
def _(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wants_gradient = others[-1]
    total = hidden_ND.new_empty((), dtype=torch.float32)
    if not wants_gradient:
        return total, hidden_ND.new_empty(0), head_VD.new_empty(0)
    return total, torch.empty_like(hidden_ND), torch.empty_like(head_VD)


class _Head(Protocol):
    """A head in some format, and what it does with slices of tokens."""

    def losses(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        factors_N: torch.Tensor | None,
        d_hidden_ND: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a slice and, with the factors that its rows have, the gradient of its logits;
        that of its hidden states is written where there is room for it."""
        ...


def _fp8_head(head_VD: torch.Tensor, dtype: torch.dtype, vocab: int, cap: float | None) -> _Head:
    from gristmill.models.kernels.head_fp8 import Fp8Head

    assert dtype is torch.bfloat16, "the rules saw to that"
    return Fp8Head(head_VD, vocab=vocab, cap=cap)


_SINGLE = ShardComm()


@dataclass(frozen=True)
class _PlainHead:
    """The head, or the rows of it from `first` on, in the format of the hidden states."""

    head_VD: torch.Tensor
    vocab: int
    cap: float | None
    kernel: bool = False
    comm: ShardComm = _SINGLE
    first: int = 0

    def losses(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        factors_N: torch.Tensor | None,
        d_hidden_ND: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute = self._triton_slice if self.kernel else self._plain_slice
        logits_NV = hidden_ND @ self.head_VD.T
        losses_N, d_logits_NV = compute(logits_NV, targets_N, factors_N)
        if d_hidden_ND is not None:
            torch.mm(d_logits_NV, self.head_VD, out=d_hidden_ND)
        return losses_N, d_logits_NV

    def _triton_slice(
        self, logits_NV: torch.Tensor, targets_N: torch.Tensor, factors_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from gristmill.models.kernels.cross_entropy import cross_entropy_

        losses = cross_entropy_(logits_NV, targets_N, factors_N, vocab=self.vocab, cap=self.cap)
        return losses, logits_NV

    def _plain_slice(
        self, logits_NV: torch.Tensor, targets_N: torch.Tensor, factors_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of one slice, and the gradient in the place of the logits where factors are
        given."""
        comm, columns = self.comm, logits_NV.shape[1]
        vocab, cap = self.vocab, self.cap
        dtype, logits_NV = logits_NV.dtype, logits_NV.float()
        slope_NV = None
        if cap is not None:
            # tanh x = 2 sigmoid(2 x) - 1, which takes half the time on a CPU.
            logits_NV = logits_NV.mul_(2 / cap).sigmoid_().mul_(2).sub_(1)
            slope_NV = 1 - logits_NV.square() if factors_N is not None else None
            logits_NV.mul_(cap)
        if vocab < self.first + columns:
            logits_NV[:, max(0, vocab - self.first) :] = -torch.inf
        target_N1 = targets_N[:, None] - self.first
        here_N1 = (target_N1 >= 0) & (target_N1 < columns)
        target_N1 = target_N1.clamp(0, columns - 1)
        picked_N1 = comm.all_sum(torch.where(here_N1, logits_NV.gather(1, target_N1), 0.0))
        largest_N1 = comm.all_max(logits_NV.amax(dim=-1, keepdim=True))
        sums_N1 = comm.all_sum(logits_NV.sub_(largest_N1).exp_().sum(dim=-1, keepdim=True))
        losses_N = (sums_N1.log() + largest_N1 - picked_N1)[:, 0]
        if factors_N is not None:
            factors_N1 = factors_N[:, None]
            logits_NV.mul_(factors_N1 / sums_N1)
            logits_NV.scatter_add_(1, target_N1, torch.where(here_N1, -factors_N1, 0.0))
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
