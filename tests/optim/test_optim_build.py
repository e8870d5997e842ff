"""Which parameters decay, and the optimizer made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import AdamConfig, AdamWConfig
from gristmill.config.resolve import resolve
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.optim.adamw import AdamW
from gristmill.optim.build import build_optimizer
from gristmill.optim.schedule import build_schedule
from gristmill.optim.spec import Optimizer


def model(*, norm: str = "layernorm", tie_head: bool = True, **settings: Any) -> GPT:
    config = GPTConfig.model_validate(
        {
            "layers": 2,
            "heads": 2,
            "width": 16,
            "context": 8,
            "norm": norm,
            "qk_norm": True,
            "tie_head": tie_head,
            **settings,
        }
    )
    built = build_model(config, vocab=20, device=torch.device("cpu"))
    built.initialise(1)
    return built


def optimizer(network: GPT, **settings: Any) -> Optimizer:
    parameters = dict(network.named_parameters())
    return build_optimizer(AdamWConfig(**settings), network, parameters=parameters)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("tie_head", [True, False])
def test_every_parameter_is_in_one_group(norm: str, tie_head: bool) -> None:
    network = model(norm=norm, tie_head=tie_head)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decaying, still = (
        [names[id(parameter)] for parameter in group["params"]]
        for group in optimizer(network).param_groups
    )
    assert sorted(decaying + still) == sorted(names.values())
    assert not [name for name in decaying if name.endswith("bias") or "norm" in name]
    assert all(name.endswith("bias") or "norm" in name for name in still)
    assert {"embedding.weight", "positions.weight", "blocks.1.mlp.up.weight"} < set(decaying)
    assert ("head.weight" in decaying) is not tie_head


def test_only_matrices_have_the_decay() -> None:
    groups = optimizer(model(), weight_decay=0.3).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_gates_are_vectors_and_do_not_decay() -> None:
    """Whatever their shape: it is the role that decides."""
    network = model(value_embeddings=1)
    _, still = optimizer(network).param_groups
    assert any(one is network.blocks["1"].attention.value_gate.weight for one in still["params"])


def test_frozen_parameters_are_left_out() -> None:
    network = model()
    network.embedding.weight.requires_grad_(False)
    groups = optimizer(network).param_groups
    chosen = [parameter for group in groups for parameter in group["params"]]
    assert all(parameter is not network.embedding.weight for parameter in chosen)


def test_adamw_takes_its_settings() -> None:
    built = optimizer(model(), lr=2e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
    assert isinstance(built, AdamW)
    for group, decay in zip(built.param_groups, (0.2, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["eps"]) == (2e-3, (0.8, 0.9), 1e-6)
        assert group["weight_decay"] == decay


def test_a_step_without_gradient_only_decays_matrices() -> None:
    network = model()
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built = optimizer(network, lr=0.1, weight_decay=0.5)
    built.step(divisor=torch.tensor(1.0), skip=torch.tensor(0.0))
    for name, parameter in network.named_parameters():
        factor = 0.95 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_adam_moves_as_torchs_own_does(kind: str) -> None:
    """To the bit, with gradients divided and steps skipped on the device."""
    network, other = model(), model()
    config = AdamWConfig(lr=0.01) if kind == "adamw" else AdamConfig(lr=0.01, weight_decay=0.1)
    parameters = dict(network.named_parameters())
    built = build_optimizer(config, network, parameters=parameters)
    assert isinstance(built, AdamW)
    groups = [
        {"params": [p for p in other.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in other.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    other_kind = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    theirs = other_kind(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        divisor, skip = torch.tensor(8.0), torch.tensor(float(step == 2))
        for mine, reference in zip(network.parameters(), other.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            reference.grad = mine.grad.clone()
        built.step(divisor=divisor, skip=skip)
        vars(theirs).update(grad_scale=divisor, found_inf=skip)
        theirs.step()
    for mine, reference in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_every_role_may_have_its_own_rate() -> None:
    network = model(tie_head=False, value_embeddings=1)
    rates = {"embedding_lr": 0.5, "table_lr": 0.25, "head_lr": 0.125, "vector_lr": 0.0625}
    made = optimizer(network, lr=1e-3, **rates)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = {names[id(p)]: group for group in made.param_groups for p in group["params"]}
    roles = network.roles()
    assert found.keys() == roles.keys()
    for name, group in found.items():
        assert group["lr"] == rates.get(f"{roles[name]}_lr", 1e-3), name
        assert group["weight_decay"] == (0.0 if roles[name] is Role.VECTOR else 0.1)
    # K-FAC reads the rate of the matrices there.
    assert made.param_groups[0]["lr"] == 1e-3
    config = load_text(RUN, [f"optim.{name}={rate}" for name, rate in rates.items()], place="x")
    schedule = build_schedule(config, resolve(config, vocab=20))
    schedule.apply(made, Progress(0))
    assert found["embedding.weight"]["lr"] == pytest.approx(500 * found["head.weight"]["lr"] / 125)


def test_embedding_and_head_may_have_their_own_floor() -> None:
    floors = {"embedding_lr": 5e-4, "embedding_min_lr": 4.5e-5, "head_min_lr": 2e-5}
    network = model(tie_head=False, value_embeddings=1)
    made = optimizer(network, lr=1e-3, **floors)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = {names[id(p)]: group for group in made.param_groups for p in group["params"]}
    words = [f"optim.{name}={value}" for name, value in floors.items()]
    words += ['schedule.type="linear"', 'schedule.warmup="2 steps"', "schedule.min_lr=1e-4"]
    config = load_text(RUN, words, place="x")
    schedule = build_schedule(config, resolve(config, vocab=20))
    for step, left in ((1, 1.0), (6, 0.5), (10, 0.0)):
        schedule.apply(made, Progress(step, step, 8 * step))
        rates = [found[name]["lr"] for name in ("embedding.weight", "head.weight")]
        body = found["blocks.0.mlp.up.weight"]["lr"]
        assert rates == pytest.approx([4.5e-5 + left * 4.55e-4, 2e-5 + left * 9.8e-4])
        assert body == pytest.approx(1e-4 + left * 9e-4)


RUN = """
name = "rates"
model = { layers = 2, heads = 2, width = 16, context = 8, tie_head = false, value_embeddings = 1 }
data.paths = "none"
train = { until = "10 steps", batch = 1 }
optim.lr = 1e-3
"""


def test_a_rate_of_what_the_model_does_not_have_is_refused() -> None:
    words = ["model.tie_head=true", "optim.head_lr=0.1"]
    with pytest.raises(UserError, match=r"optim\.head_lr: has no effect because a tied head"):
        load_text(RUN, words, place="run.toml")
    words = ["model.tie_head=true", "optim.head_min_lr=1e-5"]
    with pytest.raises(UserError, match=r"optim\.head_min_lr: has no effect because a tied head"):
        load_text(RUN, words, place="run.toml")


def test_soap_is_not_for_adam_with_l2() -> None:
    words = ['optim.type="adam"', 'optim.preconditioner.type="soap"']
    with pytest.raises(UserError, match="SOAP's weight decay is decoupled"):
        load_text(RUN, words, place="run.toml")
