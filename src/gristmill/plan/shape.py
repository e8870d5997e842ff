"""The shape of a model that a plan counts with: our own, or one of Hugging Face read as ours.

The config.json of a family that the native model knows is translated as a whole. Of any other the
usual sizes are read, under the names that most architectures give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.base.errors import UserError
from gristmill.config.hf import HFConfig, from_hf
from gristmill.config.model import GPTConfig, ModelConfig

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_inner")
_GATED = ("silu", "swish", "gelu_pytorch_tanh", "swiglu")


def planned_model(model: ModelConfig) -> GPTConfig:
    """The native model that has the sizes of a model."""
    if isinstance(model, GPTConfig):
        return model
    if not isinstance(model, HFConfig):
        what = f"the shapes of {type(model).__name__} are not known here"
        raise UserError(what, where="model")
    values = model.architecture()
    own: dict[str, Any] = {"vocab_multiple": 1, "context": model.context, "vocab": model.vocab}
    own |= {"dropout": model.dropout, "lora": model.lora}
    try:
        settings = from_hf(values, where="model.hf_config")
        return GPTConfig.model_validate({**settings, **own})
    except UserError:
        return GPTConfig.model_validate({**_usual(values), **own})


def _usual(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from the usual names of sizes."""
    width, heads = _size(values, _WIDTH), _size(values, _HEADS)
    layers = _size(values, _LAYERS)
    if not (width and heads and layers):
        kind = values.get("model_type")
        what = f"the sizes of a model of type {kind!r} are not known by their names in hf_config"
        raise UserError(what, where="model.hf_config")
    gated = "intermediate_size" in values and values.get("hidden_act", "silu") in _GATED
    head = values.get("head_dim")
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": _size(values, _GROUPS) or heads,
        "head_width": head if isinstance(head, int) else max(1, width // heads),
        "mlp_width": _size(values, _INNER) or 4 * width,
        "activation": "swiglu" if gated else "gelu_tanh",
        "norm": "rmsnorm" if gated else "layernorm",
        "positions": "rotary" if gated else "learned",
        "bias": not gated,
        "tie_head": bool(values.get("tie_word_embeddings", True)),
    }


def _size(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = (values.get(name) for name in names)
    return next((one for one in found if isinstance(one, int) and one > 0), None)
