"""GGUF files: read back by the gguf package, and loaded by transformers, which knows the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.checkpoint.model import StoredModel
from gristmill.config.model import GPTConfig
from gristmill.export.gguf import export_gguf
from gristmill.models.build import build_model
from gristmill.models.weights import ForeignTensor, WeightsInMemory
from gristmill.text.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from gristmill.text.tokenizers.training import train_tokenizer

gguf = pytest.importorskip("gguf")
CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "kv_heads": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, untied, no biases": ("gpt2", {"bias": False, "tie_head": False}),
    "llama": ("llama", LLAMA),
    "llama, untied, biased": ("llama", {**LLAMA, "bias": True, "tie_head": False}),
    "qwen2": ("qwen2", {**LLAMA, "qkv_bias": True}),
    "qwen3": ("qwen3", {**LLAMA, "qk_norm": True, "head_width": 12, "tie_head": False}),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = "the mill turns and grinds corn into flour"
    return train_tokenizer(iter([words] * 50), vocab_size=280)


def kept(
    settings: dict[str, Any], tokenizer: Tokenizer, *, vocab: int | None = None
) -> StoredModel:
    config = GPTConfig(layers=2, heads=4, width=32, context=32, **settings)
    model = build_model(config, vocab=vocab or tokenizer.size, device=CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    weights = WeightsInMemory(dict(model.named_parameters()))
    return StoredModel(config, model.vocab, weights, tokenizer, Path("nowhere"))


@pytest.mark.parametrize(("kind", "settings"), MODELS.values(), ids=MODELS)
def test_transformers_reads_the_same_model(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    settings: dict[str, Any],
) -> None:
    transformers = pytest.importorskip("transformers")
    # It asks for a package that it does not need for this.
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
    stored = kept(settings, tokenizer)
    done = export_gguf(stored, tmp_path / "model.gguf")
    assert done.architecture == kind
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.get_field("general.architecture").contents() == kind
    assert sum(one.n_bytes for one in reader.tensors) == done.bytes
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert config.model_type == kind
    # What llama.cpp sees from the tensors or reads from the file, and transformers does not.
    config.head_dim = stored.config.head_size
    config.max_position_embeddings = stored.config.context
    config.attention_bias = config.mlp_bias = settings.get("bias", False)
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path, gguf_file="model.gguf", config=config).eval()
    ids = torch.randint(0, tokenizer.size, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = stored.load(CPU).model(ids)
        found = theirs(ids).logits
    allowed = 1e-5 * max(1.0, float(expected.abs().max()))
    assert (found - expected).abs().max() <= allowed


def test_the_tokenizer_is_in_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored = kept(LLAMA, tokenizer, vocab=tokenizer.size + 3)
    export_gguf(stored, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")

    def field(name: str) -> Any:
        return reader.get_field(f"tokenizer.ggml.{name}").contents()

    tokens, types = field("tokens"), field("token_type")
    assert len(tokens) == len(set(tokens)) == len(types) == tokenizer.size + 3
    end = tokenizer.end_of_text
    assert field("eos_token_id") == field("bos_token_id") == end
    assert tokens[end] == "<|endoftext|>" and types[end] == gguf.TokenType.CONTROL
    assert types[-3:] == [gguf.TokenType.UNUSED] * 3
    assert field("model") == "gpt2" and field("pre") == "gpt-2"
    # The merges make the tokens, as BPE does: every token of several bytes is a pair of others.
    pairs = {merge.replace(" ", "") for merge in field("merges")}
    normal = [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL]
    assert {token for token in normal if len(token) > 1} == pairs
    ids = tokenizer.encode("the mill grinds")
    assert "".join(tokens[id] for id in ids) == "theĠmillĠgrinds"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation": "gelu"}, "its gpt2, has no activation = 'gelu'"),
        ({"activation": "relu"}, "its gpt2, has no activation = 'relu'"),
        ({**LLAMA, "activation": "relu2"}, "its llama, has no activation = 'relu2'"),
        ({**LLAMA, "logit_cap": 15.0}, "has no logit_cap = 15.0"),
        ({"positions": "rotary"}, "has no positions = 'rotary'"),
    ],
    ids=str,
)
def test_what_llama_cpp_cannot_compute_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        export_gguf(kept(settings, tokenizer), tmp_path / "model.gguf")
    assert error.value.exit is Exit.CONFIG
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_llama_cpp_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not know how this tokenizer splits text"):
        export_gguf(kept({}, ByteTokenizer()), tmp_path / "model.gguf")


def test_a_name_in_use_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("precious")
    with pytest.raises(UserError, match="this file exists") as error:
        export_gguf(kept({}, tokenizer), tmp_path / "model.gguf")
    assert error.value.exit is Exit.REFUSED
    assert (tmp_path / "model.gguf").read_text() == "precious"


def test_what_does_not_read_back_gets_no_name(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = ForeignTensor.read, []

    def once_wrong(self: ForeignTensor, *args: Any) -> torch.Tensor:
        value = real(self, *args)
        if self.name == "blk.1.ffn_up.weight" and not calls:
            calls.append(1)
            value[0, 0] += 1
        return value

    monkeypatch.setattr(ForeignTensor, "read", once_wrong)
    with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight does not read back") as error:
        export_gguf(kept(LLAMA, tokenizer), tmp_path / "model.gguf")
    assert error.value.exit is Exit.STORAGE
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_not_exported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored = kept(LLAMA, tokenizer)
    assert isinstance(stored.weights, WeightsInMemory)
    with torch.no_grad():
        stored.weights._tensors["norm.weight"][3] = np.nan
    with pytest.raises(UserError, match=r"NaN or infinite numbers in norm\.weight"):
        export_gguf(stored, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []
