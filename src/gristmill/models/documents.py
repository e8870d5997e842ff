"""Packed documents that do not see one another: which position attends to which.

Documents are numbered in the order in which they are packed. A dense mask suits any device. On a
GPU it costs B x T x T and slows attention down, so there the mask is one of blocks: for every block
of queries, the blocks of keys that it sees at all, and of these the ones that it sees whole. With
numbers that never fall, both follow from the first and the last document of each block:

    seen    j <= i  and  last[j] >= first[i]      whole   j < i  and  first[j] == last[i]

Shapes: B samples, T positions, N blocks of queries or keys.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions of a block."""


def document_mask(documents_BT: torch.Tensor) -> torch.Tensor:
    """Which position sees which, (B, 1, T, T): the earlier ones of the same document and itself."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]


def document_blocks(documents_BT: torch.Tensor) -> BlockMask:
    """The same for attention in blocks; T is a multiple of a block."""
    first_BN, last_BN = documents_BT[:, ::BLOCK], documents_BT[:, BLOCK - 1 :: BLOCK]
    number_N = torch.arange(first_BN.shape[1], device=documents_BT.device)
    seen_BNN = last_BN[:, None, :] >= first_BN[:, :, None]
    seen_BNN = seen_BNN & (number_N[None, :] <= number_N[:, None])
    whole_BNN = first_BN[:, None, :] == last_BN[:, :, None]
    whole_BNN = whole_BNN & (number_N[None, :] < number_N[:, None])

    def visible(
        b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (query >= key) & (documents_BT[b, query] == documents_BT[b, key])

    return BlockMask.from_kv_blocks(
        *_listed(seen_BNN & ~whole_BNN),
        *_listed(whole_BNN),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(documents_BT.shape[1], documents_BT.shape[1]),
    )


def _listed(chosen_BNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For every block of queries, how many blocks of keys are chosen, and these first in a list."""
    order_BNN = torch.argsort(chosen_BNN.int(), dim=-1, descending=True, stable=True)
    return chosen_BNN.sum(-1, dtype=torch.int32)[:, None], order_BNN.int()[:, None]
