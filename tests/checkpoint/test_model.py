"""Start weights of a model that is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gristmill.base.errors import UserError
from gristmill.base.files import write_json
from gristmill.base.tensor_slices import row_slices, whole_slice
from gristmill.base.units import Progress
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.model import load_start_weights
from gristmill.checkpoint.state import TrainState, capture
from gristmill.checkpoint.writer import commit_pieces
from gristmill.config.families import GPT2, GPT_NEOX
from gristmill.config.hf import to_hf
from gristmill.config.model import GPTConfig
from gristmill.models.build import build_model
from gristmill.models.families import foreign_state
from gristmill.models.gpt import GPT
from gristmill.optim.spec import ParameterOptimizer
from gristmill.strategies.sharding import ShardedParameter, whole_parameters

VOCAB, MORE = 100, 7
"""MORE: rows of padding that the divided model has and the weights have not."""


@pytest.fixture
def model() -> GPT:
    config = GPTConfig(layers=1, heads=2, width=8, context=6)
    built = build_model(config, vocab=VOCAB, device=torch.device("cpu"))
    built.initialise(3)
    return built


def as_run(model: GPT, folder: Path) -> None:
    folder.mkdir()
    (folder / "run.toml").write_text("")
    optimizer = ParameterOptimizer(dict(model.named_parameters()), [])
    progress = Progress(1, 1, 1)
    settings = {"model": model.config.model_dump(exclude_none=True), "vocab": VOCAB}
    snapshot = capture(TrainState(model, optimizer, {}, settings, progress=progress))
    checkpoints = CheckpointFolder(folder / "checkpoints")
    staging = checkpoints.begin(1)
    commit_pieces(checkpoints, staging, snapshot=snapshot, reports=[snapshot.write(staging)])


def as_hf(model: GPT, folder: Path) -> None:
    folder.mkdir()
    save_file(foreign_state(model, "gpt2"), folder / "model.safetensors")
    write_json(folder / "config.json", to_hf(model.config, GPT2, vocab=VOCAB, end_of_text=0))


def second_half(name: str, parameter: nn.Parameter) -> ShardedParameter:
    """What the last of two processes holds, if the table has some more rows."""
    shape = list(parameter.shape)
    if name == "embedding.weight":
        shape[0] += MORE
    pieces = row_slices(whole_slice(shape), shape, rank=1, ranks=2)
    local = torch.full((sum(p.local.shape[0] for p in pieces), *shape[1:]), torch.nan)
    return ShardedParameter(name, tuple(shape), nn.Parameter(local), pieces)


@pytest.mark.parametrize("write", [as_run, as_hf])
def test_a_rank_loads_its_shard_of_the_start_weights(
    model: GPT, tmp_path: Path, write: object
) -> None:
    assert callable(write)
    write(model, tmp_path / "start")
    held = {name: second_half(name, p) for name, p in model.named_parameters()}
    load_start_weights(model, str(tmp_path / "start"), held)
    for name, parameter in model.named_parameters():
        (piece,) = held[name].slices
        first, rows = piece.whole.begin[0], parameter.shape[0]
        kept = held[name].local[: rows - first]
        if name == "embedding.weight":
            assert torch.equal(kept[: VOCAB - first], parameter[first:VOCAB])
            assert not held[name].local[rows - first :].any()  # and nothing is left as it was
        else:
            assert torch.equal(kept, parameter[first:])
    assert any(one.shape[0] > one.local.shape[0] for one in held.values())


def test_a_rank_loads_its_shard_of_rows_in_another_order(tmp_path: Path) -> None:
    config = GPTConfig(layers=1, heads=2, width=8, context=6, positions="rotary")
    model = build_model(config, vocab=VOCAB, device=torch.device("cpu"))
    model.initialise(3)
    (tmp_path / "neox").mkdir()
    save_file(foreign_state(model, "gpt_neox"), tmp_path / "neox/model.safetensors")
    values = to_hf(config, GPT_NEOX, vocab=VOCAB, end_of_text=0)
    write_json(tmp_path / "neox/config.json", values)
    held = {name: second_half(name, p) for name, p in model.named_parameters()}
    load_start_weights(model, str(tmp_path / "neox"), held)
    one = held["blocks.0.attention.qkv.weight"]
    assert torch.equal(one.local, model.get_parameter(one.name)[12:])


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_model_of_a_checkpoint_with_a_damaged_optimizer_can_be_read(
    model: GPT, tmp_path: Path
) -> None:
    as_run(model, tmp_path / "run")
    folder = CheckpointFolder(tmp_path / "run/checkpoints")
    (path,) = folder.committed()
    spoil(path / "optimizer.safetensors")
    assert folder.newest_intact().path is None, "but training cannot resume from it"
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.initialise(4)
    load_start_weights(model, str(tmp_path / "run"), whole_parameters(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    spoil(path / "model.safetensors")
    with pytest.raises(UserError, match="no intact checkpoint"):
        load_start_weights(model, str(tmp_path / "run"), whole_parameters(model))
