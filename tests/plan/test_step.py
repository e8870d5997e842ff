"""The formula of a step: what its parts must do, whatever the constants are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gristmill.config.parallel import Mesh
from gristmill.plan.hardware import open_hardware
from gristmill.plan.step import PARTS, Shape, StepPlan, Work, model_flops, time_step

SHAPE = Shape(layers=32, width=4096, heads=32, groups=32, head_size=128, inner=16384, rows=51200)
WORK = Work(SHAPE, sequence=2048, batch=256, micro_batch=4, mesh=Mesh(dp_replicate=8))
H100 = open_hardware("h100-80gb")
MESHES = [
    Mesh(pp, replicate, shard, cp, tp)
    for pp, replicate, shard, cp, tp in itertools.product((1, 4), (1, 4), (1, 8), (1, 2), (1, 8))
]


def step(**changes: object) -> StepPlan:
    return time_step(replace(WORK, **changes), H100)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", "selective", "attention", "products", "full"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_parts_are_the_step(mesh: Mesh, recompute: str) -> None:
    plan = step(mesh=mesh, recompute=recompute, micro_batch=1)
    assert tuple(plan.parts) == PARTS
    assert all(seconds >= 0 for seconds in plan.parts.values())
    assert plan.seconds == pytest.approx(sum(plan.parts.values()))
    assert plan.tokens_per_second * plan.seconds == pytest.approx(256 * 2048)
    assert 0 < plan.mfu < 1


def test_what_is_not_there_takes_no_time() -> None:
    alone = step(mesh=Mesh(), batch=8)
    absent = ("tensor_communication", "data_communication", "pipeline_communication", "bubble")
    assert all(alone.parts[name] == 0 for name in (*absent, "recomputation"))


def test_recomputing_more_takes_longer() -> None:
    modes = ("none", "selective", "products", "full")
    times = [step(recompute=mode).seconds for mode in modes]
    assert times == sorted(times)
    assert len(set(times)) == len(modes)
    # A third of the work of blocks at most.
    assert times[-1] < 4 / 3 * times[0]


def test_more_micro_batches_wait_less_in_a_pipeline() -> None:
    shares = []
    for batch in (32, 64, 128, 256):
        plan = step(mesh=Mesh(pp=8, dp_replicate=1), batch=batch)
        shares.append(plan.parts["bubble"] / plan.seconds)
    assert shares == sorted(shares, reverse=True)
    interleaved = step(mesh=Mesh(pp=8, dp_replicate=1), stages=2)
    plain = step(mesh=Mesh(pp=8, dp_replicate=1))
    assert interleaved.parts["bubble"] < 0.6 * plain.parts["bubble"]


def test_small_products_are_slower_for_each_operation() -> None:
    """A constant share of the peak would miss small micro-batches at large tp by a factor of 2."""
    times = [
        step(mesh=Mesh(tp=8), batch=64, micro_batch=micro).parts["products"] for micro in (1, 4, 16)
    ]
    assert times == sorted(times, reverse=True)
    divided = step(mesh=Mesh(tp=8), batch=64).parts["products"]
    whole = step(mesh=Mesh(), batch=64).parts["products"]
    assert whole / 8 < divided < whole


def test_tensor_parallel_beyond_a_node_is_slow() -> None:
    inside = step(mesh=Mesh(tp=8), batch=32).parts["tensor_communication"]
    beyond = step(mesh=Mesh(tp=16), batch=32).parts["tensor_communication"]
    assert beyond > 1.4 * inside


def test_a_faster_network_is_never_slower() -> None:
    mesh = Mesh(dp_shard=64)
    for latency in (1e-6, 1e-4):
        times = []
        for bandwidth in (1e9, 1e10, 1e11):
            link = replace(H100.between, bandwidth=bandwidth, latency=latency)
            work = replace(WORK, mesh=mesh, micro_batch=1)
            times.append(time_step(work, replace(H100, between=link)).seconds)
        assert times == sorted(times, reverse=True)


def test_keeping_more_sends_less() -> None:
    """On a slow link, gathering once in a step is faster than twice in each micro-batch."""
    slow = replace(H100, between=replace(H100.between, bandwidth=1e9))
    times = []
    for keep in ("nothing", "weights", "gradients"):
        work = replace(WORK, mesh=Mesh(dp_shard=16), micro_batch=1, keep=keep)
        times.append(time_step(work, slow).parts["data_communication"])
    assert times == sorted(times, reverse=True)
    assert times[0] > 5 * times[-1]


def test_frozen_weights_save_a_third_of_the_products() -> None:
    frozen = replace(SHAPE, trained=0.0)
    share = step(shape=frozen).parts["products"] / step().parts["products"]
    assert share == pytest.approx(2 / 3)


def test_operations_of_a_token_are_those_of_the_model() -> None:
    weights = 32 * 12 * 4096**2 + 51200 * 4096
    assert model_flops(SHAPE, 2048) == pytest.approx(6 * weights + 12 * 32 * 4096 * 2048)
    assert model_flops(replace(SHAPE, trained=0.0), 2048) < model_flops(SHAPE, 2048)
