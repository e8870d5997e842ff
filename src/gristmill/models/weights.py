"""Names and layouts of weights here and in Hugging Face's GPT-2: one table, read in both
directions.

    ours                            Hugging Face                     layout
    embedding.weight                transformer.wte.weight           padded rows added, dropped
    blocks.N.attention.qkv.weight   transformer.h.N.attn.c_attn...   transposed (Conv1D)

Models without biases are written with zero biases, which compute the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from gristmill.base.errors import Exit, UserError
from gristmill.models.gpt import GPT

_GPT2 = {
    "embedding.weight": "wte.weight",
    "positions.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
    **{
        f"blocks.{{layer}}.{ours}.{kind}": f"h.{{layer}}.{theirs}.{kind}"
        for ours, theirs in {
            "attention_norm": "ln_1",
            "attention.qkv": "attn.c_attn",
            "attention.out": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        }.items()
        for kind in ("weight", "bias")
    },
}
_TRANSPOSED = re.compile(r"(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
_VOCABULARY = ("embedding.weight", "head.weight")


def gpt2_names(model: GPT) -> dict[str, str]:
    """Our parameter names to Hugging Face's, for all that a GPT-2 of this depth has."""
    names = {"head.weight": "lm_head.weight"} if not model.config.tie_head else {}
    for ours, theirs in _GPT2.items():
        for layer in range(model.config.layers if "{layer}" in ours else 1):
            names[ours.format(layer=layer)] = "transformer." + theirs.format(layer=layer)
    return names


def to_gpt2(model: GPT) -> dict[str, torch.Tensor]:
    """The model's weights under Hugging Face's names, in fp32 on the CPU, without padding."""
    ours = dict(model.named_parameters())
    result = {}
    for name, theirs in gpt2_names(model).items():
        if name in ours:
            tensor = ours[name].detach().float().cpu()
        else:
            tensor = torch.zeros(ours[name.removesuffix("bias") + "weight"].shape[0])
        if name in _VOCABULARY:
            tensor = tensor[: model.vocab]
        if _TRANSPOSED.search(theirs):
            tensor = tensor.T
        result[theirs] = tensor.contiguous().clone()
    return result


def from_gpt2(model: GPT, weights: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Fill the model from Hugging Face's GPT-2 weights; padded rows become zero."""
    ours = dict(model.named_parameters())
    plain = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    with torch.no_grad():
        for name, theirs in gpt2_names(model).items():
            tensor = plain.get(theirs.removeprefix("transformer."))
            if tensor is None:
                raise UserError(f"the weights lack {theirs}", where=where, exit=Exit.DATA)
            if _TRANSPOSED.search(theirs):
                tensor = tensor.T
            target: torch.Tensor = ours[name]
            if name in _VOCABULARY:
                target[model.vocab :].zero_()
                target = target[: model.vocab]
            if target.shape != tensor.shape:
                raise UserError(
                    f"{theirs} has shape {tuple(tensor.shape)}, not {tuple(target.shape)}",
                    where=where,
                    exit=Exit.DATA,
                )
            target.copy_(tensor)
