"""From settings to a model on a device."""

from __future__ import annotations

import torch

from gristmill.config.resolve import padded
from gristmill.config.schema import ModelConfig
from gristmill.models.gpt import GPT


def build_model(
    config: ModelConfig, *, vocab: int, device: torch.device, recompute: bool = False
) -> GPT:
    """A model with memory allocated on the device and weights not yet set."""
    with torch.device("meta"):
        model = GPT(config, vocab=vocab, rows=padded(vocab, config), recompute=recompute)
    model.to_empty(device=device)
    if model.rotary is not None:
        model.rotary.fill()
    if config.tie_head:
        model.head.weight = model.embedding.weight
    return model
