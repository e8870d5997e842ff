"""Weights in Hugging Face's form, and parts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.model import GPTConfig
from gristmill.models.build import build_model
from gristmill.models.families import foreign_state, foreign_tensors, open_foreign
from gristmill.models.gpt import GPT
from gristmill.models.weights import WeightsInMemory

VOCAB = 50


def make(**settings: Any) -> GPT:
    config = GPTConfig(layers=2, heads=2, width=8, context=6, **settings)
    model = build_model(config, vocab=VOCAB, device=torch.device("cpu"))
    model.initialise(3)
    return model


def own(model: GPT) -> WeightsInMemory:
    return WeightsInMemory(dict(model.named_parameters()))


@pytest.mark.parametrize("settings", [{}, {"bias": False, "tie_head": False, "mlp_width": 12}])
def test_parts_are_parts_of_the_whole(settings: dict[str, Any]) -> None:
    model = make(**settings)
    whole = foreign_state(model, "gpt2")
    back = open_foreign(WeightsInMemory(whole), model, "gpt2")
    assert whole["transformer.h.0.mlp.c_fc.weight"].shape == (8, settings.get("mlp_width", 32))
    for one in foreign_tensors(model, "gpt2"):
        assert whole[one.name].shape == one.shape and whole[one.name].is_contiguous()
        for box in (TensorSlice.whole(one.shape), _corner(one.shape)):
            assert torch.equal(one.read(own(model), box), whole[one.name][box.slices])
        if one.ours is None:
            assert not whole[one.name].any()
            continue
        for box in (TensorSlice.whole(back.shapes[one.ours]), _corner(back.shapes[one.ours])):
            ours = model.get_parameter(one.ours)[box.slices]
            assert torch.equal(back.read(one.ours, box), ours)
    assert ("lm_head.weight" in whole) == (not model.config.tie_head)
    assert set(back.shapes) == {name for name, _ in model.named_parameters()}


def _corner(shape: tuple[int, ...]) -> TensorSlice:
    return TensorSlice(tuple(size // 3 for size in shape), tuple(size - 1 for size in shape))


def test_tensors_are_ordered_as_the_model_computes() -> None:
    names = [
        one.name.removeprefix("transformer.")
        for one in foreign_tensors(make(tie_head=False), "gpt2")
    ]
    assert names[:3] == ["wte.weight", "wpe.weight", "h.0.ln_1.weight"]
    layers = [name.split(".")[1] for name in names if name.startswith("h.")]
    assert layers == sorted(layers) and len(layers) == 24
    assert names[-3:] == ["ln_f.weight", "ln_f.bias", "lm_head.weight"]


def test_the_published_names_are_known() -> None:
    """GPT-2 itself has no common beginning, and tensors that are no weights."""
    model = make()
    plain = {
        name.removeprefix("transformer."): value
        for name, value in foreign_state(model, "gpt2").items()
    }
    read = open_foreign(
        WeightsInMemory({**plain, "h.0.attn.bias": torch.ones(1, 1, 6, 6)}), model, "gpt2"
    )
    assert "h.0.attn.bias" not in read.shapes
    up = model.get_parameter("blocks.1.mlp.up.weight")
    assert torch.equal(read.read("blocks.1.mlp.up.weight"), up)


def test_numbers_of_other_formats_become_fp32() -> None:
    model = make()
    half = {name: value.bfloat16() for name, value in foreign_state(model, "gpt2").items()}
    read = open_foreign(WeightsInMemory(half), model, "gpt2")
    value = read.read("positions.weight", TensorSlice((1, 2), (4, 8)))
    assert value.dtype == torch.float32
    assert torch.equal(value, model.get_parameter("positions.weight")[1:4, 2:].bfloat16().float())


def test_what_is_wrong_is_said_at_once_and_in_their_names() -> None:
    model = make()
    weights = foreign_state(model, "gpt2")
    del weights["transformer.ln_f.bias"]
    weights["transformer.h.1.mlp.c_proj.weight"] = torch.zeros(8, 32)
    weights["transformer.wte.weight"] = torch.zeros(VOCAB + 1, 8)
    with pytest.raises(UserError) as error:
        open_foreign(WeightsInMemory(weights), model, "gpt2")
    assert [problem.what for problem in error.value.problems] == [
        "transformer.wte.weight has shape (51, 8), not (50, 8)",
        "transformer.h.1.mlp.c_proj.weight has shape (8, 32), not (32, 8)",
        "the weights lack transformer.ln_f.bias",
    ]
    assert error.value.exit is Exit.DATA
