"""Writes an imported model as a folder that everything here takes: safetensors under our names.

    FOLDER/  model.safetensors, or model-00001-of-0000N.safetensors ... and an index of them
             config.json (our settings, and where the model came from)
             tokenizer files, if a tokenizer was given

One tensor is in memory at a time, in the type of numbers that the source has. All tensors are
compared with the shapes of the model before the first is read. Each file is read back after it was
written. The folder gets its name when it is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import require_room, sha256_file, write_json
from gristmill.checkpoint.loading import FiniteCheck
from gristmill.checkpoint.tensorfile import DTYPE_NAMES, StreamedTensor, write_streamed
from gristmill.config.hf import CODE_TYPE, to_hf_with_code
from gristmill.export.staging import (
    SHARD,
    divide_files,
    refuse_used_folder,
    staged_folder,
    write_index,
)
from gristmill.foreign.megatron import is_megatron, read_megatron
from gristmill.foreign.model import ImportedModel
from gristmill.foreign.nanogpt import is_nanogpt, read_nanogpt
from gristmill.foreign.torch_file import LazyTensor, read_torch_file
from gristmill.models.build import build_meta_model
from gristmill.models.families import foreign_tensors
from gristmill.text.tokenizers.tokenizer import Tokenizer

_NANOGPT_FILE = "ckpt.pt"
_MOST_NAMED = 5

Advance = Callable[[int, int], None]
"""Called with the bytes of weights that are written, and with all of them."""


@dataclass(frozen=True)
class Imported:
    """What was written."""

    folder: Path
    model: ImportedModel
    parameters: int
    files: int
    bytes: int


def open_checkpoint(
    source: Path, *, activation: Literal["gelu", "gelu_tanh"] | None = None
) -> ImportedModel:
    """The model in a checkpoint of another program, its weights still on disk."""
    if not source.exists():
        raise DataError("there is no such file or folder", where=source)
    if source.is_dir() and is_megatron(source):
        if activation is not None:
            what = "the arguments in a Megatron checkpoint say which activation it has"
            raise UserError(what, where="--activation", remedy="leave it out")
        return read_megatron(source)
    file = source / _NANOGPT_FILE if source.is_dir() else source
    if not file.is_file():
        raise DataError(
            "neither a checkpoint of Megatron (latest_checkpointed_iteration.txt, mp_rank_00, "
            f".metadata) nor one of nanoGPT ({_NANOGPT_FILE})",
            where=source,
        )
    content = read_torch_file(file)
    if is_nanogpt(content):
        return read_nanogpt(content, file, activation=activation or "gelu")
    remedy = None
    if isinstance(content, dict) and "args" in content:
        remedy = f"of a Megatron checkpoint give the folder: {file.parent.parent}"
    what = "not a checkpoint of nanoGPT: it has no model_args and model"
    raise DataError(what, where=file, remedy=remedy)


def import_model(
    model: ImportedModel,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
    shard: int = SHARD,
    progress: Advance = lambda done, total: None,
) -> Imported:
    """Write a model folder."""
    config, vocab = model.config, model.config.vocab
    assert vocab is not None, "programs store all rows of the vocabulary"
    if tokenizer is not None and tokenizer.size > vocab:
        what = f"the tokenizer has {tokenizer.size} ids, but the model has {vocab}"
        raise UserError(what, where="--tokenizer", remedy="name the one that it was trained with")
    if not overwrite:
        refuse_used_folder(folder)
    _check(model, vocab)
    tensors = dict(sorted(model.tensors.items()))
    size = sum(tensor.bytes for tensor in tensors.values())
    require_room(folder, needed=size, purpose="the model", remedy="give a folder on a larger disk")
    done = 0

    def values(name: str, tensor: LazyTensor) -> Iterator[torch.Tensor]:
        nonlocal done
        value, finite = tensor.read(), FiniteCheck()
        finite.add(name, value)
        finite.require(str(model.origin))
        yield value.contiguous()
        done += tensor.bytes
        progress(done, size)

    files = divide_files({name: tensor.bytes for name, tensor in tensors.items()}, limit=shard)
    settings = to_hf_with_code(
        config, vocab=vocab, end_of_text=0 if tokenizer is None else tokenizer.end_of_text
    )
    # It says which code transformers should run, and there is none in this folder.
    del settings["auto_map"]
    if tokenizer is None:
        del settings["bos_token_id"], settings["eos_token_id"]
    settings["imported_from"] = {"program": model.program, "path": str(model.origin.resolve())}
    with staged_folder(folder, replace=overwrite) as staging:
        for file, names in files.items():
            content = {
                name: StreamedTensor(
                    tensors[name].dtype, tensors[name].shape, partial(values, name, tensors[name])
                )
                for name in names
            }
            digest = hashlib.sha256()
            write_streamed(staging / file, content, metadata={"format": "pt"}, digest=digest)
            if sha256_file(staging / file) != digest.hexdigest():
                raise UserError(
                    "does not read back as it was written; nothing was imported",
                    where=str(folder / file),
                    remedy="the disk or the memory of this machine is failing: check both",
                    exit=Exit.STORAGE,
                )
        write_index(staging, files, size=size)
        if tokenizer is not None:
            tokenizer.save(staging)
        write_json(staging / "config.json", settings)
    parameters = sum(torch.Size(tensor.shape).numel() for tensor in tensors.values())
    return Imported(folder, model, parameters, len(files), size)


def _check(model: ImportedModel, vocab: int) -> None:
    """Compare names and shapes with those of a model of these settings."""
    config, where = model.config, str(model.origin)
    if config.layers > len(model.tensors):
        what = f"{config.layers} layers, but only {len(model.tensors)} tensors are stored"
        raise DataError(what, where=where)
    try:
        meta_model = build_meta_model(config, vocab=vocab)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise DataError(f"no model has these sizes: {error}", where=where) from error
    wanted = {tensor.name: tensor.shape for tensor in foreign_tensors(meta_model, CODE_TYPE)}
    problems = [f"the checkpoint lacks {name}" for name in wanted if name not in model.tensors]
    for name, tensor in model.tensors.items():
        if name not in wanted:
            problems.append(f"a model of these settings has no {name}")
        elif tensor.shape != wanted[name]:
            problems.append(f"{name} has shape {tensor.shape}, not {wanted[name]}")
        elif tensor.dtype not in DTYPE_NAMES or not tensor.dtype.is_floating_point:
            problems.append(f"{name} holds {tensor.dtype}, which are no weights")
    if len(problems) > _MOST_NAMED:
        problems[_MOST_NAMED:] = [f"and {len(problems) - _MOST_NAMED} more of this kind"]
    if problems:
        raise DataError([Problem(what, where) for what in problems])
