"""Builds a model from its settings: one constructor for each settings class.

Models are created on the meta device, which takes milliseconds at any size, then materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from gristmill.config.hf import HFConfig
from gristmill.config.model import GPTConfig, ModelConfig
from gristmill.models.decoding import CacheDecoder, Decoder
from gristmill.models.gpt import GPT
from gristmill.models.hf import HFModel
from gristmill.models.lora import add_adapters, draw_adapters
from gristmill.models.spec import (
    PLAIN_EXECUTION,
    WHOLE,
    CausalLM,
    Execution,
    Kernels,
    ModelShard,
)
from gristmill.models.torch_decoding import TorchDecoder

MODELS: dict[type[ModelConfig], Callable[..., CausalLM]] = {GPTConfig: GPT, HFConfig: HFModel}


def build_meta_model(
    config: ModelConfig,
    *,
    vocab: int,
    shard: ModelShard = WHOLE,
    execution: Execution = PLAIN_EXECUTION,
    pad_for: int = 1,
) -> CausalLM:
    """A model, or a shard of one, on the meta device. `pad_for`: the tp size to pad the vocabulary
    of a whole model for."""
    build = MODELS[type(config)]
    with torch.device("meta"):
        model = build(config, vocab=vocab, shard=shard, execution=execution, pad_for=pad_for)
        if config.adapters is not None:
            add_adapters(model, config.adapters)
    return model


def materialise(
    module: nn.Module, device: torch.device, *, dtype: torch.dtype | None = None
) -> None:
    """Allocate memory on a device for a module's meta tensors; `dtype` is that of the parameters
    if given. Buffers that already have values keep them."""
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            if parameter.is_meta:
                memory = torch.empty_like(parameter, device=device, dtype=dtype)
                inner.register_parameter(name, nn.Parameter(memory, parameter.requires_grad))
        for name, buffer in list(inner.named_buffers(recurse=False)):
            moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            inner._buffers[name] = moved


def initialise(model: CausalLM, seed: int, names: Iterable[str]) -> None:
    """Draw initial weights; of a model with adapters only theirs, since all others are read."""
    if model.adapters:
        draw_adapters(model, seed, names)
    else:
        model.initialise(seed, names)


def build_model(
    config: ModelConfig,
    *,
    vocab: int,
    device: torch.device,
    shard: ModelShard = WHOLE,
    execution: Execution = PLAIN_EXECUTION,
    dtype: torch.dtype | None = None,
) -> CausalLM:
    """A model on the device with uninitialised weights, in fp32 unless `dtype` is given."""
    model = build_meta_model(config, vocab=vocab, shard=shard, execution=execution)
    if device.type != "meta":
        materialise(model, device, dtype=dtype)
        model.tie()
        model.reset_buffers()
    return model


def build_decoder(
    model: CausalLM, *, slots: int, capacity: int, dtype: torch.dtype, cached: bool = True
) -> Decoder:
    """The fastest decoder there is for a model; without `cached`, the one that keeps nothing."""
    native = cached and isinstance(model, GPT) and not model.adapters
    by_kernels = native and Kernels.on(model.device).decoding
    memory = model.slot_memory(slots + by_kernels, capacity, dtype=dtype) if native else None
    if memory is None:
        return CacheDecoder(model, slots=slots, capacity=capacity, dtype=dtype, cached=cached)
    if by_kernels:
        # Needs Triton.
        from gristmill.models.kernel_decoding import KernelDecoder

        return KernelDecoder(model, memory, capacity=capacity, dtype=dtype)
    return TorchDecoder(model, memory, capacity=capacity, dtype=dtype)
