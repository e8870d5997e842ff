"""One process of a large world, without memory and without the others: what it holds follows from
its place alone, and building it takes no longer however many processes there are."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gristmill.base.process import ProcessInfo
from gristmill.config.load import load_text
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig
from gristmill.distributed.device import Device
from gristmill.distributed.world import Groups, World
from gristmill.models.spec import CausalLM
from gristmill.plan.arithmetic import count_parameters
from gristmill.strategies.data_parallel import shard_parameters
from gristmill.train.build import _matrix_exchange, place_model

META = torch.device("meta")
WorldOf = Callable[..., World]
RUN = """
name = "large"
preset = "gpt3-145.6b"
data.paths = "tokens/none"
train = {{ until = "10 steps", batch = 2304, micro_batch = 1 }}
parallel = {{ tp = {tp}, pp = {pp}, dp_shard = {dp_shard} }}
"""
VOCAB = 50257


def large(*words: str, **sizes: int) -> RunConfig:
    text = RUN.format(**{"tp": 8, "pp": 16, "dp_shard": 1, **sizes})
    return load_text(text, words, place="large.toml")


@pytest.fixture
def world_of() -> Iterator[WorldOf]:
    def make(config: RunConfig, *, rank: int, processes: int) -> World:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
        mesh = check_mesh(config, processes=processes)
        place = ProcessInfo(rank, rank % 8, processes, "node")
        return World(Device(META), place, mesh, Groups(mesh, rank))

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def held_here(model: CausalLM, world: World) -> int:
    parameters = shard_parameters(model, world.mesh, world.rank)
    return sum(one.local.numel() for one in parameters.values())


@pytest.mark.slow
def test_a_rank_of_1536_holds_its_share_of_145_billion(
    world_of: WorldOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = large()
    model, rows = config.model, math.ceil(VOCAB / 1024) * 1024
    whole = count_parameters(model, rows=rows)
    assert whole == pytest.approx(145.6e9, rel=0.005)
    made: dict[int, list[int]] = {}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for copies in (1, 12, 96):
        processes = 128 * copies
        counted = made.setdefault(processes, [])
        real = dist.new_group

        def counting(
            ranks: Any, *args: Any, _counted: Any = counted, _real: Any = real, **kwargs: Any
        ) -> Any:
            _counted.append(len(ranks))
            return _real(ranks, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(dist, "new_group", counting)
            held = []
            for stage in (0, 1, 15):
                rank = stage * 8 * copies + 8 * (copies // 2) + 3
                world = world_of(config, rank=rank, processes=processes)
                model_here, _ = place_model(config, vocab=VOCAB, world=world)
                _matrix_exchange(model_here, world)
                held.append(held_here(model_here, world))
        # The inner stages hold 5 of 80 layers, an eighth of each but its norms and last biases.
        layer = 12 * model.width**2 + 13 * model.width
        common = 6 * model.width
        inner = 5 * ((layer - common) // 8 + common)
        assert held[1] == inner
        table = rows * model.width // 8
        assert held[0] == inner + table + model.context * model.width
        assert held[2] == inner + table + 2 * model.width
    assert 0 < len(made[128]) <= len(made[1536]) == len(made[12288])
    assert len(made[12288]) <= 3 * 4, "a few groups for each process"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown < 300 * 1024, f"{grown} KiB for what has no memory"


def test_shares_of_a_stage_add_up_to_it(world_of: WorldOf) -> None:
    """In a world of 32, each of two stages is divided over tp and then by rows."""
    config = large("model.layers=4", tp=2, pp=2, dp_shard=8)
    total = 0
    for rank in range(16):
        world = world_of(config, rank=rank, processes=32)
        model, _ = place_model(config, vocab=VOCAB, world=world)
        total += sum(
            sum(piece.whole.size for piece in one.slices)
            for one in shard_parameters(model, world.mesh, world.rank).values()
            if one.owned
        )
    model, rows = config.model, math.ceil(VOCAB / 256) * 256
    layers = model.layers // 2 * (12 * model.width**2 + 13 * model.width)
    assert total == layers + (rows + model.context) * model.width
