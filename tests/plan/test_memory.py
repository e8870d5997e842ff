"""Tests of planned memory, and of what is said when it runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.plan.arithmetic import gpt_size
from gristmill.plan.explain import (
    MeasuredMemory,
    Situation,
    described_change,
    explained,
    memory_table,
    smallest_change,
)
from gristmill.plan.memory import KINDS, MemoryPlan, plan_memory
from gristmill.plan.shape import planned_model

GIB = 2**30
VOCAB = 50257


def run(*settings: str, preset: str = "gpt2-small", micro: int = 8, batch: int = 16) -> RunConfig:
    words = [f"train.micro_batch={micro}", f"train.batch={batch}", 'train.until="10 steps"']
    words += ["precision.compute=bf16", *settings]
    text = f'name = "a"\npreset = "{preset}"\n[data]\npaths = "none"\n'
    return load_text(text, words, place="run.toml")


def plan(config: RunConfig, mesh: Mesh | None = None, **other: Any) -> MemoryPlan:
    given = {"micro_batch": config.train.micro_batch, "recompute": config.train.recompute, **other}
    return plan_memory(config, mesh or Mesh(), vocab=VOCAB, **given)


def test_parts_are_those_of_the_largest_moment() -> None:
    found = plan(run())
    assert tuple(found.parts) == KINDS
    moments = dict(found.timeline)
    assert found.allocated == pytest.approx(max(moments.values()), abs=len(KINDS))
    assert moments[found.moment] == max(moments.values())
    assert found.total == sum(found.parts.values()) > found.allocated


def test_weights_gradients_and_state_are_those_of_the_size_of_the_model() -> None:
    for settings in ((), ("optim.type=muon",), ("optim.type=sgd",), ("model.tie_head=false",)):
        config = run(*settings)
        parts, size = plan(config).parts, gpt_size(config, rows=50304)
        assert parts["weights"] == size.weights
        assert parts["gradients"] == size.saved
        assert parts["optimizer"] == size.state


def test_activations_grow_with_tokens_alone() -> None:
    sizes = [plan(run(micro=micro, batch=32)).parts["activations"] for micro in (2, 4, 8)]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), abs=2)
    assert plan(run(batch=16)).parts == plan(run(batch=1024)).parts


def test_recomputation_keeps_less() -> None:
    kept = [
        plan(run("runtime.kernels=false", f"train.recompute={mode}")).parts["activations"]
        for mode in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > 5 * kept[2]


def test_logits_are_those_of_a_slice() -> None:
    small, large = (plan(run(micro=micro, batch=128)).parts["logits"] for micro in (32, 128))
    hidden = 2 * 2 * 1024 * 768  # of a sample, and its gradient
    assert large - small == 96 * hidden


def test_every_process_of_a_mesh_holds_its_part() -> None:
    alone = plan(run()).parts
    shard = plan(run("parallel.dp_shard=8", batch=128), Mesh(dp_shard=8)).parts
    tensor = plan(run("parallel.tp=4"), Mesh(tp=4)).parts
    stage = plan(run("parallel.pp=4", batch=64), Mesh(pp=4), stage=1).parts
    for kind in ("weights", "optimizer"):
        assert shard[kind] == pytest.approx(alone[kind] / 8, rel=0.01)
        assert tensor[kind] == pytest.approx(alone[kind] / 4, rel=0.03)
        assert stage[kind] < alone[kind] / 5
    assert shard["activations"] < alone["activations"]
    assert tensor["activations"] < alone["activations"] / 2
    assert shard["communication"] > 0


def test_earlier_stages_hold_more_micro_batches() -> None:
    config = run("parallel.pp=4", micro=4, batch=64)
    kept = [plan(config, Mesh(pp=4), stage=n).parts["activations"] for n in range(3)]
    assert kept[0] > kept[1] > kept[2]
    gpipe = run("parallel.pp=4", "parallel.schedule=gpipe", micro=4, batch=64)
    assert plan(gpipe, Mesh(pp=4), stage=1).parts["activations"] > 2 * kept[1]


def test_workers_keep_copies_and_offload_keeps_state_on_the_host() -> None:
    gossip = run('parallel.gossip.topology="ring"', batch=32)
    plain, weights = plan(run()).parts, plan(run()).parts["weights"]
    assert plan(gossip, Mesh(dp_replicate=2)).parts["optimizer"] == plain["optimizer"] + 2 * weights
    assert plan(run("runtime.offload=optimizer", "runtime.device=cuda")).parts["optimizer"] == 0


def test_a_model_of_hugging_face_has_the_shape_of_its_config() -> None:
    sizes = "num_hidden_layers = 2, hidden_size = 64, num_attention_heads = 4, vocab_size = 100"
    text = f'model_type = "mixtral", {sizes}, intermediate_size = 96, num_key_value_heads = 2'
    text = f"{text}, max_position_embeddings = 32"
    head = 'name = "a"\n[data]\npaths = "none"\n[train]\nuntil = "1 steps"\nbatch = 4\n[model]\n'
    config = load_text(f"{head}hf_config = {{ {text} }}\n", [], place="run.toml")
    shape = planned_model(config.model)
    assert (shape.layers, shape.width, shape.groups, shape.inner) == (2, 64, 2, 96)
    assert (shape.activation, shape.positions, shape.context) == ("swiglu", "rotary", 32)
    assert plan(config, micro_batch=4).total > 0


# ------------------------------------------------------------------ what would fit


def situation(*settings: str, mesh: Mesh | None = None, **sizes: Any) -> Situation:
    return Situation(run(*settings, **sizes), mesh or Mesh(), VOCAB, "cuda")


def smallest(one: Situation, share: float) -> dict[tuple[str, str], Any] | None:
    found = smallest_change(one, capacity=int(share * one.plan().total))
    return None if found is None else found.settings


def test_a_smaller_micro_batch_comes_first_and_the_batch_stays() -> None:
    one = situation(micro=16, batch=48)
    assert smallest(one, 0.97) == {("train", "batch"): 48, ("train", "micro_batch"): 12}
    # Nothing is said about accumulation unless the settings did.
    other = load_text(
        'name = "a"\npreset = "gpt2-small"\n[data]\npaths = "none"\n',
        ["train.micro_batch=16", "train.accumulate=3", 'train.until="10 steps"'],
        place="run.toml",
    )
    found = smallest(Situation(other, Mesh(), VOCAB, "cuda"), 0.97)
    assert found is not None
    assert found["train", "accumulate"] is None
    assert found["train", "batch"] == 48


def test_recomputation_comes_where_no_micro_batch_fits() -> None:
    one = situation("runtime.kernels=false", preset="gpt2-medium", micro=1, batch=1)
    needs = one.plan().total
    settings = [smallest(one, share) for share in (0.99, 0.6)]
    assert settings[0] == {("train", "recompute"): "selective"}
    assert settings[1] is None or ("runtime", "offload") in settings[1]
    found = smallest_change(one, capacity=int(0.99 * needs))
    assert found is not None
    assert found.needs < needs
    assert found.config.train.recompute == "selective"
    assert described_change(found).startswith("train.recompute = selective needs ")


def test_copies_are_sharded_where_one_process_cannot_hold_the_state() -> None:
    one = situation(preset="gpt2-xl", micro=1, batch=8, mesh=Mesh(dp_replicate=8))
    found = smallest(one, 0.6)
    assert found is not None
    assert found["parallel", "dp_shard"] == 8
    assert found["parallel", "dp_replicate"] == 1


def test_the_rules_are_kept() -> None:
    """A pipeline needs enough micro-batches, zero-bubble does not recompute."""
    words = ("parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.stages=2")
    one = situation(*words, micro=8, batch=16, mesh=Mesh(pp=2))
    for share in (0.9, 0.7, 0.5):
        found = smallest(one, share)
        assert found is None or ("train", "recompute") not in found


def test_a_plan_that_was_too_low_is_raised() -> None:
    """A device that ran out holds less than the run needs, whatever the plan said."""
    one = situation(micro=16, batch=16)
    measured = MeasuredMemory(2 * one.plan().total, peak=one.plan().total)
    error = explained("it ran out", one, measured, source="run")
    assert error.change is not None
    assert error.change.settings["train", "micro_batch"] == 8
    assert error.change.needs > error.change.plan.total


def test_the_error_has_a_table_and_a_command() -> None:
    one = situation(micro=16, batch=16)
    measured = MeasuredMemory(
        10 * GIB, allocated=8 * GIB, peak=9 * GIB, reserved=int(9.25 * GIB), free=GIB // 4
    )
    text = str(explained("it ran out", one, measured, source="runs/a"))
    lines = text.splitlines()
    assert lines[0] == "it ran out"
    table = {line.split()[0] for line in lines[3:]}
    assert {"weights", "optimizer", "activations", "logits", "in"} <= table
    for name, size in (("peak", "9 GiB"), ("others and CUDA", "512 MiB"), ("free", "256 MiB")):
        assert any(name in line and line.rstrip().endswith(size) for line in lines)
    assert "gristmill train runs/a train.batch=16 train.micro_batch=8" in lines[-1]


def test_a_model_that_fits_nowhere_is_told_so() -> None:
    one = situation(preset="gpt3-145.6b", micro=1, batch=1)
    measured = MeasuredMemory(80 * GIB)
    error = explained("it ran out", one, measured, source="run")
    assert error.change is None
    assert "smaller model" in str(error)


def test_the_table_leaves_out_what_there_is_none_of() -> None:
    table = memory_table(plan(run(batch=8)))
    assert "communication" not in table
    assert "measured" not in table
    assert "in all" in table


@pytest.mark.parametrize("mode", ["none", "full"])
def test_settings_that_are_given_take_the_place_of_those_of_the_run(
    mode: str, make_run: Callable[..., RunConfig]
) -> None:
    config = make_run("train.micro_batch=4")
    one = plan_memory(config, Mesh(), vocab=257, micro_batch=2, recompute=mode)
    other = make_run("train.micro_batch=2", f"train.recompute={mode}")
    assert one == plan_memory(other, Mesh(), vocab=257, micro_batch=2, recompute=mode)


def test_blocks_in_fp8_keep_less() -> None:
    plain, half, whole = (
        plan(run(*words, preset="gpt2-xl")).parts["activations"]
        for words in ((), ('precision.fp8=["attention"]',), ('precision.fp8=["attention","mlp"]',))
    )
    assert plain > half > whole > 0.7 * plain
