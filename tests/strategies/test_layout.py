"""Which process holds which piece: every element once, every piece with one owner."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gristmill.config.model import GPTConfig
from gristmill.config.parallel import Mesh
from gristmill.models.build import build_meta_model, build_model
from gristmill.models.spec import ModelShard
from gristmill.strategies.sharding import ShardLayout

META = torch.device("meta")
MODEL = GPTConfig(
    layers=2,
    heads=4,
    width=16,
    context=8,
    kv_heads=2,
    value_embeddings=1,
    attention_gate=True,
    activation="swiglu",
    mlp_width=24,
    qk_norm=True,
    tie_head=False,
)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(),
        Mesh(dp_replicate=2),
        Mesh(dp_shard=3),
        Mesh(tp=2),
        Mesh(dp_replicate=2, dp_shard=2, tp=2),
        Mesh(dp_shard=2, cp=2, tp=2),
        Mesh(cp=2, tp=2),
    ],
    ids=str,
)
def test_every_element_has_one_owner(mesh: Mesh) -> None:
    shard = ModelShard(tp_size=mesh.tp)
    layout = ShardLayout.of(build_meta_model(MODEL, vocab=300, shard=shard), mesh)
    assert set(layout.shapes) == set(build_meta_model(MODEL, vocab=300).roles())
    for name, shape in layout.shapes.items():
        owned = np.zeros(shape, int)
        for rank in range(mesh.processes):
            pieces = layout.slices(name, rank)
            for one, other in itertools.combinations(pieces, 2):
                assert one.local.intersect(other.local) is None
            if layout.owned(name, rank):
                for piece in pieces:
                    owned[piece.whole.slices] += 1
        assert (owned == 1).all(), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_has_the_shapes_that_its_splits_say(ranks: int) -> None:
    whole = build_model(MODEL, vocab=300, device=META)
    rows = whole.rows
    for rank in range(ranks):
        part = build_model(
            MODEL, vocab=300, device=META, shard=ModelShard(tp_rank=rank, tp_size=ranks)
        )
        for name, parameter in part.named_parameters():
            expected = list(part.whole_shapes()[name])
            if name.partition(".")[0] not in ("embedding", "head", "values"):
                assert tuple(expected) == tuple(whole.get_parameter(name).shape), name
            split = part.splits().get(name)
            if split is not None:
                expected[split.dim] //= ranks
            assert list(parameter.shape) == expected, name
    assert rows == 384


def test_parts_begin_with_the_weights_of_the_whole() -> None:
    """Whatever the division: weights are drawn for whole parameters, padding apart."""
    cpu = torch.device("cpu")
    whole = build_model(MODEL, vocab=300, device=cpu)
    whole.initialise(7)
    for rank in range(2):
        shard = ModelShard((1,), first=False, tp_rank=rank, tp_size=2)
        part = build_model(MODEL, vocab=300, device=cpu, shard=shard)
        part.initialise(7)
        layout = ShardLayout.of(part, Mesh(tp=2))
        assert {name.partition(".")[0] for name in layout.shapes} == {
            "blocks",
            "norm",
            "head",
            "values",
        }
        for name, parameter in part.named_parameters():
            source = whole.get_parameter(name)
            for piece in layout.slices(name, rank):
                end = min(piece.whole.end[0], source.shape[0])
                length = max(0, end - piece.whole.begin[0])
                box = (slice(piece.whole.begin[0], end), *piece.whole.slices[1:])
                local = parameter[piece.local.slices][:length]
                assert torch.equal(local, source[box]), name
