"""From settings to a model: one constructor for each kind of settings.

Models are made without memory, which takes milliseconds at any size, and then given some.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gristmill.config.model import GPTConfig, ModelConfig
from gristmill.models.gpt import GPT
from gristmill.models.spec import WHOLE, CausalLM, ModelShard

MODELS: dict[type[ModelConfig], Callable[..., CausalLM]] = {GPTConfig: GPT}


def outline_model(
    config: ModelConfig, *, vocab: int, shard: ModelShard = WHOLE, pad_for: int = 1
) -> CausalLM:
    """A model, or a shard of one, with names and shapes but no memory. `pad_for`: pad the
    vocabulary of a whole model as for so many processes that share layers."""
    with torch.device("meta"):
        return MODELS[type(config)](config, vocab=vocab, shard=shard, pad_for=pad_for)


def materialise(
    module: nn.Module, device: torch.device, *, dtype: torch.dtype | None = None
) -> None:
    """Give what has no memory yet in a module some on a device, parameters in another number format
    if one is given; buffers that have a value keep it."""
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            if parameter.is_meta:
                memory = torch.empty_like(parameter, device=device, dtype=dtype)
                inner.register_parameter(name, nn.Parameter(memory, parameter.requires_grad))
        for name, buffer in list(inner.named_buffers(recurse=False)):
            empty = buffer.is_meta
            inner._buffers[name] = (
                torch.empty_like(buffer, device=device) if empty else buffer.to(device)
            )


def build_model(
    config: ModelConfig,
    *,
    vocab: int,
    device: torch.device,
    shard: ModelShard = WHOLE,
    dtype: torch.dtype | None = None,
) -> CausalLM:
    """A model with memory allocated on the device and weights not yet set; `dtype` is the number
    format of its weights if not fp32."""
    model = outline_model(config, vocab=vocab, shard=shard)
    if device.type != "meta":
        materialise(model, device, dtype=dtype)
        model.tie()
        model.reset_buffers()
    return model
