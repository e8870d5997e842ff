"""Adapters for PEFT: applied by its formula to the model of transformers, they give the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.base.errors import UserError
from gristmill.base.files import write_json
from gristmill.checkpoint.adapter_base import AdapterBase
from gristmill.checkpoint.model import StoredModel
from gristmill.config.families import FAMILIES
from gristmill.config.hf import HFConfig, to_hf
from gristmill.config.lora import LoraConfig
from gristmill.config.model import GPTConfig, ModelConfig
from gristmill.export import adapter as adapter_module
from gristmill.export.adapter import export_adapter
from gristmill.models.build import build_model, initialise
from gristmill.models.families import foreign_state
from gristmill.models.lora import MergedWeights
from gristmill.models.weights import WeightsInMemory
from gristmill.text.tokenizers.tokenizer import open_tokenizer

transformers = pytest.importorskip("transformers")
CPU, VOCAB = torch.device("cpu"), 257
SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32, "context": 16, "vocab": VOCAB}
ROTARY: dict[str, Any] = {**SIZES, "positions": "rotary", "mlp_width": 48}
LLAMA: dict[str, Any] = {**ROTARY, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
NATIVE: dict[str, dict[str, Any]] = {
    "gpt2": SIZES,
    "llama": {**LLAMA, "kv_heads": 2},
    "qwen3": {**LLAMA, "qk_norm": True, "head_width": 12},
    "gpt_neox": {**ROTARY, "activation": "gelu", "parallel_residual": True, "tie_head": False},
}


def stored_model(config: ModelConfig, base_folder: Path, **settings: Any) -> StoredModel:
    """A model with adapters as after training, as it is opened."""
    lora = LoraConfig(**{"rank": 3, "alpha": 5.0, **settings})
    torch.manual_seed(2)
    model = build_model(config.model_copy(update={"lora": lora}), vocab=VOCAB, device=CPU)
    plain = build_model(config, vocab=VOCAB, device=CPU)
    plain.initialise(4)
    initialise(model, 4, [name for name, _ in model.named_parameters()])
    adapters = {n: one.detach() for n, one in model.named_parameters() if one.requires_grad}
    for name, one in adapters.items():
        if name.endswith("lora_b"):
            one.normal_(0, 0.2)
    base_weights = WeightsInMemory(dict(plain.named_parameters()))
    weights = MergedWeights(
        base_weights, WeightsInMemory(adapters), layers=model.adapters, scale=lora.scale
    )
    base = AdapterBase(str(base_folder), str(base_folder), "../base", None, "0" * 64)
    tokenizer = open_tokenizer("bytes")
    return StoredModel(
        config, VOCAB, weights, tokenizer, base_folder, base=base, lora=lora, run=base_folder
    )


def logits_by_formula(theirs: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What PEFT computes, as it documents it."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale, targets = settings["lora_alpha"] / settings["r"], settings["target_modules"]
    used = set()
    for name, module in theirs.named_modules():
        if any(name == target or name.endswith(f".{target}") for target in targets):
            keys = [f"base_model.model.{name}.lora_{part}.weight" for part in "AB"]
            a, b = (tensors[key] for key in keys)
            used.update(keys)
            product = scale * b @ a
            module.weight.data += product.T if settings["fan_in_fan_out"] else product
    assert used == set(tensors)
    with torch.no_grad():
        logits: torch.Tensor = theirs.eval()(ids).logits
    return logits


def check(stored: StoredModel, theirs: Any, folder: Path) -> None:
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = stored.load(CPU).model(ids)
        assert (theirs.eval()(ids).logits - wanted).abs().max() > 0.05
    exported = export_adapter(stored, folder)
    assert exported.bytes == (folder / "adapter_model.safetensors").stat().st_size
    torch.testing.assert_close(logits_by_formula(theirs, folder, ids), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", NATIVE)
def test_our_layers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    config = GPTConfig(**NATIVE[family])
    stored = stored_model(config, tmp_path / "base")
    plain = build_model(config, vocab=VOCAB, device=CPU)
    plain.initialise(4)
    (tmp_path / "base").mkdir()
    save_file(
        foreign_state(plain, family), tmp_path / "base/model.safetensors", metadata={"format": "pt"}
    )
    written = to_hf(config, FAMILIES[family], vocab=VOCAB, end_of_text=0)
    write_json(tmp_path / "base/config.json", written)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    check(stored, theirs, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 5.0, "LORA")
    wanted = {
        "gpt2": ["c_attn", "c_fc", "c_proj"],
        "gpt_neox": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
    }
    seven = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert settings["target_modules"] == wanted.get(family, seven)


def test_some_layers_are_named_in_full(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write_json(tmp_path / "base/config.json", {"model_type": "gpt2"})
    stored = stored_model(GPTConfig(**SIZES), tmp_path / "base", layers=("attention.out",))
    export_adapter(stored, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    names = [f"transformer.h.{layer}.attn.c_proj" for layer in (0, 1)]
    assert settings["target_modules"] == names


def test_models_of_transformers_keep_their_names(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = HFConfig(hf_config={"model_type": "gpt2", **sizes})
    stored = stored_model(config, tmp_path / "base")
    plain = build_model(config, vocab=VOCAB, device=CPU)
    plain.initialise(4)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    missing = theirs.load_state_dict(dict(plain.named_parameters()), strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    theirs.tie_weights()
    check(stored, theirs, tmp_path / "adapter")


def test_what_has_no_such_form_is_refused(tmp_path: Path) -> None:
    config = GPTConfig(**{**SIZES, "logit_cap": 15.0})
    (tmp_path / "base").mkdir()
    write_json(tmp_path / "base/config.json", {"model_type": "gristmill"})
    stored = stored_model(config, tmp_path / "base")
    with pytest.raises(UserError, match=r"'gristmill' is not one of transformers' own.*\n.*merged"):
        export_adapter(stored, tmp_path / "adapter")
    plain = StoredModel(config, VOCAB, stored.weights.base, stored.tokenizer, tmp_path)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"no adapters.*\n.*--adapter"):
        export_adapter(plain, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_wrong_mapping_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    write_json(tmp_path / "base/config.json", {"model_type": "llama"})
    stored = stored_model(GPTConfig(**NATIVE["llama"]), tmp_path / "base")
    plain = adapter_module._linears

    def swapped(*args: Any) -> Any:
        found = plain(*args)
        rows = found[1].rows
        assert rows is not None
        rows[0], rows[1] = rows[1], rows[0]
        return found

    monkeypatch.setattr(adapter_module, "_linears", swapped)
    with pytest.raises(UserError, match="q_proj do not give the weights of the source"):
        export_adapter(stored, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
