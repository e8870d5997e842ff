"""SGD against torch's own, with steps divided and skipped on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import SGDConfig
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.optim.build import build_optimizer
from gristmill.optim.sgd import SGD

PLAIN = {"divisor": torch.tensor(1.0), "skip": torch.tensor(0.0)}


def model() -> GPT:
    config = GPTConfig(layers=1, heads=2, width=16, context=8)
    built = build_model(config, vocab=20, device=torch.device("cpu"))
    built.initialise(1)
    return built


def optimizer(network: GPT, **settings: Any) -> SGD:
    parameters = dict(network.named_parameters())
    built = build_optimizer(SGDConfig(**settings), network, parameters=parameters)
    assert isinstance(built, SGD)
    return built


def give_gradients(network: GPT, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * factor


def same_weights(one: GPT, other: GPT) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.8, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3},
    ],
    ids=str,
)
def test_weights_move_as_with_torchs_own(settings: dict[str, Any]) -> None:
    network, other = model(), model()
    built = optimizer(network, lr=0.05, **settings)
    roles, decay = other.roles(), settings.pop("weight_decay", 0.0)
    groups = [
        {
            "params": [
                p for n, p in other.named_parameters() if (roles[n] is Role.VECTOR) is still
            ],
            "weight_decay": 0.0 if still else decay,
        }
        for still in (False, True)
    ]
    theirs = torch.optim.SGD(groups, lr=0.05, **settings)
    for step in range(5):
        give_gradients(network, step, factor=8.0)
        built.step(divisor=torch.tensor(8.0), skip=torch.tensor(float(step == 2)))
        if step != 2:
            give_gradients(other, step)
            theirs.step()
    for mine, reference in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.0])
def test_a_skipped_step_leaves_everything_as_it_was(bad: float) -> None:
    network = model()
    built = optimizer(network, weight_decay=0.1)
    give_gradients(network, 1)
    built.step(**PLAIN)
    weights = [parameter.detach().clone() for parameter in network.parameters()]
    buffers = [entry.value.clone() for entry in built.entries()]
    give_gradients(network, 2, factor=bad)
    built.step(divisor=torch.tensor(1.0), skip=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(weights, network.parameters(), strict=True))
    assert all(torch.equal(a, b.value) for a, b in zip(buffers, built.entries(), strict=True))


def test_a_skipped_first_step_is_as_if_it_never_was() -> None:
    one, two = model(), model()
    for network, skips in ((one, (1.0, 0.0, 0.0)), (two, (0.0, 0.0))):
        built = optimizer(network)
        for number, skip in enumerate(skips):
            give_gradients(network, number - len(skips), factor=torch.inf if skip else 1.0)
            built.step(divisor=torch.tensor(1.0), skip=torch.tensor(skip))
    assert same_weights(one, two)


def test_it_resumes_to_the_bit() -> None:
    whole, halves = model(), model()
    built, first = optimizer(whole), optimizer(halves)
    for step in range(4):
        if step == 2:
            second = optimizer(halves)
            for entry in first.entries():
                assert second.expects(entry.kind, entry.key)
                second.load_entry(entry._replace(value=entry.value.clone()))
            first = second
        for network, one in ((whole, built), (halves, first)):
            give_gradients(network, step)
            one.step(**PLAIN)
    assert same_weights(whole, halves)


def test_without_momentum_there_is_no_state() -> None:
    network = model()
    built = optimizer(network, momentum=0.0)
    give_gradients(network, 1)
    built.step(**PLAIN)
    assert not list(built.entries())
    assert not built.expects("momentum_buffer", "embedding.weight")


def test_nesterov_needs_momentum() -> None:
    run = 'preset = "gpt2-nano"\nname = "a"\ndata.paths = "b"\ntrain.until = "9 steps"\n'
    words = ('optim.type="sgd"', "optim.momentum=0", "optim.nesterov=true")
    with pytest.raises(UserError, match=r"optim\.nesterov: has no effect when optim\.momentum"):
        load_text(run, words, place="run.toml")
