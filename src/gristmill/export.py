"""A model as a Hugging Face folder that `transformers` loads, proven equal before it is called
done, in memory that does not grow with the number of layers.

    DIR/  model.safetensors, or model-00001-of-0000N.safetensors ... and an index of them
          tokenizer files · generation_config.json · config.json

    read a piece of a tensor, wherever its parts lie -> fp32, transposed -> append it to a file
    read a piece of both, the folder and the source  -> the same bits?
    transformers loads the folder, we the source     -> the same logits and greedy tokens?

Everything is written under a temporary name and flushed; only after all checks the folder gets its
own. Whatever a killed export leaves has a name that says so and no config.json until the weights
are proven; the next export to the same folder removes it.

The last check holds the model in memory twice. In fp32 the logits must agree within 1e-5 (of the
largest logit, where that is above 1), and greedy continuations must be the same ids. Where that is
more than half of the free memory, it is left out unless it is asked for, and the result says so:
then the numbers are proven, and that they mean the same to transformers is known from smaller
models only.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from gristmill.base.errors import Exit, UserError, optional
from gristmill.base.files import (
    FolderLock,
    require_room,
    storage_errors,
    sync_file,
    sync_folder,
    write_json,
)
from gristmill.base.memory import free_memory
from gristmill.base.tensor_slices import TensorSlice
from gristmill.base.units import format_bytes
from gristmill.checkpoint.model import StoredModel
from gristmill.checkpoint.tensor_reader import HF_INDEX, TensorReader, open_hf_tensors
from gristmill.checkpoint.tensorfile import Streamed, write_streamed
from gristmill.config.hf import to_hf
from gristmill.config.model import GPTConfig
from gristmill.generate import Engine, Sampling
from gristmill.models.weights import Gpt2Tensor, Gpt2Weights, gpt2_tensors, read_part

TOLERANCE = 1e-5
SHARD = 5 * 10**9
"""Bytes of tensors in one file, if no single tensor is larger."""
_PIECE = 2**26
"""Bytes of a tensor that are in memory at once. Of a transposed one they are columns of the source:
smaller pieces would read each page of its file more often."""
_GREEDY = Sampling(temperature=0.0)
_FORMAT = torch.float32

Check = Literal["auto", "transformers", "files"]
"""Whether transformers is asked: if the model fits twice into half of the free memory, in any case,
or not at all."""


@dataclass(frozen=True)
class Agreement:
    """How closely transformers agrees with the source."""

    largest_difference: float
    greedy_tokens: int


@dataclass(frozen=True)
class Exported:
    """What was written; every number of it was read back and is the source's."""

    folder: Path
    files: int
    """Files of weights."""
    bytes: int
    """Bytes of weights."""
    agreement: Agreement | None
    """None if transformers was not asked."""
    unasked: str | None = None
    """Why it was not."""


@dataclass(frozen=True)
class ExportProgress:
    """How far an export is: each byte of weights is written, then read back."""

    doing: str
    done: int
    total: int


Watch = Callable[[ExportProgress], None]


@dataclass(frozen=True)
class _Shard:
    """The tensors of one file."""

    file: str
    tensors: tuple[Gpt2Tensor, ...]


class _Count:
    """Counts bytes of weights for somebody who watches."""

    def __init__(self, tensors: Sequence[Gpt2Tensor], watch: Watch | None) -> None:
        self._watch, self._done, self._total = watch, 0, 2 * sum(map(_bytes, tensors))

    def add(self, piece: torch.Tensor, doing: str) -> None:
        self._done += piece.nbytes
        self.say(doing)

    def say(self, doing: str) -> None:
        if self._watch is not None:
            self._watch(ExportProgress(doing, self._done, self._total))


def export(
    stored: StoredModel,
    folder: Path,
    *,
    check: Check = "auto",
    shard: int = SHARD,
    watch: Watch | None = None,
) -> Exported:
    """Write and check a Hugging Face folder."""
    end = stored.tokenizer.end_of_text
    if not isinstance(stored.config, GPTConfig):
        raise UserError(
            f"{stored.config.kind} models have no Hugging Face form that this program can write",
            where="export",
            remedy="such a model can be used with `gristmill generate` and `evaluate`",
        )
    settings = to_hf(stored.config, vocab=stored.vocab, end_of_text=end)
    tensors = gpt2_tensors(stored.outline())
    size = sum(map(_bytes, tensors))
    unasked = _why_not_asked(check, size)
    transformers = None
    if unasked is None:
        transformers = optional("transformers", extra="hf", purpose="checking an export")
    _refuse_used(folder)
    larger = "give a folder on a larger disk"
    require_room(folder, needed=size, purpose="the model", remedy=larger)
    shards, count = _divide(tensors, limit=shard), _Count(tensors, watch)
    with _staged(folder) as staging:
        _write_weights(stored, staging, shards=shards, count=count)
        _compare(stored, open_hf_tensors(staging), tensors=tensors, count=count)
        stored.tokenizer.save(staging)
        write_json(staging / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        write_json(staging / "config.json", settings)
        agreement = None
        if transformers is not None:
            count.say("checking with transformers")
            agreement = _ask(transformers, stored, staging, folder)
    return Exported(folder, len(shards), size, agreement, unasked)


def _bytes(tensor: Gpt2Tensor) -> int:
    return math.prod(tensor.shape) * _FORMAT.itemsize


# ------------------------------------------------------------------ before anything is written


def _why_not_asked(check: Check, size: int) -> str | None:
    """Why transformers need not or cannot check a model of this size; None if it can."""
    if check == "transformers":
        return None
    if check == "files":
        return "transformers was not asked"
    needed, free = 2 * size, free_memory()
    if needed <= free // 2:
        return None
    return (
        f"transformers was not asked, since that takes {format_bytes(needed)} of memory, more than "
        f"half of the {format_bytes(free)} that are free"
    )


def _refuse_used(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "this folder is not empty" if folder.is_dir() else "this is a file",
            where=str(folder),
            remedy="give a new one",
            exit=Exit.REFUSED,
        )


# ------------------------------------------------------------------ a folder that is whole or not


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder to write into. It gets its name when all went well, and goes away if not."""
    folder = folder.resolve()
    staging = folder.with_name(f".{folder.name}.writing")
    with storage_errors(folder):
        staging.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(staging)
    lock.acquire()
    try:
        with storage_errors(folder):
            _refuse_used(folder)
            _remove_leftovers(staging, lock)
            yield staging
            _commit(staging, folder)
            (folder / lock.path.name).unlink()
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lock.release()


def _remove_leftovers(staging: Path, lock: FolderLock) -> None:
    """Remove what a killed export wrote; one that lives has the lock."""
    for left in staging.iterdir():
        if left != lock.path:
            left.unlink()


def _commit(staging: Path, folder: Path) -> None:
    for file in staging.iterdir():
        sync_file(file)
    sync_folder(staging)
    _refuse_used(folder)
    # An empty folder of that name is replaced.
    os.rename(staging, folder)
    sync_folder(folder.parent)


# ------------------------------------------------------------------ weights, a piece at a time


def _divide(tensors: Sequence[Gpt2Tensor], *, limit: int) -> list[_Shard]:
    """Which file each tensor goes to: one after the other, until a file is full."""
    groups: list[list[Gpt2Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(map(_bytes, groups[-1])) + _bytes(tensor) > limit:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return [_Shard("model.safetensors", tuple(tensors))]
    names = (f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1))
    return [_Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def _write_weights(
    stored: StoredModel, folder: Path, *, shards: Sequence[_Shard], count: _Count
) -> None:
    for shard in shards:
        content = {
            one.name: Streamed(_FORMAT, one.shape, partial(_pieces, stored, one, count))
            for one in shard.tensors
        }
        write_streamed(folder / shard.file, content, metadata={"format": "pt"})
    if len(shards) > 1:
        size = sum(_bytes(one) for shard in shards for one in shard.tensors)
        places = {one.name: shard.file for shard in shards for one in shard.tensors}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / HF_INDEX, index)


def _pieces(stored: StoredModel, tensor: Gpt2Tensor, count: _Count) -> Iterator[torch.Tensor]:
    for box in _boxes(tensor.shape):
        piece = tensor.read(stored.weights, box)
        yield piece
        count.add(piece, "writing")


def _boxes(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    """Rows of a tensor, as many at once as may be in memory."""
    rest = shape[1:]
    rows = max(1, _PIECE // (math.prod(rest) * _FORMAT.itemsize))
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        yield TensorSlice((first, *(0,) * len(rest)), (last, *rest))


def _compare(
    stored: StoredModel, written: TensorReader, *, tensors: Sequence[Gpt2Tensor], count: _Count
) -> None:
    """Read the folder as a run that starts from it would, and compare every bit with the source."""
    assert set(written) == {one.name for one in tensors}
    read = Gpt2Weights(written, stored.outline())
    for one in tensors:
        for box in _boxes(one.shape if one.ours is None else read.shape(one.ours)):
            if one.ours is None:
                found, wanted = read_part(written, one.name, box), torch.zeros(box.shape)
            else:
                found = read_part(read, one.ours, box)
                wanted = read_part(stored.weights, one.ours, box)
            # As whole numbers, since what is not a number equals nothing.
            if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
                raise UserError(
                    f"{one.name} does not read back as it is in the source; nothing was exported",
                    where=str(stored.origin),
                    remedy="the disk or the memory of this machine is failing: check both",
                    exit=Exit.STORAGE,
                )
            count.add(found, "reading back")


# ------------------------------------------------------------------ what transformers makes of it


def _ask(transformers: ModuleType, stored: StoredModel, staging: Path, folder: Path) -> Agreement:
    """Compute with both, the folder and the source; `folder` is what it is going to be called."""
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(staging).eval()
    ours = stored.load(torch.device("cpu")).model
    generator = torch.Generator().manual_seed(0)
    length = min(64, ours.config.context)
    ids_BT = torch.randint(0, ours.vocab, (4, length), generator=generator)
    with torch.inference_mode():
        logits = ours(ids_BT)
        assert isinstance(logits, torch.Tensor)
        difference = float((theirs(ids_BT).logits - logits).abs().max())
        # fp32 rounds in proportion: a model sure of itself has logits far above 1.
        allowed = TOLERANCE * max(1.0, float(logits.abs().max()))
    prompt, tokens = ids_BT[0, : max(1, length // 4)].tolist(), max(1, length // 2)
    mine = [ids[0] for ids in Engine(ours).stream(prompt, tokens=tokens, sampling=_GREEDY)]
    same = mine == _greedy(theirs, prompt, tokens)
    if difference > allowed or not same:
        greedy = "the same" if same else "other"
        raise UserError(
            f"transformers' logits differ by {difference:.1e} (allowed: {allowed:.0e}) and its "
            f"greedy tokens are {greedy}; nothing was exported",
            where=str(folder),
            exit=Exit.INTERNAL,
        )
    return Agreement(difference, tokens)


def _greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(tokens):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return [int(i) for i in ids[0, len(prompt) :]]
