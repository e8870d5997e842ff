"""The settings of a model from the arguments in a checkpoint of Megatron.

    num_layers = 24              layers = 24
    normalization = "RMSNorm"    norm = "rmsnorm"
    swiglu = True                activation = "swiglu"
    num_experts = 8              refused: trained with --num-experts 8, which our GPT cannot be

What our model cannot follow is refused under the name of the option on Megatron's command line.
Arguments that change nothing about the function that the weights compute (dropout apart, which is
kept) are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Problem
from gristmill.config.model import GPTConfig
from gristmill.foreign.model import model_config
from gristmill.foreign.pickled import PickledObject

_OPTIONS = {
    "layers": "--num-layers",
    "heads": "--num-attention-heads",
    "width": "--hidden-size",
    "context": "--max-position-embeddings",
    "kv_heads": "--num-query-groups",
    "head_width": "--kv-channels",
    "mlp_width": "--ffn-hidden-size",
    "rotary_base": "--rotary-base",
    "rotary_fraction": "--rotary-percent",
    "norm_eps": "--norm-epsilon",
    "dropout": "--hidden-dropout",
    "init_std": "--init-method-std",
}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,),
    "apply_layernorm_1p": (False,),
    "num_experts": (None, 0, 1, [1]),
    "multi_latent_attention": (False,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (1,),
    "rotary_scaling_factor": (1, 1.0),
    "use_rope_scaling": (False,),
    "window_size": (),
    "no_rope_freq": (),
    "mtp_num_layers": (0,),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (False,),
    "experimental_attention_variant": (),
    "linear_attention_type": (),
    "attention_output_gate": (False,),
    "softmax_type": ("vanilla",),
    "quick_geglu": (False,),
    "qk_l2_norm": (False,),
    "glu_activation": (),
    "embed_layernorm": (False,),
    "retro_add_retriever": (False,),
}
"""Arguments of which our model knows these values only, and None."""
_POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rotary"}
_DEEPSPEED_POSITIONS = {1: "rotary", 2: "absolute", 3: "alibi"}
"""Numbers of Megatron-DeepSpeed's enumeration."""


def arguments_of(value: Any, *, where: Path) -> dict[str, Any]:
    """The arguments of a checkpoint, which are a namespace or a dictionary."""
    fields = value.fields if isinstance(value, PickledObject) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("num_layers"), int):
        raise DataError(
            "the checkpoint does not hold the arguments of its run, which say what the model is",
            where=where,
            remedy="save it with a Megatron-LM of 2020 or later",
        )
    return {key: value for key, value in fields.items() if isinstance(key, str)}


def config_of(arguments: Mapping[str, Any], *, vocab: int, where: Path) -> GPTConfig:
    """Our settings; refuses what our model cannot be."""
    problems = [
        _refused(name, arguments[name], where)
        for name, known in _ONLY.items()
        if arguments.get(name) is not None and arguments[name] not in known
    ]
    settings, more = _settings(arguments, where)
    problems += more
    if problems:
        raise DataError(problems)
    return model_config({**settings, "vocab": vocab}, _OPTIONS, where=where)


def _refused(name: str, value: Any, where: Path, what: str = "") -> Problem:
    option = f"--{name.replace('_', '-')}"
    shown = "" if value is True else f" {value}" if isinstance(value, int | float | str) else ""
    return Problem(f"trained with {option}{shown}, which our GPT cannot be{what}", str(where))


def _settings(arguments: Mapping[str, Any], where: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Our settings, and what our model cannot follow."""
    get, problems = arguments.get, list[Problem]()
    norm = str(get("normalization") or "LayerNorm")
    bias = bool(get("add_bias_linear", True))
    heads = get("num_attention_heads")
    grouped = get("group_query_attention") and get("num_query_groups")
    settings: dict[str, Any] = {
        "layers": get("num_layers"),
        "heads": heads,
        "width": get("hidden_size"),
        "context": get("max_position_embeddings") or get("seq_length"),
        "kv_heads": get("num_query_groups") if grouped else None,
        "head_width": get("kv_channels"),
        "mlp_width": get("ffn_hidden_size"),
        "norm": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}.get(norm),
        "norm_eps": get("norm_epsilon") or get("layernorm_epsilon") or 1e-5,
        "bias": bias,
        "qkv_bias": True if get("add_qkv_bias") and not bias else None,
        "qk_norm": bool(get("qk_layernorm")),
        "tie_head": not get("untie_embeddings_and_output_weights", False),
        "dropout": get("hidden_dropout") or 0.0,
        "init_std": get("init_method_std") or 0.02,
    }
    if settings["norm"] is None:
        problems.append(_refused("normalization", norm, where))
    if norm == "LayerNorm" and not bias:
        what = "--disable-bias-linear with LayerNorm, whose biases our GPT would not have"
        problems.append(Problem(f"trained with {what}", str(where)))
    if norm == "LayerNorm" and get("qk_layernorm"):
        problems.append(_refused("qk_layernorm", True, where, ": its norm of queries is RMSNorm"))
    settings["activation"] = _activation(arguments)
    settings |= _positions(arguments, problems, where)
    return {name: value for name, value in settings.items() if value is not None}, problems


def _activation(arguments: Mapping[str, Any]) -> str:
    """Megatron's fused GELU is the approximation by tanh, and the other one is not."""
    get = arguments.get
    if get("swiglu"):
        return "swiglu"
    if get("squared_relu"):
        return "relu2"
    fused = get("bias_gelu_fusion", True) and get("add_bias_linear", True)
    return "gelu_tanh" if get("openai_gelu") or fused else "gelu"


def _positions(
    arguments: Mapping[str, Any], problems: list[Problem], where: Path
) -> dict[str, Any]:
    kind = arguments.get("position_embedding_type") or "learned_absolute"
    if isinstance(kind, PickledObject):
        number = kind.arguments[0] if kind.arguments else None
        kind = _DEEPSPEED_POSITIONS.get(number, "unknown") if isinstance(number, int) else "unknown"
    if arguments.get("use_rotary_position_embeddings") or kind == "rotary":
        kind = "rope"
    if str(kind) not in _POSITIONS:
        problems.append(_refused("position_embedding_type", str(kind), where))
        return {}
    if _POSITIONS[str(kind)] == "learned":
        return {"positions": "learned"}
    fraction = arguments.get("rotary_percent")
    return {
        "positions": "rotary",
        "rotary_base": arguments.get("rotary_base"),
        "rotary_fraction": None if fraction in (None, 1) else fraction,
    }
