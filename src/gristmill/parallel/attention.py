"""Attention to some of the keys at a time, and how its results are merged.

A block is attended to by one kernel, which returns besides its result the logarithm of the sum
that the result was divided by. Two results for the same queries then merge exactly:

    s_ij = scale q_i k_j        L_i = log sum_j exp(s_ij)        y_i = sum_j exp(s_ij - L_i) v_j

    L = log(exp(L') + exp(L''))        w = sigmoid(L'' - L')        y = (1 - w) y' + w y''

A query that sees nothing in a block has L = -inf and y = 0 there. Going back, the L and y of *all*
keys are handed to the kernel, and each block's gradients are its share of the whole.

Kernels are torch's own, without dropout; the plain one is for all that they refuse. A mask is a
full table of what sees what: kernels that take the lengths of documents instead are for CUDA only.

Shapes: B samples, T queries, S keys, H heads, G key and value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

aten = torch.ops.aten

AMPERE = (8, 0)
"""The first compute capability with bf16 and flash attention."""


class Block(NamedTuple):
    """Some queries, and keys and values for them."""

    query_BHTK: torch.Tensor
    key_BGSK: torch.Tensor
    value_BGSK: torch.Tensor
    scale: float
    causal: bool = False
    """Query n sees keys up to n only."""
    mask_B1TS: torch.Tensor | None = None
    """True where a query sees a key; not beside `causal`."""


class Part(NamedTuple):
    """What came of a block, or of several."""

    y_BHTK: torch.Tensor
    log_sum_BHT: torch.Tensor


class Gradients(NamedTuple):
    """A block's share of the gradients."""

    query_BHTK: torch.Tensor
    key_BGSK: torch.Tensor
    value_BGSK: torch.Tensor


class Kernel(NamedTuple):
    """A way to compute blocks."""

    takes: Callable[[Block], bool]
    forward: Callable[[Block], Part]
    backward: Callable[[Block, Part, torch.Tensor], Gradients]
    shares: bool = True
    """Whether it knows key and value heads that several query heads share."""


def attend(block: Block) -> Part:
    """Attention of a block's queries to its keys."""
    kernel = kernel_for(block)
    part = kernel.forward(block if kernel.shares else _with_all_heads(block))
    if block.mask_B1TS is None:
        return part
    # Kernels differ in what they return for a query that sees nothing.
    blind_B1T = ~block.mask_B1TS.any(dim=-1)
    return Part(
        part.y_BHTK.masked_fill(blind_B1T[..., None], 0.0),
        part.log_sum_BHT.masked_fill(blind_B1T, -torch.inf),
    )


def attend_backward(block: Block, whole: Part, grad_BHTK: torch.Tensor) -> Gradients:
    """A block's share of the gradients; `whole` is the result over all keys of its queries."""
    kernel = kernel_for(block)
    if kernel.shares:
        return kernel.backward(block, whole, grad_BHTK)
    query, key, value = kernel.backward(_with_all_heads(block), whole, grad_BHTK)
    groups = block.key_BGSK.shape[1]
    return Gradients(query, _summed(key, groups), _summed(value, groups))


def merge(whole: Part, part: Part) -> None:
    """Add a part to what is known of the same queries, in place."""
    old, new = whole.log_sum_BHT, part.log_sum_BHT
    # What the part has not seen keeps its weight of 0, where else -inf is taken from -inf.
    weight = torch.sigmoid(new - old).masked_fill(new == -torch.inf, 0.0)
    whole.y_BHTK.lerp_(part.y_BHTK.to(whole.y_BHTK.dtype), weight[..., None])
    whole.log_sum_BHT.copy_(torch.logaddexp(old, new))


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """The format in which parts of this format are added up."""
    return torch.promote_types(dtype, torch.float32)


def repeat_heads(x_BGSK: torch.Tensor, times: int) -> torch.Tensor:
    """Every head so many times, one after the other."""
    if times == 1:
        return x_BGSK
    return x_BGSK[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def _with_all_heads(block: Block) -> Block:
    times = block.query_BHTK.shape[1] // block.key_BGSK.shape[1]
    return block._replace(
        key_BGSK=repeat_heads(block.key_BGSK, times),
        value_BGSK=repeat_heads(block.value_BGSK, times),
    )


def _summed(grad_BHSK: torch.Tensor, groups: int) -> torch.Tensor:
    if grad_BHSK.shape[1] == groups:
        return grad_BHSK
    return grad_BHSK.unflatten(1, (groups, -1)).sum(2, dtype=sums_in(grad_BHSK.dtype))


def _added(mask_B1TS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as a number added to the scores; its lines lie 16 numbers apart or a multiple, since
    kernels read them in pieces."""
    *sizes, keys = mask_B1TS.shape
    room = torch.zeros(*sizes, -(-keys // 16) * 16, dtype=dtype, device=mask_B1TS.device)
    return room[..., :keys].masked_fill_(~mask_B1TS, -torch.inf)


# ------------------------------------------------------------------ flash attention on the CPU


def _cpu_takes(block: Block) -> bool:
    return block.query_BHTK.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _cpu_forward(block: Block) -> Part:
    query, key, value, scale, causal, mask = block
    added = None if mask is None else _added(mask, query.dtype)
    return Part(
        *aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=added, scale=scale
        )
    )


def _cpu_backward(block: Block, whole: Part, grad_BHTK: torch.Tensor) -> Gradients:
    query, key, value, scale, causal, mask = block
    added = None if mask is None else _added(mask, query.dtype)
    return Gradients(
        *aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BHTK, query, key, value, *whole, 0.0, causal, attn_mask=added, scale=scale
        )
    )


# ------------------------------------------------------------------ flash attention on CUDA


def _flash_takes(block: Block) -> bool:
    query, width = block.query_BHTK, block.query_BHTK.shape[-1]
    return (
        block.mask_B1TS is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        # Backward, widths between need more shared memory than many devices have.
        and (width <= 192 or 224 < width <= 256)
        and torch.cuda.get_device_capability(query.device) >= AMPERE
    )


def _flash_forward(block: Block) -> Part:
    query, key, value, scale, causal, _ = block
    y, log_sum, *_ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, scale=scale
    )
    return Part(y, log_sum)


def _flash_backward(block: Block, whole: Part, grad_BHTK: torch.Tensor) -> Gradients:
    query, key, value, scale, causal, _ = block
    unused = query.new_empty(2, dtype=torch.uint64)  # the state of dropout
    return Gradients(
        *aten._scaled_dot_product_flash_attention_backward(
            grad_BHTK,
            query,
            key,
            value,
            whole.y_BHTK,
            whole.log_sum_BHT.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            unused,
            unused,
            scale=scale,
        )
    )


# ------------------------------------------------------------------ efficient attention on CUDA

LINE = 32
"""Efficient attention keeps the logarithms of its sums for a multiple of so many queries."""


def _efficient_takes(block: Block) -> bool:
    query = block.query_BHTK
    by_capability = {
        torch.float32: True,
        torch.float16: True,
        torch.bfloat16: torch.cuda.get_device_capability(query.device) >= AMPERE,
    }
    whole_pieces = query.shape[-1] * query.element_size() % 16 == 0
    return whole_pieces and by_capability.get(query.dtype, False)


def _efficient_bias(block: Block) -> torch.Tensor | None:
    if block.mask_B1TS is None:
        return None
    heads = block.query_BHTK.shape[1]
    return _added(block.mask_B1TS, block.query_BHTK.dtype).expand(-1, heads, -1, -1)


def _efficient_forward(block: Block) -> Part:
    query, key, value, scale, causal, _ = block
    y, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, _efficient_bias(block), True, 0.0, causal, scale=scale
    )
    return Part(y, log_sum[..., : query.shape[2]])


def _efficient_backward(block: Block, whole: Part, grad_BHTK: torch.Tensor) -> Gradients:
    query, key, value, scale, causal, _ = block
    missing = -query.shape[2] % LINE
    log_sum = torch.nn.functional.pad(whole.log_sum_BHT, (0, missing), value=torch.inf)
    # It reads results by position and asks for no distance between them.
    y = whole.y_BHTK.transpose(1, 2).contiguous().transpose(1, 2)
    unused = query.new_empty((), dtype=torch.int64)  # the state of dropout
    *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_BHTK,
        query,
        key,
        value,
        _efficient_bias(block),
        y,
        log_sum.contiguous(),
        unused,
        unused,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return Gradients(*gradients)


# ------------------------------------------------------------------ plain


def _scores(block: Block) -> torch.Tensor:
    query, key, _, scale, causal, mask = block
    dtype = sums_in(query.dtype)
    scores_BHTS = scale * query.to(dtype) @ key.to(dtype).transpose(-2, -1)
    if causal:
        mask = torch.ones_like(scores_BHTS[:1, :1], dtype=torch.bool).tril()
    return scores_BHTS if mask is None else scores_BHTS.masked_fill(~mask, -torch.inf)


def _plain_forward(block: Block) -> Part:
    scores_BHTS = _scores(block)
    log_sum_BHT = scores_BHTS.logsumexp(-1)
    weights_BHTS = torch.exp(scores_BHTS - log_sum_BHT[..., None])
    return Part(weights_BHTS @ block.value_BGSK.to(weights_BHTS.dtype), log_sum_BHT)


def _plain_backward(block: Block, whole: Part, grad_BHTK: torch.Tensor) -> Gradients:
    weights_BHTS = torch.exp(_scores(block) - whole.log_sum_BHT[..., None])
    query, key, value, y, grad = (
        x.to(weights_BHTS.dtype) for x in (*block[:3], whole.y_BHTK, grad_BHTK)
    )
    along_BHT1 = (grad * y).sum(-1, keepdim=True)
    of_scores_BHTS = block.scale * weights_BHTS * (grad @ value.transpose(-2, -1) - along_BHT1)
    return Gradients(
        of_scores_BHTS @ key,
        of_scores_BHTS.transpose(-2, -1) @ query,
        weights_BHTS.transpose(-2, -1) @ grad,
    )


# ------------------------------------------------------------------ which one

CPU_FLASH = Kernel(_cpu_takes, _cpu_forward, _cpu_backward)
CUDA_FLASH = Kernel(_flash_takes, _flash_forward, _flash_backward)
CUDA_EFFICIENT = Kernel(_efficient_takes, _efficient_forward, _efficient_backward, shares=False)
PLAIN = Kernel(lambda block: True, _plain_forward, _plain_backward, shares=False)

KERNELS = {"cpu": (CPU_FLASH,), "cuda": (CUDA_FLASH, CUDA_EFFICIENT)}
"""By device, the best first."""


def kernel_for(block: Block) -> Kernel:
    """The best kernel that takes a block."""
    kernels = KERNELS.get(block.query_BHTK.device.type, ())
    return next((kernel for kernel in kernels if kernel.takes(block)), PLAIN)
