"""Settings from the config.json of Hugging Face models, and back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import write_json
from gristmill.config.families import FAMILIES, WRITTEN
from gristmill.config.hf import (
    choose_family,
    differences,
    from_hf,
    model_settings,
    to_hf,
    to_hf_with_code,
)
from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32, "context": 16}
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}
NANOCHAT: dict[str, Any] = {
    **LLAMA,
    "activation": "relu2",
    "norm_gain": False,
    "qk_norm": True,
    "embedding_norm": True,
    "logit_cap": 20.0,
}
NEOX: dict[str, Any] = {
    "positions": "rotary",
    "activation": "gelu",
    "rotary_fraction": 0.25,
    "parallel_residual": True,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, erf": ("gpt2", {"activation": "gelu", "tie_head": False}),
    "gpt2 without biases and gains": ("gpt2", {"bias": False, "norm_gain": False}),
    "gpt2 without some biases": ("gpt2", {"qkv_bias": False}),
    "gpt2's own scale, written out": ("gpt2", {"attention_scale": 8**-0.5, "kv_heads": 4}),
    "llama": ("llama", LLAMA),
    "llama, grouped": ("llama", {**LLAMA, "kv_heads": 2, "rotary_base": 5e5}),
    "llama with biases": ("llama", {**LLAMA, "bias": True}),
    "llama with some biases": ("llama", {**LLAMA, "bias": True, "qkv_bias": False}),
    "llama, wide heads": ("llama", {**LLAMA, "head_width": 12, "norm_gain": False}),
    "qwen2": ("qwen2", {**LLAMA, "qkv_bias": True}),
    "heads that Llama's do not have": ("qwen2", {**LLAMA, "head_width": 10, "heads": 3}),
    "qwen3": ("qwen3", {**LLAMA, "qk_norm": True, "head_width": 20, "heads": 3}),
    "neox": ("gpt_neox", NEOX),
    "neox, in turn": ("gpt_neox", {**NEOX, "parallel_residual": False, "bias": False}),
    "neo": ("gpt_neo", {"qkv_bias": False, "attention_scale": 1.0, "window": 5, "layers": 3}),
    "neo, without windows": ("gpt_neo", {"qkv_bias": False, "attention_scale": 1.0}),
    "a window as long as the context": ("gpt2", {"window": 16}),
    "nanochat": ("nanochat", NANOCHAT),
    "nanochat, no cap": ("nanochat", {**NANOCHAT, "logit_cap": None, "kv_heads": 2}),
}


@pytest.mark.parametrize(("kind", "settings"), CLASSES.values(), ids=CLASSES)
def test_a_model_goes_to_the_class_that_it_can_be(kind: str, settings: dict[str, Any]) -> None:
    model = GPTConfig(**{**SIZES, "vocab": 99, **settings})
    family = choose_family(model)
    assert family.type == kind
    written = to_hf(model, family, vocab=99, end_of_text=7)
    assert written["architectures"] == [family.architecture]
    assert written["vocab_size"] == 99 and written["eos_token_id"] == 7
    back = GPTConfig.model_validate(from_hf(written, where="config.json"))
    for name in set(GPTConfig.model_fields) - GPTConfig.not_of_weights:
        filled = name in ("bias", "qkv_bias", "norm_gain") and back.effective(name)
        assert filled or back.effective(name) == model.effective(name), name


@pytest.mark.parametrize(
    ("settings", "nearest"),
    [
        ({"positions": "rotary", "activation": "swiglu"}, "Llama.* has no norm = 'layernorm'$"),
        ({**NANOCHAT, "value_embeddings": 1}, "NanoChat.*, has no value_embeddings = 1$"),
        (
            {**NANOCHAT, "value_embeddings": 1, "attention_scale": 0.12},
            "NanoChat.*, has no value_embeddings = 1, attention_scale = 0.12$",
        ),
        ({"logit_cap": 30.0}, "GPT2LMHeadModel, has no logit_cap = 30.0"),
        ({**LLAMA, "activation": "gelu_tanh"}, "Llama.*, has no activation = 'gelu_tanh'"),
        ({**LLAMA, "parallel_residual": True}, "Llama.* has no parallel_residual = True"),
        ({**LLAMA, "rotary_fraction": 0.5}, "Llama.* has no rotary_fraction = 0.5"),
        ({**LLAMA, "qk_norm": True, "qkv_bias": True}, "has no (qk_norm|qkv_bias) = True"),
        ({**NANOCHAT, "head_width": 12}, "NanoChat.*, has no head_width = 12"),
    ],
    ids=str,
)
def test_what_no_class_can_be_is_refused_by_name(settings: dict[str, Any], nearest: str) -> None:
    with pytest.raises(UserError) as error:
        choose_family(GPTConfig(**{**SIZES, **settings}))
    (problem,) = error.value.problems
    assert problem.what.startswith("no class of transformers can be this model: the nearest, ")
    assert re.search(nearest, problem.what), problem.what
    assert problem.remedy is not None and "--code" in problem.remedy


def test_every_setting_is_one_that_a_family_knows_or_refuses() -> None:
    """A new setting that changes what a model computes is a difference until a table names it."""
    plain = GPTConfig(**SIZES)
    others = {
        "positions": "rotary", "norm": "rmsnorm", "qk_norm": True, "activation": "relu2",
        "embedding_norm": True, "value_embeddings": 1, "attention_scale": 0.5, "logit_cap": 9.0,
        "parallel_residual": True, "kv_heads": 2, "head_width": 6, "window": 3,
        "attention_gate": True,
    }  # fmt: skip
    named = set(WRITTEN[0].names) | {"bias", "qkv_bias", "norm_gain"}
    rotary_only = {"rotary_base", "rotary_fraction"}
    assert set(others) | named | rotary_only | set(GPTConfig.not_of_weights) >= set(
        GPTConfig.model_fields
    )
    for name, value in others.items():
        changed = plain.model_copy(update={name: value})
        shown = [one.partition(" ")[0] for one in differences(changed, WRITTEN[0])]
        assert shown == [name]


BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "intermediate_size": 48,
}


def test_the_names_of_both_versions_of_transformers() -> None:
    older = from_hf({**BASE, "rope_theta": 500_000, "rope_scaling": None}, where="x")
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    assert from_hf({**BASE, "rope_parameters": rope}, where="x") == older
    assert older["rotary_base"] == 500_000 and older["norm_eps"] == 1e-6
    assert older["tie_head"] is False
    neox = {**BASE, "model_type": "gpt_neox"}
    assert from_hf(neox, where="x")["rotary_fraction"] == 0.25
    older = from_hf({**neox, "rotary_pct": 0.5, "rotary_emb_base": 999}, where="x")
    rope = {"rope_type": "default", "rope_theta": 999, "partial_rotary_factor": 0.5}
    assert from_hf({**neox, "rope_parameters": rope}, where="x") == older


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "of type 'bert'; the native model can be: gpt2, gpt_neo, "),
        ({"model_type": None}, "of type None"),
        ({"model_type": ["llama"]}, "of type ..llama"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"hidden_act": ["silu"]}, r"hidden_act = \['silu'\]"),
        ({"attention_bias": True}, "mlp_bias = false"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type = 'linear'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}, "hidden_act": "relu"},
            "hidden_act = 'relu', rope_parameters.rope_type = 'llama3'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters = "),
        ({"rope_parameters": "no"}, "rope_parameters = 'no'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"model_type": "mistral"} | {"sliding_window": 8}, "sliding_window = 8"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "window = 8"),
        (
            {"model_type": "qwen3", "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            "sliding_window = 8",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = true"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias = false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "there is no hidden_size"),
        ({"hidden_size": "x"}, "hidden_size = 'x': input should be"),
        ({"num_hidden_layers": 0, "rms_norm_eps": 0}, "num_hidden_layers = 0: .*\n.*rms_norm_eps"),
        ({"vocab_size": None}, "the size of the vocabulary is missing"),
        ({"num_attention_heads": 5}, "no model has these sizes: width 32, 5 heads"),
        ({"num_key_value_heads": 3}, "no model has these sizes: .* 3 key and value heads"),
        ({"head_dim": 7}, "7 rotated features"),
    ],
    ids=str,
)
def test_what_the_native_model_has_not_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        from_hf({**BASE, **change}, where="folder/config.json")
    assert error.value.exit is Exit.DATA
    assert all(problem.where == "folder/config.json" for problem in error.value.problems)


NEO: dict[str, Any] = {
    **BASE,
    "model_type": "gpt_neo",
    "num_layers": 3,
    "num_heads": 4,
    "window_size": 5,
}


@pytest.mark.parametrize(
    ("types", "window"),
    [
        ([[["global", "local"], 1], [["global"], 1]], 5),
        ([[["global"], 1], [["local", "global"], 1]], 5),
        ([[["global"], 3]], None),
    ],
)
def test_windows_in_every_other_layer(types: list[Any], window: int | None) -> None:
    assert from_hf({**NEO, "attention_types": types}, where="x").get("window") == window


@pytest.mark.parametrize(
    "types",
    [
        [[["global", "local"], 2]],
        [[["local", "global"], 1], [["local"], 1]],
        [[["local"], 3]],
        [[["global"], 10**15]],
        [[["global", "local"], "x"]],
        [["global", "local", "global"]],
        7,
    ],
    ids=str,
)
def test_other_windows_are_refused(types: Any) -> None:
    with pytest.raises(UserError, match="attention_types = "):
        from_hf({**NEO, "attention_types": types}, where="x")


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2},
        {"model_type": "mistral", "num_key_value_heads": 2},
        {"model_type": "mistral", "sliding_window": 16, "num_key_value_heads": 2},
        {"model_type": "qwen2", "sliding_window": 8, "num_key_value_heads": 4},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 10},
        {"rope_scaling": {"rope_type": "default"}},
    ],
    ids=str,
)
def test_what_makes_no_difference_is_read(change: dict[str, Any]) -> None:
    settings = from_hf({**BASE, **change}, where="x")
    assert GPTConfig.model_validate(settings).norm == "rmsnorm"


def test_content_that_is_no_object() -> None:
    with pytest.raises(UserError, match="of type None"):
        from_hf([1, 2], where="x")


def test_the_models_own_class_keeps_every_setting(tmp_path: Path) -> None:
    model = GPTConfig(
        **{**SIZES, **NANOCHAT, "value_embeddings": 1, "attention_scale": 0.12, "vocab": 99}
    )
    written = to_hf_with_code(model, vocab=99, end_of_text=0)
    assert written["auto_map"]["AutoModelForCausalLM"].startswith("modeling_gristmill.")
    write_json(tmp_path / "config.json", written)
    back = GPTConfig.model_validate(model_settings(tmp_path))
    for name in set(GPTConfig.model_fields) - {"vocab_multiple"}:
        assert back.effective(name) == model.effective(name), name


def test_the_portable_preset_is_one_that_transformers_has() -> None:
    run = 'name = "x"\ndata.paths = "x"\ntrain = { until = "1 steps", batch = 1 }\n'
    for name in ("portable-small", "gpt2-small"):
        choose_family(load_text(run, [f"preset={name}"], place="run.toml").model)
    with pytest.raises(UserError, match=r"value_embeddings = 4, .*attention_scale = 0\.12"):
        choose_family(load_text(run, ["preset=modern-small"], place="run.toml").model)


def test_every_family_has_its_tensors() -> None:
    from gristmill.models.families import TABLES

    assert set(TABLES) == set(FAMILIES)
