"""Reading tensors whose parts lie in several files, and what is wrong with some of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.base.errors import Exit, UserError
from gristmill.base.tensor_slices import TensorSlice
from gristmill.checkpoint.pieces import PIECES, TensorReport, file_name, merge_reports, write_index
from gristmill.checkpoint.tensorfile import HF_INDEX, open_hf_tensors, open_tensors, write_tensors

WHOLE = torch.arange(5.0)


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    """A vector of 5 in two files, and another that is whole."""
    reports: list[dict[str, TensorReport]] = [
        {"norm": ("F32", (5,), [((0,), (3,))]), "gate": ("F32", (1,), [((0,), (1,))])},
        {"norm": ("F32", (5,), [((3,), (5,))])},
    ]
    contents = {"norm[0:3]": WHOLE[:3], "gate": torch.ones(1)}, {"norm[3:5]": WHOLE[3:]}
    for rank, tensors in enumerate(contents):
        write_tensors(tmp_path / file_name("model", rank=rank, ranks=2), tensors)
    write_index(tmp_path / PIECES, {"model": merge_reports("model", reports), "optimizer": {}})
    return tmp_path


def test_a_part_is_read_from_where_it_lies(divided: Path) -> None:
    stored = open_tensors(divided)
    assert torch.equal(stored.read("norm"), WHOLE)
    assert torch.equal(stored.read("gate"), torch.ones(1))
    parts = list(stored.parts("norm", TensorSlice((2,), (4,))))
    assert [place for place, _ in parts] == [TensorSlice((2,), (3,)), TensorSlice((3,), (4,))]
    assert [part.tolist() for _, part in parts] == [[2.0], [3.0]]
    assert open_tensors(divided, "optimizer").shapes == {}


def _first(values: dict[str, Any]) -> dict[str, Any]:
    piece: dict[str, Any] = values["model"]["norm"]["pieces"][0]
    return piece


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(version=9), "it is not gristmill-pieces version 1"),
        (lambda values: values.pop("model"), "KeyError: 'model'"),
        (lambda values: _first(values).update(file="../x.safetensors"), "not the name of a file"),
        (lambda values: _first(values).update(file=".."), "not the name of a file"),
        (lambda values: _first(values).update(file=None), "not the name of a file"),
        (lambda values: _first(values).update(begin=[-1]), "are not sizes"),
        (lambda values: _first(values).update(begin=[False]), "are not sizes"),
        (lambda values: _first(values).update(begin=[0, 0]), "not of the same length"),
        (lambda values: _first(values).update(begin=[0, 0], end=[1, 1]), "outside of shape"),
        (lambda values: _first(values).update(end=[9]), "outside of shape"),
        (lambda values: _first(values).update(end=[4]), "is in two pieces"),
        (lambda values: _first(values).update(end=[2]), "its pieces hold 4 of 5"),
        (lambda values: _first(values).update(key="other"), "other cannot be read"),
        (lambda values: _first(values).update(file="absent"), "cannot be read"),
        (lambda values: _first(values).update(key="gate"), r"gate has shape \(1,\)"),
        (lambda values: values["model"]["norm"].update(dtype="F16"), "and format F32"),
        (lambda values: values["model"]["norm"].update(dtype="F7"), "unknown number format, 'F7'"),
    ],
)
def test_a_wrong_index_is_refused(
    divided: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    values = json.loads((divided / PIECES).read_text())
    change(values)
    (divided / PIECES).write_text(json.dumps(values))
    with pytest.raises(UserError, match=message) as error:
        open_tensors(divided).read_exact("norm")
    assert error.value.exit is Exit.DATA


def test_a_file_that_is_missing_or_no_file_of_tensors_is_named(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=r"model.safetensors: cannot be read") as error:
            open_tensors(tmp_path)
        assert error.value.exit is Exit.DATA
        (tmp_path / "model.safetensors").write_bytes(b"not tensors")


def test_files_are_closed_and_opened_again(divided: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.checkpoint.tensorfile._READ_BEFORE_CLOSE", 8)
    stored = open_tensors(divided)
    parts = list(stored.parts("norm", TensorSlice((0,), (5,))))
    assert list(stored._files) == ["model-00002-of-00002.safetensors"]
    assert torch.equal(torch.cat([part for _, part in parts]), WHOLE)  # these stay readable
    assert torch.equal(stored.read("norm"), WHOLE)


# ------------------------------------------------------------------ Hugging Face folders


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two files with an index, and one that does not belong to them."""
    contents = {"a": {"norm": WHOLE}, "b": {"gate": torch.ones(1)}, "c": {"norm": torch.zeros(9)}}
    for file, tensors in contents.items():
        write_tensors(tmp_path / f"{file}.safetensors", tensors)
    places = {"norm": "a.safetensors", "gate": "b.safetensors"}
    (tmp_path / HF_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path


def test_several_files_by_their_index(sharded: Path) -> None:
    stored = open_hf_tensors(sharded)
    assert set(stored.shapes) == {"norm", "gate"} and torch.equal(stored.read("norm"), WHOLE)
    (sharded / HF_INDEX).unlink()
    (sharded / "c.safetensors").unlink()
    assert torch.equal(
        open_hf_tensors(sharded).read("norm"), WHOLE
    )  # without one, all files there are


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "not an index of tensors"),
        ("{", "not valid JSON"),
        ('{"weight_map": {"norm": "../a.safetensors"}}', "not the name of a file in this folder"),
        ('{"weight_map": {"norm": "gone.safetensors"}}', r"gone\.safetensors: cannot be read"),
        ('{"weight_map": {"norm": "b.safetensors"}}', r"b\.safetensors: has no norm"),
    ],
)
def test_a_wrong_index_of_files_is_refused(sharded: Path, index: str, message: str) -> None:
    (sharded / HF_INDEX).write_text(index)
    with pytest.raises(UserError, match=message) as error:
        open_hf_tensors(sharded)
    assert error.value.exit is Exit.DATA
