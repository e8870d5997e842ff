"""Which process holds which piece: every element once, every piece with one owner."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gristmill.config.parallel import Mesh
from gristmill.config.schema import ModelConfig
from gristmill.models.build import build_model, whole_names
from gristmill.models.spec import Portion
from gristmill.parallel.replicas import build_layout

META = torch.device("meta")
MODEL = ModelConfig(
    layers=2,
    heads=4,
    width=16,
    context=8,
    kv_heads=2,
    value_embeddings=1,
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
    portion = Portion((0, 1), ranks=mesh.tp)
    layout = build_layout(build_model(MODEL, vocab=300, device=META, portion=portion), mesh)
    assert list(layout.shapes) == whole_names(MODEL)
    for name, shape in layout.shapes.items():
        owned = np.zeros(shape, int)
        for rank in range(mesh.processes):
            pieces = layout.pieces(name, rank)
            for one, other in itertools.combinations(pieces, 2):
                assert one.local.meet(other.local) is None
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
            MODEL, vocab=300, device=META, portion=Portion((0, 1), rank=rank, ranks=ranks)
        )
        for name, parameter in part.named_parameters():
            expected = list(part.whole_shape(name))
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
        portion = Portion((1,), first=False, rank=rank, ranks=2)
        part = build_model(MODEL, vocab=300, device=cpu, portion=portion)
        part.initialise(7)
        layout = build_layout(part, Mesh(tp=2))
        assert {name.partition(".")[0] for name in layout.shapes} == {
            "blocks",
            "norm",
            "head",
            "values",
        }
        for name, parameter in part.named_parameters():
            source = whole.get_parameter(name)
            for piece in layout.pieces(name, rank):
                end = min(piece.whole.end[0], source.shape[0])
                length = max(0, end - piece.whole.begin[0])
                box = (slice(piece.whole.begin[0], end), *piece.whole.slices[1:])
                local = parameter[piece.local.slices][:length]
                assert torch.equal(local, source[box]), name
