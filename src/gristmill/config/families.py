"""Families of Hugging Face models that the native model can be: what their settings are called.

    ours        gpt2        llama, qwen3 ...            gpt_neox
    layers      n_layer     num_hidden_layers           num_hidden_layers
    norm_eps    layer_norm_epsilon   rms_norm_eps       layer_norm_eps

A family is data. `config/hf.py` reads and writes a `config.json` by it, and finds out which family
can express a model by writing its settings and reading them back. The tensors of each family are in
`models/families.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_GELUS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}
_PLAIN = {**_GELUS, "relu": "relu"}
"""Activations without a gate."""
_WIDE = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "context": "max_position_embeddings",
    "mlp_width": "intermediate_size",
    "vocab": "vocab_size",
    "tie_head": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Names that almost all families share."""
_GPT2_DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "activation_function": "gelu_new",
}
_LLAMA = {
    **_WIDE,
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "norm_eps": "rms_norm_eps",
}
_LLAMA_LIKE = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "bias": False,
    "norm_gain": True,
}
_LLAMA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Family:
    """A class of transformers, by what its settings are called and which of ours it fixes."""

    type: str
    """`model_type` in config.json."""
    architecture: str
    """The class that computes logits."""
    names: Mapping[str, str]
    """Their names of our settings that have the same values."""
    fixed: Mapping[str, Any]
    """Our settings that are the same in all models of the family, unless they are the default."""
    activations: Mapping[str, str]
    """Our activations by their names; the name that is written comes first."""
    activation: str = "hidden_act"
    """Their name of the activation."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a setting is if config.json leaves it out."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Their settings of which we know one value only."""
    equal: Mapping[str, str] = field(default_factory=dict)
    """Their settings that must be the same as another, since we have one for both."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    rotary_base: str = "rope_theta"
    """Their older name of the base of rotary positions."""
    rotary_fraction: str | None = None
    """Their older name of the fraction of features that are rotated, if it can be chosen."""
    windows: bool = False
    """Whether layers may have a window; then `attention_types` and `window_size` say which."""
    heads_divide: bool = False
    """Whether the heads must divide the width even if their width is given."""


GPT2 = Family(
    type="gpt2",
    architecture="GPT2LMHeadModel",
    names={
        "layers": "n_layer",
        "heads": "n_head",
        "width": "n_embd",
        "context": "n_positions",
        "mlp_width": "n_inner",
        "vocab": "vocab_size",
        "norm_eps": "layer_norm_epsilon",
        "tie_head": "tie_word_embeddings",
        "init_std": "initializer_range",
    },
    fixed={"bias": True},
    activations=_PLAIN,
    activation="activation_function",
    defaults=_GPT2_DEFAULTS,
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
)
LLAMA = Family(
    type="llama",
    architecture="LlamaForCausalLM",
    names={**_LLAMA, "bias": "attention_bias"},
    fixed={name: value for name, value in _LLAMA_LIKE.items() if name != "bias"},
    activations={"silu": "swiglu"},
    defaults={**_LLAMA_DEFAULTS, "attention_bias": False, "mlp_bias": False},
    equal={"mlp_bias": "attention_bias"},
    heads_divide=True,
)
MISTRAL = Family(
    type="mistral",
    architecture="MistralForCausalLM",
    names=_LLAMA,
    fixed=_LLAMA_LIKE,
    activations={"silu": "swiglu"},
    defaults={
        **_LLAMA_DEFAULTS,
        "num_key_value_heads": 8,
        "use_sliding_window": True,
        "sliding_window": 4096,
    },
)
QWEN2 = Family(
    type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=_LLAMA,
    fixed={**_LLAMA_LIKE, "qkv_bias": True},
    activations={"silu": "swiglu"},
    defaults={**_LLAMA_DEFAULTS, "num_key_value_heads": 32, "sliding_window": 4096},
)
QWEN3 = Family(
    type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=_LLAMA,
    fixed={**_LLAMA_LIKE, "qk_norm": True},
    activations={"silu": "swiglu"},
    defaults={
        **_LLAMA_DEFAULTS,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    only={"attention_bias": False},
)
GPT_NEOX = Family(
    type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    names={**_WIDE, "norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
    fixed={"positions": "rotary", "bias": True},
    activations=_PLAIN,
    defaults={
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "rotary_pct": 0.25,
    },
    only={"attention_bias": True},
    dropouts=("attention_dropout", "hidden_dropout"),
    rotary_base="rotary_emb_base",
    rotary_fraction="rotary_pct",
)
GPT_NEO = Family(
    type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    names={
        **_WIDE,
        "layers": "num_layers",
        "heads": "num_heads",
        "norm_eps": "layer_norm_epsilon",
    },
    # It does not scale attention at all.
    fixed={"bias": True, "qkv_bias": False, "attention_scale": 1.0},
    activations=_PLAIN,
    activation="activation_function",
    defaults={
        **_GPT2_DEFAULTS,
        "window_size": 256,
        "attention_types": [[["global", "local"], 12]],
    },
    dropouts=("attention_dropout", "embed_dropout", "resid_dropout"),
    windows=True,
)
NANOCHAT = Family(
    type="nanochat",
    architecture="NanoChatForCausalLM",
    names={
        name: theirs
        for name, theirs in {**_LLAMA, "logit_cap": "final_logit_softcapping"}.items()
        if name != "head_width"
    },
    fixed={**_LLAMA_LIKE, "norm_gain": False, "qk_norm": True, "embedding_norm": True},
    activations={"relu2": "relu2", **_GELUS},
    defaults={**_LLAMA_DEFAULTS, "hidden_act": "relu2", "final_logit_softcapping": 15.0},
    only={"attention_bias": False},
)

WRITTEN = (GPT2, LLAMA, QWEN2, QWEN3, GPT_NEOX, GPT_NEO, NANOCHAT)
"""A model is exported to the first of these that can express it."""
FAMILIES = {family.type: family for family in (*WRITTEN, MISTRAL)}
"""All that can be read, by `model_type`. Mistral's are Llamas by another name."""
