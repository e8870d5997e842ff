"""Files of tensors, byte for byte those of the safetensors package."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.checkpoint.tensorfile import DTYPES, StreamedTensor, write_streamed, write_tensors

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
    monkeypatch.setattr("gristmill.checkpoint.tensorfile._CHUNK", 64)
    tensors = {"large": torch.randn(100), "even": torch.randn(32)}
    write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def in_rows(tensor: torch.Tensor, *, rows: int = 2) -> StreamedTensor:
    return StreamedTensor(tensor.dtype, tuple(tensor.shape), lambda: iter(tensor.split(rows)))


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}], ids=str)
def test_tensors_in_parts_are_the_same_bytes(tmp_path: Path, metadata: dict[str, str]) -> None:
    tensors = {"b": torch.randn(7, 3), "a": torch.randn(4), "half": torch.randn(5, 1).half()}
    streamed = {name: in_rows(tensor) for name, tensor in tensors.items()}
    write_streamed(tmp_path / "ours", streamed, metadata=metadata)
    save_file(tensors, tmp_path / "theirs", metadata=metadata or None)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_only_one_part_is_made_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []

    def parts() -> Iterator[torch.Tensor]:
        for number in range(5):
            part = torch.full((2, 3), float(number))
            seen.append(weakref.ref(part))
            alive.append(sum(one() is not None for one in seen))
            yield part
            del part

    seen: list[weakref.ref[torch.Tensor]] = []
    streamed = {"one": StreamedTensor(torch.float32, (10, 3), parts)}
    write_streamed(tmp_path / "ours", streamed, metadata={})
    assert load_file(tmp_path / "ours")["one"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert max(alive) <= 2  # the one before is let go when the next is taken


@pytest.mark.parametrize("rows", [4, 6])
def test_parts_that_are_not_the_tensor(tmp_path: Path, rows: int) -> None:
    wrong = StreamedTensor(torch.float32, (5, 3), lambda: iter((torch.zeros(rows, 3),)))
    with pytest.raises(AssertionError, match=f"one was {rows * 12} bytes, not 60"):
        write_streamed(tmp_path / "ours", {"one": wrong}, metadata={})
