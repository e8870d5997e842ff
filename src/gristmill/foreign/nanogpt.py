"""nanoGPT's ckpt.pt.

    model_args    n_layer, n_head, n_embd, block_size, bias, vocab_size, dropout
    model         transformer.wte.weight, transformer.h.0.attn.c_attn.weight, … , lm_head.weight

The names are those of GPT-2 in transformers, but the matrices are not transposed; torch.compile
may have put `_orig_mod.` before them. The head is the embedding in nanoGPT itself; a changed one
may have a head of its own, which is kept. The rows of the vocabulary are padded by hand, usually to
50,304, and all of them are kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch

from gristmill.base.errors import DataError, Problem
from gristmill.foreign.model import ImportedModel, model_config
from gristmill.foreign.torch_file import LazyTensor, tensors_below

_NAMES = {
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "context": "block_size",
    "vocab": "vocab_size",
    "bias": "bias",
    "dropout": "dropout",
}
_MODULES = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_OUTSIDE = {"wte": "embedding", "wpe": "positions", "ln_f": "norm"}
_EMBEDDING = "embedding.weight"
_MOST_NAMED = 5
_IN_BLOCK = re.compile(r"transformer\.h\.(\d{1,5})\.(.+)\.(weight|bias)")
_AROUND = re.compile(r"transformer\.(wte|wpe|ln_f)\.(weight|bias)")
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.bias")
"""Versions without flash attention saved the causal mask."""


def is_nanogpt(content: Any) -> bool:
    """Whether a file of torch.save is nanoGPT's."""
    return isinstance(content, dict) and "model_args" in content and "model" in content


def read_nanogpt(
    content: Any, path: Path, *, activation: Literal["gelu", "gelu_tanh"] = "gelu"
) -> ImportedModel:
    """The model of a ckpt.pt. The file does not say which GELU it was trained with: nanoGPT had
    the approximation by tanh until the middle of 2023."""
    arguments = content["model_args"]
    if not isinstance(arguments, dict):
        raise DataError("model_args is no dictionary", where=path)
    missing = [name for name in _NAMES.values() if name not in arguments]
    missing = [name for name in missing if name not in ("bias", "dropout")]
    if missing:
        raise DataError(f"model_args lacks {', '.join(missing)}", where=path)
    strange = [str(name)[:60] for name in arguments if name not in _NAMES.values()]
    if strange:
        raise DataError(
            f"nanoGPT's model_args have no {', '.join(strange[:_MOST_NAMED])}: this is a changed "
            "nanoGPT, whose model may be another one",
            where=path,
            remedy="if these change nothing in the model, take them out of model_args",
        )
    if type(arguments["vocab_size"]) is not int:
        raise DataError("vocab_size is no number", where=path)
    settings = {ours: arguments[name] for ours, name in _NAMES.items() if name in arguments}
    settings |= {"activation": activation}
    tensors: dict[str, LazyTensor] = {}
    head, unknown, notes = None, [], tuple[str, ...]()
    for name, tensor in tensors_below(content["model"], where=path).items():
        name = name.removeprefix("module.").removeprefix("_orig_mod.")
        ours = _our_name(name)
        if ours is not None:
            tensors[ours] = tensor
        elif name == "lm_head.weight":
            head = tensor
        elif not _MASK.fullmatch(name):
            unknown.append(name[:60])
    if unknown:
        named = ", ".join(unknown[:_MOST_NAMED])
        raise DataError([Problem(f"nanoGPT's model has no {named}", str(path))])
    if head is not None and not _is_same(head, tensors.get(_EMBEDDING)):
        tensors["head.weight"] = head
        settings |= {"tie_head": False}
        notes = ("lm_head.weight is not the embedding, so the model has a head of its own",)
    config = model_config(settings, _NAMES, where=path)
    return ImportedModel("nanoGPT", path, config, tensors, notes)


def _is_same(head: LazyTensor, embedding: LazyTensor | None) -> bool:
    """Whether the head is the embedding, number by number. A missing one is told later."""
    if embedding is None:
        return True
    return head.shape == embedding.shape and torch.equal(head.read(), embedding.read())


def _our_name(name: str) -> str | None:
    if match := _AROUND.fullmatch(name):
        return f"{_OUTSIDE[match[1]]}.{match[2]}"
    if (match := _IN_BLOCK.fullmatch(name)) and match[2] in _MODULES:
        return f"blocks.{int(match[1])}.{_MODULES[match[2]]}.{match[3]}"
    return None
