"""All layouts of a run: which are found, which are refused, and in which order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.config.layouts import layout_problems
from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.plan.hardware import open_hardware
from gristmill.plan.layouts import (
    EQUAL,
    HEADROOM,
    LayoutPlan,
    LayoutPlans,
    on_device,
    plan_layout,
    plan_layouts,
    with_batch,
)
from gristmill.plan.timing import plan_step

TEXT = """
name = "run"
preset = "gpt3-1.7b"
[data]
paths = "tokens"
[train]
until = "10B tokens"
batch = 96
[precision]
compute = "bf16"
"""
H100, A100 = open_hardware("h100-80gb"), open_hardware("a100-40gb")


def run(*words: str) -> RunConfig:
    return load_text(TEXT, words, place="run.toml")


def plans(*words: str, gpus: int = 16, **changes: Any) -> LayoutPlans:
    hardware = replace(H100, **changes)
    return plan_layouts(run(*words), gpus=gpus, hardware=hardware, vocab=50257)


def key(layout: LayoutPlan) -> tuple[object, ...]:
    return layout.mesh, layout.variant, layout.micro_batch, layout.recompute


@pytest.mark.parametrize("gpus", [1, 6, 16])
def test_every_layout_uses_all_devices_and_obeys_the_rules(gpus: int) -> None:
    found = plans(gpus=gpus)
    assert found.layouts
    for layout in found.layouts:
        assert layout.mesh.processes == gpus
        assert 96 % (layout.mesh.data * layout.micro_batch) == 0
        words = [f"{name}={one}" for name, one in layout.settings.items() if one is not None]
        config = run(*words)
        assert list(layout_problems(config, processes=gpus)) == []
        again = plan_step(
            config,
            layout.mesh,
            found.hardware,
            vocab=50257,
            micro_batch=layout.micro_batch,
            recompute=layout.recompute,
        )
        assert again.seconds == pytest.approx(layout.step.seconds)


def test_no_layout_is_planned_twice() -> None:
    found = plans()
    assert len({key(layout) for layout in found.layouts}) == len(found.layouts)


def test_the_first_is_the_fastest_within_what_counts_as_equal() -> None:
    times = [layout.step.seconds for layout in plans().layouts]
    assert times[0] <= min(times) * (1 + EQUAL)
    assert all(later * (1 + EQUAL) >= max(times[: n + 1]) for n, later in enumerate(times))


def test_more_memory_never_makes_fewer_layouts_fit() -> None:
    before: set[tuple[object, ...]] = set()
    for gibibytes in (8, 16, 24, 40, 80, 192):
        found = plans(memory=gibibytes * 2**30)
        room = gibibytes * 2**30 * (1 - HEADROOM)
        assert all(layout.memory.total <= room for layout in found.layouts)
        assert all(layout.memory.total > room for layout in found.too_large)
        now = {key(layout) for layout in found.layouts}
        assert before <= now
        before = now
    assert before


def test_what_does_not_fit_says_what_it_needs() -> None:
    found = plans("preset=gpt3-18.4b", gpus=2)
    assert not found.layouts
    assert "needs " in str(found.too_large[0].why_not)
    needs = [layout.memory.total for layout in found.too_large]
    assert needs == sorted(needs)


def test_what_cannot_be_says_why() -> None:
    refused = {one.what: one.why for one in plans(gpus=80).refused}
    assert "does not divide the heads" in refused["tp 5"] or "node" in refused["tp 5"]
    assert "5 does not divide the layers 24" in refused["pp 5"]
    assert "node of 8" in refused["tp above 8"]
    assert any("do not divide the batch of 96" in why for why in refused.values())


def test_a_layout_stays_within_its_node() -> None:
    found = plan_layouts(run(), gpus=16, hardware=H100, per_node=2, vocab=50257)
    assert {layout.mesh.tp for layout in found.layouts} == {1, 2}


def test_the_batch_stays_what_it_is() -> None:
    """Given as micro-batches of each process, it is a number on the devices asked for."""
    words = ("train.batch=unset", "train.micro_batch=2", "train.accumulate=3")
    assert with_batch(run(*words), 8).train.batch == 48
    found = plans(*words, gpus=8)
    for layout in found.layouts:
        rate = layout.step.tokens_per_second * layout.step.seconds
        assert rate == pytest.approx(48 * 2048)


def test_a_given_schedule_is_kept() -> None:
    found = plans("parallel.pp=2", "parallel.schedule=gpipe", gpus=8)
    schedules = {layout.variant.schedule for layout in found.layouts if layout.mesh.pp > 1}
    assert schedules == {"gpipe"}
    free = plans(gpus=8).layouts
    assert {layout.variant.schedule for layout in free} == {None, "interleaved"}


def test_tpus_are_divided_as_xla_can() -> None:
    found = plan_layouts(run(), gpus=8, hardware=open_hardware("tpu-v5p"), vocab=50257)
    assert found.layouts
    assert {(layout.mesh.pp, layout.mesh.cp) for layout in found.layouts} == {(1, 1)}
    with pytest.raises(UserError, match="soap does not run"):
        on_device(run("optim.preconditioner.type=soap"), open_hardware("tpu-v5p"))


def test_workers_that_average_wait_for_what_they_send() -> None:
    """On a slow link, exchanges every 500 steps cost almost nothing, and sums in each step all."""
    slow = replace(H100, per_node=1, between=replace(H100.between, bandwidth=1.25e8))

    def seconds(*words: str) -> float:
        layout = plan_layout(
            on_device(run(*words), slow),
            Mesh(dp_replicate=8),
            slow,
            vocab=50257,
            micro_batch=1,
            recompute="full",
        )
        return layout.step.seconds

    together, apart = seconds(), seconds('parallel.local.every="500 steps"')
    assert together > 10 * apart


def test_planning_for_thousands_of_devices_needs_no_torch() -> None:
    code = f"""
import sys
from gristmill.config.load import load_text
from gristmill.plan.hardware import open_hardware
from gristmill.plan.layouts import plan_layouts
config = load_text({TEXT!r}, ["preset=gpt3-145.6b", "train.batch=4096"], place="run.toml")
found = plan_layouts(config, gpus=4096, hardware=open_hardware("h100-80gb"), vocab=50257)
assert len(found.layouts) > 50
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


BILLIONS = {"1.7": 32, "3.6": 64, "7.5": 128, "18.4": 256, "39.1": 512, "76.1": 1024}
BATCHES = {"18.4": 1024, "39.1": 1536, "76.1": 1792}


@pytest.mark.parametrize("billions", BILLIONS)
def test_the_sizes_of_the_megatron_guide_fit_where_they_were_trained(billions: str) -> None:
    words = (f"preset=gpt3-{billions}b", f"train.batch={BATCHES.get(billions, 512)}")
    hardware, gpus = open_hardware("a100-80gb"), BILLIONS[billions]
    best = plan_layouts(run(*words), gpus=gpus, hardware=hardware, vocab=50257).layouts[0]
    assert 0.4 < best.step.mfu < 0.75


# ------------------------------------------------------------------ fp8

FP8 = 'precision.fp8=["mlp","attention"]'


def seconds_of(*words: str) -> float:
    plan = plan_step(run(*words), Mesh(), H100, vocab=50257, micro_batch=8, recompute="none")
    return plan.seconds


def test_blocks_in_fp8_are_faster_and_each_part_counts() -> None:
    plain, half, whole = (seconds_of(*words) for words in ((), ('precision.fp8=["mlp"]',), (FP8,)))
    assert 1.05 < plain / half < plain / whole < 2
    # The head has products of its own, which are planned in bf16.
    assert seconds_of('precision.fp8=["head"]') == plain


def test_narrow_models_are_planned_in_the_format_that_they_have() -> None:
    words = ('preset="gpt2-small"', "train.micro_batch=unset")
    narrow = on_device(run(*words, FP8), H100)
    assert narrow.precision.fp8 == ()


def test_a_device_without_fp8_is_refused() -> None:
    with pytest.raises(UserError, match="a100-40gb has no products in fp8") as error:
        on_device(run(FP8), A100)
    assert error.value.problems[0].where == "--gpu a100-40gb"
