"""Adapters beside the layers of a model, and the weights they make together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from gristmill.base.errors import UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.hf import HFConfig
from gristmill.config.lora import LoraConfig
from gristmill.config.model import GPTConfig, ModelConfig, Role
from gristmill.models import lora as lora_module
from gristmill.models.build import build_meta_model, build_model, initialise
from gristmill.models.lora import MergedWeights, keep_frozen_in
from gristmill.models.recompute import Recompute
from gristmill.models.spec import CausalLM, Kernels, Loss, linear_shapes
from gristmill.models.weights import WeightsInMemory
from gristmill.plan.arithmetic import count_adapters, count_parameters, token_cost

CPU, VOCAB = torch.device("cpu"), 61
GPT2 = GPTConfig(layers=2, heads=2, width=16, context=12, vocab=VOCAB)
MODERN = GPTConfig(
    layers=2,
    heads=4,
    kv_heads=2,
    width=32,
    context=12,
    vocab=VOCAB,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    value_embeddings=1,
    tie_head=False,
)
CONV1D = HFConfig(
    hf_config={
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 12,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
)
KINDS = pytest.mark.parametrize("config", [GPT2, MODERN, CONV1D], ids=["gpt2", "modern", "hf"])


def with_lora(config: ModelConfig, **settings: Any) -> ModelConfig:
    return config.model_copy(update={"lora": LoraConfig(**{"rank": 3, **settings})})


def base_of(config: ModelConfig) -> CausalLM:
    if isinstance(config, HFConfig):
        pytest.importorskip("transformers")
    model = build_model(config, vocab=VOCAB, device=CPU)
    model.initialise(7)
    if isinstance(config, HFConfig):
        return model.eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() > 1 and "embedding" not in name:
                one.mul_(4)  # far enough from linear that every layer matters
    return model.eval()


def adapted(config: ModelConfig, base: CausalLM, *, trained: bool = True) -> CausalLM:
    """The same model with adapters, as after some training."""
    model = build_model(config, vocab=VOCAB, device=CPU)
    initialise(model, 5, [name for name, _ in model.named_parameters()])
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, one in base.named_parameters():
            own[name].copy_(one)
        for name, one in own.items():
            if trained and name.endswith("lora_b"):
                one.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def ids(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, 12), generator=torch.Generator().manual_seed(1))


def loss_of(model: CausalLM, **options: Any) -> Loss:
    tokens = ids()
    loss = model(tokens, targets_BT=tokens.roll(-1, 1), **options)
    return Loss(*loss)


@KINDS
def test_it_starts_as_its_base_to_the_bit(config: ModelConfig) -> None:
    base = base_of(config)
    model = adapted(with_lora(config), base, trained=False)
    assert torch.equal(model(ids()), base(ids()))
    assert torch.equal(loss_of(model).total, loss_of(base).total)


@KINDS
def test_only_adapters_are_trained(config: ModelConfig) -> None:
    base = base_of(config)
    model = adapted(with_lora(config), base)
    loss_of(model).scaled.backward()
    own = {name for name, one in model.named_parameters() if one.requires_grad}
    assert own == {name for name, _ in model.named_parameters() if ".lora_" in name}
    for name, one in model.named_parameters():
        assert (one.grad is not None) == (name in own), name
        assert one.grad is None or one.grad.abs().max() > 0, name
    assert model.base_parameters() == set(base.roles())
    assert model.base_size() == sum(one.numel() for one in base.parameters())
    assert model.size_by_role()[Role.MATRIX] == sum(
        one.numel() for one in model.parameters() if one.requires_grad
    )


def merged(model: CausalLM) -> MergedWeights:
    own = {name: one for name, one in model.named_parameters() if ".lora_" in name}
    base = {name: one for name, one in model.named_parameters() if ".lora_" not in name}
    lora = model.config.lora
    assert lora is not None
    weights = WeightsInMemory(base), WeightsInMemory(own)
    return MergedWeights(*weights, layers=model.adapters, scale=lora.scale)


def merged_model(model: CausalLM) -> CausalLM:
    whole, weights = build_model(model.config.merged, vocab=VOCAB, device=CPU), merged(model)
    with torch.no_grad():
        for name, one in whole.named_parameters():
            one.copy_(weights.read(name))
    return whole.eval()


@KINDS
def test_merged_weights_compute_the_same(config: ModelConfig) -> None:
    base = base_of(config)
    model = adapted(with_lora(config, alpha=5.0), base)
    ours, whole = model(ids()), merged_model(model)(ids())
    assert (ours - base(ids())).abs().max() > 0.05
    torch.testing.assert_close(whole, ours, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("config", [GPT2, CONV1D], ids=["gpt2", "hf"])
def test_gradients_are_those_of_the_product(config: ModelConfig) -> None:
    """The gradients of A and B follow from that of a whole weight W + s B A: s B^T dW, s dW A^T."""
    model = adapted(with_lora(config), base_of(config))
    whole = merged_model(model)
    if isinstance(config, GPTConfig):
        model.double().compute = whole.double().compute = torch.float64
    loss_of(model).scaled.backward()
    loss_of(whole).scaled.backward()
    scale = model.config.lora.scale  # type: ignore[union-attr]
    assert model.adapters
    for layer, transposed in model.adapters.items():
        weight = whole.get_parameter(f"{layer}.weight").grad
        assert weight is not None
        weight = weight.T if transposed else weight
        a, b = (model.get_parameter(f"{layer}.{part}") for part in ("lora_a", "lora_b"))
        # The loss itself is summed in fp32.
        torch.testing.assert_close(a.grad, scale * b.T @ weight, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(b.grad, scale * weight @ a.T, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_merged_weight_has_the_same_bits_by_any_region(
    monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    monkeypatch.setattr(lora_module, "_BLOCK", 96)
    generator = torch.Generator().manual_seed(3)
    shape = (37, 29)
    weight, a, b = (torch.randn(size, generator=generator) for size in ((37, 29), (5, 29), (37, 5)))
    stored = weight.T.contiguous() if transposed else weight
    base = WeightsInMemory({"x.weight": stored, "x.bias": a[0]})
    adapters = WeightsInMemory({"x.lora_a": a, "x.lora_b": b})
    weights = MergedWeights(base, adapters, layers={"x": transposed}, scale=0.7)
    whole = weights.read("x.weight")
    exact = (weight.double() + 0.7 * b.double() @ a.double()).float()
    assert torch.equal(whole, exact.T if transposed else exact)
    assert torch.equal(weights.read("x.bias"), a[0])
    rows, columns = shape[::-1] if transposed else shape
    for first in range(0, rows, 5):
        for left in range(0, columns, 11):
            region = TensorSlice((first, left), (min(first + 5, rows), min(left + 11, columns)))
            assert torch.equal(weights.read("x.weight", region), whole[region.slices])


def test_initial_adapters_depend_on_seed_and_name_only() -> None:
    config = with_lora(GPT2)
    names = list(build_meta_model(config, vocab=VOCAB).base_parameters())
    one, two, other = (build_model(config, vocab=VOCAB, device=CPU) for _ in range(3))
    own = [name for name, _ in one.named_parameters() if name not in names]
    initialise(one, 3, own)
    for name in reversed(own):
        initialise(two, 3, [name])
    initialise(other, 4, own)
    for name in own:
        assert torch.equal(one.get_parameter(name), two.get_parameter(name))
        if name.endswith("lora_b"):
            assert not one.get_parameter(name).any()
        else:
            assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
            assert one.get_parameter(name).abs().max() <= one.get_parameter(name).shape[1] ** -0.5


@pytest.mark.parametrize("config", [GPT2, MODERN], ids=["gpt2", "modern"])
def test_sizes_by_formula_are_those_of_the_model(config: GPTConfig) -> None:
    for layers in (("*",), ("qkv", "blocks.1.mlp.*")):
        small = with_lora(config, layers=layers)
        assert isinstance(small, GPTConfig)
        model = build_meta_model(small, vocab=VOCAB)
        assert linear_shapes(model) == small.linears()
        assert count_adapters(small) == sum(model.size_by_role().values())
        rows = model.rows  # type: ignore[attr-defined]
        assert model.base_size() == count_parameters(config, rows=rows)
        full, less = (token_cost(c, rows=rows, sequence=8).palm for c in (config, small))
        assert 0.6 * full < less < 1.1 * full and (layers == ("*",) or less < full)


def test_frozen_weights_in_half_precision_change_no_bit() -> None:
    base = base_of(MODERN)
    model = adapted(with_lora(MODERN), base)
    model.compute = torch.bfloat16
    plain = loss_of(model)
    plain.scaled.backward()
    halved = adapted(with_lora(MODERN), base)
    keep_frozen_in(halved, torch.bfloat16)
    halved.compute = torch.bfloat16
    loss = loss_of(halved)
    loss.scaled.backward()
    assert {one.dtype for one in halved.parameters() if not one.requires_grad} == {torch.bfloat16}
    assert torch.equal(loss.total, plain.total)
    for name, one in model.named_parameters():
        if one.requires_grad:
            assert torch.equal(one.grad, halved.get_parameter(name).grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_changes_no_bit(kind: Any) -> None:
    base = base_of(MODERN)
    gradients = []
    for recompute in (Recompute(), Recompute(kind)):
        model = adapted(with_lora(MODERN, dropout=0.3), base).train()
        model.recompute_blocks(recompute)
        torch.manual_seed(1)
        loss_of(model).scaled.backward()
        gradients.append([one.grad for one in model.parameters() if one.requires_grad])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_dropout_acts_in_training_only() -> None:
    model = adapted(with_lora(GPT2, dropout=0.5), base_of(GPT2))
    assert torch.equal(loss_of(model).total, loss_of(model).total)
    model.train()
    assert not torch.equal(loss_of(model).total, loss_of(model).total)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "blocks"])
def test_it_compiles(whole: bool) -> None:
    model = adapted(with_lora(GPT2), base_of(GPT2))
    plain = loss_of(model)
    plain.scaled.backward()
    wanted = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    model.zero_grad()
    options: dict[str, Any] = {"dynamic": False, "fullgraph": True, "backend": "aot_eager"}
    compiled: Callable[..., Any] = model
    if whole:
        compiled = torch.compile(model, **options)
    for name in () if whole else model.block_names():
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, **options)
    tokens = ids()
    loss = Loss(*compiled(tokens, targets_BT=tokens.roll(-1, 1)))
    loss.scaled.backward()
    torch.testing.assert_close(loss.total, plain.total)
    for name, gradient in wanted.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, atol=1e-4, rtol=1e-4)
    frozen = [one for one in model.parameters() if not one.requires_grad]
    assert frozen and all(one.grad is None for one in frozen)


def test_a_fused_mlp_never_passes_adapters_by(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(with_lora(GPT2), base_of(GPT2))
    without = model(ids())
    monkeypatch.setattr("gristmill.models.layers.worth_fusing_mlp", lambda *args, **more: True)
    monkeypatch.setattr("gristmill.models.layers.fused_mlp", lambda *args: functional.relu(args[0]))
    model.kernels = Kernels(products=True)
    assert torch.equal(model(ids()), without)
    base = base_of(GPT2)
    base.kernels = Kernels(products=True)
    assert not torch.equal(base(ids()), base_of(GPT2)(ids()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": ("q_proj",)}, r"'q_proj' matches no linear layer.*\n.*there are: transformer"),
        (
            {"layers": ("c_fc", "attn.cattn")},
            r"'attn.cattn' .*\n.*there are: transformer.h.\*.attn.c_attn, ",
        ),
        ({"rank": 17}, r"rank: 17 is more than transformer.h.0.attn.c_attn has: 16 inputs, 48"),
        ({"layers": ("lm_head", "wte")}, "'lm_head' matches no linear layer"),
    ],
)
def test_layers_of_other_models_are_refused_when_outlined(
    settings: dict[str, Any], message: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=message):
        build_meta_model(with_lora(CONV1D, **settings), vocab=VOCAB)
