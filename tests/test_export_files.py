"""Exports as files: from any layout, in little memory, whole or not at all. Nothing here needs
transformers."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gristmill.base.errors import Exit, UserError
from gristmill.base.locks import FolderLock
from gristmill.base.tensor_slices import row_slices, split_slices, whole_slice
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.model import StoredModel, open_model, open_stored
from gristmill.checkpoint.state import TrainState, capture
from gristmill.checkpoint.tensorfile import HF_INDEX
from gristmill.checkpoint.writer import commit_pieces
from gristmill.config.model import GPTConfig
from gristmill.export import folder as module
from gristmill.export import staging
from gristmill.export.folder import export
from gristmill.models.build import build_model
from gristmill.models.families import foreign_state
from gristmill.models.gpt import GPT
from gristmill.models.weights import ForeignTensor
from gristmill.optim.spec import ParameterOptimizer
from gristmill.strategies.sharding import ShardedParameter
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

VOCAB = ByteTokenizer.size
SMALL: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "context": 12}


def make(**settings: Any) -> GPT:
    model = build_model(GPTConfig(**{**SMALL, **settings}), vocab=VOCAB, device=torch.device("cpu"))
    model.initialise(7)
    return model


def save(model: GPT, run: Path, *, ranks: int = 1) -> Path:
    """A run folder with a checkpoint of this many ranks, each with some rows of some tensors and
    some columns of others."""
    run.mkdir()
    (run / "run.toml").write_text("")
    ByteTokenizer().save(run / "tokenizer")
    settings = {"model": model.config.model_dump(exclude_none=True), "vocab": VOCAB}
    checkpoints = CheckpointFolder(run / "checkpoints")
    staging, reports, snapshots = checkpoints.begin(0), [], []
    for rank in range(ranks):
        held = {name: shard(name, p, rank, ranks) for name, p in model.named_parameters()}
        state = TrainState(model, ParameterOptimizer({}, []), {}, settings, parameters=held)
        snapshot = capture(state)
        reports.append(snapshot.write(staging, rank=rank, ranks=ranks))
        snapshots.append(snapshot)
    commit_pieces(checkpoints, staging, snapshot=snapshots[0], reports=reports)
    return run


def shard(name: str, parameter: nn.Parameter, rank: int, ranks: int) -> ShardedParameter:
    whole, shape = parameter.detach(), tuple(parameter.shape)
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        pieces = split_slices(shape, dim=1, parts=shape[1:], rank=rank, ranks=ranks)
    else:
        pieces = row_slices(whole_slice(shape), shape, rank=rank, ranks=ranks)
    (piece,) = pieces
    return ShardedParameter(name, shape, nn.Parameter(whole[piece.whole.slices].clone()), pieces)


@pytest.fixture
def stored(tmp_path: Path) -> StoredModel:
    return open_stored(str(save(make(), tmp_path / "run")))


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != "run")


def content(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


# ------------------------------------------------------------------ from any layout


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"tie_head": False}], ids=str)
def test_every_layout_gives_the_same_files(tmp_path: Path, settings: dict[str, Any]) -> None:
    model, contents = make(**settings), []
    for ranks in (1, 2, 4):
        stored = open_stored(str(save(model, tmp_path / f"run-{ranks}", ranks=ranks)))
        done = export(stored, tmp_path / f"hf-{ranks}", check="files")
        assert done.agreement is None and done.skipped == "not compared with transformers"
        contents.append(content(done.folder))
    assert contents[0] == contents[1] == contents[2]
    names = ["config.json", "generation_config.json", "gristmill_tokenizer.json"]
    assert sorted(contents[0]) == [*names, "model.safetensors"]
    # The same bytes, too, that the safetensors package writes of a model in memory.
    save_file(foreign_state(model, "gpt2"), tmp_path / "expected", metadata={"format": "pt"})
    expected = (tmp_path / "expected").read_bytes()
    assert (tmp_path / "hf-2" / "model.safetensors").read_bytes() == expected


def test_a_checkpoint_under_another_name(tmp_path: Path) -> None:
    (checkpoint,) = (save(make(), tmp_path / "run") / "checkpoints").iterdir()
    stored = open_stored(str(checkpoint.rename(checkpoint.with_name("the-good-one"))))
    assert stored.step == 0
    assert export(stored, tmp_path / "hf", check="files").files == 1


def test_several_files_and_their_index(tmp_path: Path) -> None:
    stored = open_stored(str(save(make(), tmp_path / "run", ranks=2)))
    done = export(stored, tmp_path / "hf", check="files", shard=8_000)
    index = json.loads((done.folder / HF_INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{n:05d}-of-{done.files:05d}.safetensors" for n in range(1, done.files + 1)
    ]
    assert files == sorted(file.name for file in done.folder.glob("*.safetensors"))
    found = {}
    for file in files:
        tensors = load_file(done.folder / file)
        assert set(tensors) == {n for n, place in index["weight_map"].items() if place == file}
        # Only one that is larger than a file should be makes a file larger.
        assert len(tensors) == 1 or sum(one.nbytes for one in tensors.values()) <= 8_000
        found |= tensors
    assert index["metadata"]["total_size"] == done.bytes == sum(t.nbytes for t in found.values())
    expected = foreign_state(make(), "gpt2")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = open_model(str(done.folder), device=torch.device("cpu")).model
    ids = torch.randint(0, VOCAB, (2, 12))
    assert torch.equal(again(ids), make().eval()(ids))


def test_a_folder_from_elsewhere(stored: StoredModel, tmp_path: Path) -> None:
    """In bf16, under the names of the published GPT-2, with a mask and a head that is tied."""
    source = export(stored, tmp_path / "source", check="files").folder
    file = source / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor.bfloat16()
        for name, tensor in load_file(file).items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 12, 12, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, file)
    done = export(open_stored(str(source)), tmp_path / "hf", check="files")
    found = load_file(done.folder / "model.safetensors")
    assert found.keys() == foreign_state(make(), "gpt2").keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, tensors[name.removeprefix("transformer.")].float())


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path, value: float) -> None:
    model = make()
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = value
    stored = open_stored(str(save(model, tmp_path / "run")))
    with pytest.raises(UserError, match=r"NaN or infinite numbers in norm\.weight"):
        export(stored, tmp_path / "hf", check="files")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ------------------------------------------------------------------ in little memory


def memory(name: str) -> int:
    """A number of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_does_not_grow_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    run = save(make(layers=12, width=256), tmp_path / "run", ranks=ranks)
    gc.collect()
    monkeypatch.setattr(staging, "BYTES_AT_ONCE", 2**19)
    monkeypatch.setattr("gristmill.checkpoint.tensorfile._READ_BEFORE_CLOSE", 2**20)
    stored = open_stored(str(run))
    export(open_stored(str(save(make(), tmp_path / "warm"))), tmp_path / "warm-hf", check="files")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    done = export(stored, tmp_path / "hf", check="files", shard=2**23)
    grown = memory("VmHWM") - before
    assert done.bytes > 36 * 2**20 and done.files > 1
    assert grown < done.bytes // 4


def test_progress_counts_every_byte_twice(stored: StoredModel, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    done = export(
        stored, tmp_path / "hf", check="files", progress=lambda *state: seen.append(state)
    )
    steps, counts, totals = zip(*seen, strict=True)
    assert list(counts) == sorted(counts) and counts[-1] == totals[-1] == 2 * done.bytes
    assert list(dict.fromkeys(steps)) == ["writing", "reading back"]


# ------------------------------------------------------------------ which check


def test_transformers_is_used_if_there_is_memory(
    stored: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any, **named: Any) -> Any:
        raise UserError("asked for transformers")

    monkeypatch.setattr(module, "optional", missing)
    needed = 4 * sum(tensor.nbytes for tensor in foreign_state(make(), "gpt2").values())
    monkeypatch.setattr(module, "free_memory", lambda: needed)
    with pytest.raises(UserError, match="asked for transformers"):
        export(stored, tmp_path / "hf")
    assert left(tmp_path) == []
    monkeypatch.setattr(module, "free_memory", lambda: needed - 1)
    with pytest.raises(UserError, match="asked for transformers"):
        export(stored, tmp_path / "hf", check="transformers")
    done = export(stored, tmp_path / "hf")
    assert done.agreement is None
    assert done.skipped is not None
    assert "takes 85.1 KiB of memory, more than half of the 170 KiB that are free" in done.skipped


@pytest.mark.parametrize("settings", [{}, {"bias": False}], ids=str)
def test_what_was_not_written_as_it_was_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    real = ForeignTensor.read

    def wrong(self: ForeignTensor, *args: Any) -> torch.Tensor:
        value = real(self, *args)
        if self.name == "transformer.h.1.mlp.c_proj.bias":
            value[3] = -0.0
        return value

    stored = open_stored(str(save(make(**settings), tmp_path / "run")))
    monkeypatch.setattr(ForeignTensor, "read", wrong)
    with pytest.raises(UserError, match=r"(c_proj|mlp\.down)\.bias does not read back") as error:
        export(stored, tmp_path / "hf", check="files")
    assert error.value.exit is Exit.STORAGE
    assert left(tmp_path) == []


# ------------------------------------------------------------------ whole, or not at all


@pytest.mark.parametrize("moment", ["writing", "reading back"])
def test_an_export_that_is_interrupted_leaves_nothing(
    stored: StoredModel, tmp_path: Path, moment: str
) -> None:
    def interrupt(doing: str, done: int, total: int) -> None:
        if doing == moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(stored, tmp_path / "hf", check="files", progress=interrupt)
    assert left(tmp_path) == []


def export_until_killed(run: Path, folder: Path, moment: str) -> None:
    def kill(doing: str, done: int, total: int) -> None:
        if doing == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    export(open_stored(str(run)), folder, check="files", shard=8_000, progress=kill)


def test_an_export_that_is_killed_leaves_nothing_that_looks_whole(
    crowd: Callable[..., list[Any]], tmp_path: Path
) -> None:
    run = save(make(), tmp_path / "run", ranks=2)
    place = tmp_path / "out"
    with pytest.raises(AssertionError, match="ended without a word"):
        crowd(1, export_until_killed, run, place / "hf", "reading back")
    assert left(place) == [".hf.writing"]
    assert len(list((place / ".hf.writing").glob("*.safetensors"))) > 1
    assert not (place / ".hf.writing" / "config.json").exists()
    done = export(open_stored(str(run)), place / "hf", check="files")
    assert left(place) == ["hf"]
    assert [file.name for file in done.folder.glob("model*")] == ["model.safetensors"]
    assert not (done.folder / ".lock").exists()


def test_two_exports_to_one_folder(stored: StoredModel, tmp_path: Path) -> None:
    staging = tmp_path / ".hf.writing"
    staging.mkdir()
    (staging / "model.safetensors").write_text("the other's")
    lock = FolderLock(staging)
    lock.acquire()
    with pytest.raises(UserError, match="in use by process") as error:
        export(stored, tmp_path / "hf", check="files")
    assert error.value.exit is Exit.REFUSED
    assert (staging / "model.safetensors").read_text() == "the other's"
    lock.release()
    export(stored, tmp_path / "hf", check="files")
    assert left(tmp_path) == ["hf"]


def test_a_folder_that_is_filled_meanwhile_is_not_touched(
    stored: StoredModel, tmp_path: Path
) -> None:
    def fill(*_: object) -> None:
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / "precious").write_text("x")

    with pytest.raises(UserError, match="not empty"):
        export(stored, tmp_path / "hf", check="files", progress=fill)
    assert left(tmp_path) == ["hf"] and left(tmp_path / "hf") == ["precious"]


@pytest.mark.parametrize("name", ["{}/hf", "."])
def test_an_empty_folder_is_used(
    stored: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "hf").mkdir()
    monkeypatch.chdir(tmp_path / "hf")
    export(stored, Path(name.format(tmp_path)), check="files")
    assert left(tmp_path) == ["hf"] and (tmp_path / "hf" / "config.json").is_file()


# ------------------------------------------------------------------ refused before it begins


def test_a_place_in_use_is_refused(stored: StoredModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place, message in ((tmp_path, "folder is not empty"), (tmp_path / "file", "is a file")):
        with pytest.raises(UserError, match=message) as error:
            export(stored, place, check="files")
        assert error.value.exit is Exit.REFUSED
    assert left(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "x"


def test_too_little_room_is_refused(
    stored: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(9, 8, 1000))
    with pytest.raises(UserError, match=r"needs .* KiB, and the disk has 1000 B free") as error:
        export(stored, tmp_path / "new" / "hf", check="files")
    assert error.value.exit is Exit.STORAGE
    assert left(tmp_path) == []


def test_a_full_disk_leaves_nothing(
    stored: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(module, "write_streamed", full)
    with pytest.raises(UserError, match="the disk is full") as error:
        export(stored, tmp_path / "hf", check="files")
    assert error.value.exit is Exit.STORAGE
    assert left(tmp_path) == []


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    run = save(make(), tmp_path / "run", ranks=2)
    (checkpoint,) = (run / "checkpoints").iterdir()
    file = checkpoint / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="no intact checkpoint"):
        open_stored(str(run))
    for spec, which in ((run, "0"), (checkpoint, "latest")):
        with pytest.raises(UserError, match=r"00002-of-00002\.safetensors: has changed bytes"):
            open_stored(str(spec), checkpoint=which)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    run = save(make(), tmp_path / "run")
    (checkpoint,) = (run / "checkpoints").iterdir()
    state = checkpoint / "state.json"
    state.write_text(state.read_text().replace('"layers": 2', '"layers": 3'))
    (checkpoint / "MANIFEST").unlink()
    CheckpointFolder(run / "checkpoints").commit(
        checkpoint.rename(checkpoint.with_name(".writing-step-00000000"))
    )
    with pytest.raises(UserError, match=r"there is no blocks\.2\.") as error:
        open_stored(str(run), checkpoint="0")
    assert len(error.value.problems) == 12 and error.value.exit is Exit.DATA
    with pytest.raises(UserError, match=r"no intact checkpoint\n.*no blocks\.2\..*; and 9 more"):
        open_stored(str(run))
