"""The same run on every layout: equal to one process within rounding, and to the bit where the
arithmetic is the same.

Losses are about 5.5 and have 24 bits, so one rounding is 5e-7; the norm of the first gradient,
which every mistake in a weighting, a sum or a seam changes, has to agree to some of those. In a few
steps roundings grow through the optimizer. With AdamW to less than 5e-6: eps is raised, since where
a gradient is nothing but rounding Adam would divide it by itself. With Muon to less than 2e-5: it
multiplies the smallest singular values, and their roundings, by up to a thousand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_cases import (
    FP8,
    GPT2,
    LAYOUTS,
    MORE,
    RUN,
    VOCAB,
    Crowd,
    Curve,
    assert_close,
    compare,
    run,
)

from gristmill.base.process import ProcessInfo
from gristmill.base.units import parse_seconds
from gristmill.config.load import load_text
from gristmill.config.rules import check_mesh
from gristmill.distributed.device import Device
from gristmill.distributed.world import open_world
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.models.layers import Linear
from gristmill.models.products import cast_linear
from gristmill.train.build import build_strategy


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_one_process_does(crowd: Crowd, layout: str) -> None:
    processes, _ = LAYOUTS[layout]
    # Many processes on few cores are slow: fewer steps have to do.
    compare(crowd, layout, steps=8 if processes == 2 else 4, muon=2e-5, adamw=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS | MORE)
def test_every_layout_over_twenty_steps(crowd: Crowd, layout: str) -> None:
    """Roundings grow from step to step."""
    compare(crowd, layout, steps=20, muon=2e-4, adamw=2e-5)


def with_own_products(words: tuple[str, ...], steps: int) -> Curve:
    """As on a GPU, where the products of linear layers have a backward pass of their own."""
    Linear._linear = lambda self, x, bias: cast_linear(x, self.weight, bias)  # type: ignore[method-assign]
    return run(words, packed=False, steps=steps)


def test_a_split_backward_pass_takes_products_with_one_of_their_own(crowd: Crowd) -> None:
    model = (*GPT2, "model.layers=4")
    split = ("parallel.pp=2", 'parallel.schedule="zero-bubble"')
    one, other = crowd(2, with_own_products, (*model, *split), 4)
    assert one == other
    assert_close(one, run(model, packed=False, steps=4), far=2e-5)


def common_weights() -> list[list[list[float]]]:
    """Weights that all processes sharing layers have, after steps with dropout."""
    found = []
    only_hidden = "model.attention_dropout=0.0"
    for words in (
        ("parallel.tp=2",),
        ("parallel.tp=2", "parallel.sequence=false"),
        ("parallel.tp=2", "parallel.sequence=false", only_hidden),
        ("parallel.cp=2", only_hidden),
    ):
        run((*words, "model.dropout=0.2"), packed=False, steps=4, keep=(kept := []))
        (model,) = kept
        everywhere = [name for name, _ in model.named_parameters() if name not in model.splits()]
        found.append([model.get_parameter(name).flatten().tolist() for name in everywhere])
    return found


def test_processes_that_share_layers_drop_the_same_where_they_must(crowd: Crowd) -> None:
    one, other = crowd(2, common_weights)
    assert one == other


def losses_of(
    layouts: list[tuple[str, ...]], words: tuple[str, ...], steps: int
) -> list[list[float]]:
    return [run((*words, *one), packed=False, steps=steps)["losses"] for one in layouts]


SHARES = ("parallel.dp_shard=2",)


def test_copies_and_shares_are_equal_to_the_bit(crowd: Crowd) -> None:
    """Two gradients have one sum, in whichever order micro-batches come; there is one here. Norms
    are added up in another order, so clipping is off."""
    layouts = [(), SHARES, (*SHARES, 'parallel.keep="gradients"')]
    words = ("train.clip=0", "train.accumulate=1")
    copies, shares, whole_gradients = crowd(2, losses_of, layouts, words, 8)[0]
    assert copies == shares == whole_gradients


def test_blocks_in_fp8_learn_the_same_on_several_processes(crowd: Crowd) -> None:
    """Scales are the same everywhere. Those of the first step come from other samples, and each
    rounding to fp8 makes a difference of 2^-4 of another one."""
    words, none = ("optim.eps=1e-4", FP8), ("optim.eps=1e-4",)
    (alone,), (plain,) = (losses_of([()], chosen, 6) for chosen in (words, none))
    layouts = [(), SHARES, ("parallel.tp=2",), ("parallel.cp=2",)]
    for losses in (found := crowd(2, losses_of, layouts, words, 6))[0]:
        assert losses == pytest.approx(alone, abs=1e-3)
        assert losses != plain
    assert found[0] == found[1]
    assert alone == pytest.approx(plain, abs=2e-3)


SOAP = (
    'optim.preconditioner.type="soap"',
    "optim.preconditioner.eps=1e-4",
    # The longer side of the MLP has more directions than the first gradient, and those that are
    # left over are nothing but rounding.
    "optim.preconditioner.max_dim=32",
)


@pytest.mark.parametrize(
    ("base", "far"), [(("optim.eps=1e-4",), 2e-4), (GPT2, 1e-3)], ids=["adamw", "muon"]
)
def test_soap_does_the_same_on_two_processes(
    crowd: Crowd, base: tuple[str, ...], far: float
) -> None:
    """One of them computes each matrix, whether they hold copies or shards of it. Rounding grows
    as fast on one process, with another number of micro-batches."""
    words = (*base, *SOAP, "train.clip=0", "train.accumulate=1")
    (alone,) = losses_of([()], words, 6)
    copies, shares, tensor = crowd(2, losses_of, [(), SHARES, ("parallel.tp=2",)], words, 6)[0]
    assert copies == shares
    assert copies == pytest.approx(alone, rel=0, abs=far)
    assert tensor == pytest.approx(alone, rel=0, abs=far)


def test_sums_in_a_narrow_format_stay_close(crowd: Crowd) -> None:
    (exact,) = losses_of([()], (), 4)
    for narrow in crowd(2, losses_of, [(), SHARES], ('precision.reduce="bf16"',), 4)[0]:
        assert narrow == pytest.approx(exact, rel=2e-3)
        assert narrow != exact


def half_precision() -> list[Curve]:
    # One micro-batch, and no clipping by a norm that is added up in another order.
    words = ('precision.compute="bf16"', "train.accumulate=1", "train.clip=0", "model.layers=1")
    layouts = ((), ("parallel.dp_shard=2",))
    return [run((*words, *layout), packed=False, steps=3) for layout in layouts]


def test_head_and_embedding_sum_their_gradients_in_fp32_when_sharded(crowd: Crowd) -> None:
    """FSDP gathers weights in bf16, in which gradients of the same sharded weights would arrive:
    rounded before they are summed. Those of blocks are products in bf16 in any case."""
    for copies, shards in crowd(2, half_precision):
        assert shards["losses"] == copies["losses"]
        assert shards["norms"] == pytest.approx(copies["norms"], rel=1e-6)


def gathered() -> dict[str, Any] | None:
    config = load_text(RUN, ("parallel.dp_shard=2", 'precision.compute="bf16"'), place="run.toml")
    place = ProcessInfo.current()
    mesh = check_mesh(config, processes=2)
    world = open_world(config.runtime, mesh=mesh, parallel=config.parallel, place=place)
    control = world.control_group("test")
    strategy = build_strategy(config, vocab=VOCAB, world=world, control=control)
    real = Device.free_memory
    Device.free_memory = lambda self: 1000  # type: ignore[method-assign]
    try:
        whole = strategy.gather_full_model()
    finally:
        Device.free_memory = real  # type: ignore[method-assign]
    if whole is None:
        return None
    alone = build_model(config.model, vocab=VOCAB, device=torch.device("cpu"))
    alone.initialise(config.train.seed)
    alone.compute = torch.bfloat16
    ids = torch.arange(16)[None]
    with torch.no_grad():
        same = torch.equal(whole(ids), alone.eval()(ids))
    return {"dtypes": {str(p.dtype) for p in whole.parameters()}, "same": same}


def test_a_gathered_model_takes_no_more_than_it_computes_with(crowd: Crowd) -> None:
    """In the number format of its activations, and on the host where the device has no room."""
    answer, nothing = crowd(2, gathered)
    assert nothing is None
    assert answer == {"dtypes": {"torch.bfloat16"}, "same": True}


def timeouts() -> list[float]:
    config = load_text(RUN, ('parallel.timeout="10s"',), place="run.toml")
    mesh, place = check_mesh(config, processes=2), ProcessInfo.current()
    world = open_world(config.runtime, mesh=mesh, parallel=config.parallel, place=place)
    groups = [
        world.control_group("run").group,
        world.control_group("checkpoints", timeout=parse_seconds("1h")).group,
    ]
    backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_processes_wait_longer_for_one_another_in_a_save_than_in_a_step(crowd: Crowd) -> None:
    """Collectives outlast the monitor, which names the process to blame, by a minute."""
    assert crowd(2, timeouts) == [[70.0, 3660.0]] * 2


def compiled_dropout() -> list[Curve]:
    real = torch.compile

    def traced(function: Any, **options: Any) -> Any:
        return real(function, backend="aot_eager", **options)

    torch.compile = traced  # type: ignore[assignment]
    words = ("parallel.tp=2", "parallel.sequence=false", "model.dropout=0.1", "model.layers=2")
    try:
        return [
            run((*words, f"runtime.compile={compiled}"), packed=False, steps=2)
            for compiled in ("false", "true")
        ]
    finally:
        torch.compile = real


@pytest.mark.slow
def test_dropout_without_sequence_parallelism_can_be_compiled(crowd: Crowd) -> None:
    """Attention weights of different heads are dropped by random numbers of their own, for which
    the random state is forked: no graph can hold that, so the block is not one graph."""
    for plain, compiled in crowd(2, compiled_dropout):
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def overflowing() -> list[Curve]:
    """Runs in fp16, in whose third step the gradient overflows on the last process only."""
    real, passes = GPT.run_blocks, 0
    last = not dist.is_initialized() or dist.get_rank() == 1

    def run_blocks(self: GPT, *args: Any) -> torch.Tensor:
        nonlocal passes
        hidden = real(self, *args)
        passes += self.training
        if last and self.training and passes == 5:
            hidden.register_hook(lambda gradient: gradient * torch.inf)
        return hidden

    GPT.run_blocks = run_blocks  # type: ignore[method-assign]
    scale = ("precision.loss_scale.initial=1024.0", "precision.loss_scale.hysteresis=1")
    # Processors multiply in fp16 slowly.
    small = ("model.layers=1", "model.heads=2", "model.width=8")
    curves = []
    try:
        for layout in ((), ("parallel.dp_shard=2",)) if dist.is_initialized() else ((),):
            passes = 0
            words = ('precision.compute="fp16"', *scale, *small, *layout)
            curves.append(run(words, packed=False, steps=5))
    finally:
        GPT.run_blocks = real  # type: ignore[method-assign]
    return curves


def test_an_overflow_on_one_process_is_skipped_by_all(crowd: Crowd) -> None:
    one, other = crowd(2, overflowing)
    (alone,) = overflowing()
    for mine, theirs in zip(one, other, strict=True):
        assert mine["skipped"] == theirs["skipped"] == [0, 0, 1, 0, 0]
        assert mine["scales"] == theirs["scales"] == [1024] * 3 + [512] * 2
        assert mine["losses"] == theirs["losses"] == pytest.approx(alone["losses"], rel=2e-4)
        assert mine["validation"] == theirs["validation"]
