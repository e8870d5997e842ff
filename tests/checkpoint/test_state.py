"""Weights for use: whole models from checkpoints with other padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gristmill.base.errors import UserError
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.loading import load_weights
from gristmill.checkpoint.state import TrainState, capture
from gristmill.checkpoint.tensorfile import open_tensors
from gristmill.checkpoint.writer import commit_pieces
from gristmill.optim.spec import ParameterOptimizer

VOCAB = 50


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


class Tables(nn.Module):
    """A model with a row for each token."""

    def __init__(self, *, rows: int, width: int = 5) -> None:
        super().__init__()
        self.vocab = VOCAB
        self.embedding = nn.Embedding(rows, width)
        self.norm = nn.Parameter(torch.randn(5))

    def vocabulary_parameters(self) -> frozenset[str]:
        return frozenset({"embedding.weight"})

    def base_parameters(self) -> frozenset[str]:
        return frozenset()


def save_tables(folder: CheckpointFolder, model: Tables) -> Path:
    snapshot = capture(
        TrainState(model, ParameterOptimizer(dict(model.named_parameters()), []), {}, {})
    )
    staging = folder.begin(1)
    return commit_pieces(folder, staging, snapshot=snapshot, reports=[snapshot.write(staging)])


@pytest.mark.parametrize(("stored", "wanted"), [(52, 64), (64, 52), (56, 56)])
def test_weights_for_use_may_have_other_padding(
    folder: CheckpointFolder, stored: int, wanted: int
) -> None:
    wrote, reads = Tables(rows=stored), Tables(rows=wanted)
    load_weights(reads, open_tensors(save_tables(folder, wrote)))
    common = min(stored, wanted)
    assert torch.equal(reads.embedding.weight[:common], wrote.embedding.weight[:common])
    assert not reads.embedding.weight[common:].any()


def test_weights_for_use_need_the_vocabulary(folder: CheckpointFolder) -> None:
    weights = open_tensors(save_tables(folder, Tables(rows=48)))
    with pytest.raises(UserError, match=r"embedding.weight has shape \(48, 5\), not \(52, 5\)"):
        load_weights(Tables(rows=52), weights)
    with pytest.raises(UserError, match="not \\(48, 6\\)"):
        load_weights(Tables(rows=48, width=6), weights)
