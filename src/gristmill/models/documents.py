"""Attention masks for packed documents, which do not attend to one another.

Documents are numbered in the order in which they are packed. A dense mask works on any device. On a
GPU its B x T x T entries slow attention down, so there the mask is a block mask: for every query
block i, the key blocks j it attends to at all, and which of these it attends to fully. Document
numbers never decrease, so both follow from the first and last document of each block:

    seen    j <= i  and  last[j] >= first[i]      full    j < i  and  first[j] == last[i]

Shapes: B samples, T positions, N query or key blocks.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions per block."""


def document_mask(documents_BT: torch.Tensor) -> torch.Tensor:
    """A dense causal mask within documents, (B, 1, T, T)."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]


def document_blocks(documents_BT: torch.Tensor) -> BlockMask:
    """The same as a block mask; T must be a multiple of the block size."""
    first_BN, last_BN = documents_BT[:, ::BLOCK], documents_BT[:, BLOCK - 1 :: BLOCK]
    number_N = torch.arange(first_BN.shape[1], device=documents_BT.device)
    seen_BNN = last_BN[:, None, :] >= first_BN[:, :, None]
    seen_BNN = seen_BNN & (number_N[None, :] <= number_N[:, None])
    full_BNN = first_BN[:, None, :] == last_BN[:, :, None]
    full_BNN = full_BNN & (number_N[None, :] < number_N[:, None])

    def visible(
        b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (query >= key) & (documents_BT[b, query] == documents_BT[b, key])

    return BlockMask.from_kv_blocks(
        *_listed(seen_BNN & ~full_BNN),
        *_listed(full_BNN),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(documents_BT.shape[1], documents_BT.shape[1]),
    )


def _listed(chosen_BNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every query block, the number of chosen key blocks, and the key blocks, chosen first."""
    order_BNN = torch.argsort(chosen_BNN.int(), dim=-1, descending=True, stable=True)
    return chosen_BNN.sum(-1, dtype=torch.int32)[:, None], order_BNN.int()[:, None]
