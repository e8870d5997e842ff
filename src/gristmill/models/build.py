"""From settings to a model on a device."""

from __future__ import annotations

import torch

from gristmill.config.resolve import padded
from gristmill.config.schema import ModelConfig
from gristmill.models.gpt import GPT
from gristmill.models.recompute import NOTHING, Recompute
from gristmill.models.spec import Portion


def whole_names(config: ModelConfig) -> list[str]:
    """The names of all parameters of a model."""
    with torch.device("meta"):
        model = GPT(config, vocab=1, rows=padded(1, config))
    return [name for name, _ in model.named_parameters()]


def build_model(
    config: ModelConfig,
    *,
    vocab: int,
    device: torch.device,
    recompute: Recompute = NOTHING,
    portion: Portion | None = None,
) -> GPT:
    """A model, or a part of one, with memory allocated on the device and weights not yet set."""
    ranks = 1 if portion is None else portion.ranks
    with torch.device("meta"):
        rows = padded(vocab, config, ranks=ranks)
        model = GPT(config, vocab=vocab, rows=rows, recompute=recompute, portion=portion)
    if device.type != "meta":
        model.to_empty(device=device)
        model.tie()
        if model.rotary is not None:
            model.rotary.fill()
    return model
