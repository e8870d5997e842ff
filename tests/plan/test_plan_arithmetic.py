"""Parameters and operations by formula, against published numbers and against the model itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from gristmill.config.load import load_preset
from gristmill.config.model import GPTConfig
from gristmill.config.resolve import padded
from gristmill.models.build import build_model
from gristmill.plan.arithmetic import count_parameters, peak_flops, token_cost


def preset(name: str) -> GPTConfig:
    return GPTConfig.model_validate(load_preset(name)["model"])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_has_its_published_sizes(name: str, parameters: int) -> None:
    assert count_parameters(preset(name), rows=50257) == parameters


@pytest.mark.parametrize("billions", ["1.7", "3.6", "7.5", "18.4", "39.1", "76.1", "145.6", "310"])
def test_gpt3_presets_have_the_sizes_of_their_names(billions: str) -> None:
    size = count_parameters(preset(f"gpt3-{billions}b"), rows=51200) / 1e9
    assert f"{size:.1f}" == {"310": "310.1"}.get(billions, billions)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2", "swiglu"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_formula_counts_what_the_model_has(activation: str, norm: str, positions: str) -> None:
    switches = itertools.product((False, True), (False, True), (None, 1, 2), (False, True))
    for bias, tie_head, kv_heads, qk_norm in switches:
        config = GPTConfig.model_validate(
            {
                "layers": 2,
                "heads": 4,
                "width": 24,
                "context": 10,
                "activation": activation,
                "norm": norm,
                "positions": positions,
                "bias": bias,
                "tie_head": tie_head,
                "kv_heads": kv_heads,
                "qk_norm": qk_norm,
                "mlp_width": 40 if kv_heads == 2 else None,
                "head_width": 10 if kv_heads == 1 else None,
                "qkv_bias": not bias if kv_heads == 2 else None,
            }
        )
        model = build_model(config, vocab=300, device=torch.device("meta"))
        built = sum(parameter.numel() for parameter in model.parameters())
        assert count_parameters(config, rows=padded(300, config)) == built, config


def test_the_cost_of_a_token_at_124_million() -> None:
    cost = token_cost(preset("gpt2-small"), rows=50304, sequence=1024)
    assert f"{cost.palm / 1e6:.1f}" == "854.7"
    assert f"{cost.causal / 1e6:.1f}" == "798.0"


def test_a_longer_window_costs_attention_only() -> None:
    model = preset("gpt2-small")
    short, long = (token_cost(model, rows=50304, sequence=length) for length in (512, 1024))
    assert long.palm - short.palm == 12 * 12 * 768 * 512
    assert long.causal - short.causal == 6 * 12 * 768 * 512


def test_a_window_costs_only_what_it_sees() -> None:
    whole = preset("gpt2-small")
    short = whole.model_copy(update={"window": 256})
    all_keys, near_keys = (token_cost(one, rows=50304, sequence=1024) for one in (whole, short))
    assert all_keys.palm - near_keys.palm == 12 * 6 * 768 * (1024 - 256)
    seen = [sum(min(t + 1, keys) for t in range(1024)) / 1024 for keys in (1024, 256)]
    saved = all_keys.causal - near_keys.causal
    assert saved == pytest.approx(12 * 6 * 768 * (seen[0] - seen[1]), rel=2e-3)
    assert token_cost(short, rows=50304, sequence=200) == token_cost(
        whole, rows=50304, sequence=200
    )


def test_tying_the_head_saves_no_operations() -> None:
    tied = preset("gpt2-small")
    untied = tied.model_copy(update={"tie_head": False})
    assert token_cost(tied, rows=50304, sequence=8) == token_cost(untied, rows=50304, sequence=8)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_known_devices_have_their_dense_peak(device: str, tflops: float) -> None:
    assert peak_flops(device) == tflops * 1e12


@pytest.mark.parametrize("device", ["cpu", "", "Tesla T4", "NVIDIA H20", "NVIDIA A10"])
def test_an_unknown_device_has_no_peak(device: str) -> None:
    assert peak_flops(device) is None


@pytest.mark.parametrize(
    ("device", "other"), [("NVIDIA L40", "NVIDIA L4"), ("NVIDIA RTX A1000", "NVIDIA A100")]
)
def test_a_device_is_not_taken_for_one_with_a_similar_name(device: str, other: str) -> None:
    assert peak_flops(device) != peak_flops(other)


def test_each_number_format_has_its_own_peak() -> None:
    """What a step reaches in fp32 is a share of fp32's peak, not of bf16's."""
    formats = ("bf16", "fp16", "tf32", "fp32")
    peaks = [peak_flops("NVIDIA A100-SXM4-80GB", one) for one in formats]
    assert peaks == [312e12, 312e12, 156e12, 19.5e12]
