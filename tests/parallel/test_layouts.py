"""The same run on every layout: equal to one process within rounding, and to the bit where the
arithmetic is the same.

Losses are about 5.5 and have 24 bits, so one rounding is 5e-7; the norm of the first gradient,
which every mistake in a weighting, a sum or a seam changes, has to agree to some of those. In 20
steps roundings grow through the optimizer. With AdamW to less than 2e-5: eps is raised, since where
a gradient is nothing but rounding Adam would divide it by itself. With Muon to less than 2e-4: it
multiplies the smallest singular values, and their roundings, by up to a thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gristmill.base.process import Place
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.rules import check_mesh
from gristmill.data.documents import JOINED, DocumentRules
from gristmill.data.loader import make_batch
from gristmill.models.gpt import GPT
from gristmill.optim.build import build_optimizer
from gristmill.parallel.build import build_exchange, build_strategy, place_model
from gristmill.parallel.world import open_world

Crowd = Callable[..., list[Any]]

RUN = """
name = "layouts"
model = { layers = 2, heads = 4, width = 32, context = 32 }
data.paths = "none"
train = { until = "20 steps", batch = 8, accumulate = 2, seed = 5 }
optim.lr = 1e-3
runtime = { device = "cpu", threads = 1 }
"""
GPT2 = ('optim.type="muon"', 'optim.normalise="neurons"', "optim.adam_eps=1e-4")
MODERN = (
    'model.positions="rotary"',
    'model.norm="rmsnorm"',
    "model.qk_norm=true",
    'model.activation="swiglu"',
    "model.mlp_width=64",
    "model.bias=false",
    "model.shortcut=true",
    "model.value_embeddings=1",
    "model.embedding_norm=true",
    "model.tie_head=false",
    "model.logit_cap=15.0",
    "model.kv_heads=2",
    "optim.eps=1e-4",
)
PACKED = DocumentRules(marks="ids", attention=True, positions=True, unweighted=True, end_of_text=3)
VOCAB = 257


Curve = dict[str, Any]
"""What a run shows of itself."""


def run(
    words: tuple[str, ...], *, packed: bool, steps: int = 20, keep: list[GPT] | None = None
) -> Curve:
    """Steps of a small run on the processes of this crowd, or on one process."""
    config = load_text(RUN, words, place="layouts.toml")
    several = dist.is_initialized()
    place = Place.current() if several else Place()
    mesh = check_mesh(config, processes=place.world)
    numbers = resolve(config, vocab=VOCAB, mesh=mesh)
    world = open_world(config.runtime, mesh=mesh, parallel=config.parallel, place=place)
    placed = place_model(config, vocab=VOCAB, world=world)
    replicas = placed.replicas
    optimizer = build_optimizer(
        config.optim,
        replicas.model,
        parameters={name: held.local for name, held in replicas.held.items()},
        exchange=build_exchange(replicas, world),
    )
    council = world.council()
    strategy = build_strategy(
        config, placed=placed, optimizer=optimizer, world=world, council=council
    )
    rng, rules = np.random.default_rng(0), PACKED if packed else JOINED
    results, progress = [], Progress()
    for _ in range(steps):
        ids = rng.zipf(1.3, (8, 33)) % VOCAB
        mine = ids.reshape(-1, mesh.data, numbers.micro_batch, 33)[:, world.data_rank]
        batches = [make_batch(part, rules=rules) for part in mine]
        result = strategy.update(strategy.accumulate(batches, progress))
        progress = progress.after(samples=result.samples, tokens=result.tokens)
        results.append(result)
    if keep is not None:
        keep.append(replicas.model)
    held_out = np.split(rng.integers(0, VOCAB, (9, 33)), [2, 4, 6, 8])
    validation = strategy.evaluate([make_batch(ids, rules=rules) for ids in held_out])
    return {
        "losses": [result.loss.item() for result in results],
        "norms": [result.grad_norm.item() for result in results if result.grad_norm is not None],
        "validation": validation,
        "samples": progress.samples,
    }


def both(words: tuple[str, ...], steps: int) -> list[Curve]:
    return [
        run((*GPT2, *words), packed=False, steps=steps),
        run((*MODERN, *words), packed=True, steps=steps),
    ]


@cache
def alone(words: tuple[str, ...], steps: int) -> list[Curve]:
    threads = torch.get_num_threads()
    try:
        return both(words, steps)
    finally:
        torch.set_num_threads(threads)


LAYOUTS = {
    "copies": (2, ""),
    "shares": (2, "dp_shard=2"),
    "shares, weights whole": (2, 'dp_shard=2 keep="weights"'),
    "shares, gradients whole": (2, 'dp_shard=2 keep="gradients"'),
    "tensor": (2, "tp=2 sequence=false"),
    "tensor and sequence": (2, "tp=2"),
    "ring": (2, "cp=2"),
    "heads": (2, 'cp=2 attention="heads"'),
    "gpipe": (2, 'pp=2 schedule="gpipe"'),
    "1f1b": (2, "pp=2"),
    "interleaved": (2, 'pp=2 schedule="interleaved"'),
    "zero-bubble": (2, 'pp=2 schedule="zero-bubble"'),
    "copies of shares": (4, "dp_replicate=2 dp_shard=2"),
    "shares and tensor": (4, "dp_shard=2 tp=2"),
    "ring and tensor": (4, "cp=2 tp=2"),
    "shares and ring": (4, "dp_shard=2 cp=2"),
    "pipeline and copies": (4, 'pp=2 dp_replicate=2 schedule="zero-bubble"'),
    "pipeline and tensor": (4, "pp=2 tp=2"),
    "pipeline, shares and tensor": (8, "pp=2 dp_shard=2 tp=2"),
    "copies, shares and tensor": (8, "dp_replicate=2 dp_shard=2 tp=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_one_process_does(crowd: Crowd, layout: str) -> None:
    processes, settings = LAYOUTS[layout]
    words = tuple(f"parallel.{word}" for word in settings.split())
    # Two stages on each of two processes need four layers.
    model = ("model.layers=4",) if "pp=" in settings else ()
    # Many processes on few cores are slow: half the steps have to do.
    steps = 20 if processes == 2 else 10
    answers = crowd(processes, both, (*model, *words), steps)
    for answer in answers[1:]:
        assert answer == answers[0], "all processes know the same"
    for curve, expected, far in zip(answers[0], alone(model, steps), (2e-4, 2e-5), strict=True):
        assert curve["norms"][0] == pytest.approx(expected["norms"][0], rel=2e-6)
        assert curve["losses"] == pytest.approx(expected["losses"], rel=0, abs=far)
        assert curve["norms"] == pytest.approx(expected["norms"], rel=10 * far)
        assert curve["validation"] == pytest.approx(expected["validation"], rel=0, abs=far)
        assert curve["samples"] == expected["samples"]


def common_weights(words: tuple[str, ...]) -> list[list[float]]:
    """Weights that all processes sharing layers have, after steps with dropout."""
    run((*words, "model.dropout=0.2"), packed=False, steps=4, keep=(kept := []))
    (model,) = kept
    everywhere = [name for name, _ in model.named_parameters() if name not in model.splits()]
    return [model.get_parameter(name).flatten().tolist() for name in everywhere]


def test_processes_that_share_layers_drop_the_same_where_they_must(crowd: Crowd) -> None:
    for words in (("parallel.tp=2",), ("parallel.tp=2", "parallel.sequence=false")):
        one, other = crowd(2, common_weights, words)
        assert one == other


def unclipped(words: tuple[str, ...]) -> list[float]:
    return run(("train.clip=0", "train.accumulate=1", *words), packed=False, steps=8)["losses"]


def test_copies_and_shares_are_equal_to_the_bit(crowd: Crowd) -> None:
    """Two gradients have one sum, in whichever order micro-batches come; there is one here. Norms
    are added up in another order, so clipping is off."""
    copies = crowd(2, unclipped, ())[0]
    for words in (("parallel.dp_shard=2",), ("parallel.dp_shard=2", 'parallel.keep="gradients"')):
        assert crowd(2, unclipped, words)[0] == copies


def test_sums_in_a_narrow_format_stay_close(crowd: Crowd) -> None:
    words = ('precision.reduce="bf16"',)
    exact = run((), packed=False, steps=4)["losses"]
    for layout in ((), ("parallel.dp_shard=2",)):
        narrow = crowd(2, losses_of, (*words, *layout), 4)[0]
        assert narrow == pytest.approx(exact, rel=2e-3)
        assert narrow != exact


def losses_of(words: tuple[str, ...], steps: int) -> list[float]:
    return run(words, packed=False, steps=steps)["losses"]
