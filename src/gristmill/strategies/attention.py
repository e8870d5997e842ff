"""Attention to one block of keys at a time, and merging of the partial results.

A kernel attends to one block of keys. Besides its result it returns the logarithm of the softmax
denominator (logsumexp), so that two results for the same queries merge exactly:

    s_ij = scale q_i k_j        L_i = log sum_j exp(s_ij)        y_i = sum_j exp(s_ij - L_i) v_j

    L = log(exp(L') + exp(L''))        w = sigmoid(L'' - L')        y = (1 - w) y' + w y''

A query that sees nothing in a block has L = -inf and y = 0 there. In the backward pass the kernel
gets L and y of *all* keys, and returns what its block adds to the gradients.

The kernels are torch's own, without dropout; the plain one is for inputs that they do not support.
A mask has an entry for every query and key: kernels that take the lengths of documents instead
exist for CUDA only.

Shapes: B samples, T queries, S keys, H heads, G key and value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

aten = torch.ops.aten

AMPERE = (8, 0)
"""The first compute capability with bf16 and flash attention."""


class KeyBlock(NamedTuple):
    """Queries, and some of their keys and values."""

    query_BHTK: torch.Tensor
    key_BGSK: torch.Tensor
    value_BGSK: torch.Tensor
    scale: float
    causal: bool = False
    """Query n sees keys up to n only."""
    mask_B1TS: torch.Tensor | None = None
    """True where a query sees a key; not together with `causal`."""


class PartialAttention(NamedTuple):
    """The result of attention to one block of keys, or to several."""

    y_BHTK: torch.Tensor
    log_sum_BHT: torch.Tensor


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The contribution of a block to the gradients of queries, keys and values."""


class AttentionKernel(NamedTuple):
    """An implementation of attention to a block."""

    supports: Callable[[KeyBlock], bool]
    forward: Callable[[KeyBlock], PartialAttention]
    backward: Callable[[KeyBlock, PartialAttention, torch.Tensor], Gradients]
    grouped: bool = True
    """Whether it supports fewer key and value heads than query heads."""


def attend(block: KeyBlock) -> PartialAttention:
    """Attention of a block's queries to its keys."""
    kernel = kernel_for(block)
    part = kernel.forward(block if kernel.grouped else _repeat_kv(block))
    if block.mask_B1TS is None:
        return part
    # Kernels differ in what they return for a query that sees nothing.
    blind_B1T = ~block.mask_B1TS.any(dim=-1)
    return PartialAttention(
        part.y_BHTK.masked_fill(blind_B1T[..., None], 0.0),
        part.log_sum_BHT.masked_fill(blind_B1T, -torch.inf),
    )


def attend_backward(block: KeyBlock, whole: PartialAttention, grad_BHTK: torch.Tensor) -> Gradients:
    """The contribution of a block to the gradients; `whole` is the result over all keys of its
    queries."""
    kernel = kernel_for(block)
    if kernel.grouped:
        return kernel.backward(block, whole, grad_BHTK)
    query, key, value = kernel.backward(_repeat_kv(block), whole, grad_BHTK)
    groups = block.key_BGSK.shape[1]
    if query.shape[1] != groups:
        key, value = (
            one.unflatten(1, (groups, -1)).sum(2, dtype=sum_dtype(one.dtype))
            for one in (key, value)
        )
    return query, key, value


def merge(whole: PartialAttention, part: PartialAttention) -> None:
    """Merge a part into the result for the same queries, in place."""
    old, new = whole.log_sum_BHT, part.log_sum_BHT
    # A query that saw nothing in the part gets weight 0, also where -inf is subtracted from -inf.
    weight = torch.sigmoid(new - old).masked_fill(new == -torch.inf, 0.0)
    whole.y_BHTK.lerp_(part.y_BHTK.to(whole.y_BHTK.dtype), weight[..., None])
    whole.log_sum_BHT.copy_(torch.logaddexp(old, new))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def repeat_heads(x_BGSK: torch.Tensor, times: int) -> torch.Tensor:
    """Each head repeated this many times, one after the other."""
    if times == 1:
        return x_BGSK
    return x_BGSK[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def _repeat_kv(block: KeyBlock) -> KeyBlock:
    times = block.query_BHTK.shape[1] // block.key_BGSK.shape[1]
    key, value = (repeat_heads(one, times) for one in (block.key_BGSK, block.value_BGSK))
    return block._replace(key_BGSK=key, value_BGSK=value)


def _bias(block: KeyBlock) -> torch.Tensor | None:
    """The mask as a number added to the scores of all heads; its rows are a multiple of 16 elements
    apart, since kernels read aligned vectors."""
    if block.mask_B1TS is None:
        return None
    *sizes, keys = block.mask_B1TS.shape
    padded = block.query_BHTK.new_zeros(*sizes, -(-keys // 16) * 16)
    bias_B1TS = padded[..., :keys].masked_fill_(~block.mask_B1TS, -torch.inf)
    return bias_B1TS.expand(-1, block.query_BHTK.shape[1], -1, -1)


# ------------------------------------------------------------------ flash attention on the CPU


def _cpu_forward(block: KeyBlock) -> PartialAttention:
    query, key, value, scale, causal, _ = block
    return PartialAttention(
        *aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=_bias(block), scale=scale
        )
    )


def _cpu_backward(block: KeyBlock, whole: PartialAttention, grad: torch.Tensor) -> Gradients:
    query, key, value, scale, causal, _ = block
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, *whole, 0.0, causal, attn_mask=_bias(block), scale=scale
    )


# ------------------------------------------------------------------ flash attention on CUDA


def _flash_supports(block: KeyBlock) -> bool:
    query, width = block.query_BHTK, block.query_BHTK.shape[-1]
    return (
        block.mask_B1TS is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        # In the backward pass, widths between need more shared memory than many devices have.
        and (width <= 192 or 224 < width <= 256)
        and torch.cuda.get_device_capability(query.device) >= AMPERE
    )


def _flash_forward(block: KeyBlock) -> PartialAttention:
    query, key, value, scale, causal, _ = block
    y, log_sum, *_ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, scale=scale
    )
    return PartialAttention(y, log_sum)


def _flash_backward(block: KeyBlock, whole: PartialAttention, grad: torch.Tensor) -> Gradients:
    query, key, value, scale, causal, _ = block
    result = whole.y_BHTK, whole.log_sum_BHT.contiguous()
    lengths = None, None, query.shape[2], key.shape[2]
    rng = query.new_empty(2, dtype=torch.uint64)  # the state of dropout, which is not used
    return aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, *result, *lengths, 0.0, causal, rng, rng, scale=scale
    )


# ------------------------------------------------------------------ efficient attention on CUDA

LOG_SUM_ROWS = 32
"""Efficient attention keeps the logarithms of its sums for a multiple of this many queries."""


def _efficient_supports(block: KeyBlock) -> bool:
    query = block.query_BHTK
    if query.dtype == torch.bfloat16 and torch.cuda.get_device_capability(query.device) < AMPERE:
        return False
    aligned = query.shape[-1] * query.element_size() % 16 == 0
    return aligned and query.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _efficient_forward(block: KeyBlock) -> PartialAttention:
    query, key, value, scale, causal, _ = block
    y, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, _bias(block), True, 0.0, causal, scale=scale
    )
    return PartialAttention(y, log_sum[..., : query.shape[2]])


def _efficient_backward(block: KeyBlock, whole: PartialAttention, grad: torch.Tensor) -> Gradients:
    query, key, value, scale, causal, _ = block
    missing = -query.shape[2] % LOG_SUM_ROWS
    log_sum = torch.nn.functional.pad(whole.log_sum_BHT, (0, missing), value=torch.inf)
    # The kernel assumes results laid out by position, and takes no strides for them.
    result = whole.y_BHTK.transpose(1, 2).contiguous().transpose(1, 2), log_sum.contiguous()
    inputs = grad, query, key, value, _bias(block)
    rng = query.new_empty((), dtype=torch.int64)  # the state of dropout, which is not used
    wanted = [True, True, True, False]
    query, key, value, _ = aten._scaled_dot_product_efficient_attention_backward(
        *inputs, *result, rng, rng, 0.0, wanted, causal, scale=scale
    )
    return query, key, value


# ------------------------------------------------------------------ plain


def _scores(block: KeyBlock) -> torch.Tensor:
    query, key, _, scale, causal, mask = block
    dtype = sum_dtype(query.dtype)
    scores_BHTS = scale * query.to(dtype) @ key.to(dtype).transpose(-2, -1)
    if causal:
        mask = torch.ones_like(scores_BHTS[:1, :1], dtype=torch.bool).tril()
    return scores_BHTS if mask is None else scores_BHTS.masked_fill(~mask, -torch.inf)


def _plain_forward(block: KeyBlock) -> PartialAttention:
    scores_BHTS = _scores(block)
    log_sum_BHT = scores_BHTS.logsumexp(-1)
    weights_BHTS = torch.exp(scores_BHTS - log_sum_BHT[..., None])
    return PartialAttention(weights_BHTS @ block.value_BGSK.to(weights_BHTS.dtype), log_sum_BHT)


def _plain_backward(block: KeyBlock, whole: PartialAttention, grad_BHTK: torch.Tensor) -> Gradients:
    weights_BHTS = torch.exp(_scores(block) - whole.log_sum_BHT[..., None])
    query, key, value, y, grad = (
        x.to(weights_BHTS.dtype) for x in (*block[:3], whole.y_BHTK, grad_BHTK)
    )
    delta_BHT1 = (grad * y).sum(-1, keepdim=True)
    grad_BHTS = block.scale * weights_BHTS * (grad @ value.transpose(-2, -1) - delta_BHT1)
    grad_key, grad_value = (
        grad_BHTS.transpose(-2, -1) @ query,
        weights_BHTS.transpose(-2, -1) @ grad,
    )
    return grad_BHTS @ key, grad_key, grad_value


# ------------------------------------------------------------------ choosing a kernel

CPU_FLASH = AttentionKernel(
    lambda block: block.query_BHTK.dtype in (torch.float32, torch.bfloat16, torch.float16),
    _cpu_forward,
    _cpu_backward,
)
CUDA_FLASH = AttentionKernel(_flash_supports, _flash_forward, _flash_backward)
CUDA_EFFICIENT = AttentionKernel(
    _efficient_supports, _efficient_forward, _efficient_backward, grouped=False
)
PLAIN = AttentionKernel(lambda block: True, _plain_forward, _plain_backward, grouped=False)

KERNELS = {"cpu": (CPU_FLASH,), "cuda": (CUDA_FLASH, CUDA_EFFICIENT)}
"""By device type, the best first."""


def kernel_for(block: KeyBlock) -> AttentionKernel:
    """The best kernel that supports a block."""
    kernels = KERNELS.get(block.query_BHTK.device.type, ())
    return next((kernel for kernel in kernels if kernel.supports(block)), PLAIN)
