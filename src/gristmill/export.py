"""Exports a model as a Hugging Face folder that `transformers` loads, in memory that does not grow
with the number of layers, and verifies it before the folder gets its name.

    DIR/  model.safetensors, or model-00001-of-0000N.safetensors ... and an index of them
          tokenizer files · generation_config.json · config.json

    read some rows of a tensor from the source -> finite? -> fp32, transposed -> append to a file
    read some rows from both, folder and source -> are the bits the same?
    transformers loads the folder, we the source -> same logits and greedy tokens?

Everything is written under a temporary name and flushed; the folder gets its own name after all
checks. What a killed export leaves has the temporary name, and no config.json before the weights
are verified; the next export to the same folder removes it.

The last check holds the model in memory twice. In fp32 the logits must agree within 1e-5 (of the
largest logit, where that is above 1), and greedy continuations must be the same ids. If it needs
more than half of the free memory it is skipped, unless it is asked for, and the result says so.
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
from typing import Literal

import torch

from gristmill.base.errors import DataError, Exit, UserError, optional
from gristmill.base.files import require_room, storage_errors, sync_file, sync_folder, write_json
from gristmill.base.locks import FolderLock
from gristmill.base.memory import free_memory
from gristmill.base.tensor_slices import TensorSlice
from gristmill.base.units import format_bytes
from gristmill.checkpoint.model import StoredModel
from gristmill.checkpoint.state import FiniteCheck
from gristmill.checkpoint.tensor_reader import HF_INDEX, open_hf_tensors
from gristmill.checkpoint.tensorfile import StreamedTensor, write_streamed
from gristmill.config.hf import to_hf
from gristmill.config.model import GPTConfig
from gristmill.generate import Engine, Sampling
from gristmill.models.weights import Gpt2Tensor, Gpt2Weights, gpt2_tensors

TOLERANCE = 1e-5
SHARD = 5 * 10**9
"""Bytes of tensors in one file, if no single tensor is larger."""
_BYTES_AT_ONCE = 2**26
"""Bytes of a tensor that are in memory at once. For a transposed tensor they are columns of the
source: with fewer, each page of its file would be read more often."""
_DTYPE = torch.float32

Check = Literal["auto", "transformers", "files"]
"""Whether to compare with transformers: if the model fits twice into half of the free memory,
always, or never."""


@dataclass(frozen=True)
class Agreement:
    """How closely transformers agrees with the source."""

    largest_difference: float
    greedy_tokens: int


@dataclass(frozen=True)
class Exported:
    """What was written; all weights were read back and compared with the source."""

    folder: Path
    files: int
    """Files of weights."""
    bytes: int
    """Bytes of weights."""
    agreement: Agreement | None
    """None if the model was not compared with transformers."""
    skipped: str | None = None
    """Why it was not."""


_Advance = Callable[[str, int], None]
"""Called with what was done, and with how many bytes of weights."""


def export(
    stored: StoredModel,
    folder: Path,
    *,
    check: Check = "auto",
    shard: int = SHARD,
    progress: Callable[[str, int, int], None] = lambda doing, done, total: None,
) -> Exported:
    """Write and check a Hugging Face folder. `progress` is called with what is being done, and the
    bytes done and in total: all weights are written, then read back."""
    end = stored.tokenizer.end_of_text
    if not isinstance(stored.config, GPTConfig):
        raise UserError(
            f"{stored.config.kind} models have no Hugging Face form that this program can write",
            where="export",
            remedy="such a model can be used with `gristmill generate` and `evaluate`",
        )
    settings = to_hf(stored.config, vocab=stored.vocab, end_of_text=end)
    tensors = gpt2_tensors(stored.outline())
    size, done = sum(map(_bytes, tensors)), 0
    skipped, agreement, transformers = _why_skipped(check, size), None, None
    if skipped is None:
        transformers = optional("transformers", extra="hf", purpose="checking an export")
    _refuse_used(folder)
    larger = "give a folder on a larger disk"
    require_room(folder, needed=size, purpose="the model", remedy=larger)
    files = _divide(tensors, limit=shard)

    def advance(doing: str, count: int) -> None:
        nonlocal done
        done += count
        progress(doing, done, 2 * size)

    with _staged(folder) as staging:
        _write_weights(stored, staging, files, advance)
        _compare(stored, staging, tensors, advance)
        stored.tokenizer.save(staging)
        write_json(staging / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        write_json(staging / "config.json", settings)
        if transformers is not None:
            advance("checking with transformers", 0)
            agreement = _compare_with_transformers(transformers, stored, staging, folder)
    return Exported(folder, len(files), size, agreement, skipped)


def _bytes(tensor: Gpt2Tensor) -> int:
    return math.prod(tensor.shape) * _DTYPE.itemsize


def _why_skipped(check: Check, size: int) -> str | None:
    """Why a model of this size is not compared with transformers; None if it is."""
    skipped = "not compared with transformers"
    if check != "auto":
        return skipped if check == "files" else None
    needed, free = 2 * size, free_memory()
    if needed <= free // 2:
        return None
    return (
        f"{skipped}, since that takes {format_bytes(needed)} of memory, more than half of the "
        f"{format_bytes(free)} that are free"
    )


# ------------------------------------------------------------------ all or nothing


def _refuse_used(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "this folder is not empty" if folder.is_dir() else "this is a file",
            where=str(folder),
            remedy="give a new one",
            exit=Exit.REFUSED,
        )


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A folder to write into. It gets its name if all went well, and is removed if not."""
    folder = folder.resolve()
    staging = folder.with_name(f".{folder.name}.writing")
    with storage_errors(folder):
        staging.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(staging)
    lock.acquire()
    try:
        with storage_errors(folder):
            _refuse_used(folder)
            # Left by a killed export: one that still runs would hold the lock.
            for file in staging.iterdir():
                if file != lock.path:
                    file.unlink()
            yield staging
            for file in staging.iterdir():
                sync_file(file)
            sync_folder(staging)
            _refuse_used(folder)
            os.rename(staging, folder)  # replaces an empty folder
            sync_folder(folder.parent)
            (folder / lock.path.name).unlink()
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        lock.release()


# ------------------------------------------------------------------ weights, some rows at a time


def _divide(tensors: Sequence[Gpt2Tensor], *, limit: int) -> dict[str, list[Gpt2Tensor]]:
    """The tensors of each file: one after the other, until the file is full."""
    groups: list[list[Gpt2Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(map(_bytes, groups[-1])) + _bytes(tensor) > limit:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _write_weights(
    stored: StoredModel, folder: Path, files: dict[str, list[Gpt2Tensor]], advance: _Advance
) -> None:
    for file, tensors in files.items():
        content = {
            one.name: StreamedTensor(_DTYPE, one.shape, partial(_read_rows, stored, one, advance))
            for one in tensors
        }
        write_streamed(folder / file, content, metadata={"format": "pt"})
    if len(files) > 1:
        places = {one.name: file for file, tensors in files.items() for one in tensors}
        size = sum(_bytes(one) for tensors in files.values() for one in tensors)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / HF_INDEX, index)


def _read_rows(
    stored: StoredModel, tensor: Gpt2Tensor, advance: _Advance
) -> Iterator[torch.Tensor]:
    for rows in _row_regions(tensor.shape):
        value, found = tensor.read(stored.weights, rows), FiniteCheck()
        found.add(tensor.ours or tensor.name, value)
        try:
            found.require(str(stored.origin))
        except DataError as error:
            raise stored.unusable(error) from error
        yield value
        advance("writing", value.nbytes)


def _row_regions(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    """A tensor in regions of as many rows as may be in memory at once."""
    count = max(1, _BYTES_AT_ONCE // (math.prod(shape[1:]) * _DTYPE.itemsize))
    for first in range(0, shape[0], count):
        yield TensorSlice.whole(shape).narrow(0, first, min(first + count, shape[0]))


def _compare(
    stored: StoredModel, folder: Path, tensors: Sequence[Gpt2Tensor], advance: _Advance
) -> None:
    """Read the folder as a run that starts from it would, and compare every bit with the source."""
    written = open_hf_tensors(folder)
    assert set(written.shapes) == {one.name for one in tensors}
    converted = Gpt2Weights(written, stored.outline())
    for one in tensors:
        for rows in _row_regions(one.shape if one.ours is None else converted.shapes[one.ours]):
            if one.ours is None:
                found, wanted = written.read(one.name, rows), torch.zeros(rows.shape)
            else:
                found = converted.read(one.ours, rows)
                wanted = stored.weights.read(one.ours, rows)
            # As integers: 0 and -0 are equal, but not the same bits.
            if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
                raise UserError(
                    f"{one.name} does not read back as it is in the source; nothing was exported",
                    where=str(stored.origin),
                    remedy="the disk or the memory of this machine is failing: check both",
                    exit=Exit.STORAGE,
                )
            advance("reading back", found.nbytes)


# ------------------------------------------------------------------ transformers


def _compare_with_transformers(
    transformers: ModuleType, stored: StoredModel, staging: Path, folder: Path
) -> Agreement:
    """Compute with the written folder and with the source; `folder` is its final name."""
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(staging).eval()
    ours = stored.load(torch.device("cpu")).model
    generator = torch.Generator().manual_seed(0)
    length = min(64, ours.config.context)
    ids_BT = torch.randint(0, ours.vocab, (4, length), generator=generator)
    prompt_BT, tokens = ids_BT[:1, : max(1, length // 4)], max(1, length // 2)
    with torch.inference_mode():
        logits = ours(ids_BT)
        assert isinstance(logits, torch.Tensor)
        difference = float((theirs(ids_BT).logits - logits).abs().max())
        # fp32 rounds in proportion: a confident model has logits far above 1.
        allowed = TOLERANCE * max(1.0, float(logits.abs().max()))
        greedy_BT = prompt_BT
        for _ in range(tokens):
            greedy_BT = torch.cat((greedy_BT, theirs(greedy_BT).logits[:, -1:].argmax(-1)), dim=1)
    prompt, greedy = prompt_BT[0].tolist(), Sampling(temperature=0.0)
    continuation = [ids[0] for ids in Engine(ours).stream(prompt, tokens=tokens, sampling=greedy)]
    same = prompt + continuation == greedy_BT[0].tolist()
    # A difference that is not a number is not small either.
    if not difference <= allowed or not same:
        raise UserError(
            f"transformers' logits differ by {difference:.1e} (allowed: {allowed:.0e}) and its "
            f"greedy tokens are {'the same' if same else 'different'}; nothing was exported",
            where=str(folder),
            exit=Exit.INTERNAL,
        )
    return Agreement(difference, tokens)
