"""Muon against its formulas in float64, and its Adam against torch's."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import MuonConfig
from gristmill.config.resolve import resolve
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.models.loss_terms import LossTerms
from gristmill.optim import muon
from gristmill.optim.build import build_optimizer
from gristmill.optim.matrix import MatrixOptimizer
from gristmill.optim.muon import POLAR_EXPRESS, QUINTIC, StepScalars
from gristmill.optim.schedule import build_schedule


def model(**settings: Any) -> GPT:
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": 8, **settings}
    built = build_model(GPTConfig(**sizes), vocab=20, device=torch.device("cpu"))
    built.initialise(1)
    return built


PLAIN = {"divisor": torch.tensor(1.0), "skip": torch.tensor(0.0)}
"""A step that is neither unscaled, clipped nor skipped."""


def named(network: GPT) -> dict[str, torch.nn.Parameter]:
    return dict(network.named_parameters())


def optimizer(network: GPT, **settings: Any) -> MatrixOptimizer:
    built = build_optimizer(MuonConfig(**settings), network, parameters=named(network))
    assert isinstance(built, MatrixOptimizer)
    return built


def give_gradients(network: GPT, seed: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Set random gradients and return them in float64, before the factor."""
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for name, parameter in network.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        given[name] = gradient.double()
        parameter.grad = gradient * factor
    return given


def copied(network: GPT) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def state_of(built: MatrixOptimizer) -> list[torch.Tensor]:
    return [value.clone() for kinds in built.state.values() for value in kinds.values()]


# ------------------------------------------------------------------ matrices


class Transcription:
    """One parameter moved by the formulas, in float64, with no batching and no thrift."""

    def __init__(self, weight: torch.Tensor, rows: tuple[int, ...], config: MuonConfig) -> None:
        self.config, self.rows = config, rows
        self.weight = weight.double()
        self.momentum = torch.zeros_like(self.weight)
        self.moments = [torch.zeros(()).double() for _ in rows]

    def step(self, gradient: torch.Tensor, *, lr: float, momentum: float) -> None:
        self.momentum = momentum * self.momentum + (1 - momentum) * gradient
        u = self.momentum
        if self.config.nesterov:
            u = (1 - momentum) * gradient + momentum * self.momentum
        begin = 0
        for part, count in enumerate(self.rows):
            piece = slice(begin, begin + count)
            self.weight[piece] -= self.change(part, u[piece], self.weight[piece], lr)
            begin += count

    def change(self, part: int, u: torch.Tensor, weight: torch.Tensor, lr: float) -> torch.Tensor:
        config, (rows, columns) = self.config, u.shape
        x = self.orthogonal(u)
        if config.normalise == "neurons":
            dim = 1 if rows >= columns else 0
            beta2 = 0.95 if config.beta2 is None else config.beta2
            fresh = (x**2).mean(dim=dim, keepdim=True)
            self.moments[part] = beta2 * self.moments[part] + (1 - beta2) * fresh
            equal = x / self.moments[part].sqrt()
            x = equal * x.norm() / equal.norm()
        scale = {
            "shape": math.sqrt(max(1, rows / columns)),
            "rms": 0.2 * math.sqrt(max(rows, columns)),
        }[config.scale]
        decay = lr * config.weight_decay * weight
        if config.cautious:
            decay = decay * (lr / config.lr) * (x.sign() == weight.sign())
        return lr * scale * x + decay

    def orthogonal(self, u: torch.Tensor) -> torch.Tensor:
        best = self.config.coefficients == "polar-express"
        x = u / u.norm() / (1.02 if best else 1.0)
        for step in range(self.config.steps):
            a, b, c = POLAR_EXPRESS[step] if best else QUINTIC
            products = x.T @ x
            x = a * x + b * x @ products + c * x @ products @ products
        return x


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"nesterov": False, "weight_decay": 0.0},
    "nesterov": {"weight_decay": 0.0},
    "decay": {"weight_decay": 2.0},
    "cautious": {"weight_decay": 2.0, "cautious": True},
    "quintic, rms": {"coefficients": "quintic", "scale": "rms", "lr": 0.01},
    "few steps": {"steps": 3},
    "neurons": {"normalise": "neurons", "beta2": 0.8},
    "everything": {"normalise": "neurons", "cautious": True, "weight_decay": 1.0},
    "whole": {"split": False},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 1, "activation": "swiglu"}], ids=str)
def test_matrices_move_by_the_formula(settings: dict[str, Any], sizes: dict[str, Any]) -> None:
    network, config = model(**sizes), MuonConfig(**settings)
    built = optimizer(network, **settings)
    parts = network.stacked_rows() if config.split else {}
    plain = {
        name: Transcription(p.detach(), parts.get(name, (p.shape[0],)), config)
        for name, p in network.named_parameters()
        if network.roles()[name] is Role.MATRIX
    }
    assert len(plain) == 8
    for step in range(4):
        lr, momentum = config.lr * (1 - step / 5), 0.8 + step / 30
        for group in built.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
            if group["role"] is Role.MATRIX:
                group["momentum"] = momentum
        gradients = give_gradients(network, step)
        built.step(**PLAIN)
        for name, one in plain.items():
            one.step(gradients[name], lr=lr, momentum=momentum)
    for name, one in plain.items():
        found = network.get_parameter(name).detach().double()
        # fp32 with its rounding through five steps, against changes of about lr.
        torch.testing.assert_close(found, one.weight, rtol=0, atol=2e-5 * config.lr / 0.02)


def test_stacked_matrices_are_orthogonalised_each_for_itself() -> None:
    network = model(kv_heads=1)
    before = copied(network)
    give_gradients(network, 1)
    optimizer(network, weight_decay=0.0, steps=8).step(**PLAIN)
    moved = (
        network.blocks["0"].attention.qkv.weight.detach() - before["blocks.0.attention.qkv.weight"]
    )
    for part in moved.split((16, 8, 8)):
        values = torch.linalg.svdvals(part) / 0.02
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-3)
    whole = torch.linalg.svdvals(moved) / 0.02
    assert whole.max() > 1.2


def test_the_model_knows_its_stacked_matrices() -> None:
    assert model(kv_heads=1, activation="swiglu").stacked_rows() == {
        "blocks.0.attention.qkv.weight": (16, 8, 8),
        "blocks.0.mlp.up.weight": (64, 64),
        "blocks.1.attention.qkv.weight": (16, 8, 8),
        "blocks.1.mlp.up.weight": (64, 64),
    }
    assert set(model().stacked_rows().values()) == {(16, 16, 16)}


def test_a_group_in_pieces_moves_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parted = model(layers=5), model(layers=5)
    for network in (whole, parted):
        if network is parted:
            monkeypatch.setattr(muon, "PIECE", 2 * 48 * 16)
        built = optimizer(network, normalise="neurons")
        for step in range(2):
            give_gradients(network, step)
            built.step(**PLAIN)
    for one, two in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_small_chunks_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "PIECE", 100)
    sizes = [30, 70, 1, 120, 40, 60]
    scalars = StepScalars(*torch.zeros(6))
    matrices = [torch.nn.Parameter(torch.empty(size, 1)) for size in sizes]
    several = [muon.Chunk({}, scalars, [matrix]) for matrix in matrices]
    packed = [[len(one.parameters[0]) for one in together] for together in muon.packed(several)]
    assert packed == [[30, 70], [1], [120], [40, 60]]


def test_pieces_are_few_and_even() -> None:
    for count, size, lengths in ((7, 2**18, [7]), (9, 2**25, [3, 3, 3]), (2, 2**28, [1, 1])):
        found = muon.pieces(range(count), size=size)
        assert [len(piece) for piece in found] == lengths


@pytest.mark.parametrize(
    ("cautious", "graphs"), [(False, 1), pytest.param(True, 5, marks=pytest.mark.slow)]
)
def test_a_compiled_step_is_made_once_and_does_the_same(
    monkeypatch: pytest.MonkeyPatch, cautious: bool, graphs: int
) -> None:
    """With torch's tracing but not its code generation, which takes a minute on a CPU; a checkpoint
    is loaded on the way."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    muon._compiled.cache_clear()
    counters.clear()
    plain, traced = model(kv_heads=1), model(kv_heads=1)
    settings = MuonConfig(normalise="neurons", cautious=cautious)
    for network, compiled in ((plain, False), (traced, True)):
        built = build_optimizer(settings, network, parameters=named(network), compiled=compiled)
        for step in range(4):
            for group in built.param_groups:
                group["lr"] *= 0.9
                if "momentum" in group:
                    group["momentum"] = 0.8 + step / 30
            give_gradients(network, step)
            built.step(divisor=torch.tensor(1.0 + step), skip=torch.tensor(step % 2.0))
            if step == 1:
                for entry in list(built.entries()):
                    built.load_entry(entry._replace(value=entry.value.clone()))
    muon._compiled.cache_clear()
    assert counters["stats"]["unique_graphs"] == graphs  # moves are one for each shape
    for one, two in zip(plain.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_a_model_learns() -> None:
    network = model(width=32, context=16)
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, 20, (8, 17), generator=generator)
    built, losses = optimizer(network), []
    for _ in range(40):
        terms = LossTerms(scale=torch.tensor(1 / 128))
        loss = network(tokens_BT[:, :-1], targets_BT=tokens_BT[:, 1:], terms=terms)
        network.zero_grad()
        loss.scaled.backward()
        built.step(**PLAIN)
        losses.append(loss.scaled.item())
    assert losses[0] == pytest.approx(math.log(20), rel=0.05)
    assert losses[-1] < 0.3 * losses[0]


# ------------------------------------------------------------------ Adam


def test_other_roles_move_as_with_fused_adamw() -> None:
    network, other = model(tie_head=False), model(tie_head=False)
    rates = {Role.EMBEDDING: 0.3, Role.HEAD: 0.01, Role.VECTOR: 0.02}
    built = optimizer(
        network, embedding_lr=0.3, head_lr=0.01, vector_lr=0.02, adam_weight_decay=0.1
    )
    roles = other.roles()
    adam = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in other.named_parameters() if roles[n] is role],
                "lr": lr,
                "weight_decay": 0.0 if role is Role.VECTOR else 0.1,
            }
            for role, lr in rates.items()
        ],
        betas=(0.8, 0.95),
        eps=1e-10,
        fused=True,
    )
    for step in range(4):
        for one in (network, other):
            give_gradients(one, step, factor=8.0)
        divisor, skip = torch.tensor(8.0), torch.tensor(1.0 if step == 2 else 0.0)
        built.step(divisor=divisor, skip=skip)
        vars(adam).update(grad_scale=divisor, found_inf=skip)
        adam.step()
    for name, role in roles.items():
        if role is not Role.MATRIX:
            mine, theirs = network.get_parameter(name), other.get_parameter(name)
            assert torch.equal(mine, theirs), name
            assert built.state[mine].keys() == adam.state[theirs].keys()
            for kind, value in adam.state[theirs].items():
                assert torch.equal(built.state[mine][kind], value), (name, kind)


# ------------------------------------------------------------------ decisions of the device


@pytest.mark.parametrize("normalise", ["none", "neurons"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_step_leaves_everything_as_it_was(normalise: str, bad: float) -> None:
    network = model()
    built = optimizer(network, normalise=normalise)
    give_gradients(network, 1)
    built.step(divisor=torch.tensor(1.0), skip=torch.tensor(0.0))
    weights, state = copied(network), state_of(built)
    give_gradients(network, 2, factor=bad)
    built.step(divisor=torch.tensor(1.0), skip=torch.tensor(1.0))
    assert all(torch.equal(weights[n], p) for n, p in network.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(state, state_of(built), strict=True))


def test_a_skipped_first_step_is_as_if_it_never_was() -> None:
    one, two = model(), model()
    for network, skips in ((one, (1.0, 0.0)), (two, (0.0,))):
        built = optimizer(network, normalise="neurons")
        for number, skip in enumerate(skips):
            give_gradients(network, number - len(skips))
            built.step(divisor=torch.tensor(1.0), skip=torch.tensor(skip))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_gradients_are_divided() -> None:
    one, two = model(), model()
    for network, factor in ((one, 1.0), (two, 1024.0)):
        built = optimizer(network, adam_eps=0.1)
        for step in range(3):
            give_gradients(network, step, factor)
            built.step(divisor=torch.tensor(factor), skip=torch.tensor(0.0))
    # A power of two divides without rounding.
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_parameters_without_a_gradient_stay() -> None:
    network = model()
    built = optimizer(network)
    before = copied(network)
    give_gradients(network, 1)
    still = {"blocks.0.mlp.up.weight", "embedding.weight"}
    for name in still:
        network.get_parameter(name).grad = None
    built.step(**PLAIN)
    for name, parameter in network.named_parameters():
        assert torch.equal(before[name], parameter) is (name in still), name


# ------------------------------------------------------------------ groups, rates, state


@pytest.mark.parametrize("settings", [{}, {"tie_head": False, "bias": False, "qk_norm": True}])
def test_every_parameter_is_in_one_group_of_its_role(settings: dict[str, Any]) -> None:
    network = model(**settings)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = {}
    for group in optimizer(network).param_groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in found
            found[names[id(parameter)]] = group["role"]
    assert found == network.roles()


def test_frozen_parameters_are_left_out() -> None:
    network = model()
    network.embedding.weight.requires_grad_(False)
    chosen = [p for group in optimizer(network).param_groups for p in group["params"]]
    assert all(parameter is not network.embedding.weight for parameter in chosen)


RUN = """\
name = "trial"
preset = "gpt2-nano"
data.paths = "tokens/books"
train.until = "200 steps"
train.batch = 12
optim.type = "muon"
"""


def test_rates_of_roles_that_the_model_lacks_are_refused() -> None:
    words = ("optim.table_lr=0.1", "optim.head_lr=0.1", "optim.embedding_lr=0.1")
    with pytest.raises(UserError) as error:
        load_text(RUN, words, place="run.toml")
    text = str(error.value)
    assert "optim.table_lr: has no effect because the model has no value embeddings" in text
    assert "optim.head_lr" in text and "embedding_lr: " not in text


def rates_at(step: int, *words: str) -> dict[Role, tuple[float, float | None]]:
    config = load_text(RUN, words, place="run.toml")
    assert isinstance(config.optim, MuonConfig)
    numbers = resolve(config, vocab=300)
    network = model()
    built = build_optimizer(config.optim, network, parameters=named(network))
    build_schedule(config, numbers).apply(built, numbers.progress_at(step))
    return {g["role"]: (g["lr"], g.get("momentum")) for g in built.param_groups}


def test_all_rates_follow_one_schedule() -> None:
    words = ("optim.lr=0.02", "optim.embedding_lr=0.3", "schedule.min_lr=0.002")
    peak = rates_at(0, *words, "schedule.warmup=0")
    assert peak[Role.MATRIX][0] == pytest.approx(0.02)
    assert peak[Role.EMBEDDING][0] == pytest.approx(0.3)
    assert peak[Role.VECTOR][0] == pytest.approx(0.004)
    end = rates_at(200, *words)
    assert end[Role.MATRIX][0] == pytest.approx(0.002)
    assert end[Role.EMBEDDING][0] == pytest.approx(0.03)
    assert end[Role.VECTOR][0] == pytest.approx(0.0004)


def test_momentum_rises_with_progress_alone() -> None:
    words = ("optim.momentum_start=0.5", "optim.momentum=0.9", "optim.momentum_warmup=40 steps")
    found = [rates_at(step, *words)[Role.MATRIX][1] for step in (0, 10, 20, 39, 40, 41, 500)]
    assert found == pytest.approx([0.5, 0.6, 0.7, 0.89, 0.9, 0.9, 0.9])
    assert rates_at(3, *words)[Role.EMBEDDING][1] is None
    assert rates_at(0, "optim.momentum_warmup=0")[Role.MATRIX][1] == 0.95
    assert rates_at(0)[Role.MATRIX][1] == 0.85
    by_tokens = rates_at(20, *words[:2], "optim.momentum_warmup=0.2")
    assert by_tokens[Role.MATRIX][1] == pytest.approx(0.7)


def test_momentum_never_falls() -> None:
    assert {rates_at(step, "optim.momentum=0.5")[Role.MATRIX][1] for step in (0, 9, 400)} == {0.5}
    with pytest.raises(UserError, match=r"optim\.momentum_start: 0\.85 is above optim\.momentum"):
        rates_at(0, "optim.momentum=0.5", "optim.momentum_start=0.85")


def test_the_schedule_leaves_the_momentum_of_other_optimizers() -> None:
    config = load_text(RUN, ('optim.type="adamw"',), place="run.toml")
    numbers = resolve(config, vocab=300)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.3)
    build_schedule(config, numbers).apply(plain, Progress())
    assert plain.param_groups[0]["momentum"] == 0.3


MISTAKES = {
    "optim.momentum_start": ("optim.momentum_start=0.5", "optim.momentum_warmup=0"),
    "optim.beta2": ("optim.beta2=0.9",),
    "optim.cautious": ("optim.cautious=true", "optim.weight_decay=0"),
    "optim.head_lr": ("optim.head_lr=0.01",),
    "optim.vector_lr": ("optim.vector_lr=0.01", "model.bias=false", "model.norm_gain=false"),
    "optim.lr": ("optim.scale=rms",),
    "optim.beta1": ("optim.beta1=0.9",),
}


@pytest.mark.parametrize(("where", "words"), MISTAKES.items(), ids=MISTAKES.keys())
def test_settings_that_would_not_act_are_refused(where: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        load_text(RUN, words, place="run.toml")
    assert f": {where}: " in str(error.value)


def test_the_same_settings_where_they_act() -> None:
    words = (
        "optim.momentum_start=0.5", "optim.normalise=neurons", "optim.beta2=0.9",
        "optim.cautious=true", "optim.head_lr=0.01", "model.tie_head=false",
        "optim.scale=rms", "optim.lr=6e-4",
    )  # fmt: skip
    assert load_text(RUN, words, place="run.toml").optim.lr == 6e-4
    for vectors in ("bias=true", "norm_gain=true", "value_embeddings=1"):
        bare = ("model.bias=false", "model.norm_gain=false", f"model.{vectors}")
        load_text(RUN, (*bare, "optim.vector_lr=0.01"), place="run.toml")


@pytest.mark.parametrize(("normalise", "lines"), [("none", 0), ("neurons", 1)])
def test_what_the_state_takes(normalise: str, lines: int) -> None:
    """4 bytes for each number of a matrix, 8 for each of the rest; lines and counters are few."""
    network = model()
    built = optimizer(network, normalise=normalise)
    give_gradients(network, 1)
    built.step(**PLAIN)
    roles = network.roles()
    for name, parameter in network.named_parameters():
        taken = sum(value.nbytes for value in built.state[parameter].values())
        if roles[name] is Role.MATRIX:
            parts = network.stacked_rows().get(name, (parameter.shape[0],))
            longer = sum(max(rows, parameter.shape[1]) for rows in parts)
            assert taken == 4 * parameter.numel() + 4 * lines * longer
        else:
            assert taken == 8 * parameter.numel() + 4
        assert all(value.dtype == torch.float32 for value in built.state[parameter].values())


def test_replaced_state_is_gone_on_with() -> None:
    whole, parted = model(), model()
    built = optimizer(whole, normalise="neurons")
    first = optimizer(parted, normalise="neurons")
    for step in range(2):
        for network, stepped in ((whole, built), (parted, first)):
            give_gradients(network, step)
            stepped.step(**PLAIN)
    second = optimizer(parted, normalise="neurons")
    for parameter, kinds in first.state.items():
        for kind, value in kinds.items():
            second.state[parameter][kind] = value.clone()
    for network, stepped in ((whole, built), (parted, second)):
        give_gradients(network, 2)
        stepped.step(**PLAIN)
    pairs = zip(whole.parameters(), parted.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_lines_begin_anew_when_matrices_are_split_in_another_way() -> None:
    network = model(kv_heads=1)
    weight = network.blocks["0"].attention.qkv.weight
    lengths = []
    state: dict[Any, Any] = {}
    for split in (True, False):
        built = optimizer(network, normalise="neurons", split=split)
        built.state.update(state)
        give_gradients(network, 1)
        built.step(**PLAIN)
        state = dict(built.state)
        lengths.append(len(state[weight]["second_moment"]))
    assert lengths == [16 * 3, 16 + 8 + 8]
