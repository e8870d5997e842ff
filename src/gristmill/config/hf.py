"""Model settings from the config.json of a Hugging Face GPT-2, and back.

    n_layer <-> layers    n_head <-> heads    n_embd <-> width    n_positions <-> context   ...

A run folder serves as well: its `run.toml` holds the settings.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import read_json
from gristmill.config.model import GPTConfig

_SAME = {
    "n_layer": "layers",
    "n_head": "heads",
    "n_embd": "width",
    "n_positions": "context",
    "n_inner": "mlp_width",
    "vocab_size": "vocab",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_head",
    "initializer_range": "init_std",
}
_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "activation_function": "gelu_new",
    "initializer_range": 0.02,
    "scale_attn_weights": True,
}
_UNSUPPORTED = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")


def model_settings(folder: Path) -> dict[str, Any]:
    """The `[model]` table that fits the weights in a run folder or a Hugging Face folder."""
    run = folder / "run.toml"
    if run.is_file():
        try:
            model = tomllib.loads(run.read_text())["model"]
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise DataError(f"this is not the run file of a run: {error}", where=run) from error
        return {name: value for name, value in model.items() if name != "start"}
    if not (folder / "config.json").is_file():
        what = f"'{folder}' holds neither a run (run.toml) nor a Hugging Face model (config.json)"
        raise DataError(what, where="model.start")
    return from_hf(read_json(folder / "config.json"), where=str(folder / "config.json"))


def from_hf(values: Any, *, where: str) -> dict[str, Any]:
    """Model settings from the content of a Hugging Face `config.json`."""
    if not isinstance(values, dict) or values.get("model_type") != "gpt2":
        kind = values.get("model_type") if isinstance(values, dict) else None
        raise DataError(f"the model is of type {kind!r}; only GPT-2 can be read", where=where)
    values = {**_DEFAULTS, **values}
    activation = _ACTIVATIONS.get(values["activation_function"])
    wrong = [f"{name} = true" for name in _UNSUPPORTED if values.get(name)]
    if values["scale_attn_weights"] is False:
        wrong.append("scale_attn_weights = false")
    if activation is None:
        wrong.append(f"activation_function = {values['activation_function']!r}")
    if wrong:
        raise DataError(f"{', '.join(wrong)}: not supported", where=where)
    settings = {
        ours: values[theirs] for theirs, ours in _SAME.items() if values.get(theirs) is not None
    }
    return {**settings, "activation": activation, "bias": True}


def to_hf(model: GPTConfig, *, vocab: int, end_of_text: int) -> dict[str, Any]:
    """The `config.json` of `GPT2LMHeadModel`; refuses settings that GPT-2 does not have."""
    unlike = {
        "positions": ("learned", model.positions),
        "norm": ("layernorm", model.norm),
        "qk_norm": (False, model.qk_norm),
        "kv_heads": (model.heads, model.groups),
        "norm_gain": (True, model.norm_gain),
        "embedding_norm": (False, model.embedding_norm),
        "value_embeddings": (0, model.value_embeddings),
        "attention_scale": (None, model.attention_scale),
        "logit_cap": (None, model.logit_cap),
    }
    wrong = [f"{name} = {got!r}" for name, (needed, got) in unlike.items() if got != needed]
    if model.activation not in _ACTIVATIONS.values():
        wrong.append(f"activation = {model.activation!r}")
    if wrong:
        raise UserError(
            f"Hugging Face's GPT-2 has no {', '.join(wrong)}",
            where="export",
            remedy="such a model can be used with `gristmill generate` and `evaluate`",
        )
    values = model.model_dump()
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: values[ours] for theirs, ours in _SAME.items()},
        "n_inner": model.inner,
        "vocab_size": vocab,
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        "attn_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
