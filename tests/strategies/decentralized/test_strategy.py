"""Decentralized steps against a simulation: all workers in one process, the exchange as a product
with the topology's matrix, the outer optimizer as torch's SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gristmill.base.process import ProcessInfo
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.rules import check_mesh
from gristmill.data.loader import JOINED, Batch, make_batch
from gristmill.distributed.world import World, open_world
from gristmill.plan.arithmetic import exchange_copies
from gristmill.strategies.decentralized.strategy import Decentralized
from gristmill.strategies.decentralized.topologies import groups_of_round
from gristmill.train.build import build_strategy

Crowd = Callable[..., list[Any]]
Weights = dict[str, torch.Tensor]

RUN = """
name = "workers"
model = { layers = 2, heads = 2, width = 16, context = 16 }
data.paths = "none"
train = { until = "20 steps", batch = 8, accumulate = 2, seed = 5, clip = 0.5 }
optim = { lr = 3e-3, eps = 1e-4 }
schedule = { type = "constant", warmup = 0 }
runtime = { device = "cpu", threads = 1 }
"""
VOCAB, STEPS = 61, 7


def batches(*, part: int, parts: int, size: int = 8) -> Iterator[list[Batch]]:
    """Every step's micro-batches of one of the parts of the batch."""
    rng = np.random.default_rng(0)
    while True:
        ids = (rng.zipf(1.3, (size, 17)) % VOCAB).reshape(2, parts, -1, 17)[:, part]
        yield [make_batch(micro, rules=JOINED) for micro in ids]


def open_strategy(words: Sequence[str]) -> tuple[Any, World]:
    config = load_text(RUN, list(words), place="workers.toml")
    place = ProcessInfo.current() if dist.is_initialized() else ProcessInfo()
    mesh = check_mesh(config, processes=place.world)
    world = open_world(config.runtime, mesh=mesh, parallel=config.parallel, place=place)
    control = world.control_group("test")
    numbers = resolve(config, vocab=VOCAB, mesh=mesh)
    strategy = build_strategy(config, vocab=VOCAB, world=world, control=control, resolved=numbers)
    return strategy, world


def train(words: Sequence[str], steps: int, size: int = 8) -> dict[str, Any]:
    """Steps of one worker on the processes of this crowd; what it holds and reports at the end."""
    strategy, world = open_strategy([*words, f"train.batch={size}"])
    assert isinstance(strategy, Decentralized)
    held_out = [make_batch(np.arange(34).reshape(2, 17), rules=JOINED)]
    progress, own = Progress(), batches(part=world.data_rank, parts=world.mesh.data, size=size)
    norms, sent = [], 0
    for _, micro_batches in zip(range(steps), own, strict=False):
        result = strategy.update(strategy.accumulate(micro_batches, progress))
        progress = progress.after(samples=result.samples, tokens=result.tokens)
        norms.append(result.grad_norm.item())
        assert result.exchange is not None
        sent = result.exchange.sent_bytes
    before = {name: one.local.detach().clone() for name, one in strategy.parameters.items()}
    validation = strategy.evaluate(held_out)
    assert all(torch.equal(one.local, before[name]) for name, one in strategy.parameters.items())
    whole = strategy.gather_full_model()
    average = None
    if whole is not None:
        average = {name: one.detach().numpy() for name, one in whole.named_parameters()}
    strategy.close()
    return {
        "weights": {name: value.numpy() for name, value in before.items()},
        "average": average,
        "validation": validation,
        "distance": strategy.distance,
        "norms": norms,
        "samples": progress.samples,
        "sent": sent,
    }


class Simulation:
    """All workers, one after the other; exchanges have no network and no thread."""

    def __init__(self, workers: int, *words: str) -> None:
        self.workers = workers
        alone = [word for word in words if not word.startswith("parallel.")]
        size = (f"train.batch={8 // workers}",)
        self.strategies = [open_strategy([*alone, *size])[0] for _ in range(workers)]
        self.streams = [batches(part=part, parts=workers) for part in range(workers)]
        self.progress = Progress()
        self.norms: list[list[float]] = []

    def weights(self) -> list[Weights]:
        return [
            {name: one.local.detach().clone() for name, one in strategy.parameters.items()}
            for strategy in self.strategies
        ]

    def step(self, arrive: Callable[[list[Weights]], list[Weights]] | None) -> None:
        """One step of every worker; `arrive` replaces the weights between gradient and update."""
        results = [
            strategy.accumulate(next(stream), self.progress)
            for strategy, stream in zip(self.strategies, self.streams, strict=True)
        ]
        if arrive is not None:
            self.put(arrive(self.weights()))
        pairs = zip(self.strategies, results, strict=True)
        results = [strategy.update(result) for strategy, result in pairs]
        self.norms.append([result.grad_norm.item() for result in results])
        self.progress = self.progress.after(samples=8, tokens=8 * 16)

    def put(self, weights: list[Weights]) -> None:
        for strategy, held in zip(self.strategies, weights, strict=True):
            for name, one in strategy.parameters.items():
                one.local.data.copy_(held[name])


def mixed(matrix: list[list[float]], weights: list[Weights]) -> list[Weights]:
    return [
        {
            name: sum(share * one[name] for share, one in zip(row, weights, strict=True))
            for name in weights[0]
        }
        for row in matrix
    ]


def gossip(
    topology: str, workers: int, *, per_node: int = 1, factor: float = 1.0, steps: int = STEPS
) -> Simulation:
    simulation = Simulation(workers)
    for step in range(steps):
        groups = groups_of_round(
            topology, workers=workers, per_node=per_node, round=step - 1, seed=5
        )
        matrix = [[0.0] * workers for _ in range(workers)]
        for i, j, share in ((i, j, 1 / len(g)) for g in groups for i in g for j in g):
            matrix[i][j] = share

        def arrive(weights: list[Weights], matrix: Any = matrix) -> list[Weights]:
            pairs = zip(weights, mixed(matrix, weights), strict=True)
            return [
                {name: old[name] + factor * (new[name] - old[name]) for name in old}
                for old, new in pairs
            ]

        simulation.step(arrive if step else None)
    return simulation


def assert_same(simulation: Simulation, answers: list[dict[str, Any]], *, atol: float) -> None:
    weights = simulation.weights()
    for worker, answer in enumerate(answers):
        for name, value in answer["weights"].items():
            np.testing.assert_allclose(value, weights[worker][name], atol=atol, err_msg=name)
        np.testing.assert_allclose(
            answer["norms"], [norms[worker] for norms in simulation.norms], rtol=1e-3
        )
        assert answer["samples"] == simulation.progress.samples
    average = mixed([[1 / len(weights)] * len(weights)], weights)[0]
    for name, value in answers[0]["average"].items():
        np.testing.assert_allclose(value, average[name], atol=atol, err_msg=name)
    assert all(answer["average"] is None for answer in answers[1:])


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("ring", ""),
        pytest.param("complete", "", marks=pytest.mark.slow),
        pytest.param("random", "", marks=pytest.mark.slow),
        ("alternating-exp-ring", "gossip.workers_per_node=2"),
        ("exp", "gossip.mixing=0.5"),
    ],
)
def test_gossip_mixes_the_weights_before_the_update(
    crowd: Crowd, topology: str, words: str
) -> None:
    settings = [f"parallel.{word}" for word in (f"gossip.topology={topology}", *words.split())]
    answers = crowd(4, train, settings, STEPS)
    factor = 0.5 if "mixing" in words else 1.0
    per_node = 2 if "per_node" in words else 1
    expected = gossip(topology, 4, per_node=per_node, factor=factor)
    assert_same(expected, answers, atol=2e-6)
    assert len({answer["validation"] for answer in answers}) == 1
    assert all(answer["distance"] > 0 for answer in answers)
    assert all(answer["sent"] > 0 for answer in answers)


def diloco(workers: int, *, every: int, delay: int, momentum: float, steps: int) -> Simulation:
    """Workers whose anchor torch's SGD moves, with the mean of their changes as its gradient."""
    simulation = Simulation(workers)
    anchor = {n: torch.nn.Parameter(v) for n, v in simulation.weights()[0].items()}
    outer = torch.optim.SGD(anchor.values(), lr=0.7, momentum=momentum, nesterov=momentum > 0)
    sent: list[Weights] | None = None
    for step in range(1, steps + 1):

        def arrive(weights: list[Weights], sent: Any = sent) -> list[Weights]:
            pairs = zip(weights, sent, strict=True)
            return [{n: now[n] + anchor[n].detach() - then[n] for n in now} for now, then in pairs]

        due = delay > 0 and sent is not None and (step - delay) % every == 0
        simulation.step(arrive if due else None)
        if step % every == 0:
            sent = simulation.weights()
            for name, one in anchor.items():
                one.grad = one.detach() - sum(held[name] for held in sent) / workers
            outer.step()
            if delay == 0:
                simulation.put(arrive(simulation.weights(), sent))
    return simulation


@pytest.mark.parametrize(("delay", "outer"), [(1, "nesterov"), (2, "sgd")])
def test_local_updates_are_diloco(crowd: Crowd, delay: int, outer: str) -> None:
    words = ['parallel.local.every="3 steps"', f"parallel.exchange.delay={delay}"]
    answers = crowd(2, train, [*words, f"parallel.local.outer={outer}"], 8)
    momentum = 0.9 if outer == "nesterov" else 0.0
    expected = diloco(2, every=3, delay=delay, momentum=momentum, steps=8)
    assert_same(expected, answers, atol=1e-5)


@pytest.mark.parametrize(
    "inside",
    ["dp_shard=2", "tp=2", pytest.param("pp=2 schedule=1f1b", marks=pytest.mark.slow)],
)
def test_a_worker_may_be_sharded(crowd: Crowd, inside: str) -> None:
    """Two workers of two processes each do what two workers of one process do."""
    sharding = [f"parallel.{word}" for word in inside.split()]
    answers = crowd(4, train, ["parallel.gossip.topology=ring", *sharding], 4)
    expected = gossip("ring", 2, steps=4)
    weights = expected.weights()
    average = mixed([[0.5, 0.5]], weights)[0]
    for name, value in answers[0]["average"].items():
        np.testing.assert_allclose(value, average[name], atol=5e-6, err_msg=name)
    assert len({answer["validation"] for answer in answers}) == 1


@pytest.mark.parametrize(("send", "workers"), [("bf16", 2), ("int8", 3), ("top-k", 2)])
def test_what_is_sent_may_be_rounded(crowd: Crowd, send: str, workers: int) -> None:
    """With a common anchor all workers go on from the same weights, and few bytes are sent."""
    words = [
        'parallel.local.every="2 steps"',
        "parallel.local.outer=sgd",
        "parallel.local.outer_lr=1.0",
        "parallel.exchange.delay=0",
    ]
    exact = crowd(workers, train, words, 4, 12)
    rounded = crowd(workers, train, [*words, f"parallel.exchange.send={send}"], 4, 12)
    first = rounded[0]["weights"]
    for answer in rounded[1:]:
        for name, value in answer["weights"].items():
            np.testing.assert_array_equal(value, first[name])
    # The error is one of a change, which is small itself.
    change = max(np.abs(v - exact[0]["weights"][n]).max() for n, v in first.items())
    assert 0 < change < {"bf16": 1e-3, "int8": 2e-3, "top-k": 0.1}[send]
    factor = {"bf16": 0.55, "int8": 0.3, "top-k": 0.05}[send] * (workers - 1)
    assert rounded[0]["sent"] < factor * exact[0]["sent"]


def test_rounded_gossip_keeps_the_mean(crowd: Crowd) -> None:
    """In one round, without any step: what all workers hold together does not change."""
    for topology in ("ring", "alternating-exp-ring"):
        before, after = zip(*crowd(4, exchange_once, topology), strict=True)
        for name in before[0]:
            wanted = np.mean([one[name] for one in before], axis=0)
            got = np.mean([one[name] for one in after], axis=0)
            np.testing.assert_allclose(got, wanted, atol=1e-6, err_msg=name)
        pairs = list(zip(before, after, strict=True))
        assert any((one[name] != other[name]).any() for one, other in pairs for name in one)


def exchange_once(topology: str) -> tuple[Any, Any]:
    words = [f"parallel.gossip.topology={topology}", "parallel.exchange.send=int8"]
    if topology != "ring":
        words.append("parallel.gossip.workers_per_node=2")
    strategy, world = open_strategy(words)
    torch.manual_seed(world.rank)
    for one in strategy.parameters.values():
        one.local.data.add_(torch.randn_like(one.local))
    layout = strategy.layout
    before, results = layout.read(), []
    for round in range(2):
        mixed_weights, _ = strategy.exchange.run(layout.read(), round=round)
        layout.write(mixed_weights)
        results.append(mixed_weights)
    views = [layout.views(held) for held in (before, results[-1])]
    first, last = ({name: value.numpy() for name, value in held.items()} for held in views)
    return first, last


def loss_of_the_same_batch(words: Sequence[str]) -> float:
    strategy, _ = open_strategy(words)
    (micro_batches,) = (one for one, _ in zip(batches(part=0, parts=2), range(1), strict=False))
    return strategy.accumulate(micro_batches, Progress()).loss.item()


def test_every_worker_drops_other_activations(crowd: Crowd) -> None:
    words = ["parallel.gossip.topology=ring"]
    without = crowd(2, loss_of_the_same_batch, words)
    assert without[0] == without[1]
    dropped = crowd(2, loss_of_the_same_batch, [*words, "model.dropout=0.5"])
    assert dropped[0] != dropped[1]


@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize("send", ["fp32", "int8"])
@pytest.mark.parametrize(
    "local",
    [
        "",
        "outer=sgd",
        "outer=sgd outer_lr=1.0",
        "outer=nesterov",
        "outer_lr=1.0",
        "outer_momentum=0",
        "outer_momentum=0 outer_lr=1",
    ],
)
def test_the_memory_of_an_exchange_is_known_before(topology: str, send: str, local: str) -> None:
    words = [f"parallel.gossip.topology={topology}", f"parallel.exchange.send={send}"]
    if local:
        words += ['parallel.local.every="2 steps"', *(f"parallel.local.{w}" for w in local.split())]
    strategy, _ = open_strategy(words)
    assert isinstance(strategy, Decentralized)
    config = load_text(RUN, words, place="workers.toml")
    # Beside what it keeps from one exchange to the next: the weights sent, and the result.
    assert exchange_copies(config.parallel) == 2 + len(strategy.exchange.state.named())


def test_an_outer_step_under_way_is_kept_with_the_average() -> None:
    strategy, _ = open_strategy(
        ['parallel.local.every="2 steps"', "parallel.exchange.average=keep"]
    )
    assert isinstance(strategy, Decentralized)
    progress = Progress()
    for _, micro_batches in zip(range(2), batches(part=0, parts=1), strict=False):
        result = strategy.update(strategy.accumulate(micro_batches, progress))
        progress = progress.after(samples=result.samples, tokens=result.tokens)
    before = strategy.layout.read()
    strategy.evaluate([make_batch(np.arange(34).reshape(2, 17), rules=JOINED)])
    after, anchor = strategy.layout.read(), strategy.exchange.state.anchor
    assert all(torch.equal(one, other) for one, other in zip(after, anchor, strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_new_weights_forget_what_exchanges_kept() -> None:
    """Such as those of a checkpoint with other workers, loaded after one that was damaged."""
    words = ['parallel.local.every="1 steps"', "parallel.exchange.delay=0"]
    strategy, _ = open_strategy([*words, "parallel.exchange.send=int8"])
    assert isinstance(strategy, Decentralized)
    strategy.update(strategy.accumulate(next(batches(part=0, parts=1)), Progress()))
    assert any(one.any() for one in strategy.exchange.state.momentum)
    strategy.weights_changed()
    state = strategy.exchange.state
    assert not any(one.any() for one in (*state.momentum, *state.residual))
    now = zip(state.anchor, strategy.layout.read(), strict=True)
    assert all(torch.equal(one, other) for one, other in now)


def test_one_worker_alone_may_use_an_outer_optimizer() -> None:
    words = ['parallel.local.every="2 steps"', "parallel.exchange.delay=0"]
    answer = train(words, 5)
    expected = diloco(1, every=2, delay=0, momentum=0.9, steps=5)
    assert_same(expected, [answer], atol=1e-6)
    assert train(["parallel.gossip.topology=ring"], 2)["sent"] == 0
