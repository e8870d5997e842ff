"""Models of transformers compute here what they compute there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from gristmill.base.errors import DataError, UserError
from gristmill.checkpoint.model import open_model
from gristmill.checkpoint.tensorfile import open_hf_tensors
from gristmill.config.hf import HFConfig, architecture_settings
from gristmill.config.model import Role
from gristmill.evaluate.scoring import Continuation, score
from gristmill.generate.engine import Engine
from gristmill.generate.sampling import Sampling
from gristmill.models.build import build_meta_model, build_model
from gristmill.models.hf import HFModel, folder_weights
from gristmill.models.loss_terms import LossTerms
from gristmill.models.spec import Loss
from gristmill.text.tokenizers.tokenizer import open_tokenizer

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0.0)

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": "null",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "max_position_embeddings": 64,
    "vocab_size": 96,
    "resid_dropout": 0.0,
    "embed_dropout": 0.0,
    "attention_dropout": 0.0,
}
_OPT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "word_embed_proj_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, **_NO_DROPOUT},
    "gpt_neo": _NEO,
    "gpt_neox": {**_COMMON, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "opt": _OPT,
    "llama": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 16},
    "mistral": {**_GROUPED, "sliding_window": 16},
    "gemma": {**_GROUPED, "head_dim": 16},
    "gemma2": {**_GROUPED, "head_dim": 16, "sliding_window": 16},
    "phi": {**_COMMON, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    "olmo2": _GROUPED,
    "granite": {**_GROUPED, "logits_scaling": 3.0},
    "cohere": {**_GROUPED, "logit_scale": 0.25},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny(kind: str, **changes: Any) -> HFConfig:
    return HFConfig(hf_config={"model_type": kind, **TINY[kind], **changes})  # type: ignore[call-arg]


def built(config: HFConfig, seed: int = 5) -> HFModel:
    model = build_model(config, vocab=config.vocab, device=CPU)
    assert isinstance(model, HFModel)
    model.initialise(seed)
    return model


def original(model: HFModel) -> Any:
    """The same weights in a model that transformers built by itself."""
    theirs = type(model.inner)(model.inner.config)
    missing, unexpected = theirs.load_state_dict(model.inner.state_dict(), strict=False)
    assert not missing and not unexpected
    return theirs.train(model.training)


def batch(vocab: int, length: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (3, length + 1), generator=generator)
    weights = torch.rand(3, length, generator=generator).round(decimals=1)
    return ids[:, :-1], ids[:, 1:], weights


@pytest.mark.parametrize("kind", TINY)
def test_logits_loss_and_gradients_are_those_of_transformers(kind: str) -> None:
    model = built(tiny(kind)).train()
    theirs = original(model)
    tokens, targets, weights = batch(96)
    logits = theirs(input_ids=tokens).logits
    assert torch.equal(model(tokens), logits)
    some = torch.tensor([2, 7, 7, 20])
    torch.testing.assert_close(model(tokens, logits_at_N=some), logits.flatten(0, 1)[some])
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    expected = (losses * weights.flatten()).sum()
    loss = model(tokens, targets_BT=targets, terms=LossTerms(weights, torch.tensor(0.25)))
    assert isinstance(loss, Loss)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.scaled.backward()
    (0.25 * expected).backward()
    wanted = dict(theirs.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in wanted.values() if one.grad is not None)
    for name, one in model.named_parameters():
        gradient = wanted[name].grad
        assert (one.grad is None) == (gradient is None), name
        if gradient is not None:
            assert torch.allclose(one.grad, gradient, rtol=1e-4, atol=1e-6 * largest), name


@pytest.mark.parametrize("kind", TINY)
def test_the_loss_never_needs_all_logits(kind: str) -> None:
    """Everything these classes do after the head is known: a bias, a factor, a soft cap."""
    function = built(tiny(kind))._logits
    assert function is not None
    factor = {"granite": 1 / 3, "cohere": 0.25}.get(kind, 1.0)
    assert function.factor == pytest.approx(factor, rel=1e-5)
    assert function.cap == (pytest.approx(30.0) if kind == "gemma2" else None)


def test_a_class_that_does_something_else_to_its_logits_is_computed_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = transformers.LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, *args, **kwargs)
        made.logits = made.logits.sin()
        return made

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    model = built(tiny("llama")).train()
    assert model._logits is None
    tokens, targets, weights = batch(96)
    losses = functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten(), reduction="none"
    )
    loss = model(tokens, targets_BT=targets, terms=LossTerms(weights))
    assert loss.total.item() == pytest.approx((losses * weights.flatten()).sum().item(), rel=1e-6)
    loss.scaled.backward()
    assert all(one.grad is not None for one in model.parameters())


@pytest.mark.parametrize("kind", TINY)
def test_generation_with_a_cache_is_that_of_transformers(kind: str) -> None:
    model = built(tiny(kind)).eval()
    prompt = [5, 17, 3, 80]
    texts = [
        engine.generate([prompt], tokens=20, sampling=GREEDY)[0]
        for engine in (Engine(model), Engine(model, cached=False))
    ]
    theirs = original(model).generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert texts[0] == texts[1] == theirs[0, len(prompt) :].tolist()


# ------------------------------------------------------------------ outlines and initial weights


@pytest.mark.parametrize("kind", TINY)
def test_an_outline_has_no_memory(kind: str) -> None:
    model = build_meta_model(tiny(kind), vocab=96)
    assert all(one.is_meta for one in model.parameters())
    assert not any(one.is_meta for one in model.buffers())
    blocks = model.block_names()
    assert len(blocks) == 2
    assert set(model.roles()) == {name for name, _ in model.named_parameters()}


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    whole, parts = built(tiny("gpt2")), build_model(tiny("gpt2"), vocab=96, device=CPU)
    blocks = set(parts.block_names())
    names = [name for name, _ in parts.named_parameters()]
    inside = [name for name in names if ".".join(name.split(".")[:3]) in blocks]
    parts.initialise(5, [name for name in names if name not in inside])
    for block in reversed(parts.block_names()):
        parts.initialise(5, [name for name in inside if name.startswith(f"{block}.")])
    for name, one in whole.named_parameters():
        assert torch.equal(one, parts.get_parameter(name)), name
    other = built(tiny("gpt2"), seed=6)
    assert not torch.equal(other.inner.lm_head.weight, whole.inner.lm_head.weight)
    state = torch.get_rng_state()
    built(tiny("gpt2"))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", TINY)
def test_initial_weights_have_the_spread_that_transformers_gives_them(kind: str) -> None:
    model = built(tiny(kind))
    torch.manual_seed(0)
    theirs = dict(type(model.inner)(model.inner.config).named_parameters())
    for name, one in model.named_parameters():
        if one.dim() < 2:
            assert torch.equal(one, theirs[name]), name
        else:
            assert one.std().item() == pytest.approx(theirs[name].std().item(), rel=0.25), name


def test_tied_weights_stay_tied() -> None:
    tied, untied = built(tiny("llama", tie_word_embeddings=True)), built(tiny("llama"))
    assert tied.inner.lm_head.weight is tied.inner.model.embed_tokens.weight
    assert tied.canonical_name("lm_head.weight") == "model.embed_tokens.weight"
    assert "lm_head.weight" not in tied.roles()
    assert tied.roles()["model.embed_tokens.weight"] is Role.EMBEDDING
    assert untied.roles()["lm_head.weight"] is Role.HEAD
    assert untied.roles()["model.layers.0.mlp.up_proj.weight"] is Role.MATRIX
    assert untied.roles()["model.norm.weight"] is Role.VECTOR


def test_only_the_experts_that_a_token_uses_are_counted() -> None:
    dense, sparse = (
        build_meta_model(tiny("mistral"), vocab=96),
        build_meta_model(tiny("mixtral"), vocab=96),
    )
    router = 2 * 4 * 32
    experts = 2 * 2 * 3 * 32 * 48
    extra = sparse.token_cost(32).palm - dense.token_cost(32).palm
    assert extra == 6 * (experts // 2 + router)


# ------------------------------------------------------------------ weights of folders


@pytest.mark.parametrize("kind", TINY)
def test_pretrained_weights_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    model = built(tiny(kind))
    original(model).save_pretrained(tmp_path, max_shard_size="20KB")
    config = HFConfig(  # type: ignore[call-arg]
        hf_config=architecture_settings(model.inner.config.to_dict())
    )
    again = built(config, seed=9)
    weights = folder_weights(open_hf_tensors(tmp_path), again, {}, folder=tmp_path)
    for name, one in model.named_parameters():
        assert torch.equal(weights.read(name), one), name


def test_weights_without_the_prefix_of_the_body(tmp_path: Path) -> None:
    model = built(tiny("llama", tie_word_embeddings=True))
    model.inner.model.save_pretrained(tmp_path)
    weights = folder_weights(open_hf_tensors(tmp_path), model, {}, folder=tmp_path)
    assert torch.equal(weights.read("model.norm.weight"), model.get_parameter("model.norm.weight"))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    model = built(tiny("llama"))
    model.inner.model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"the weights lack lm_head\.weight"):
        folder_weights(open_hf_tensors(tmp_path), model, {}, folder=tmp_path)


def test_a_folder_of_transformers_is_a_model(tmp_path: Path) -> None:
    model = built(tiny("olmo2", vocab_size=300))
    model.inner.save_pretrained(tmp_path)
    open_tokenizer("bytes").save(tmp_path)
    loaded = open_model(str(tmp_path), device=CPU)
    tokens, _, _ = batch(256)
    assert torch.equal(loaded.model(tokens), model.eval()(tokens))


# ------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"model_type": "lama"}, "knows no model type 'lama'.*did you mean llama"),
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"model_type": "xlnet"}, "'xlnet' is not a causal language model"),
        (
            {"model_type": "llama", "num_hidden_layer": 3},
            "no 'num_hidden_layer'.*num_hidden_layers",
        ),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "transformers"),
    ],
)
def test_what_transformers_cannot_build_is_refused_in_one_line(
    table: dict[str, Any], problem: str
) -> None:
    config = HFConfig(hf_config=table, context=32, vocab=96)
    with pytest.raises(UserError, match=f"(?s){problem}"):
        build_meta_model(config, vocab=96)


def test_encoders_are_told_not_to_look_ahead() -> None:
    table = {"model_type": "bert", **{k: v for k, v in TINY["gpt_neox"].items() if "drop" not in k}}
    model = built(HFConfig(hf_config=table)).eval()  # type: ignore[call-arg]
    tokens, _, _ = batch(96)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 96
    assert torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])


@pytest.mark.parametrize("kind", TINY)
def test_continuations_are_scored_as_one_at_a_time(kind: str) -> None:
    """Branches of a cache, which sliding windows and experts make harder."""
    model = built(tiny(kind)).eval()
    ids = torch.randint(0, 96, (12, 40), generator=torch.Generator().manual_seed(1)).tolist()
    asked = [
        [Continuation((*ids[n][: 20 + n], *ids[m][: m - 1]), 20 + n) for m in (3, 5, 9)]
        for n in range(6)
    ]
    for options, scores in zip(asked, score(model, asked), strict=True):
        for one, found in zip(options, scores, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([one.ids[:-1]]))[0]
            targets = torch.tensor(one.ids[one.start :])
            kept = logits[one.start - 1 :].log_softmax(-1)
            total = kept.gather(1, targets[:, None]).sum().item()
            assert found.log_prob == pytest.approx(total, abs=1e-3)
