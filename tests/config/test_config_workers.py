"""What workers with weights of their own allow, and the sizes that fit a topology."""

from __future__ import annotations

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.config.rules import check_mesh
from gristmill.strategies.decentralized.workers import workers_per_node

RUN = """
name = "workers"
model = { layers = 2, heads = 2, width = 16, context = 16 }
data.paths = "tokens/none"
train = { until = "10 steps", batch = 48 }
"""
RING, DILOCO = "parallel.gossip.topology=ring", 'parallel.local.every="50 steps"'


def said(*words: str, processes: int = 4) -> str:
    with pytest.raises(UserError) as error:
        check_mesh(load_text(RUN, words, place="workers.toml"), processes=processes)
    assert error.value.exit is Exit.CONFIG
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["parallel.exchange.send=int8"],
            [
                "parallel.exchange: has no effect when all processes have the same weights",
                "remove it, or set parallel.gossip or parallel.local",
            ],
        ),
        (
            ["parallel.elastic=true"],
            ["parallel.elastic: has no effect when all processes have the same weights"],
        ),
        (
            [DILOCO, "parallel.gossip.mixing=0.5"],
            [
                "parallel.gossip.mixing: with parallel.local, all of the result counts",
                "leave mixing and mixing_power out",
            ],
        ),
        (
            [
                "parallel.gossip.topology=complete",
                "parallel.gossip.mixing_power=1.0",
                "parallel.exchange.send=bf16",
            ],
            ['with a complete graph and send = "bf16", all of the result counts'],
        ),
        (
            [RING, 'parallel.gossip.mixing_from="5 steps"'],
            [
                "parallel.gossip.mixing_from: has no effect without mixing_power",
                "remove it, or set parallel.gossip.mixing_power",
            ],
        ),
        (
            [RING, "parallel.gossip.workers_per_node=2"],
            ["parallel.gossip.workers_per_node: has no effect", "which does not know nodes"],
        ),
        (
            [DILOCO, "parallel.local.outer=sgd", "parallel.local.outer_momentum=0.5"],
            [
                'parallel.local.outer_momentum: has no effect with outer = "sgd"',
                'remove it, or set outer = "nesterov"',
            ],
        ),
        (
            [RING, "parallel.exchange.density=0.1"],
            ['parallel.exchange.density: has no effect with send = "fp32"', 'set send = "top-k"'],
        ),
        (
            [RING, "parallel.exchange.send=top-k"],
            [
                "parallel.exchange.send: top-k sends differences to the last average",
                'set parallel.gossip.topology = "complete", or send = "int8"',
            ],
        ),
        (
            [DILOCO, "parallel.exchange.delay=51"],
            [
                "parallel.exchange.delay: 51 steps are longer than from one exchange to the next",
                "give at most 50",
            ],
        ),
        ([RING, "parallel.exchange.delay=2"], ["give at most 1"]),
        (
            [RING, "train.guard.action=rollback"],
            [
                "train.guard.action: going back needs a loss that all processes share",
                'set it to "skip"',
            ],
        ),
        (
            [RING, 'parallel.compare="5 steps"'],
            ["parallel.compare: has no effect with dp_replicate 4: no weights are held twice"],
        ),
        (
            [RING, "precision.reduce=bf16", "precision.compute=bf16"],
            ["precision.reduce: has no effect with dp_replicate 4"],
        ),
    ],
)
def test_what_would_not_act_is_refused(words: list[str], expected: list[str]) -> None:
    text = said(*words)
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("topology", "words", "processes", "expected"),
    [
        ("ring", [], 3, ["needs an even number of workers, not 3", "use 2 or 4 workers"]),
        ("exp", [], 6, ["a power of two, not 6 workers", "use 4 or 8 workers, or one of complete"]),
        (
            "alternating-exp-ring",
            ["parallel.gossip.workers_per_node=2"],
            6,
            ["and 2, 4, 8, … of them, not 6 workers with 2 on each node", "use 4 or 8 workers"],
        ),
        (
            "hierarchical",
            ["parallel.gossip.workers_per_node=4"],
            6,
            ["nodes with equally many workers, not 6 workers with 4", "use 4 or 8 workers"],
        ),
        ("ring", ["parallel.dp_shard=2"], 6, ["not 3 workers", "use 2 or 4 workers"]),
    ],
)
def test_sizes_that_do_not_fit_name_sizes_that_do(
    topology: str, words: list[str], processes: int, expected: list[str]
) -> None:
    text = said(f"parallel.gossip.topology={topology}", *words, processes=processes)
    for part in ("parallel.gossip.topology", *expected):
        assert part in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([RING], "after every step: ring, fp32, result used 1 step later"),
        (
            [DILOCO, "parallel.exchange.send=int8", "parallel.exchange.delay=0"],
            "every 50 steps: complete, outer nesterov, int8, result used at once",
        ),
        (
            [DILOCO, "parallel.gossip.topology=random", "parallel.exchange.delay=3"],
            "every 50 steps: random, outer nesterov, fp32, result used 3 steps later",
        ),
    ],
)
def test_exchanges_in_words(words: list[str], expected: str) -> None:
    parallel = load_text(RUN, words, place="workers.toml").parallel
    assert parallel.described_exchange == f"workers exchange weights {expected}"


@pytest.mark.parametrize("topology", ["complete", "ring", "exp", "random", "hierarchical"])
def test_one_worker_alone_fits_every_topology(topology: str) -> None:
    config = load_text(RUN, [f"parallel.gossip.topology={topology}"], place="workers.toml")
    assert check_mesh(config, processes=1) == Mesh()
    assert workers_per_node(config.parallel, Mesh(), local_world=None) == 1


def test_nodes_are_found_from_the_launcher() -> None:
    words = ["parallel.gossip.topology=alternating-exp-ring"]
    parallel = load_text(RUN, words, place="workers.toml").parallel
    assert workers_per_node(parallel, Mesh(dp_replicate=16), local_world=4) == 4
    assert workers_per_node(parallel, Mesh(dp_replicate=4, dp_shard=2), local_world=4) == 2
    alone = load_text(RUN, ["parallel.gossip.workers_per_node=4", *words], place="workers.toml")
    assert workers_per_node(alone.parallel, Mesh(), local_world=1) == 1
    for local_world, mesh, what in (
        (None, Mesh(dp_replicate=4), "the number of workers on each node is not known"),
        (4, Mesh(dp_replicate=6), "the number of workers on each node is 4, of 6"),
        (4, Mesh(dp_replicate=4, dp_shard=8), "is not known"),
        (4, Mesh(dp_replicate=12), "not 12 workers with 4 on each node"),
        (4, Mesh(dp_replicate=4), "not 4 workers with 4 on each node"),
    ):
        with pytest.raises(UserError) as error:
            workers_per_node(parallel, mesh, local_world=local_world)
        assert what in str(error.value)
