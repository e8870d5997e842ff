"""Exports with the model's own code, as a user of transformers loads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import StoredModel, open_stored
from gristmill.config.model import GPTConfig
from gristmill.export import folder as module
from gristmill.export.folder import export
from gristmill.generate.engine import Engine
from gristmill.generate.sampling import Sampling
from gristmill.models.build import build_model
from gristmill.models.weights import WeightsInMemory
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
VOCAB = ByteTokenizer.size
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "relu": {"activation": "relu", "qk_norm": True},
    "modern": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_gain": False,
        "qk_norm": True,
        "activation": "relu2",
        "bias": False,
        "tie_head": False,
        "embedding_norm": True,
        "value_embeddings": 2,
        "attention_gate": True,
        "attention_scale": 0.12,
        "logit_cap": 15.0,
    },
    "everything else": {
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "rotary_base": 500.0,
        "activation": "swiglu",
        "kv_heads": 2,
        "head_width": 12,
        "qkv_bias": False,
        "qk_norm": True,
        "parallel_residual": True,
        "value_embeddings": 1,
        "window": 5,
    },
}


def kept(settings: dict[str, Any]) -> StoredModel:
    """A model as if it were on a disk; all its weights are random."""
    config = GPTConfig(layers=3, heads=4, width=32, context=32, **settings)
    model = build_model(config, vocab=VOCAB, device=CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    weights = WeightsInMemory(dict(model.named_parameters()))
    return StoredModel(config, VOCAB, weights, ByteTokenizer(), Path("nowhere"))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a folder as anybody would, with a cache of its own for the code."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))

    def from_folder(folder: Path) -> Any:
        auto = transformers.AutoModelForCausalLM
        return auto.from_pretrained(folder, trust_remote_code=True).eval()

    return from_folder


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_transformers_computes_the_same_by_the_exported_code(
    tmp_path: Path, load: Any, settings: dict[str, Any]
) -> None:
    stored = kept(settings)
    done = export(stored, tmp_path / "hf", code=True)
    assert done.architecture == "GristmillForCausalLM" and done.agreement is not None
    theirs, ours = load(tmp_path / "hf"), stored.load(CPU).model
    assert type(theirs).__module__.startswith("transformers_modules.")
    ids = torch.randint(0, VOCAB, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = ours(ids)
        assert expected.std() > 0.1
        allowed = 1e-5 * max(1.0, float(expected.abs().max()))
        assert (theirs(ids).logits - expected).abs().max() <= allowed
        assert theirs(ids, logits_to_keep=2).logits.shape == (2, 2, VOCAB)
    # A run can start from it, too.
    again = open_stored(str(tmp_path / "hf")).load(CPU).model
    with torch.inference_mode():
        assert torch.equal(again(ids), expected)


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_it_generates_with_a_cache_and_from_padded_prompts(
    tmp_path: Path, load: Any, settings: dict[str, Any]
) -> None:
    stored = kept(settings)
    export(stored, tmp_path / "hf", code=True, check="files")
    theirs, prompt = load(tmp_path / "hf"), [5, 80, 3, 200, 7]
    engine, greedy = Engine(stored.load(CPU).model), Sampling(temperature=0.0)
    wanted = engine.generate([prompt], tokens=12, sampling=greedy)[0]
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    alone = theirs.generate(torch.tensor([prompt]), **asked)
    assert alone[0].tolist() == prompt + wanted
    ids = torch.tensor([[0, 0, *prompt], [9, 9, *prompt]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    padded = theirs.generate(ids, attention_mask=mask, **asked)
    assert padded[0].tolist() == [0, 0, *prompt, *wanted]


def test_a_folder_with_a_setting_that_was_taken_out_is_refused(tmp_path: Path) -> None:
    export(kept(MODELS["modern"]), tmp_path / "hf", code=True, check="files")
    file = tmp_path / "hf" / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "shifted_keys": 0}))
    assert open_stored(str(tmp_path / "hf")).config.effective("layers") == 3
    file.write_text(json.dumps({**values, "shifted_keys": 2}))
    with pytest.raises(UserError, match="shifted_keys = 2: there is no such setting"):
        open_stored(str(tmp_path / "hf"))


def test_the_loss_is_that_of_the_next_token(tmp_path: Path, load: Any) -> None:
    stored = kept(MODELS["modern"])
    export(stored, tmp_path / "hf", code=True, check="files")
    ids = torch.randint(0, VOCAB, (2, 32))
    ours = stored.load(CPU).model(ids[:, :-1], targets_BT=ids[:, 1:])
    found = load(tmp_path / "hf")(ids, labels=ids).loss
    assert found.item() == pytest.approx(ours.total.item() / (2 * 31), rel=1e-5)


def test_the_code_needs_nothing_of_ours(tmp_path: Path) -> None:
    export(kept(MODELS["modern"]), tmp_path / "hf", code=True, check="files")
    text = (tmp_path / "hf" / "modeling_gristmill.py").read_text()
    modules = {match[1] for match in re.finditer(r"^ *(?:from|import) (\w+)", text, re.M)}
    assert modules == {"__future__", "typing", "torch", "transformers"}


def test_code_that_computes_otherwise_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.to_hf_with_code

    def wrong(*words: Any, **named: Any) -> dict[str, Any]:
        return {**real(*words, **named), "logit_cap": 14.0}

    monkeypatch.setattr(module, "to_hf_with_code", wrong)
    with pytest.raises(UserError, match="nothing was exported") as error:
        export(kept(MODELS["modern"]), tmp_path / "hf", code=True)
    assert error.value.exit is Exit.INTERNAL
    assert list(tmp_path.iterdir()) == []
