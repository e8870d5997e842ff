"""Activation checkpointing: the backward pass recomputes activations instead of saving them.

    full        saves only the inputs of blocks: least memory, a third more time
    selective   also saves the outputs of matrix products and attention, and recomputes norms,
                activation functions and the like; needs the unfused MLP

Either applies to every n-th block; the other blocks save everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in _KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Recompute:
    """What is recomputed, and in which blocks."""

    kind: Literal["none", "selective", "full"] = "none"
    every: int = 1

    def concerns(self, number: int) -> bool:
        """Whether a block recomputes anything."""
        return self.kind != "none" and number % self.every == 0

    def wrap(self, block: nn.Module, number: int) -> None:
        """Checkpoint a block's activations, if it is one of those concerned."""
        if not self.concerns(number):
            return
        plain = block.forward
        contexts: dict[str, Any] = {}
        if self.kind == "selective":
            contexts["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return checkpoint(plain, *args, use_reentrant=False, **contexts, **kwargs)

        block.forward = forward
