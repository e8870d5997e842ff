"""One step: gradients, clipping, skipping, loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.base.units import Progress
from gristmill.config.schema import LossScaleConfig, RunConfig
from gristmill.data.loader import Batch, make_batch
from gristmill.distributed.world import open_world
from gristmill.models.gpt import GPT
from gristmill.optim.build import build_optimizer
from gristmill.strategies.precision import LossScale
from gristmill.strategies.sharding import Offload, ShardedParameters
from gristmill.strategies.spmd import Spmd
from gristmill.strategies.strategy import StepStatistics
from gristmill.train.build import build_strategy

MakeRun = Callable[..., RunConfig]


def make_strategy(config: RunConfig) -> tuple[Spmd, GPT]:
    strategy = build_strategy(config, vocab=257, world=open_world(config.runtime))
    assert isinstance(strategy, Spmd)
    assert isinstance(strategy.model, GPT)
    return strategy, strategy.model


def windows(count: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 257, (count, 25))


def step(strategy: Spmd, batches: list[Batch]) -> dict[str, float]:
    result = strategy.update(strategy.accumulate(batches, Progress()))
    assert result.grad_norm is not None
    assert result.skipped is not None
    return {
        "loss": result.loss.item(),
        "norm": result.grad_norm.item(),
        "skipped": result.skipped.item(),
    }


def test_the_whole_or_its_blocks_are_compiled(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = torch.compile, []

    def compile_(function: Any, **options: Any) -> Any:
        asked.append(function)
        return real(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_)
    torch.compiler.reset()  # the limit on recompilations counts what earlier tests compiled
    results = {}
    for wanted in ("false", "true", '"blocks"'):
        asked.clear()
        words = (f"runtime.compile={wanted}", "train.mtp=0.5")
        strategy, model = make_strategy(make_run(*words))
        # What is beside the blocks: embedding, value embeddings, loss.
        whole, blocks = [model], [*model.blocks.values(), *3 * [model]]
        found = [getattr(one, "__self__", one) for one in asked]
        assert found == {"false": [], "true": whole, '"blocks"': blocks}[wanted]
        results[wanted] = step(strategy, [make_batch(windows())])
    for result in results.values():
        assert result["loss"] == pytest.approx(results["false"]["loss"], rel=1e-6)
        assert result["norm"] == pytest.approx(results["false"]["norm"], rel=1e-5)


def test_dividing_a_batch_changes_nothing_but_rounding(make_run: MakeRun) -> None:
    results, weights = [], []
    for parts in (1, 3, 12):
        strategy, model = make_strategy(make_run())
        results.append(step(strategy, [make_batch(w) for w in np.split(windows(), parts)]))
        weights.append(model.blocks["1"].mlp.up.weight.detach().clone())
    for result, weight in zip(results[1:], weights[1:], strict=True):
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
        assert result["norm"] == pytest.approx(results[0]["norm"], rel=1e-4)
        assert torch.allclose(weight, weights[0], atol=1e-4)


def test_masked_tokens_are_weighted_over_the_whole_step(make_run: MakeRun) -> None:
    """Uneven micro-batches count by tokens, not by micro-batch."""
    strategy, model = make_strategy(make_run())
    whole = make_batch(windows(2))
    mask = torch.ones(2, 24)
    mask[0, 4:] = 0
    batches = [
        Batch(whole.tokens_BT[i : i + 1], whole.targets_BT[i : i + 1], mask[i : i + 1], loss_tokens)
        for i, loss_tokens in ((0, 4.0), (1, 24.0))
    ]
    logits = model(whole.tokens_BT).flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, whole.targets_BT.flatten(), reduction="none")
    expected = (losses * mask.flatten()).sum() / mask.sum()
    assert step(strategy, batches)["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_clipping_scales_the_whole_gradient(make_run: MakeRun) -> None:
    batch = [make_batch(windows())]
    free, model = make_strategy(make_run("train.clip=0", "optim.eps=1e4", "optim.lr=100.0"))
    norm = step(free, batch)["norm"]
    clipped, small = make_strategy(
        make_run(f"train.clip={norm / 10}", "optim.eps=1e4", "optim.lr=100.0")
    )
    assert step(clipped, batch)["norm"] == pytest.approx(norm, rel=1e-6)
    start, _ = make_strategy(make_run())
    # With eps far above the gradients, Adam's first update is proportional to the gradient.
    for name, before in start.model.named_parameters():
        if before.dim() > 1:
            continue
        full = dict(model.named_parameters())[name] - before
        tenth = dict(small.named_parameters())[name] - before
        assert torch.allclose(full, 10 * tenth, rtol=1e-2, atol=3e-6), name


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(make_run: MakeRun) -> None:
    strategy, model = make_strategy(make_run())
    batch = [make_batch(windows())]
    step(strategy, batch)
    state = strategy.optimizer.state
    with torch.no_grad():
        saved = model.norm.bias[0].item()
        model.norm.bias[0] = torch.nan
    before = [p.detach().clone() for p in model.parameters()]
    moments = [{k: v.clone() for k, v in state[p].items()} for p in model.parameters()]
    assert step(strategy, batch)["skipped"] == 1
    for parameter, old, moment in zip(model.parameters(), before, moments, strict=True):
        assert torch.equal(parameter.nan_to_num(), old.nan_to_num())
        assert all(torch.equal(state[parameter][k], v) for k, v in moment.items())
    with torch.no_grad():
        model.norm.bias[0] = saved
    assert step(strategy, batch)["skipped"] == 0
    assert not torch.equal(before[0], next(model.parameters()))


def test_fp16_finds_its_scale_and_then_trains(make_run: MakeRun) -> None:
    config = make_run('precision.compute="fp16"', "precision.loss_scale.hysteresis=1")
    strategy, _ = make_strategy(config)
    batch = [make_batch(windows())]
    results = [step(strategy, batch) for _ in range(40)]
    skipped = [r["skipped"] for r in results]
    assert skipped[0] == 1  # 2**32 is far too large
    assert sum(skipped[:15]) > 8 > sum(skipped[20:])
    assert strategy.loss_scale is not None
    assert strategy.loss_scale.scale.item() == 2.0 ** (32 - sum(skipped))
    assert results[-1]["loss"] < results[0]["loss"] - 0.5
    plain, _ = make_strategy(make_run())
    first_good = results[skipped.index(0)]
    expected = step(plain, batch)
    assert first_good["norm"] == pytest.approx(expected["norm"], rel=0.02)


def test_bf16_agrees_with_fp32(make_run: MakeRun) -> None:
    batch = [make_batch(windows())]
    half, _ = make_strategy(make_run('precision.compute="bf16"'))
    full, _ = make_strategy(make_run())
    ours, theirs = step(half, batch), step(full, batch)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=0.05)
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


class PlainLossScale:
    """Megatron's rules, step by step on the host."""

    def __init__(self, config: LossScaleConfig) -> None:
        self.config, self.scale = config, config.initial
        self.clean, self.patience = 0, config.hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * 0.5, self.config.minimum)
        else:
            self.clean += 1
            if self.clean == self.config.window:
                self.clean = 0
                self.patience = self.config.hysteresis
                self.scale *= 2


@pytest.mark.parametrize("seed", range(6))
def test_loss_scale_follows_megatron(seed: int) -> None:
    config = LossScaleConfig(initial=1024.0, minimum=4.0, window=5, hysteresis=1 + seed % 3)
    ours, plain = LossScale.start(config, torch.device("cpu")), PlainLossScale(config)
    rng = np.random.default_rng(seed)
    for _ in range(300):
        overflow = bool(rng.random() < 0.25)
        ours.update(torch.tensor(overflow))
        plain.update(overflow)
        assert ours.scale.item() == plain.scale
    copy = LossScale.start(config, torch.device("cpu"))
    copy.load(ours.state())
    assert copy.state() == ours.state()


def test_a_second_target_counts_for_two_thirds_of_the_run(make_run: MakeRun) -> None:
    """It changes the gradient, not the loss; at the end there is nothing left of it."""
    words = ('train.until="30 steps"', "train.clip=0")
    norms = {}
    for weight in (0, 0.5):
        for steps in (0, 10, 20, 29):
            strategy, _ = make_strategy(make_run(*words, f"train.mtp={weight}"))
            result = strategy.accumulate([make_batch(windows())], Progress(steps=steps))
            result = strategy.update(result)
            assert result.grad_norm is not None
            norms[weight, steps] = result.grad_norm.item()
            assert result.loss.item() == pytest.approx(5.55, abs=0.05)
    assert len({norms[0, steps] for steps in (0, 10, 20, 29)}) == 1
    assert norms[0.5, 0] > 1.02 * norms[0.5, 10] > 1.04 * norms[0, 0]
    for steps in (20, 29):
        assert norms[0.5, steps] == pytest.approx(norms[0, 0], rel=1e-6)


def test_dropout_is_a_function_of_the_step(make_run: MakeRun) -> None:
    batch = [make_batch(windows())]
    losses = []
    for number in (0, 0, 1):
        strategy, _ = make_strategy(make_run("model.dropout=0.3"))
        torch.rand(number + 3)  # whatever else drew numbers before must not matter
        losses.append(strategy.accumulate(batch, Progress(steps=number)).loss.item())
    assert losses[0] == losses[1] != losses[2]


def test_evaluation_is_the_mean_over_tokens(make_run: MakeRun) -> None:
    strategy, _ = make_strategy(make_run())
    parts = [make_batch(windows(5)[:2]), make_batch(windows(5)[2:])]
    whole = strategy.evaluate([make_batch(windows(5))])
    assert strategy.evaluate(parts) == pytest.approx(whole, rel=1e-6)


def test_an_optimizer_in_host_memory_moves_the_same(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, where it is refused since it is of no use."""
    results, weights = [], []
    for on_host in (False, True):
        config = make_run()
        strategy, model = make_strategy(config)
        if on_host:
            strategy.offload = Offload(strategy.parameters)
            strategy.parameters = strategy.offload.parameters
            strategy.optimizer = build_optimizer(
                config.optim,
                model,
                parameters={name: one.local for name, one in strategy.parameters.items()},
            )
        batches = [make_batch(part) for part in np.split(windows(), 3)]
        results.append([step(strategy, batches) for _ in range(3)])
        weights.append(model.blocks["1"].mlp.up.weight.detach().clone())
        if on_host:
            moments = [one for one in strategy.optimizer.entries() if one.kind == "exp_avg"]
            assert all(one.value.abs().sum() > 0 for one in moments)
    assert results[0] == results[1]
    assert torch.equal(*weights)


class Doubling:
    """A preconditioner that says what it was given."""

    def __init__(self) -> None:
        self.given: list[float] = []

    def begin(self, progress: Progress) -> None:
        pass

    def apply(self, parameters: ShardedParameters, step: StepStatistics) -> None:
        assert step.skip.item() == 0
        gradients = [one.local.grad for one in parameters.values() if one.local.grad is not None]
        self.given.append(torch.stack(torch._foreach_norm(gradients)).norm().item())
        torch._foreach_mul_(gradients, 2.0)


@pytest.mark.parametrize(
    "words", [(), ('precision.compute="fp16"', "precision.loss_scale.initial=1024.0")], ids=str
)
def test_a_preconditioner_has_its_place(make_run: MakeRun, words: tuple[str, ...]) -> None:
    """After the loss scale is gone, before gradients are clipped. The norm that is reported is that
    of the plain gradient."""
    batches = [make_batch(windows(4))]
    clip = "train.clip=1e-3"
    plain, model = make_strategy(make_run(*words, clip))
    strategy, other = make_strategy(make_run(*words, clip))
    strategy.preconditioner = doubling = Doubling()  # type: ignore[assignment]
    expected, found = step(plain, batches), step(strategy, batches)
    assert doubling.given == [pytest.approx(expected["norm"], rel=1e-5)]
    assert found == expected
    # Both are clipped to the same norm.
    weights = (one.blocks["1"].mlp.up.weight for one in (model, other))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


def test_an_optimizer_that_takes_no_decision_cannot_train(make_run: MakeRun) -> None:
    """It would train unclipped and never skip, and nobody would notice."""
    strategy, model = make_strategy(make_run())
    strategy.optimizer = torch.optim.SGD(model.parameters())  # type: ignore[assignment]
    before = model.head.weight.detach().clone()
    with pytest.raises(TypeError, match="divisor"):
        step(strategy, [make_batch(windows(4))])
    assert torch.equal(model.head.weight, before)
