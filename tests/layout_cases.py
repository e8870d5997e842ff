"""One list of layouts for the tests on the CPU and on a GPU, and what these do with them: some
steps of a small run, compared with one process; runs that stop and go on.

The functions run in processes of their own, started by the fixture `crowd`, or here alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from gristmill.base.process import ProcessInfo
from gristmill.base.units import Progress
from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig
from gristmill.data.loader import JOINED, DocumentRules, make_batch
from gristmill.distributed.world import open_world
from gristmill.models.gpt import GPT
from gristmill.train.build import build_strategy
from gristmill.train.run import Run
from gristmill.train.stop import StopRequest

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
    "model.value_embeddings=1",
    "model.attention_gate=true",
    "model.embedding_norm=true",
    "model.tie_head=false",
    "model.logit_cap=15.0",
    "model.kv_heads=2",
    "model.head_width=12",
    "model.rotary_fraction=0.5",
    "model.qkv_bias=true",
    "model.parallel_residual=true",
    "optim.eps=1e-4",
)
PACKED = DocumentRules(
    doc_starts="ids", attention=True, positions=True, unweighted=True, end_of_text=3
)
VOCAB = 257


Curve = dict[str, Any]
"""What a run shows of itself."""


def run(
    words: tuple[str, ...], *, packed: bool, steps: int = 20, keep: list[GPT] | None = None
) -> Curve:
    """Steps of a small run on the processes of this crowd, or on one process."""
    config = load_text(RUN, words, place="layouts.toml")
    place = ProcessInfo.current() if "RANK" in os.environ else ProcessInfo()
    mesh = check_mesh(config, processes=place.world)
    numbers = resolve(config, vocab=VOCAB, mesh=mesh)
    world = open_world(
        config.runtime,
        tf32=config.precision.tf32,
        mesh=mesh,
        parallel=config.parallel,
        place=place,
    )
    control = world.control_group("test")
    strategy = build_strategy(config, vocab=VOCAB, world=world, control=control)
    rng, rules = np.random.default_rng(0), PACKED if packed else JOINED
    results, progress = [], Progress()
    for _ in range(steps):
        ids = rng.zipf(1.3, (numbers.batch, 33)) % VOCAB
        mine = ids.reshape(-1, mesh.data, numbers.micro_batch, 33)[:, world.data_rank]
        batches = [make_batch(part, rules=rules) for part in mine]
        result = strategy.update(strategy.accumulate(batches, progress))
        progress = progress.after(samples=result.samples, tokens=result.tokens)
        results.append(result)
    if keep is not None:
        keep.append(strategy.model)
    held_out = np.split(rng.integers(0, VOCAB, (9, 33)), [2, 4, 6, 8])
    validation = strategy.evaluate([make_batch(ids, rules=rules) for ids in held_out])
    return {
        "losses": [result.loss.item() for result in results],
        "norms": [result.grad_norm.item() for result in results if result.grad_norm is not None],
        "validation": validation,
        "samples": progress.samples,
        "skipped": [result.skipped.item() for result in results if result.skipped is not None],
        "scales": [one.loss_scale.item() for one in results if one.loss_scale is not None],
    }


def both(words: tuple[str, ...], steps: int) -> list[Curve]:
    """A plain model and a modern one, on packed documents."""
    return [
        run((*GPT2, *words), packed=False, steps=steps),
        run((*MODERN, *words), packed=True, steps=steps),
    ]


LAYOUTS = {
    "copies": (2, ""),
    "shares": (2, "dp_shard=2"),
    "shares, gradients whole": (2, 'dp_shard=2 keep="gradients"'),
    "tensor and sequence": (2, "tp=2"),
    "heads": (2, 'cp=2 attention="heads"'),
    "1f1b": (2, "pp=2"),
    "interleaved": (2, 'pp=2 schedule="interleaved"'),
    "zero-bubble": (2, 'pp=2 schedule="zero-bubble"'),
    "shares and tensor": (4, "dp_shard=2 tp=2"),
    "shares and ring": (4, "dp_shard=2 cp=2"),
    "pipeline and tensor": (4, "pp=2 tp=2"),
}
MORE = {
    "ring and tensor": (4, "cp=2 tp=2"),
    "pipeline, shares and tensor": (8, "pp=2 dp_shard=2 tp=2"),
    "copies, shares and tensor": (8, "dp_replicate=2 dp_shard=2 tp=2"),
    "shares, weights whole": (2, 'dp_shard=2 keep="weights"'),
    "tensor": (2, "tp=2 sequence=false"),
    "ring": (2, "cp=2"),
    "gpipe": (2, 'pp=2 schedule="gpipe"'),
    "copies of shares": (4, "dp_replicate=2 dp_shard=2"),
    "pipeline and copies": (4, 'pp=2 dp_replicate=2 schedule="zero-bubble"'),
    "pipeline and ring": (4, "pp=2 cp=2"),
    "pipeline and heads": (4, 'pp=2 cp=2 attention="heads" schedule="interleaved"'),
    "shares, ring and tensor": (8, "dp_shard=2 cp=2 tp=2"),
    "pipeline, ring and tensor": (8, "pp=2 cp=2 tp=2"),
}
"""Where there is time for them."""


@cache
def alone(words: tuple[str, ...], steps: int) -> list[Curve]:
    """What one process computes, here."""
    threads = torch.get_num_threads()
    try:
        return both(words, steps)
    finally:
        torch.set_num_threads(threads)


def compare(crowd: Crowd, layout: str, *, steps: int, muon: float, adamw: float) -> None:
    """Run a layout and one process for so many steps; losses may differ by as much as is said."""
    processes, settings = (LAYOUTS | MORE)[layout]
    model = model_for(settings)
    answers = crowd(processes, both, (*model, *parallel_words(settings)), steps)
    for answer in answers[1:]:
        assert answer == answers[0], "all processes know the same"
    for curve, expected, far in zip(answers[0], alone(model, steps), (muon, adamw), strict=True):
        assert_close(curve, expected, far=far)


def parallel_words(settings: str) -> list[str]:
    """The settings of a layout as on the command line."""
    return [f"parallel.{word}" for word in settings.split()]


def model_for(settings: str) -> tuple[str, ...]:
    """What the model of a layout needs, which one process then has too."""
    # Two stages on each of two processes need four layers.
    model = ("model.layers=4",) if "pp=" in settings else ()
    # The token after the next one is on another process if sequences are divided.
    return model + (() if "cp=" in settings else ("train.mtp=0.5",))


def assert_close(curve: Curve, expected: Curve, *, far: float) -> None:
    """Equal within rounding: the first norm, which every mistake changes, to some bits."""
    assert curve["norms"][0] == pytest.approx(expected["norms"][0], rel=2e-6)
    assert curve["losses"] == pytest.approx(expected["losses"], rel=0, abs=far)
    assert curve["norms"] == pytest.approx(expected["norms"], rel=10 * far)
    assert curve["validation"] == pytest.approx(expected["validation"], rel=0, abs=far)
    assert curve["samples"] == expected["samples"]


# ------------------------------------------------------------------ runs that go on

RESUMED = (
    'train.until="12 steps"',
    "model.layers=4",
    "model.width=32",
    "model.heads=4",
    "model.context=16",
    "train.batch=8",
    "train.accumulate=2",
    "optim.lr=1e-3",
    "optim.eps=1e-4",
    'validate.every="6 steps"',
    'checkpoint.every="100 steps"',
    'parallel.timeout="30s"',
)


SOAP = (
    'optim.type="muon"',
    'optim.preconditioner.type="soap"',
    "optim.preconditioner.basis_every=2",
    "optim.preconditioner.eps=1e-4",
)

KFAC = (
    'optim.preconditioner.type="kfac"',
    "optim.preconditioner.factor_every=2",
    "optim.preconditioner.inverse_every=4",
)


FP8 = 'precision.fp8=["mlp", "attention"]'

EXACT = {
    "3 processes": {
        "copies": ("",),
        "shards": ("dp_shard=3",),
        "kfac": ("", *KFAC),
        "fp8": ("dp_shard=3", FP8),
    },
    "4 processes": {
        "copies": ("",),
        "copies of shards": ("dp_replicate=2 dp_shard=2", 'optim.type="muon"'),
        "shards and tensor": ("dp_shard=2 tp=2",),
        "fp8": ("dp_shard=2 tp=2", FP8),
        "ring": ("cp=2",),
        "pipeline": ("pp=2",),
        "pipeline alone": ("pp=4", "model.layers=4", "train.accumulate=4"),
        "soap": ("dp_shard=4", *SOAP),
    },
    "4 processes, other layouts": {
        "shards": ("dp_shard=4",),
        "shards, gradients whole": ('dp_shard=4 keep="gradients"',),
        "tensor": ("tp=2",),
        "tensor alone": ("tp=4",),
        "ring alone": ("cp=4",),
        "heads": ('cp=2 attention="heads"',),
        "zero-bubble": ('pp=2 schedule="zero-bubble"', "model.layers=4"),
        "muon": ("", 'optim.type="muon"'),
        "soap": ("", *SOAP),
        "kfac of copies": ("", *KFAC),
        "kfac": ("dp_shard=4", *KFAC),
    },
}
"""Layouts on so many processes that the order of sums shows: with two, a + b = b + a hides it."""


def go_on(config: RunConfig, stop_at: int | None, asked: int | None = None) -> int:
    """Train until a step, at which one process or all of them are asked to stop."""
    rank = int(os.environ.get("RANK", "0"))
    real, steps = StopRequest.check_time, 0

    def check(self: StopRequest, *, reserve: float) -> None:
        nonlocal steps
        steps += 1
        if steps == stop_at and asked in (None, rank):
            self.reason = "the test"
        real(self, reserve=reserve)

    StopRequest.check_time = check  # type: ignore[method-assign]
    try:
        return int(Run(config).train().exit)
    finally:
        StopRequest.check_time = real  # type: ignore[method-assign]


def all_go_on(configs: list[RunConfig], stop_at: int | None, asked: int | None = None) -> list[int]:
    """One run after the other, in the same processes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gristmill.train.run.close_run_world", lambda world: None)
        return [go_on(config, stop_at, asked) for config in configs]


def wholes_and_halves(pairs: list[tuple[RunConfig, RunConfig]]) -> list[int]:
    """Each pair's first run to its end, and how its second ends, which the last process is asked to
    stop in its second step."""
    all_go_on([whole for whole, _ in pairs], None)
    last = int(os.environ["WORLD_SIZE"]) - 1
    return all_go_on([half for _, half in pairs], 2, last)


def exact_pairs(
    make_run: Callable[..., RunConfig],
    layouts: dict[str, tuple[str, ...]],
    more: tuple[str, ...] = (),
) -> list[tuple[RunConfig, RunConfig]]:
    """For each layout the settings of a run to its end, and of one that is stopped."""
    short = ('train.until="5 steps"', 'validate.every="3 steps"', "train.batch=24")
    pairs = []
    for name, (layout, *own) in layouts.items():
        dropout = 0.0 if "cp=" in layout else 0.1
        usual = [word for word in RESUMED if "optim.eps" not in word]
        model = (f"model.dropout={dropout}", "model.layers=2")
        settings = (*usual, *short, *model, *parallel_words(layout), *own, *more)
        whole, halves = (
            make_run(*settings, folder=f"{name}, {part}") for part in ("whole", "halves")
        )
        pairs.append((whole, halves))
    return pairs
