"""Models of every family against transformers' own: from their weights, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.checkpoint.loading import load_weights
from gristmill.checkpoint.model import open_stored
from gristmill.config.hf import from_hf
from gristmill.config.model import GPTConfig
from gristmill.export.folder import export
from gristmill.models.build import build_model
from gristmill.models.families import foreign_state, foreign_tensors, open_foreign
from gristmill.models.gpt import GPT
from gristmill.models.loss_terms import LossTerms
from gristmill.models.weights import WeightsInMemory
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
VOCAB = ByteTokenizer.size
assert VOCAB % 128, "not a multiple of vocab_multiple, so that ours has rows of padding"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "intermediate_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 700.0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "gpt2", {}),
    "gpt2, untied": ("GPT2", "gpt2", {"tie_word_embeddings": False}),
    "llama": ("Llama", "llama", {"num_key_value_heads": 2, "rope_parameters": ROPE}),
    "llama, tied, biased, wide heads": (
        "Llama",
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "mistral": ("Mistral", "llama", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", "qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen3", {"num_key_value_heads": 1, "head_dim": 12}),
    "neox": ("GPTNeoX", "gpt_neox", {}),
    "neox, in turn, tied, half rotated": (
        "GPTNeoX",
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "neo": (
        "GPTNeo",
        "gpt_neo",
        {"window_size": 5, "attention_types": [[["global", "local"], 1], [["global"], 1]]},
    ),
    "neo, without windows": (
        "GPTNeo",
        "gpt_neo",
        {"attention_types": [[["global"], 3]], "tie_word_embeddings": False},
    ),
    "nanochat": ("NanoChat", "nanochat", {"num_key_value_heads": 2}),
    "nanochat, tied, no cap": (
        "NanoChat",
        "nanochat",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "final_logit_softcapping": None},
    ),
}


def reference(name: str, settings: dict[str, Any]) -> Any:
    """A model of theirs with random weights, also where they begin as zeros and ones."""
    torch.manual_seed(2)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    sizes = dict(SIZES)
    if name == "GPTNeo":
        sizes |= {"num_layers": 3, "num_heads": sizes.pop("num_attention_heads")}
        del sizes["num_hidden_layers"]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **settings})
    model = getattr(transformers, f"{name}{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "family", "settings"), CASES.values(), ids=CASES)
def test_logits_are_theirs_and_the_way_back_is_exact(
    tmp_path: Path, name: str, family: str, settings: dict[str, Any]
) -> None:
    theirs, ids = reference(name, settings), random_ids()
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    ByteTokenizer().save(tmp_path / "in")
    stored = open_stored(str(tmp_path / "in"))
    with torch.no_grad():
        expected = theirs(ids).logits
        logits = stored.load(CPU).model(ids)
    assert expected.std() > 0.1, "a model that says the same of all tokens would prove little"
    assert torch.allclose(logits, expected, atol=1e-5, rtol=0)

    done = export(stored, tmp_path / "out", shard=20_000)
    assert done.agreement is not None and done.agreement.largest_difference < 1e-5
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.model_type == family
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("case", ["llama", "qwen3", "neox", "neo", "nanochat"])
def test_gradients_are_theirs(case: str) -> None:
    """Weights in the right place with the wrong neighbours would still be wrong."""
    name, family, settings = CASES[case]
    theirs, ids = reference(name, settings), random_ids()
    config = GPTConfig(**from_hf(theirs.config.to_dict(), where="test"))
    ours = build_model(config, vocab=VOCAB, device=CPU)
    load_weights(ours, open_foreign(WeightsInMemory(theirs.state_dict()), ours, family))
    theirs(ids, labels=ids).loss.backward()
    terms = LossTerms(scale=torch.tensor(1 / (3 * 23)))
    loss = ours(ids[:, :-1], targets_BT=ids[:, 1:], terms=terms)
    loss.scaled.backward()
    gradients = WeightsInMemory({n: p.grad for n, p in ours.named_parameters()})
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    for one in foreign_tensors(ours, family):
        found = one.read(gradients, TensorSlice.whole(one.shape))
        expected = wanted[one.name.replace("embed_out", "lm_head")]
        assert torch.allclose(found, expected, atol=1e-6, rtol=1e-4), one.name


# ------------------------------------------------------------------ without transformers

VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {"bias": False, "norm_gain": False, "tie_head": False},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "kv_heads": 2},
    "qwen2": {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "qkv_bias": True},
    "qwen3": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "qk_norm": True,
        "norm_gain": False,
        "head_width": 6,
    },
    "gpt_neox": {"parallel_residual": True, "tie_head": False},
    "gpt_neo": {"qkv_bias": False, "attention_scale": 1.0, "window": 3},
    "nanochat": {
        "norm": "rmsnorm",
        "norm_gain": False,
        "bias": False,
        "kv_heads": 2,
        "embedding_norm": True,
    },
    "gristmill": {"value_embeddings": 1, "kv_heads": 2, "logit_cap": 9.0},
}


def make(family: str) -> GPT:
    positions = "learned" if family in ("gpt2", "gpt_neo") else "rotary"
    sizes: dict[str, Any] = {"layers": 2, "heads": 4, "width": 16, "context": 6}
    config = GPTConfig(**sizes, positions=positions, **VARIANTS[family])
    model = build_model(config, vocab=50, device=CPU)
    model.initialise(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return model


@pytest.mark.parametrize("family", VARIANTS)
def test_any_region_is_a_region_of_the_whole(family: str) -> None:
    model = make(family)
    own, whole = WeightsInMemory(dict(model.named_parameters())), foreign_state(model, family)
    for one in foreign_tensors(model, family):
        assert whole[one.name].shape == one.shape and whole[one.name].is_contiguous()
        for region in regions(one.shape):
            assert torch.equal(one.read(own, region), whole[one.name][region.slices])
        if one.ours is None:
            assert (whole[one.name] == (1 if one.name.endswith("weight") else 0)).all()
    back = open_foreign(WeightsInMemory(whole), model, family)
    assert set(back.shapes) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for region in regions(back.shapes[name]):
            assert torch.equal(back.read(name, region), parameter[region.slices])


def regions(shape: tuple[int, ...]) -> list[TensorSlice]:
    corner = TensorSlice(tuple(size // 3 for size in shape), tuple(size - 1 for size in shape))
    return [TensorSlice.whole(shape), corner]


@pytest.mark.parametrize("family", VARIANTS)
def test_all_that_is_wrong_is_said_at_once(family: str) -> None:
    model = make(family)
    weights = foreign_state(model, family)
    first, second, *_ = weights
    del weights[first]
    weights[second] = torch.zeros(3, 3)
    weights |= {f"extra.{number}": torch.zeros(1) for number in range(7)}
    with pytest.raises(UserError) as error:
        open_foreign(WeightsInMemory(weights), model, family)
    assert error.value.exit is Exit.DATA
    lacking, shaped, surplus = [problem.what for problem in error.value.problems]
    assert lacking == f"the weights lack {first}"
    assert shaped.startswith(f"{second} has shape (3, 3), not (")
    assert surplus == (
        "the weights have extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more, and a model of "
        "this kind has not"
    )


def test_files_from_elsewhere() -> None:
    """Names without their prefix, other names of the head, and tensors that are no weights."""
    model = make("gpt_neox")
    weights = foreign_state(model, "gpt_neox")
    bare = {name.removeprefix("gpt_neox."): value for name, value in weights.items()}
    bare["lm_head.weight"] = bare.pop("embed_out.weight")
    for layer in range(2):
        bare[f"layers.{layer}.attention.bias"] = torch.ones(1, 1, 6, 6)
        bare[f"layers.{layer}.attention.masked_bias"] = torch.tensor(-1e9)
        bare[f"layers.{layer}.attention.rotary_emb.inv_freq"] = torch.ones(2)
    found = open_foreign(WeightsInMemory(bare), model, "gpt_neox")
    for name, parameter in model.named_parameters():
        rows = slice(0, 50) if name in ("embedding.weight", "head.weight") else slice(None)
        assert torch.equal(found.read(name), parameter[rows])


def test_the_head_of_a_tied_model_may_be_there() -> None:
    model = make("llama")
    weights = foreign_state(model, "llama")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert "head.weight" not in open_foreign(WeightsInMemory(weights), model, "llama").shapes
