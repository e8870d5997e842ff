"""Files of tensors, byte for byte those of the safetensors package."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.checkpoint.tensorfile import DTYPES, write_tensors

FLOATS = {
    "one.weight": torch.randn(7, 3),
    "another.weight[0:7,3:6]": torch.randn(7, 3),
    "exp_avg/ä": torch.randn(5),
    "step": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize(
    "tensors",
    [{}, FLOATS, {**FLOATS, "wide": torch.randn(3).double(), "half": torch.randn(5).half()}],
    ids=["none", "one format", "several"],
)
def test_the_bytes_are_those_of_safetensors(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    written = write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "theirs").read_bytes()
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    assert (written.name, written.size) == ("ours", len(content))


def test_every_number_format_is_read_back(tmp_path: Path) -> None:
    numbers = torch.randn(9).mul(20).round()
    tensors = {name: numbers.to(dtype) for name, dtype in DTYPES.items()}
    write_tensors(tmp_path / "all", tensors)
    read = load_file(tmp_path / "all")
    assert {name: tensor.dtype for name, tensor in read.items()} == DTYPES
    assert all(torch.equal(read[name].double(), tensors[name].double()) for name in DTYPES)


def test_tensors_larger_than_what_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.checkpoint.tensorfile._AT_ONCE", 64)
    tensors = {"large": torch.randn(100), "even": torch.randn(32)}
    write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
