"""Hugging Face folders, out and in, with transformers as the judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import StoredModel, open_model
from gristmill.cli.inspect import config as show_config
from gristmill.config.hf import model_settings
from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig
from gristmill.config.schema import RunConfig
from gristmill.export.folder import export
from gristmill.hub.downloads import model_folder
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.models.weights import WeightsInMemory
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.text.tokenizers.training import train_tokenizer

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = "the mill turns and grinds corn into flour in 1234"
    return train_tokenizer(iter([words] * 50), vocab_size=280)


def small(tokenizer: Tokenizer, **settings: Any) -> GPT:
    config = GPTConfig(**{"layers": 2, "heads": 2, "width": 16, "context": 32, **settings})
    model = build_model(config, vocab=tokenizer.size, device=CPU)
    model.initialise(0)
    return model.eval()


def kept(model: GPT, tokenizer: Tokenizer) -> StoredModel:
    """A model as if it were on a disk."""
    weights = WeightsInMemory(dict(model.named_parameters()))
    return StoredModel(model.config, model.vocab, weights, tokenizer, Path("nowhere"))


@pytest.mark.parametrize(
    "settings",
    [{}, {"bias": False}, {"tie_head": False, "activation": "gelu"}, {"mlp_width": 24}],
    ids=str,
)
def test_transformers_loads_the_same_model_and_tokenizer(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict[str, Any]
) -> None:
    source = small(tokenizer, **settings)
    done = export(kept(source, tokenizer), tmp_path / "hf")
    assert done.agreement is not None and done.agreement.largest_difference < 1e-5
    assert done.files == 1 and done.skipped is None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert theirs.config.vocab_size == tokenizer.size  # padded rows are dropped
    text = "the mill grinds 🌾"
    named = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert named(text)["input_ids"] == tokenizer.encode(text)
    assert named.eos_token_id == tokenizer.end_of_text
    again = open_model(str(tmp_path / "hf"), device=CPU)
    ids = torch.randint(0, tokenizer.size, (2, 32))
    assert torch.allclose(again.model(ids), source(ids), atol=1e-6)
    assert again.tokenizer.fingerprint == tokenizer.fingerprint


LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}
MODERN: dict[str, Any] = {
    **LLAMA,
    "activation": "relu2",
    "norm_gain": False,
    "qk_norm": True,
    "embedding_norm": True,
    "logit_cap": 15.0,
    "embedding_std": 1.0,
    "tie_head": False,
}


@pytest.mark.parametrize(
    ("settings", "architecture"),
    [
        ({"positions": "rotary"}, "GPTNeoXForCausalLM"),
        ({**LLAMA, "kv_heads": 1}, "LlamaForCausalLM"),
        ({**LLAMA, "norm_gain": False}, "LlamaForCausalLM"),
        ({**LLAMA, "qkv_bias": True}, "Qwen2ForCausalLM"),
        ({**LLAMA, "heads": 3, "head_width": 10}, "Qwen2ForCausalLM"),
        ({"qkv_bias": False, "attention_scale": 1.0, "window": 5}, "GPTNeoForCausalLM"),
        ({**LLAMA, "qk_norm": True, "head_width": 6}, "Qwen3ForCausalLM"),
        (MODERN, "NanoChatForCausalLM"),
    ],
    ids=str,
)
def test_a_model_is_exported_to_the_class_that_it_can_be(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict[str, Any], architecture: str
) -> None:
    source = small(tokenizer, **settings)
    done = export(kept(source, tokenizer), tmp_path / "hf")
    assert done.architecture == architecture and done.agreement is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(theirs).__name__ == architecture
    assert theirs.config.eos_token_id == tokenizer.end_of_text
    ids = torch.randint(0, tokenizer.size, (2, 32))
    with torch.inference_mode():
        assert torch.allclose(theirs(ids).logits, source(ids), atol=1e-5)
    again = open_model(str(tmp_path / "hf"), device=CPU)
    assert torch.allclose(again.model(ids), source(ids), atol=1e-5)
    text = "the mill  🌾\n turns 12 mills"
    # Whatever the folder says, transformers takes a tokenizer of its own for this type.
    other = architecture == "Qwen2ForCausalLM"
    assert [note.split()[3] for note in done.notes] == ["Qwen2Tokenizer"] * other
    kind = transformers.PreTrainedTokenizerFast if other else transformers.AutoTokenizer
    named = kind.from_pretrained(tmp_path / "hf")
    assert named(text)["input_ids"] == tokenizer.encode(text)
    assert named.decode(tokenizer.encode(text)) == text
    assert named.eos_token_id == tokenizer.end_of_text


def test_a_tokenizer_that_transformers_cannot_load_is_no_obstacle(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*words: object) -> None:
        raise KeyError("no such thing\nat all")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    done = export(kept(small(tokenizer), tokenizer), tmp_path / "hf")
    (note,) = done.notes
    assert "cannot load the tokenizer of this model: 'no such thing" in note
    assert done.folder.is_dir()


def test_what_no_class_can_be_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = small(tokenizer, **MODERN, value_embeddings=1, attention_scale=0.12)
    with pytest.raises(UserError, match=r"value_embeddings = 1, attention_scale = 0\.12") as error:
        export(kept(source, tokenizer), tmp_path / "hf")
    assert error.value.exit is Exit.CONFIG and "--code" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_portable_preset_needs_no_code(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = 'name = "x"\npreset = "portable-small"\ndata.paths = "x"\n'
    text += 'train = { until = "1 steps", batch = 1 }\n'
    words = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=32"]
    config = load_text(text, words, place="run.toml").model
    model = build_model(config, vocab=tokenizer.size, device=CPU)
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():  # some start at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    done = export(kept(model, tokenizer), tmp_path / "hf")
    assert done.architecture == "NanoChatForCausalLM" and done.agreement is not None


def test_a_class_that_this_transformers_has_not(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older:
        __version__ = "4.50.0"
        utils = transformers.utils

    from gristmill.export import folder as module

    monkeypatch.setattr(module, "optional", lambda *words, **named: Older)
    stored = kept(small(tokenizer, **MODERN), tokenizer)
    with pytest.raises(UserError, match=r"transformers 4\.50\.0 has no NanoChatForCausalLM"):
        export(stored, tmp_path / "hf")
    assert export(stored, tmp_path / "hf", check="files").files == 1


def test_several_files_are_one_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = small(tokenizer, tie_head=False)
    done = export(kept(source, tokenizer), tmp_path / "hf", shard=20_000)
    assert done.agreement is not None and done.files > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.randint(0, tokenizer.size, (2, 32))
    with torch.inference_mode():
        assert torch.allclose(theirs(ids).logits, source(ids), atol=1e-5)


def test_a_model_with_large_logits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """fp32 rounds in proportion, so what is allowed grows with them."""
    source = small(tokenizer)
    with torch.no_grad():
        source.norm.weight *= 1000.0
    agreement = export(kept(source, tokenizer), tmp_path / "hf").agreement
    assert agreement is not None and agreement.greedy_tokens > 0


def test_an_export_that_transformers_reads_otherwise_is_not_kept(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.export import folder as module

    real = module.to_hf

    def wrong(*args: Any, **named: Any) -> dict[str, Any]:
        return {**real(*args, **named), "n_head": 1}

    monkeypatch.setattr(module, "to_hf", wrong)
    with pytest.raises(UserError, match="nothing was exported") as error:
        export(kept(small(tokenizer), tokenizer), tmp_path / "hf")
    assert error.value.exit is Exit.INTERNAL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{}, {**LLAMA, "kv_heads": 1}, {"positions": "rotary"}])
def test_training_starts_from_a_hugging_face_folder(
    make_run: Callable[..., RunConfig], tmp_path: Path, settings: dict[str, Any]
) -> None:
    from gristmill.text.tokenizers.tokenizer import ByteTokenizer
    from gristmill.train.run import Run

    source = small(ByteTokenizer(), **settings)
    export(kept(source, ByteTokenizer()), tmp_path / "hf", check="files")
    config = make_run()
    text = f"""
name = "from-hf"
folder = "{tmp_path / "run"}"
[model]
start = "{tmp_path / "hf"}"
[data]
paths = "{config.data.paths}"
[train]
until = "2 steps"
batch = 2
[optim]
lr = 1e-12
"""
    started = load_text(text, place="run.toml")
    assert started.model.width == 16
    assert started.model.vocab == 257
    Run(started).train()
    after = open_model(str(tmp_path / "run"), device=CPU)
    ids = torch.randint(0, 257, (1, 20))
    assert torch.allclose(after.model(ids), source(ids), atol=1e-5)
    with pytest.raises(UserError, match=r"model\.width: is 32, but the weights in .* have 16"):
        load_text(text, ["model.width=32"], place="run.toml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"model_type": "unheard-of"}, "knows no model type 'unheard-of'"),
        ({"n_layer": 3}, "the weights lack transformer.h.2."),
        ({"n_inner": 32}, "has shape"),
    ],
    ids=str,
)
def test_hugging_face_folders_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    export(kept(small(tokenizer), tokenizer), tmp_path / "hf", check="files")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        open_model(str(tmp_path / "hf"), device=CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "of type 'bert'; the native model can be: gpt2, "),
        ({"model_type": "llama"}, "there is no num_hidden_layers"),
        ({"activation_function": "tanh"}, "activation_function = 'tanh'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
    ids=str,
)
def test_what_the_native_model_cannot_be_is_no_start_for_it(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    export(kept(small(tokenizer), tokenizer), tmp_path / "hf", check="files")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        model_settings(tmp_path / "hf")


@pytest.mark.parametrize(
    "change",
    [{"activation_function": "tanh"}, {"scale_attn_by_inverse_layer_idx": True}],
    ids=str,
)
def test_what_the_native_model_cannot_be_is_computed_by_transformers(
    tokenizer: Tokenizer, tmp_path: Path, change: dict[str, Any]
) -> None:
    export(kept(small(tokenizer), tokenizer), tmp_path / "hf", check="files")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.arange(20)[None]
    ours = open_model(str(tmp_path / "hf"), device=CPU).model
    assert torch.equal(ours(ids), theirs(ids).logits)


def test_pickled_weights_are_never_opened(tokenizer: Tokenizer, tmp_path: Path) -> None:
    export(kept(small(tokenizer), tokenizer), tmp_path / "hf", check="files")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights are not read"):
        open_model(str(tmp_path / "hf"), device=CPU)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of Hugging Face's, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_name_that_is_nowhere(hub: Path) -> None:
    for name, message in {
        "no-such/model": "there is no folder 'no-such/model' here, the model 'no-such/model' is",
        "not a name": "there is no folder 'not a name', and this is no Hugging Face name",
    }.items():
        with pytest.raises(UserError, match=message):
            open_model(name, device=CPU)


def test_a_name_is_found_in_the_cache(
    hub: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small(tokenizer)
    export(kept(source, tokenizer), hub / "models--mill--tiny" / "snapshots" / "abc")
    refs = hub / "models--mill--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    opened = open_model("mill/tiny", device=CPU)
    ids = torch.randint(0, tokenizer.size, (1, 20))
    assert torch.allclose(opened.model(ids), source(ids), atol=1e-6)
    text = 'name = "x"\n[model]\nstart = "mill/tiny"\n[data]\npaths = "x"\n[train]\n'
    text += 'until = "2 steps"\nbatch = 2\n'
    config = load_text(text, place="run.toml", find_model=model_folder)
    assert config.model.width == 16
    (tmp_path / "run.toml").write_text(text)
    show_config(tmp_path / "run.toml")
    assert "width = 16" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"run\.toml:3: model\.start: .*'mill/gone' is not in"):
        load_text(text.replace("tiny", "gone"), place="run.toml", find_model=model_folder)


def test_a_start_folder_that_holds_no_model(tmp_path: Path) -> None:
    text = f'name = "x"\n[model]\nstart = "{tmp_path}"\n[data]\npaths = "x"\n[train]\n'
    with pytest.raises(
        UserError, match=r"run\.toml:3: model\.start: .* holds neither a run"
    ) as error:
        load_text(text + 'until = "2 steps"\nbatch = 2\n', place="run.toml")
    assert error.value.exit is Exit.DATA
