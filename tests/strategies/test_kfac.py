"""K-FAC in training steps: which gradients it sees, what it makes of them, and on which process."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gristmill.base.units import Progress
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch, make_batch
from gristmill.distributed.world import open_world
from gristmill.models.gpt import GPT
from gristmill.models.spec import CausalLM, block_linears, is_transposed
from gristmill.plan.preconditioner import assign_layers, rows_of_grid
from gristmill.strategies.kfac import Kfac
from gristmill.strategies.sharding import ShardedParameters
from gristmill.strategies.spmd import Spmd
from gristmill.train.build import build_strategy

Crowd = Callable[..., list[Any]]
MakeRun = Callable[..., RunConfig]
Gradients = dict[str, torch.Tensor]

KFAC = ('optim.preconditioner.type="kfac"',)
EIGEN = 'optim.preconditioner.method="eigen"'
EXACT = (*KFAC, EIGEN, "optim.preconditioner.kl_clip=0.0", "optim.preconditioner.damping=0.1")
SMALL = ("model.width=8", "model.heads=2")


def make_strategy(config: RunConfig) -> tuple[Spmd, Kfac]:
    strategy = build_strategy(config, vocab=257, world=open_world(config.runtime))
    assert isinstance(strategy, Spmd)
    assert isinstance(strategy.preconditioner, Kfac)
    return strategy, strategy.preconditioner


def windows(count: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 257, (count, 25))


def step(strategy: Spmd, batches: Sequence[Batch], number: int = 0) -> tuple[Gradients, Gradients]:
    """The gradients of a step before and after they are preconditioned."""
    kfac = strategy.preconditioner
    assert kfac is not None
    seen: list[Gradients] = []
    real = kfac.apply

    def apply(parameters: ShardedParameters, *rest: Any) -> None:
        for turn in (lambda: None, lambda: real(parameters, *rest)):
            turn()
            found = {n: one.local.grad for n, one in parameters.items()}
            seen.append({n: one.clone() for n, one in found.items() if one is not None})

    kfac.apply = apply  # type: ignore[method-assign]
    try:
        strategy.update(strategy.accumulate(batches, Progress(number)))
    finally:
        kfac.apply = real  # type: ignore[method-assign]
    return seen[0], seen[1]


def moments(model: CausalLM, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """The second moments of all linear layers in float64, from a pass of the model's own."""
    seen: dict[str, list[torch.Tensor]] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            output.retain_grad()
            seen[name] = [inputs[0].detach(), output]

        return hook

    handles = [one.register_forward_hook(watch(n)) for n, one in block_linears(model).items()]
    logits = model(tokens).flatten(0, 1)
    functional.cross_entropy(logits, targets.flatten(), reduction="sum").backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    found, count = {}, targets.numel()
    for name, (x, y) in seen.items():
        assert y.grad is not None
        rows = x.flatten(0, -2).double()
        if model.get_submodule(name).bias is not None:
            rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], dim=1)
        parts = model.stacked_rows().get(f"{name}.weight", (y.shape[-1],))
        gradients = y.grad.flatten(0, -2).double().split(parts, dim=1)
        found[name] = [rows.T @ rows / count, [g.T @ g / count for g in gradients]]
    return found


def natural(gradient: torch.Tensor, a: torch.Tensor, g: torch.Tensor, damping: float) -> Any:
    """The solution of a dense linear system."""
    fisher = torch.kron(g, a)
    damped = fisher + damping * fisher.diagonal().mean() * torch.eye(len(fisher))
    return torch.linalg.solve(damped, gradient.double().flatten()).view_as(gradient)


def assert_natural(strategy: Spmd, before: Gradients, after: Gradients, expected: Any) -> None:
    model = strategy.model
    for name, (a, gs) in expected.items():
        module = model.get_submodule(name)
        found = []
        for gradients in (before, after):
            weight = gradients[f"{name}.weight"]
            weight = weight.T if is_transposed(module) else weight
            if module.bias is not None:
                weight = torch.cat([weight, gradients[f"{name}.bias"][:, None]], dim=1)
            found.append(weight.split([len(g) for g in gs]))
        for old, new, g in zip(*found, gs, strict=True):
            solved = natural(old, a, g, 0.1)
            assert (new - solved).norm() < 2e-4 * solved.norm(), name
    others = set(before) - {f"{n}.{kind}" for n in expected for kind in ("weight", "bias")}
    assert others
    assert all(torch.equal(before[name], after[name]) for name in others)


MODELS = {
    "gpt2": SMALL,
    "modern": (
        *SMALL,
        "model.bias=false",
        'model.activation="swiglu"',
        "model.mlp_width=16",
        "model.kv_heads=1",
        'model.positions="rotary"',
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_get_the_dense_natural_gradient(make_run: MakeRun, name: str) -> None:
    """Whole batches of several micro-batches; embeddings, head and norms keep their gradients."""
    strategy, _ = make_strategy(make_run(*MODELS[name], *EXACT))
    batch = make_batch(windows(4))
    expected = moments(strategy.model, batch.tokens_BT, batch.targets_BT)
    parts = [make_batch(part) for part in np.split(windows(4), 2)]
    assert_natural(strategy, *step(strategy, parts), expected)


def test_layers_of_transformers_that_store_weights_transposed(make_run: MakeRun) -> None:
    config = make_run(
        'model={hf_config={model_type="gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=257, '
        "embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0}, context=24}",
        *EXACT,
    )
    strategy, kfac = make_strategy(config)
    assert all(layer.transposed for layer in kfac.layers.values())
    batch = make_batch(windows(4))
    strategy.model.train()
    expected = moments(strategy.model, batch.tokens_BT, batch.targets_BT)
    assert_natural(strategy, *step(strategy, [batch]), expected)


def preconditioned(config: RunConfig, parts: int = 1) -> Gradients:
    strategy, _ = make_strategy(config)
    batches = [make_batch(part) for part in np.split(windows(), parts)]
    return step(strategy, batches)[1]


def assert_alike(found: Gradients, expected: Gradients, rel: float) -> None:
    for name, value in expected.items():
        assert (found[name] - value).norm() <= rel * value.norm(), name


def test_all_micro_batches_count_once(make_run: MakeRun) -> None:
    """Neither the first alone is preconditioned, nor do factors mix those of two steps."""
    once = preconditioned(make_run(*EXACT))
    for parts in (3, 12):
        assert_alike(preconditioned(make_run(*EXACT), parts), once, rel=1e-3)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_layers_count_once(make_run: MakeRun, how: str) -> None:
    once = preconditioned(make_run(*EXACT))
    assert_alike(preconditioned(make_run(*EXACT, f'train.recompute="{how}"')), once, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["true", '"blocks"'])
def test_a_compiled_model_gives_the_same_statistics(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: real(f, backend="aot_eager", **o))
    torch.compiler.reset()
    small = (*EXACT, "model.layers=1", 'optim.preconditioner.factor_every={"0 steps"=2}')
    strategy, kfac = make_strategy(make_run(*small, f"runtime.compile={how}"))
    plain, other = make_strategy(make_run(*small))
    for number in range(3):
        batches = [make_batch((windows(4) + number) % 257)]
        found, expected = (step(one, batches, number)[1] for one in (strategy, plain))
        assert_alike(found, expected, rel=1e-3)
    # The second of the three steps collects nothing.
    assert kfac.updates.item() == other.updates.item() == 2


def factors(kfac: Kfac) -> Gradients:
    return {key: value.clone() for kind, key, value in kfac.entries() if kind == "factor"}


FP16 = (*EXACT, *SMALL, "model.layers=1", 'precision.compute="fp16"')


def test_the_loss_scale_is_not_in_the_factors(make_run: MakeRun) -> None:
    """A factor of the gradients with the scale in it is wrong by the scale's square."""
    found = []
    for scale in (128.0, 4096.0):
        strategy, kfac = make_strategy(make_run(*FP16, f"precision.loss_scale.initial={scale}"))
        after = step(strategy, [make_batch(windows(4))])[1]
        found.append(factors(kfac) | after)
    assert_alike(found[1], found[0], rel=0.05)


@pytest.mark.parametrize("overflows", [{1}, {0, 1}], ids=["later", "from the start"])
def test_an_overflow_leaves_no_trace(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, overflows: set[int]
) -> None:
    """One would poison a running average for good."""
    real, number = GPT.run_blocks, 0

    def run_blocks(self: GPT, *args: Any) -> torch.Tensor:
        hidden = real(self, *args)
        if number in overflows:
            hidden.register_hook(lambda gradient: gradient * torch.inf)
        return hidden

    monkeypatch.setattr(GPT, "run_blocks", run_blocks)
    often = ("optim.preconditioner.factor_every=1", "optim.preconditioner.inverse_every=1")
    config = make_run(*FP16, *often, "precision.loss_scale.initial=256.0")
    strategy, kfac = make_strategy(config)
    good = 0
    for number in range(4):
        before = factors(kfac)
        _, after = step(strategy, [make_batch((windows(4) + number) % 257)], number)
        good += number not in overflows
        assert kfac.updates.item() == good
        assert kfac.ready == (good > 0)
        if number in overflows:
            assert all(torch.equal(value, before[key]) for key, value in factors(kfac).items())
        else:
            assert all(torch.isfinite(value).all() for value in after.values())
            assert any(not torch.equal(value, before[key]) for key, value in factors(kfac).items())


def test_factors_are_in_fp32(make_run: MakeRun) -> None:
    exact, kfac = make_strategy(make_run(*EXACT))
    half, other = make_strategy(make_run(*EXACT, 'precision.compute="bf16"'))
    for one in (exact, half):
        step(one, [make_batch(windows(4))])
    assert {value.dtype for _, _, value in other.entries()} == {torch.float32}
    assert_alike(factors(other), factors(kfac), rel=0.02)


def test_kl_clip_bounds_the_step(make_run: MakeRun) -> None:
    """lr^2 x (preconditioned . plain gradient), over all layers together."""
    words = (*KFAC, "optim.preconditioner.damping=0.1")
    free, limited = (
        preconditioned_pair(make_run(*words, f"optim.preconditioner.kl_clip={clip}"))
        for clip in (0.0, 1e-6)
    )
    layers = [name for name in free[1] if not torch.equal(free[0][name], free[1][name])]
    product = sum((free[0][name] * free[1][name]).sum() for name in layers)
    lr = make_run().optim.lr
    factor = (1e-6 / (lr**2 * product)).sqrt().item()
    assert factor < 1
    for name in layers:
        torch.testing.assert_close(limited[1][name], factor * free[1][name], rtol=1e-3, atol=1e-9)
    generous = preconditioned_pair(make_run(*words, "optim.preconditioner.kl_clip=1e9"))
    assert all(torch.equal(generous[1][name], free[1][name]) for name in layers)


def preconditioned_pair(config: RunConfig) -> tuple[Gradients, Gradients]:
    strategy, _ = make_strategy(config)
    for group in strategy.optimizer.param_groups:
        group["lr"] = config.optim.lr
    return step(strategy, [make_batch(windows())])


def test_skipped_layers_keep_their_gradient(make_run: MakeRun) -> None:
    config = make_run(*EXACT, 'optim.preconditioner.skip=["mlp.*", "blocks.0.attention.out"]')
    strategy, kfac = make_strategy(config)
    names = {name for name in block_linears(strategy.model) if "qkv" in name}
    assert set(kfac.layers) == names | {"blocks.1.attention.out"}
    before, after = step(strategy, [make_batch(windows())])
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {one for layer in kfac.layers.values() for one in layer.parameters}


def test_intervals_and_schedules(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        *KFAC,
        "optim.preconditioner.factor_every=2",
        'optim.preconditioner.inverse_every={"0 steps"=3, "6 steps"=4}',
        'optim.preconditioner.damping={"0 steps"=0.5, "5 steps"=0.25}',
    )
    strategy, kfac = make_strategy(make_run(*words))
    done: list[tuple[int, str, float]] = []
    for kind in ("_update_factors", "_update_inverses"):
        monkeypatch.setattr(
            kfac, kind, lambda *_, kind=kind: done.append((number, kind, kfac._settings.damping))
        )
    for number in range(9):
        step(strategy, [make_batch(windows(2))], number)
    found = {kind: [n for n, one, _ in done if one == kind] for _, kind, _ in done}
    assert found == {"_update_factors": [0, 2, 4, 6, 8], "_update_inverses": [0, 3, 8]}
    assert {n: damping for n, _, damping in done} == {
        n: 0.5 if n < 5 else 0.25 for n in (0, 2, 3, 4, 6, 8)
    }


# ------------------------------------------------------------------ several processes


def test_a_grid_from_least_memory_to_least_communication() -> None:
    costs = {f"layer-{n}": float(n + 1) for n in range(9)}
    for fraction, rows in ((0.0, 1), (0.25, 1), (0.5, 2), (1.0, 4)):
        assert rows_of_grid(fraction, 4) == rows
        work = assign_layers(costs, [4, 5, 6, 7], fraction=fraction)
        assert set(work) == set(costs)
        for one in work.values():
            assert len(one.preconditions) == rows
            assert one.inverts in one.preconditions
        load = dict.fromkeys(range(4, 8), 0.0)
        for name, one in work.items():
            load[one.inverts] += costs[name]
        assert max(load.values()) <= 1.4 * sum(costs.values()) / 4
    assert rows_of_grid(0.5, 3) == 1
    assert rows_of_grid(0.9, 6) == 6


WORDS = (
    *KFAC,
    EIGEN,
    "optim.preconditioner.factor_every=2",
    "optim.preconditioner.inverse_every=3",
    # Wrong by a factor, a curvature would have the same effect with relative damping.
    "optim.preconditioner.relative_damping=false",
    "optim.preconditioner.damping=1e-5",
    "optim.preconditioner.kl_clip=1e-5",
)
STEPS = 4
"""So that both are computed twice."""


def curves(layouts: list[str]) -> list[dict[str, Any]]:
    run = runpy.run_path(str(Path(__file__).with_name("test_layouts.py")))["run"]
    found = []
    for layout in layouts:
        words = [f"parallel.{word}" if "." not in word else word for word in layout.split()]
        model = ("model.layers=4",) if "pp=" in layout else ()
        found.append(
            [
                run((*WORDS, "optim.eps=1e-4", *model, *words), packed=False, steps=STEPS),
                run((*WORDS, *MODERN_MUON, *model, *words), packed=True, steps=STEPS),
            ]
        )
    return found


MODERN_MUON = (
    'model.positions="rotary"',
    'model.activation="swiglu"',
    "model.mlp_width=64",
    "model.bias=false",
    "model.tie_head=false",
    "model.kv_heads=2",
    'optim.type="muon"',
    "optim.adam_eps=1e-4",
    'optim.preconditioner.method="inverse"',
)


@cache
def alone(deep: bool) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    try:
        return curves(["model.layers=4" if deep else "model.layers=2"])[0]
    finally:
        torch.set_num_threads(threads)


FRACTION = "optim.preconditioner.worker_fraction"


@pytest.mark.parametrize(
    ("processes", "layouts"),
    [
        (2, [f"{FRACTION}=1.0", "dp_shard=2", "tp=2", "pp=2"]),
        pytest.param(
            2,
            ["model.layers=2", "cp=2", "tp=2 sequence=false", f"dp_shard=2 {FRACTION}=1.0"],
            marks=pytest.mark.slow,
        ),
        (4, [f"{FRACTION}=0.5", f"dp_replicate=2 dp_shard=2 {FRACTION}=0.5"]),
        pytest.param(4, ["dp_shard=2 tp=2", "pp=2 tp=2"], marks=pytest.mark.slow),
    ],
)
def test_all_layouts_agree(crowd: Crowd, processes: int, layouts: list[str]) -> None:
    answers = crowd(processes, curves, layouts)
    assert all(answer == answers[0] for answer in answers[1:])
    for layout, found in zip(layouts, answers[0], strict=True):
        expected = alone("pp=" in layout)
        for one, other in zip(found, expected, strict=True):
            assert one["losses"] == pytest.approx(other["losses"], rel=0, abs=2e-4), layout
            assert one["norms"][0] == pytest.approx(other["norms"][0], rel=2e-6), layout
            assert one["norms"] == pytest.approx(other["norms"], rel=2e-3), layout
