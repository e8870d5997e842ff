"""SOAP with AdamW and with Muon against its formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.model import GPTConfig, Role
from gristmill.config.optim import AdamWConfig, MuonConfig
from gristmill.config.resolve import Resolved, resolve
from gristmill.config.rules import config_warnings
from gristmill.config.schema import RunConfig
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.optim import muon, soap
from gristmill.optim.adamw import AdamW
from gristmill.optim.build import build_optimizer
from gristmill.optim.factors import decompose, refresh_basis
from gristmill.optim.matrix import MatrixOptimizer
from gristmill.optim.muon import POLAR_EXPRESS
from gristmill.optim.schedule import build_schedule
from gristmill.optim.soap import part_name
from gristmill.optim.spec import Placement

PLAIN = {"divisor": torch.tensor(1.0), "skip": torch.tensor(0.0)}
SKIPPED = {"divisor": torch.tensor(1.0), "skip": torch.tensor(1.0)}


def model(**settings: Any) -> GPT:
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": 8, **settings}
    built = build_model(GPTConfig(**sizes), vocab=20, device=torch.device("cpu"))
    built.initialise(1)
    return built


def optimizer(
    network: torch.nn.Module,
    kind: str,
    *,
    compiled: bool | None = None,
    own: dict[str, Any] | None = None,
    **settings: Any,
) -> MatrixOptimizer:
    """`own` are the optimizer's settings, the others SOAP's."""
    table = {"type": "soap", **settings}
    config = {"adamw": AdamWConfig, "muon": MuonConfig}[kind](preconditioner=table, **own or {})
    built = build_optimizer(
        config, network, parameters=dict(network.named_parameters()), compiled=compiled
    )
    assert isinstance(built, MatrixOptimizer)
    return built


def give_gradients(
    network: torch.nn.Module, seed: int, factor: float = 1.0
) -> dict[str, torch.Tensor]:
    """Set random gradients, whose rows and columns have sizes of their own, and return them in
    float64, before the factor."""
    generator, given = torch.Generator().manual_seed(seed), {}
    for name, parameter in network.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if gradient.dim() == 2:
            rows, columns = gradient.shape
            gradient *= torch.linspace(1, 2, rows)[:, None] * torch.linspace(0.5, 2, columns)
        given[name] = gradient.double()
        parameter.grad = gradient * factor
    return given


def weights_of(network: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


def state_of(built: MatrixOptimizer) -> dict[tuple[str, str], torch.Tensor]:
    return {(one.kind, one.key): one.value.clone() for one in built.entries()}


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def refresh_at(built: MatrixOptimizer, step: int, every: int) -> None:
    for group in built.param_groups:
        if "refresh" in group:
            group["refresh"] = step % every == 0


# ------------------------------------------------------------------ against the formulas


class Transcription:
    """One part moved by the formulas, in float64."""

    def __init__(self, weight: torch.Tensor, *, muon: bool, max_dim: int, decay: float) -> None:
        self.weight, self.muon, self.decay = weight.double(), muon, decay
        self.mu, self.beta2 = (0.9, 0.9) if muon else (0.9, 0.95)
        self.m, self.v = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.sides = [dim for dim in (0, 1) if self.weight.shape[dim] <= max_dim]
        self.factors: dict[int, torch.Tensor] = {}
        self.bases = {dim: torch.eye(self.weight.shape[dim]).double() for dim in (0, 1)}
        self.t = 0

    def begin(self, dim: int, basis: torch.Tensor, g: torch.Tensor) -> None:
        """The first basis is not unique: where the gradient is zero, any will do. So it is taken
        over, if it is orthogonal and diagonalises the first factor."""
        self.bases[dim] = torch.linalg.qr(basis.double()).Q * 1.0
        self.bases[dim] *= (self.bases[dim] * basis).sum(dim=0).sign()
        torch.testing.assert_close(self.bases[dim], basis.double(), rtol=0, atol=1e-5)
        diagonal = basis.double().T @ (g @ g.T if dim == 0 else g.T @ g) @ basis.double()
        size = diagonal.abs().max().item()
        torch.testing.assert_close(
            diagonal, torch.diag(diagonal.diagonal()), rtol=0, atol=1e-5 * size
        )

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        return self.bases[0].T @ x @ self.bases[1]

    def step(self, g: torch.Tensor, *, lr: float, refresh: bool) -> None:
        self.t += 1
        samples = {0: g @ g.T, 1: g.T @ g}
        for dim in self.sides:
            if self.t == 1:
                self.factors[dim] = samples[dim]
            memory = min(0.7, 1 - 1 / self.t)
            self.factors[dim] = memory * self.factors[dim] + (1 - memory) * samples[dim]
        self.m = self.mu * self.m + (1 - self.mu) * g
        u = self.mu * self.m + (1 - self.mu) * g if self.muon else self.m
        self.v = self.beta2 * self.v + (1 - self.beta2) * self.rotated(g) ** 2
        root = (self.v / (1 - self.beta2**self.t)).sqrt()
        eps = 1e-3 + 0.01 * root.max() if self.t == 1 else 1e-3
        u = self.rotated(u) / (1 - self.mu**self.t) / (root + eps)
        u = self.bases[0] @ u @ self.bases[1].T
        if self.muon:
            x = u / u.norm() / 1.02
            for a, b, c in POLAR_EXPRESS:
                x = a * x + (b * x @ x.T + c * x @ x.T @ x @ x.T) @ x
            u = x * math.sqrt(max(1, x.shape[0] / x.shape[1]))
        self.weight = self.weight - lr * u - lr * self.decay * self.weight
        if refresh and self.t > 1:
            for dim in self.sides:
                self.refresh(dim)

    def refresh(self, dim: int) -> None:
        factor, basis = self.factors[dim], self.bases[dim]
        order = torch.diagonal(basis.T @ factor @ basis).argsort(descending=True)
        self.bases[dim] = torch.linalg.qr(factor @ basis[:, order]).Q
        self.v = self.v[order] if dim == 0 else self.v[:, order]


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("max_dim", [8192, 20])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_matrices_move_by_the_formula(kind: str, max_dim: int, steps: int) -> None:
    """Stacked parts each for themselves; 20 leaves out the longer side of the MLP."""
    network, muon = model(kv_heads=1, activation="swiglu", mlp_width=24), kind == "muon"
    own = {"weight_decay": 0.1, "lr": 0.01} | ({"momentum": 0.9} if muon else {})
    built = optimizer(network, kind, own=own, decay=0.7, eps=1e-3, max_dim=max_dim)
    plain = {
        name: [
            Transcription(part, muon=muon, max_dim=max_dim, decay=0.1)
            for part in parameter.detach().split(
                network.stacked_rows().get(name, parameter.shape[:1])
            )
        ]
        for name, parameter in network.named_parameters()
        if network.roles()[name] is Role.MATRIX
    }
    assert len(plain) == 8 and sum(map(len, plain.values())) == 14
    for step in range(steps):
        refresh_at(built, step, 3)
        gradients = give_gradients(network, step, factor=8.0)
        built.step(divisor=torch.tensor(8.0), skip=torch.tensor(0.0))
        state = state_of(built)
        for name, parts in plain.items():
            heights = [len(one.weight) for one in parts]
            whole = gradients[name].split(heights)
            for number, (one, gradient) in enumerate(zip(parts, whole, strict=True)):
                key = part_name(name, number, parts=len(parts))
                for dim in one.sides if step == 0 else ():
                    one.begin(dim, state[f"{('row', 'column')[dim]}_basis", key], gradient)
                one.step(gradient, lr=0.01, refresh=step % 3 == 0)
    for name, parts in plain.items():
        found = network.get_parameter(name).detach().double()
        expected = torch.cat([one.weight for one in parts])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_the_rest_moves_as_with_adamw() -> None:
    network, other = model(), model()
    built = optimizer(network, "adamw")
    plain = build_optimizer(AdamWConfig(), other, parameters=dict(other.named_parameters()))
    for step in range(3):
        for one, its in ((network, built), (other, plain)):
            give_gradients(one, step)
            its.step(**PLAIN)
    for name, role in network.roles().items():
        equal = torch.equal(network.get_parameter(name), other.get_parameter(name))
        assert equal is (role is not Role.MATRIX), name


class OneMatrix(torch.nn.Module):
    """|W a - b|^2 for random a and b, whose gradient turns with W."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        super().__init__()
        self.generator, self.left, self.right = torch.Generator().manual_seed(1), left, right
        self.weight = torch.nn.Parameter(left @ self.random(6, 6) @ right.T)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def roles(self) -> dict[str, Role]:
        return {"weight": Role.MATRIX}

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        return {}

    def backward(self) -> None:
        a, b = self.right @ self.random(6, 9), self.left @ self.random(6, 9)
        self.weight.grad = 2 * (self.weight.detach() @ a - b) @ a.T


@pytest.mark.parametrize("kind", ["soap", "soap-muon", "adamw"])
def test_results_turn_with_the_problem(kind: str) -> None:
    """Which is what the eigenbasis is for: Adam's results depend on the axes."""
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(6, 6, generator=generator)).Q for _ in range(2))
    results = []
    for turn in ((torch.eye(6), torch.eye(6)), (left, right)):
        network = OneMatrix(*turn)
        built: Any = build_optimizer(
            AdamWConfig(lr=0.01), network, parameters={"weight": network.weight}
        )
        if kind != "adamw":
            base = "muon" if kind == "soap-muon" else "adamw"
            built = optimizer(network, base, own={"lr": 0.01})
        for _ in range(12):
            network.backward()
            built.step(**PLAIN)
        results.append(network.weight.detach())
    off = (left @ results[0] @ right.T - results[1]).abs().max().item()
    assert off > 0.05 if kind == "adamw" else off < 1e-3, off


# ------------------------------------------------------------------ the basis


def test_a_refresh_reorders_second_moments() -> None:
    factor = torch.diag(torch.tensor([1.0, 9.0, 4.0]))
    state = {
        "row_factor": factor,
        "row_basis": torch.eye(3),
        "soap_exp_avg_sq": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    }
    soap.refresh_parts([state], torch.tensor(0.0))
    assert state["soap_exp_avg_sq"].tolist() == [[3.0, 4.0], [5.0, 6.0], [1.0, 2.0]]
    expected = torch.eye(3)[:, [1, 2, 0]]
    torch.testing.assert_close(state["row_basis"].abs(), expected)


def test_refreshes_approach_the_eigenvectors() -> None:
    generator = torch.Generator().manual_seed(4)
    sample = torch.randn(12, 40, generator=generator) * torch.linspace(1, 6, 12)[:, None]
    factor = sample @ sample.T
    basis = torch.eye(12)
    for _ in range(300):
        basis, _ = refresh_basis(factor, basis)
    expected = decompose(factor).basis.flip(1)
    torch.testing.assert_close((basis.T @ expected).abs(), torch.eye(12), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_factor_of_low_rank_gives_an_orthogonal_basis(rank: int) -> None:
    sample = torch.randn(8, max(1, rank), generator=torch.Generator().manual_seed(5))
    factor = sample @ sample.T * 1e-12 if rank else torch.zeros(8, 8)
    basis = decompose(factor).basis
    for _ in range(5):
        basis, order = refresh_basis(factor, basis)
        assert sorted(order.tolist()) == list(range(8))
        torch.testing.assert_close(basis.T @ basis, torch.eye(8), rtol=0, atol=1e-5)


def test_a_long_side_has_no_basis() -> None:
    network = model()
    built = optimizer(network, "muon", max_dim=16)
    give_gradients(network, 1)
    built.step(**PLAIN)
    kinds = {kind for kind, key in state_of(built) if key == "blocks.0.mlp.up.weight"}
    assert kinds == {"momentum", "soap_step", "soap_exp_avg_sq", "column_factor", "column_basis"}


def test_a_matrix_waits_for_its_first_gradient() -> None:
    """Such as that of the attention before an output projection that starts at zero."""
    network, name = model(), "blocks.0.attention.out.weight"
    built = optimizer(network, "adamw", own={"weight_decay": 0.0})
    before = network.get_parameter(name).detach().clone()
    for step in range(2):
        give_gradients(network, step)
        network.get_parameter(name).grad = torch.zeros(16, 16)
        built.step(**PLAIN)
    assert torch.equal(network.get_parameter(name), before)
    assert {kind for kind, key in state_of(built) if key == name} == {"momentum"}
    gradient = give_gradients(network, 2)[name]
    built.step(**PLAIN)
    expected = decompose((gradient @ gradient.T).float()).basis
    torch.testing.assert_close(
        (state_of(built)["row_basis", name].T @ expected).abs(), torch.eye(16), rtol=0, atol=1e-2
    )
    # All of its singular values become about 1, and rounding stays out of it.
    values = torch.linalg.svdvals(network.get_parameter(name).detach() - before) / 6e-4
    assert values[:12].min() > 0.8 and values.max() < 1.01


# ------------------------------------------------------------------ decisions of the device


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_step_leaves_everything_as_it_was(kind: str, bad: float) -> None:
    network = model()
    built = optimizer(network, kind)
    for step in range(2):
        give_gradients(network, step)
        built.step(**PLAIN)
    weights, state = weights_of(network), state_of(built)
    give_gradients(network, 2, factor=bad)
    built.step(**SKIPPED)
    assert same(weights, weights_of(network))
    after = state_of(built)
    assert state.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in state.items())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_skipped_first_steps_are_as_if_they_never_were(kind: str) -> None:
    one, two = model(), model()
    for network, skips in ((one, 3), (two, 0)):
        built = optimizer(network, kind)
        for step in range(-skips, 3):
            give_gradients(network, step + 10, factor=math.inf if step < 0 else 1.0)
            built.step(**SKIPPED if step < 0 else PLAIN)
    assert same(weights_of(one), weights_of(two))


def test_the_host_reads_nothing_once_there_is_a_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    network = model()
    built = optimizer(network, "muon")
    give_gradients(network, 1)
    built.step(**PLAIN)
    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, None)
    give_gradients(network, 2)
    built.step(**PLAIN)


# ------------------------------------------------------------------ state


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_it_resumes_to_the_bit_between_two_refreshes(kind: str) -> None:
    whole, halves = model(kv_heads=1), model(kv_heads=1)
    built, other = optimizer(whole, kind), optimizer(halves, kind)
    for step in range(8):
        if step == 5:
            fresh = optimizer(halves, kind)
            for entry in other.entries():
                assert fresh.expects(entry.kind, entry.key), entry
                fresh.load_entry(entry._replace(value=entry.value.clone()))
            other = fresh
        for network, one in ((whole, built), (halves, other)):
            refresh_at(one, step, 3)
            give_gradients(network, step)
            one.step(**PLAIN)
    assert same(weights_of(whole), weights_of(halves))
    left, right = state_of(built), state_of(other)
    assert all(torch.equal(value, right[key]) for key, value in left.items())


def test_the_state_of_a_matrix_is_assigned_to_the_process_that_computes_it() -> None:
    network = model()
    built = optimizer(network, "muon")
    give_gradients(network, 1)
    built.step(**PLAIN)
    of_parts = {
        key
        for kind, key in state_of(built)
        if built.placements[kind] is Placement.ASSIGNED and kind == "row_basis"
    }
    assert {f"blocks.0.attention.qkv.weight.{part}" for part in range(3)} < of_parts
    assert len(of_parts) == 2 * (3 + 3)
    assert not built.expects("row_basis", "blocks.0.attention.qkv.weight")
    assert not built.expects("row_basis", "embedding.weight")
    assert built.expects("exp_avg", "embedding.weight")


def test_other_bases_start_over() -> None:
    """After a run with another `max_dim` the second moment belongs to another basis."""
    network, name = model(), "blocks.0.mlp.up.weight"
    first = optimizer(network, "muon", max_dim=16)
    give_gradients(network, 1)
    first.step(**PLAIN)
    second = optimizer(network, "muon")
    for entry in first.entries():
        if second.expects(entry.kind, entry.key):
            second.load_entry(entry)
    give_gradients(network, 2)
    second.step(**PLAIN)
    state = state_of(second)
    assert state["soap_step", name] == 1 and ("row_basis", name) in state
    assert state["soap_step", "blocks.0.attention.out.weight"] == 2


def test_a_group_in_pieces_moves_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parted = model(layers=3), model(layers=3)
    for network in (whole, parted):
        if network is parted:
            monkeypatch.setattr(muon, "PIECE", 2 * 48 * 16)
        built = optimizer(network, "adamw", eps=1e-4)
        for step in range(3):
            give_gradients(network, step)
            built.step(**PLAIN)
    for one, two in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_step_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's tracing but not its code generation, which takes a minute on a CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    muon._compiled.cache_clear()
    plain, traced = model(layers=1), model(layers=1)
    for network, compiled in ((plain, False), (traced, True)):
        built = optimizer(network, "muon", compiled=compiled, own={"normalise": "neurons"})
        for step in range(4):
            for group in built.param_groups:
                group["lr"] *= 0.9
                if "factor_decay" in group:
                    group["factor_decay"] = 0.9 + step / 100
            give_gradients(network, step)
            built.step(divisor=torch.tensor(1.0 + step), skip=torch.tensor(step % 2.0))
    muon._compiled.cache_clear()
    for one, two in zip(plain.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


# ------------------------------------------------------------------ settings

RUN = """\
name = "trial"
preset = "gpt2-nano"
data.paths = "tokens/books"
train.until = "200 steps"
train.batch = 12
"""
SOAP = 'optim.preconditioner.type="soap"'


@cache
def run_with(*words: str) -> tuple[RunConfig, Resolved]:
    config = load_text(RUN, (SOAP, *words), place="run.toml")
    return config, resolve(config, vocab=300)


def settings_at(step: int, *words: str) -> tuple[float, bool]:
    (config, numbers), network = run_with(*words), model()
    built = build_optimizer(config.optim, network, parameters=dict(network.named_parameters()))
    build_schedule(config, numbers).apply(built, numbers.progress_at(step))
    (found,) = {(g["factor_decay"], g["refresh"]) for g in built.param_groups if "refresh" in g}
    return found


def test_bases_are_refreshed_by_progress_alone() -> None:
    words = (
        'optim.preconditioner.basis_every={ "0 steps" = 4, "10 steps" = 5 }',
        'optim.preconditioner.decay={ "0 steps" = 0.5, "10 steps" = 0.9 }',
    )
    found = [settings_at(step, *words) for step in range(21)]
    assert [step for step, (_, due) in enumerate(found) if due] == [0, 4, 8, 10, 15, 20]
    assert [decay for decay, _ in found] == [0.5] * 10 + [0.9] * 11


def test_a_young_basis_is_refreshed_in_every_step_with_adamw_alone() -> None:
    due = [settings_at(step)[1] for step in range(61)]
    assert [step for step, one in enumerate(due) if one] == [*range(41), 50, 60]
    muon = 'optim={ type = "muon", preconditioner = { type = "soap" } }'
    due = [settings_at(step, muon)[1] for step in range(61)]
    assert [step for step, one in enumerate(due) if one] == [0, 10, 20, 30, 40, 50, 60]


def test_second_moments_are_forgotten_as_the_settings_say() -> None:
    network = model()
    for kind, own, given, expected in (
        ("adamw", {"beta2": 0.97}, {}, 0.97),
        ("muon", {}, {}, 0.9),
        ("muon", {}, {"beta2": 0.5}, 0.5),
        ("adamw", {"beta2": 0.97}, {"beta2": 0.0}, 0.0),
    ):
        built = optimizer(network, kind, own=own, **given)
        assert built.soap is not None and built.soap.rule.beta2 == expected


def test_adamw_alone_stays_adamw() -> None:
    network = model()
    built = build_optimizer(AdamWConfig(), network, parameters=dict(network.named_parameters()))
    assert isinstance(built, AdamW)


def test_a_basis_of_one_step_only_is_doubted() -> None:
    config = load_text(RUN, (SOAP, "optim.preconditioner.basis_every=300"), place="run.toml")
    (said,) = config_warnings(config, resolve(config, vocab=300))
    assert "optim.preconditioner.basis_every, 300 steps, is as long as the run" in said
    config = load_text(RUN, (SOAP,), place="run.toml")
    assert not config_warnings(config, resolve(config, vocab=300))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optim.type=sgd",), r"optim\.preconditioner\.type: .*\n.*adamw"),
        (("runtime.offload=optimizer",), r"runtime\.offload: .*SOAP"),
        (("model.lora.rank=4",), r"optim\.preconditioner\.type: .*adapters.*\n.*model\.lora"),
    ],
    ids=["sgd", "offload", "lora"],
)
def test_what_does_not_go_with_soap_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_text(RUN, (SOAP, *words), place="run.toml")


def test_stacked_experts_stay_with_adam() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = torch.nn.Parameter(torch.ones(3, 4, 5))
            self.single = torch.nn.Parameter(torch.ones(4, 5))

        def roles(self) -> dict[str, Role]:
            return {"stacked": Role.MATRIX, "single": Role.MATRIX}

        def stacked_rows(self) -> dict[str, tuple[int, ...]]:
            return {}

    network = Experts()
    built = optimizer(network, "adamw")
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6))
    built.step(**PLAIN)
    state = state_of(built)
    assert ("exp_avg_sq", "stacked") in state and ("row_basis", "single") in state
    with pytest.raises(UserError, match="stacked has 3 dimensions"):
        optimizer(network, "muon")


def test_progress_is_all_that_a_schedule_needs() -> None:
    config = load_text(RUN, (SOAP,), place="run.toml")
    schedule = build_schedule(config, resolve(config, vocab=300))
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    schedule.apply(plain, Progress())  # type: ignore[arg-type]
    assert "refresh" not in plain.param_groups[0]
