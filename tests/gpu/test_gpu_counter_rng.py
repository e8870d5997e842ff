"""Initial weights have the same bits on a GPU as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.load import load_preset
from gristmill.config.model import GPTConfig
from gristmill.models.build import build_model
from gristmill.models.counter_rng import fill_normal, fill_uniform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("shape", [(), (33, 7), (5, 3, 11), (50304, 768), (70_000_000,)])
def test_numbers_are_those_of_the_cpu(shape: tuple[int, ...]) -> None:
    """The last one is longer than what is drawn at once."""
    here, there = torch.empty(shape), torch.empty(shape, device=GPU)
    for each in (here, there):
        fill_normal(each, 0.02, seed=3, name="weight")
    assert torch.equal(here, there.cpu())
    for each in (here, there):
        fill_uniform(each, -1.3, 0.7, seed=3, name="weight")
    assert torch.equal(here, there.cpu())


def test_a_region_far_behind() -> None:
    region = TensorSlice((2**33, 1), (2**33 + 5, 3))
    here, there = torch.empty(5, 2), torch.empty(5, 2, device=GPU)
    for each in (here, there):
        fill_normal(each, 1.0, seed=3, name="weight", shape=(2**34, 4), region=region)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("preset", ["gpt2-nano", "modern-nano"])
def test_models_begin_alike(preset: str, tmp_path: Path) -> None:
    config = GPTConfig.model_validate(load_preset(preset)["model"])
    models = [build_model(config, vocab=301, device=d) for d in (torch.device("cpu"), GPU)]
    for model in models:
        model.initialise(1337)
    here, there = (model.state_dict() for model in models)
    assert all(torch.equal(value, there[name].cpu()) for name, value in here.items())
