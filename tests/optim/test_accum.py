"""AccumAdamW and AccumAdam against their formulas in float64, and against AdamW."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import AccumAdamConfig, AccumAdamWConfig, AdamWConfig
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.optim import accum
from gristmill.optim.accum import AccumAdam
from gristmill.optim.build import build_optimizer
from gristmill.optim.spec import Optimizer, Placement, StateEntry

CONFIGS = {"accum-adamw": AccumAdamWConfig, "accum-adam": AccumAdamConfig}


def model() -> GPT:
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": 8}
    built = build_model(GPTConfig(**sizes), vocab=20, device=torch.device("cpu"))
    built.initialise(1)
    return built


def optimizer(network: GPT, kind: str = "accum-adamw", **settings: Any) -> AccumAdam:
    parameters = dict(network.named_parameters())
    built = build_optimizer(CONFIGS[kind](**settings), network, parameters=parameters)
    assert isinstance(built, AccumAdam)
    return built


def give_gradients(network: GPT, seed: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Set random gradients and return them in float64, before the factor."""
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for name, parameter in network.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator) * 0.1
        given[name], parameter.grad = gradient.double(), gradient * factor
    return given


def take_step(built: Optimizer, *, divisor: float = 1.0, skip: bool = False) -> None:
    built.step(divisor=torch.tensor(divisor), skip=torch.tensor(float(skip)))


def state_of(built: AccumAdam) -> dict[tuple[str, str], torch.Tensor]:
    return {(entry.kind, entry.key): entry.value.clone() for entry in built.entries()}


def weights_of(network: GPT) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


class Transcription:
    """One parameter moved by the published formulas in float64. Moments are stored multiplied by
    their beta, as there."""

    def __init__(self, weight: torch.Tensor, config: AccumAdamWConfig, *, decay: float) -> None:
        self.config, self.decay, self.weight = config, decay, weight.double()
        self.average, self.square, self.sum = (torch.zeros_like(self.weight) for _ in range(3))
        self.step_number = 0

    def step(self, gradient: torch.Tensor, *, lr: float, coupled: bool) -> None:
        config, k = self.config, self.config.accum
        self.step_number += 1
        if coupled:
            gradient = gradient + self.decay * self.weight
        else:
            self.weight = self.weight * (1 - lr * self.decay)
        self.sum = self.sum + gradient / k
        average = self.average + (1 - config.beta1) * gradient
        square = self.square + (1 - config.beta2) * gradient**2
        window = math.ceil(self.step_number / k)
        rate = lr / (1 - config.beta1**window)
        root = square.sqrt() / math.sqrt(1 - config.beta2**window)
        self.weight = self.weight - rate * average / (root + config.eps)
        if self.step_number % k == 0:
            self.average = config.beta1 * (self.average + (1 - config.beta1) * self.sum)
            self.square = config.beta2 * (self.square + (1 - config.beta2) * self.sum**2)
            self.sum = torch.zeros_like(self.sum)


@pytest.mark.parametrize("piece", [2**24, 300], ids=["at once", "in pieces"])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("k", [1, 3, 4])
def test_it_follows_the_formulas(
    monkeypatch: pytest.MonkeyPatch, kind: str, k: int, piece: int
) -> None:
    """With gradients divided, steps skipped on the device and a rate that changes."""
    monkeypatch.setattr(accum, "PIECE", piece)
    network, roles = model(), model().roles()
    built = optimizer(network, kind, accum=k, weight_decay=0.2, eps=1e-6)
    config = CONFIGS[kind](accum=k, eps=1e-6)
    expected = {
        name: Transcription(weight, config, decay=0.0 if roles[name] is Role.VECTOR else 0.2)
        for name, weight in weights_of(network).items()
    }
    for number in range(14):
        gradients, lr = give_gradients(network, number, factor=8.0), 0.01 / (1 + number)
        skip = number in (0, 2, 7)
        for group in built.param_groups:
            group["lr"] = lr
        take_step(built, divisor=8.0, skip=skip)
        for name, one in expected.items():
            if not skip:
                one.step(gradients[name], lr=lr, coupled=kind == "accum-adam")
    state = state_of(built)
    beta1, beta2 = config.beta1, config.beta2
    for name, parameter in network.named_parameters():
        one = expected[name]
        close = {"rtol": 1e-5, "atol": 2e-6}
        torch.testing.assert_close(parameter.detach().double(), one.weight, **close)
        stored = {
            "step": torch.tensor(11.0),
            "exp_avg": one.average / beta1,
            "exp_avg_sq": one.square / beta2,
            "grad_accum": one.sum,
        }
        for what, value in stored.items():
            torch.testing.assert_close(state[what, name].double(), value.double(), **close)


def test_weights_move_at_every_step_and_moments_only_when_a_window_is_full() -> None:
    network = model()
    built = optimizer(network, accum=3)
    for number in range(7):
        before, weights = state_of(built), weights_of(network)
        give_gradients(network, number)
        take_step(built)
        after, full = state_of(built), number % 3 == 2
        for name, parameter in network.named_parameters():
            assert not torch.equal(parameter, weights[name])
            assert bool(after["grad_accum", name].any()) is not full
            if before:
                same = torch.equal(before["exp_avg", name], after["exp_avg", name])
                assert same is not full


def test_one_step_a_window_is_adamw() -> None:
    network, other = model(), model()
    built = optimizer(network, accum=1, lr=0.01, beta2=0.95, weight_decay=0.1)
    config = AdamWConfig(lr=0.01, beta2=0.95, weight_decay=0.1)
    theirs = build_optimizer(config, other, parameters=dict(other.named_parameters()))
    for number in range(6):
        for each, moving in ((network, built), (other, theirs)):
            give_gradients(each, number)
            take_step(moving, divisor=4.0, skip=number == 2)
    for mine, reference in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_skipped_step_leaves_everything(kind: str, steps: int) -> None:
    """Even where a gradient is not finite, and at each place of a window."""
    network = model()
    built = optimizer(network, kind, accum=3, weight_decay=0.1)
    for number in range(steps):
        give_gradients(network, number)
        take_step(built)
    give_gradients(network, 9, factor=math.inf)
    weights, state = weights_of(network), state_of(built)
    take_step(built, skip=True)
    assert all(torch.equal(weights[name], one) for name, one in network.named_parameters())
    left = state_of(built)
    for key, value in left.items():
        assert torch.equal(value, state.get(key, torch.zeros_like(value)))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("steps", [4, 6])
def test_it_resumes_to_the_bit(kind: str, steps: int) -> None:
    """In the middle of a window and at the end of one."""
    network, copy = model(), model()
    built = optimizer(network, kind, accum=3, weight_decay=0.1)
    for number in range(steps):
        give_gradients(network, number)
        take_step(built)
    resumed = optimizer(copy, kind, accum=3, weight_decay=0.1)
    copy.load_state_dict(network.state_dict())
    for (what, key), value in state_of(built).items():
        assert resumed.expects(what, key)
        resumed.load_entry(StateEntry(what, key, value))
    for number in range(steps, steps + 5):
        for each, moving in ((network, built), (copy, resumed)):
            give_gradients(each, number)
            take_step(moving)
    first, second = state_of(built), state_of(resumed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    for mine, theirs in zip(network.parameters(), copy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_parameter_has_the_declared_kinds() -> None:
    network = model()
    built = optimizer(network)
    assert state_of(built) == {}
    give_gradients(network, 1)
    take_step(built)
    kinds = {(kind, key) for key, kinds in built.stepped_kinds().items() for kind in kinds}
    assert kinds == set(state_of(built))
    assert built.placements["step"] is Placement.SCALAR
    assert built.placements["grad_accum"] is Placement.SHARDED


def test_a_parameter_without_a_gradient_stays_and_its_window_ends() -> None:
    network = model()
    built = optimizer(network, accum=2, weight_decay=0.1)
    name, still = next(iter(network.named_parameters()))
    for number in range(3):
        give_gradients(network, number)
        if number == 1:
            still.grad, before = None, still.detach().clone()
        take_step(built)
        if number == 1:
            state = state_of(built)
            assert torch.equal(still, before)
            assert state["exp_avg", name].any() and not state["grad_accum", name].any()
    assert {float(one) for (kind, _), one in state_of(built).items() if kind == "step"} == {3.0}


def test_a_parameter_that_comes_later_joins_the_window() -> None:
    network = model()
    built = optimizer(network, accum=4)
    late = next(network.parameters())
    for number in range(2):
        give_gradients(network, number)
        if number == 0:
            late.grad = None
        take_step(built)
    assert {float(one) for (kind, _), one in state_of(built).items() if kind == "step"} == {2.0}


RUN = """
name = "accum"
preset = "gpt2-nano"
data.paths = "tokens"
train.until = "10 steps"
train.batch = 4
optim.type = "accum-adamw"
optim.accum = 8
"""


def test_settings_of_a_run_file() -> None:
    optim = load_text(RUN, (), place="run.toml").optim
    assert isinstance(optim, AccumAdamWConfig)
    assert (optim.accum, optim.beta1, optim.beta2) == (8, 0.9, 0.98)
    assert optim.state_bytes(Role.MATRIX) == 12
    with pytest.raises(UserError, match=r"optim\.accum: .* greater than or equal to 1"):
        load_text(RUN, ("optim.accum=0",), place="run.toml")
