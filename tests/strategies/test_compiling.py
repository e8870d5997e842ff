"""What is compiled in one graph, and the time that it takes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from gristmill.base.errors import UserError
from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.config.resolve import resolve
from gristmill.distributed.device import Device
from gristmill.distributed.world import World
from gristmill.strategies.compiling import CompileClock, choose_graphs, uses_cuda_graphs

RUN = """
name = "choice"
data.paths = "tokens/text"
train = { until = "1M tokens", batch = 32 }
"""


def gpu(name: str) -> World:
    """With a GPU that no machine needs to have: nothing is computed on it."""
    device = Device(torch.device("cuda"))
    device.__dict__["name"] = name
    return World(device)


def chosen(world: World, *settings: str) -> str | None:
    config = load_text(RUN, ["precision.compute=fp32", *settings], place="choice.toml")
    return choose_graphs(config, world, resolve(config, vocab=50257))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("preset=gpt2-small",), "blocks"),
        (("preset=gpt2-small", 'train.until="100M tokens"'), "blocks"),
        (("preset=gpt2-small", 'train.until="10B tokens"'), "whole"),
        # a larger model takes longer to compile, and longer to train
        (("preset=gpt2-xl",), "blocks"),
        (("preset=gpt2-xl", 'train.until="1B tokens"'), "whole"),
        # what is asked for is done
        (("preset=gpt2-small", "runtime.compile=true"), "whole"),
        (("preset=gpt2-small", 'train.until="10B tokens"', "runtime.compile=blocks"), "blocks"),
        (("preset=gpt2-small", "runtime.compile=false"), None),
    ],
)
def test_only_a_long_run_waits_for_one_graph(
    settings: tuple[str, ...], expected: str | None
) -> None:
    assert chosen(gpu("NVIDIA H200"), *settings) == expected


def recorded(world: World, *settings: str) -> bool:
    config = load_text(RUN, ["precision.compute=bf16", *settings], place="choice.toml")
    numbers = resolve(config, vocab=50257)
    return uses_cuda_graphs(config, world, numbers, choose_graphs(config, world, numbers))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("preset=modern-mini",), True),
        (("preset=modern-mini", "runtime.compile=true"), True),
        (("preset=modern-mini", "runtime.cuda_graphs=false"), False),
        (("preset=modern-mini", "runtime.compile=false"), False),
        (("preset=modern-mini", "train.accumulate=2"), False),
        (("preset=modern-mini", "data.documents=masked"), False),
        (("preset=modern-mini", "train.recompute=full"), False),
        # the kernels of a larger model take longer than their launches
        (("preset=gpt2-medium",), False),
        (("preset=gpt2-medium", "runtime.cuda_graphs=true"), True),
    ],
)
def test_small_models_replay_their_launches(settings: tuple[str, ...], expected: bool) -> None:
    assert recorded(gpu("NVIDIA H200"), *settings) is expected


def test_launches_that_cannot_be_replayed() -> None:
    settings = ("preset=modern-mini", "train.accumulate=2", "runtime.cuda_graphs=true")
    with pytest.raises(UserError, match="2 micro-batches in a step") as error:
        recorded(gpu("NVIDIA H200"), *settings)
    assert "runtime.cuda_graphs" in str(error.value)
    cpu = World(Device(torch.device("cpu")))
    assert recorded(cpu, "preset=modern-mini", "runtime.compile=true") is False
    for world, more in (
        (cpu, "runtime.compile=true"),
        (gpu("NVIDIA H200"), "runtime.compile=false"),
    ):
        with pytest.raises(UserError, match="needs a compiled model on CUDA"):
            recorded(world, "preset=modern-mini", "runtime.cuda_graphs=true", more)


def test_where_there_is_no_choice() -> None:
    assert chosen(gpu("one of next year"), "preset=gpt2-small") == "whole"
    several = replace(gpu("one of next year"), mesh=Mesh(dp_replicate=2))
    assert chosen(several, "preset=gpt2-small", "parallel.dp_replicate=2") == "blocks"
    assert chosen(World(Device(torch.device("cpu"))), "preset=gpt2-small") is None


def test_compiling_is_timed_and_announced() -> None:
    begun = []
    with CompileClock(begins=lambda: begun.append(time.monotonic())) as clock:
        compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
        compiled(torch.ones(3))
        first = clock.seconds
        assert first > 0 and len(begun) == 1
        compiled(torch.ones(3))
        assert clock.seconds == first
        compiled(torch.ones(4))
        assert clock.seconds > first and len(begun) == 2
    after = clock.seconds
    compiled(torch.ones(5))
    assert clock.seconds == after
