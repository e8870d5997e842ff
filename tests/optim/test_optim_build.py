"""Which parameters decay, and the optimizer made of them."""

from __future__ import annotations

import pytest
import torch

from gristmill.config.optim import AdamWConfig
from gristmill.config.schema import ModelConfig
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.optim.build import build_optimizer, decay_groups


def model(*, norm: str = "layernorm", tie_head: bool = True) -> GPT:
    config = ModelConfig.model_validate(
        {
            "layers": 2,
            "heads": 2,
            "width": 16,
            "context": 8,
            "norm": norm,
            "qk_norm": True,
            "tie_head": tie_head,
        }
    )
    built = build_model(config, vocab=20, device=torch.device("cpu"))
    built.initialise(1)
    return built


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("tie_head", [True, False])
def test_every_parameter_is_in_one_group(norm: str, tie_head: bool) -> None:
    network = model(norm=norm, tie_head=tie_head)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decaying, still = (
        [names[id(parameter)] for parameter in group["params"]]
        for group in decay_groups(network.parameters(), 0.1)
    )
    assert sorted(decaying + still) == sorted(names.values())
    assert not [name for name in decaying if name.endswith("bias") or "norm" in name]
    assert all(name.endswith("bias") or "norm" in name for name in still)
    assert {"embedding.weight", "positions.weight", "blocks.1.mlp.up.weight"} < set(decaying)
    assert ("head.weight" in decaying) is not tie_head


def test_only_matrices_have_the_decay() -> None:
    assert [group["weight_decay"] for group in decay_groups(model().parameters(), 0.3)] == [
        0.3,
        0.0,
    ]


def test_frozen_parameters_are_left_out() -> None:
    network = model()
    network.embedding.weight.requires_grad_(False)
    groups = build_optimizer(AdamWConfig(), network).param_groups
    chosen = [parameter for group in groups for parameter in group["params"]]
    assert all(parameter is not network.embedding.weight for parameter in chosen)


def test_adamw_takes_its_settings() -> None:
    optimizer = build_optimizer(
        AdamWConfig(lr=2e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2), model()
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    for group, decay in zip(optimizer.param_groups, (0.2, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.9), 1e-6)
        assert group["weight_decay"] == decay


def test_a_step_without_gradient_only_decays_matrices() -> None:
    network = model()
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(AdamWConfig(lr=0.1, weight_decay=0.5), network).step()
    for name, parameter in network.named_parameters():
        factor = 0.95 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
