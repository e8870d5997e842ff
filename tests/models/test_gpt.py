"""The native model against transformers' GPT-2, and its variants against plain definitions."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.checkpoint.loading import load_weights
from gristmill.config.hf import from_hf
from gristmill.config.model import GPTConfig
from gristmill.models import layers
from gristmill.models.build import build_model
from gristmill.models.cache import KVCache
from gristmill.models.families import foreign_state, foreign_tensors, open_foreign
from gristmill.models.gpt import GPT
from gristmill.models.layers import Attention, BlockContext, Rotary
from gristmill.models.loss_terms import LossTerms
from gristmill.models.recompute import Recompute
from gristmill.models.spec import Kernels, Loss
from gristmill.models.weights import WeightsInMemory

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"layers": 2, "heads": 4, "width": 32, "context": 20}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "no bias": {"bias": False},
    "erf gelu, untied": {"activation": "gelu", "tie_head": False},
    "rotary": {"positions": "rotary"},
    "relu": {"activation": "relu"},
    "rmsnorm, relu2": {"norm": "rmsnorm", "activation": "relu2", "bias": False},
    "swiglu": {"activation": "swiglu"},
    "grouped heads": {"kv_heads": 2},
    "one key head, qk norm": {"kv_heads": 1, "qk_norm": True},
    "all modern": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "qk_norm": True,
        "activation": "swiglu",
        "kv_heads": 2,
        "bias": False,
        "tie_head": False,
    },
    "as Qwen2 and Qwen3": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "head_width": 12,
        "bias": False,
        "qkv_bias": True,
    },
    "as GPT-NeoX": {
        "positions": "rotary",
        "rotary_fraction": 0.5,
        "parallel_residual": True,
        "activation": "gelu",
    },
    "windows": {"window": 3},
    "windows with rotary": {"window": 5, "positions": "rotary", "kv_heads": 2, "layers": 3},
    "gates": {"attention_gate": True},
    "everything else": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_gain": False,
        "qk_norm": True,
        "activation": "relu2",
        "bias": False,
        "tie_head": False,
        "embedding_norm": True,
        "value_embeddings": 1,
        "attention_gate": True,
        "attention_scale": 0.2,
        "logit_cap": 20.0,
    },
}


def make(settings: dict[str, Any] | None = None, *, vocab: int = 50, seed: int = 3) -> GPT:
    config = GPTConfig(**{**SMALL, **(settings or {})})
    model = build_model(config, vocab=vocab, device=CPU)
    model.initialise(seed)
    return model


def fill(model: GPT, theirs: dict[str, torch.Tensor]) -> None:
    """Take weights in Hugging Face's form."""
    load_weights(model, open_foreign(WeightsInMemory(theirs), model, "gpt2"))


def random_ids(*shape: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "theirs",
    [
        {},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"tie_word_embeddings": False},
        {"n_inner": 40, "layer_norm_epsilon": 1e-3},
        {"n_head": 1, "n_layer": 3},
    ],
    ids=str,
)
def test_logits_and_gradients_equal_transformers(theirs: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    base = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 20, "vocab_size": 50}
    quiet = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 0}
    config = transformers.GPT2Config(**{**base, **quiet, "eos_token_id": 0, **theirs})
    reference = transformers.GPT2LMHeadModel(config)
    model = build_model(GPTConfig(**from_hf(config.to_dict(), where="test")), vocab=50, device=CPU)
    fill(model, reference.state_dict())
    ids, targets = random_ids(3, 20), random_ids(3, 20, seed=1)

    expected = reference(ids).logits
    assert torch.allclose(model(ids), expected, atol=1e-5, rtol=0)

    functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    loss = model(ids, targets_BT=targets, terms=LossTerms(scale=torch.tensor(1 / 60)))
    loss.scaled.backward()
    theirs_by_name = dict(reference.named_parameters())
    ours = dict(model.named_parameters())
    for one in foreign_tensors(model, "gpt2"):
        assert one.ours is not None
        gradient, wanted = ours[one.ours].grad, theirs_by_name[one.name].grad
        assert gradient is not None
        if one.ours in ("embedding.weight", "head.weight"):
            assert not gradient[50:].any()
            gradient = gradient[:50]
        if "c_" in one.name and one.name.endswith("weight"):
            wanted = wanted.T
        assert torch.allclose(gradient, wanted, atol=1e-6, rtol=1e-4), one.name


def test_weights_go_to_hugging_face_names_and_back() -> None:
    source, target = make(), make(seed=4)
    fill(target, foreign_state(source, "gpt2"))
    for (name, ours), theirs in zip(source.named_parameters(), target.parameters(), strict=True):
        kept = slice(0, 50) if name == "embedding.weight" else slice(None)
        assert torch.equal(ours[kept], theirs[kept]), name


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_a_cache_gives_the_same_logits_as_the_whole_text(settings: dict[str, Any]) -> None:
    model = make(settings).eval()
    ids = random_ids(2, 20)
    with torch.inference_mode():
        whole = model(ids)
        for cuts in ([7, 8, 9, 15, 20], [1, 20], [20]):
            cache, parts = KVCache(20), []
            for begin, end in itertools.pairwise([0, *cuts]):
                parts.append(model(ids[:, begin:end], cache=cache))
            assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_no_position_sees_the_future(settings: dict[str, Any]) -> None:
    model = make(settings).eval()
    ids = random_ids(1, 20)
    changed = ids.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 50
    with torch.inference_mode():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_learns(settings: dict[str, Any]) -> None:
    model = make(settings)
    ids = random_ids(4, 21)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        terms = LossTerms(scale=torch.tensor(1 / 80))
        loss = model(ids[:, :-1], targets_BT=ids[:, 1:], terms=terms)
        loss.scaled.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.total.item() / 80)
    assert losses[0] == pytest.approx(3.91, abs=0.15)  # log 50: nothing is known yet
    assert losses[-1] < 0.6 * losses[0]


def test_grouped_heads_are_shared_keys_and_values() -> None:
    grouped = Attention(GPTConfig(**SMALL, kv_heads=2), layer=0)
    full = Attention(GPTConfig(**SMALL), layer=0)
    query, key, value = grouped.qkv.weight.detach().split([32, 16, 16])
    repeated = [
        m.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1) for m in (key, value)
    ]
    with torch.no_grad():
        full.qkv.weight.copy_(torch.cat((query, *repeated)))
        full.qkv.bias.zero_()
        grouped.qkv.bias.zero_()
        full.out.load_state_dict(grouped.out.state_dict())
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    around = BlockContext(torch.arange(9))
    assert torch.allclose(full(x, around, None), grouped(x, around, None), atol=1e-6)


def test_rotary_products_depend_on_distance_only() -> None:
    rotary = Rotary(GPTConfig(**SMALL, positions="rotary"))
    rotary.fill()
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator).unbind(0)

    def product(at: int, other: int) -> torch.Tensor:
        turns = rotary(torch.tensor([at])), rotary(torch.tensor([other]))
        return (turns[0].apply(query) * turns[1].apply(key)).sum()

    assert product(3, 1) == pytest.approx(product(12, 10).item(), abs=1e-5)
    assert product(3, 1).item() != pytest.approx(product(3, 2).item(), abs=1e-3)
    assert torch.allclose(rotary(torch.tensor([0])).apply(query), query)


def test_recomputing_activations_changes_nothing() -> None:
    ids = random_ids(2, 21)
    gradients = []
    for kind, every in (("none", 1), ("full", 1), ("full", 2), ("selective", 1)):
        config = GPTConfig(**SMALL, dropout=0.1)
        recompute = Recompute(kind, every)
        model = build_model(config, vocab=50, device=CPU)
        model.recompute_blocks(recompute)
        model.initialise(3)
        model.train()
        torch.manual_seed(7)
        model(ids[:, :-1], targets_BT=ids[:, 1:]).scaled.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for others in gradients[1:]:
        for plain, again in zip(gradients[0], others, strict=True):
            assert torch.equal(plain, again)


@pytest.mark.parametrize(
    ("kind", "every", "fused"),
    [("none", 1, 2), ("full", 1, 4), ("selective", 1, 0), ("selective", 2, 1)],
)
def test_products_are_kept_by_selective_recomputation(
    monkeypatch: pytest.MonkeyPatch,
    kind: Literal["none", "selective", "full"],
    every: int,
    fused: int,
) -> None:
    """A kernel that has the activation inside its product would compute both again."""
    calls = []

    def plain(
        x: torch.Tensor, up: torch.Tensor, bias: None, down: torch.Tensor, activation: str
    ) -> torch.Tensor:
        calls.append(activation)
        return functional.relu(x @ up.T).square() @ down.T

    monkeypatch.setattr(layers, "fused_mlp", plain)
    monkeypatch.setattr(layers, "worth_fusing_mlp", lambda x, **sizes: True)
    config = GPTConfig(**SMALL, activation="relu2", bias=False)
    model = build_model(config, vocab=50, device=CPU)
    model.recompute_blocks(Recompute(kind, every))
    model.kernels = Kernels(products=True)
    model.initialise(3)
    ids = random_ids(2, 21)
    with CountedProducts() as counted:
        model(ids[:, :-1], targets_BT=ids[:, 1:]).scaled.backward()
    # Of each layer, four products forward and twice as many backward; the result of the last is not
    # needed again. The head has one; its gradients are added to or written into a tensor.
    again = 3 if kind == "full" else 0
    assert counted.number == SMALL["layers"] * (12 + again) + 1
    assert len(calls) == fused


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({}, 2),
        ({"bias": False}, 2),
        ({"kv_heads": 2}, 0),
        ({"positions": "rotary"}, 0),
        ({"qk_norm": True}, 0),
    ],
)
def test_where_queries_keys_and_values_have_a_backward_pass_of_their_own(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], used: int
) -> None:
    calls = []

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> tuple[torch.Tensor, ...]:
        calls.append(bias is not None)
        return functional.linear(x, weight, bias).chunk(3, dim=-1)

    monkeypatch.setattr(layers, "project_qkv", plain)
    monkeypatch.setattr(layers, "worth_fusing_qkv", lambda x, **sizes: True)
    ids, results = random_ids(2, 21), []
    for kernels in (Kernels(), Kernels(products=True)):
        model = build_model(GPTConfig(**SMALL, **settings), vocab=50, device=CPU)
        model.kernels = kernels
        model.initialise(3)
        loss = model(ids[:, :-1], targets_BT=ids[:, 1:]).scaled
        results.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert calls == [settings.get("bias", True)] * used
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


class CountedProducts(TorchDispatchMode):
    """Counts matrix products with a result of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.number += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_start_weights_follow_gpt2() -> None:
    config = GPTConfig(layers=8, heads=4, width=64, context=32)
    model = build_model(config, vocab=500, device=CPU)
    model.initialise(1)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    block = model.blocks["0"]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not block.mlp.up.bias.any()
    assert torch.equal(model.norm.weight, torch.ones(64))
    assert not torch.equal(model.blocks["0"].mlp.up.weight, model.blocks["1"].mlp.up.weight)


def test_start_weights_are_a_function_of_the_seed() -> None:
    one, two, other = make(seed=3), make(seed=3), make(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    # A deeper model has the same first layers: no weight depends on those made before it.
    deeper = make({"layers": 3, "init_std": 0.02}, seed=3)
    assert torch.equal(one.blocks["0"].mlp.up.weight, deeper.blocks["0"].mlp.up.weight)


def test_dropout_acts_in_training_only() -> None:
    model = make({"dropout": 0.5})
    ids = random_ids(1, 20)
    model.train()
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(("hidden", "attention"), [(0.0, 0.5), (0.5, 0.0)])
def test_attention_may_have_its_own_dropout(
    hidden: float, attention: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, plain = list[float](), functional.scaled_dot_product_attention

    def watched(*args: Any, dropout_p: float, **kwargs: Any) -> torch.Tensor:
        rates.append(dropout_p)
        return plain(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    model = make({"dropout": hidden, "attention_dropout": attention})
    ids = random_ids(1, 20)
    model.train()
    assert not torch.equal(model(ids), model(ids))
    assert set(rates) == {attention}
    assert {one.p for one in model.modules() if isinstance(one, nn.Dropout)} == {hidden}
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_padding_is_never_predicted() -> None:
    model = make(vocab=50)
    assert model.embedding.weight.shape[0] == 128
    assert model(random_ids(1, 5)).shape == (1, 5, 50)
    with torch.no_grad():
        model.head.weight[50:] = 1e4  # even absurd padding must not matter
    loss = model(random_ids(1, 5), targets_BT=random_ids(1, 5, seed=1))
    assert isinstance(loss, Loss)
    assert loss.total.item() / 5 == pytest.approx(3.91, abs=0.3)
