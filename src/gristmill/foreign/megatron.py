"""Megatron's GPT checkpoints: shards merged, rows in our order.

    FOLDER/latest_checkpointed_iteration.txt      the number of the newest, or "release"
    FOLDER/iter_0001000/
      mp_rank_00/model_optim_rng.pt               rank 0 of tensor parallelism
      mp_rank_01_003/model_optim_rng.pt           rank 1, of the fourth pipeline stage
    or
      .metadata, __0_0.distcp …, common.pt        any layout: see `torch_file`

    Megatron-DeepSpeed's pipeline:
    FOLDER/latest                                 the name of the newest
    FOLDER/global_step1000/
      layer_01-model_00-model_states.pt           the embedding, of rank 0 of tensor parallelism
      layer_03-model_00-model_states.pt …         the blocks; the last file is the final norm
      mp_rank_00_model_states.pt                  the arguments

Layers are numbered from 0 in each stage, and stages hold as many as they hold. With virtual stages,
`model0`, `model1` … of all stages come one after the other.

The rows of queries, keys and values lie group by group (`checkpoint_version` 2 and 3), with all
three by feature (1), or one after the other on each rank (0). SwiGLU's halves are both on each
rank. Names have changed over the years; `_MODULES` has all of them.

Settings come from the arguments that a checkpoint holds (see `megatron_settings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import DataError, Problem
from gristmill.config.model import GPTConfig
from gristmill.foreign.megatron_settings import arguments_of, config_of
from gristmill.foreign.model import ImportedModel
from gristmill.foreign.torch_file import (
    METADATA,
    LazyTensor,
    concatenated,
    read_distributed,
    read_torch_file,
    tensors_below,
)

LATEST = "latest_checkpointed_iteration.txt"
DEEPSPEED_LATEST = "latest"
_SHARD = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?")
_EXPERT_SHARD = re.compile(r"mp_rank_\d{2,5}_\d{3,5}_\d{3,5}")
_LAYER_FILE = re.compile(r"layer_(\d{2,5})-model_(\d{2,5})-model_states\.pt")
_FILE = "model_optim_rng.pt"
_MODULES = {
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.dense": "attention.out",
    "self_attention.linear_proj": "attention.out",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.linear_fc1": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.linear_fc2": "mlp.down",
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
}
_AROUND = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "embedding.position_embeddings.weight": "positions.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_layernorm.bias": "norm.bias",
    "output_layer.weight": "head.weight",
}
_PARALLEL = {
    "embedding.weight": 0,
    "head.weight": 0,
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
}
"""The dimension that tensor parallelism divides; all other tensors are whole on every rank."""
_IN_LAYER = re.compile(r"decoder\.layers\.(?:(\d{1,5})\.)?(.+?)[._](weight|bias)")
_NO_WEIGHT = re.compile(
    r".*(_extra_state(\.\w+)*|\.inv_freq|\.masked_bias|word_embeddings_for_head\.weight)"
)


@dataclass(frozen=True)
class _Shards:
    """What the files of a checkpoint hold, under our names."""

    tensors: Mapping[str, Sequence[LazyTensor]]
    """The parts of all ranks of tensor parallelism, in order."""
    arguments: Mapping[str, Any]
    version: float
    ranks: int
    """How many ranks of tensor parallelism the order of rows depends on."""


def is_megatron(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of Megatron, or of Megatron-DeepSpeed."""
    names = [path.name for path in folder.iterdir()]
    return (
        LATEST in names
        or METADATA in names
        or any(_SHARD.fullmatch(name) or _LAYER_FILE.fullmatch(name) for name in names)
        or (DEEPSPEED_LATEST in names and any(name.startswith("global_step") for name in names))
    )


def read_megatron(folder: Path) -> ImportedModel:
    """The model of a checkpoint: of a folder of them, the newest."""
    folder, program = _newest(folder), "Megatron-LM"
    names = sorted(path.name for path in folder.iterdir())
    if any(_EXPERT_SHARD.fullmatch(name) for name in names):
        what = "trained with --expert-model-parallel-size, and our GPT has no experts"
        raise DataError(what, where=folder)
    if METADATA in names:
        shards = _read_distributed(folder)
    elif any(_LAYER_FILE.fullmatch(name) for name in names):
        shards, program = _read_layer_files(folder, names), "Megatron-DeepSpeed"
    elif any(_SHARD.fullmatch(name) for name in names):
        shards = _read_ranks(folder, names)
    else:
        what = "no checkpoint of Megatron: neither mp_rank_00 nor .metadata is here"
        raise DataError(what, where=folder)
    return _assemble(folder, shards, program)


def _newest(folder: Path) -> Path:
    """The checkpoint that the file beside all of them names."""
    for file, name in ((LATEST, "iter_{:0>7}"), (DEEPSPEED_LATEST, "{}")):
        if not (folder / file).is_file():
            continue
        named = (folder / file).read_text(errors="replace").strip()
        if named != "release":
            named = name.format(named)
        if not re.fullmatch(r"iter_\d{7,12}|release|global_step\d{1,12}", named):
            raise DataError(f"names no checkpoint: {named[:60]!r}", where=folder / file)
        if not (folder / named).is_dir():
            raise DataError(f"names {named}, which is not there", where=folder / file)
        return folder / named
    return folder


# ------------------------------------------------------------------ names


def _core_name(name: str) -> str:
    """The name that the tensor has in megatron-core, of one from an older Megatron."""
    name = name.removeprefix("module.").removeprefix("language_model.")
    name = re.sub(r"^(encoder|transformer)\.", "decoder.", name)
    name = name.replace(".attention.", ".self_attention.")
    return name.replace("decoder.final_norm.", "decoder.final_layernorm.")


def _our_name(name: str, first_layer: int, *, where: Path) -> str | None:
    """Our name of a tensor; None if it is no weight, or a copy of one."""
    if _NO_WEIGHT.fullmatch(name):
        return None
    core = _core_name(name)
    if core in _AROUND:
        return _AROUND[core]
    match = _IN_LAYER.fullmatch(core)
    if match is None or match[2] not in _MODULES:
        raise DataError(f"our GPT has no {name[:100]}", where=where)
    layer = f"{int(match[1]) + first_layer}" if match[1] is not None else "*"
    return f"blocks.{layer}.{_MODULES[match[2]]}.{match[3]}"


def _layers_in(names: Iterator[str]) -> int:
    """How many layers a stage has."""
    matches = (_IN_LAYER.fullmatch(_core_name(name)) for name in names)
    return 1 + max(
        (int(match[1]) for match in matches if match and match[1] is not None), default=-1
    )


# ------------------------------------------------------------------ the layouts


def _read_ranks(folder: Path, names: list[str]) -> _Shards:
    """Files of one rank of tensor and pipeline parallelism each."""
    places = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            places[int(match[2] or 0), int(match[1])] = folder / name / _FILE
    stages, ranks = (1 + max(place[dim] for place in places) for dim in (0, 1))
    missing = [(p, t) for p in range(stages) for t in range(ranks) if (p, t) not in places]
    if missing:
        stage, rank = missing[0]
        what = f"there is no mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
        raise DataError(f"{what}: the checkpoint has {ranks} x {stages} ranks", where=folder)
    content = {place: read_torch_file(path) for place, path in places.items()}
    for place, value in content.items():
        if not isinstance(value, dict):
            raise DataError("not the checkpoint of a rank", where=places[place])
    first = content[0, 0]
    chunks = ["model"]
    if "model" not in first:
        numbered = (key for key in first if re.fullmatch(r"model\d+", str(key)))
        chunks = sorted(numbered, key=lambda key: int(key.removeprefix("model")))
    if not chunks:
        what = "there is no model in this file"
        raise DataError(what, where=places[0, 0], remedy="--no-save-optim keeps the model")
    tensors: dict[str, list[LazyTensor]] = {}
    layers = 0
    for chunk in chunks:
        for stage in range(stages):
            count = 0
            for rank in range(ranks):
                path = places[stage, rank]
                below = tensors_below(content[stage, rank].get(chunk), where=path)
                count = _layers_in(iter(below))
                # Only the last stage has a head, which is a copy of the embedding if it is tied.
                for name, tensor in below.items():
                    ours = _our_name(name, layers, where=path)
                    if ours is not None:
                        tensors.setdefault(ours, []).append(tensor)
            layers += count
    for name, parts in tensors.items():
        if len(parts) != ranks:
            what = f"{name} is there {len(parts)} times, and the checkpoint has {ranks} ranks"
            raise DataError(what, where=folder)
    arguments = arguments_of(first.get("args"), where=places[0, 0])
    return _Shards(tensors, arguments, _version(first, places[0, 0]), ranks)


def _version(content: Mapping[Any, Any], where: Path) -> float:
    version = content.get("checkpoint_version", 0)
    if type(version) not in (int, float) or version not in (0, 1, 2, 3):
        raise DataError(f"checkpoint_version {str(version)[:20]} is not known", where=where)
    return float(version)


def _read_distributed(folder: Path) -> _Shards:
    """torch's distributed format, which has whole tensors in pieces."""
    common = folder / "common.pt"
    content = read_torch_file(common)
    if not isinstance(content, dict):
        raise DataError("not the common part of a checkpoint", where=common)
    arguments = arguments_of(content.get("args"), where=common)
    tensors: dict[str, list[LazyTensor]] = {}

    def wanted(name: str) -> bool:
        core = _core_name(name.removeprefix("model."))
        return core in _AROUND or (core.startswith("decoder.") and not _NO_WEIGHT.fullmatch(core))

    for name, tensor in read_distributed(folder, wanted).items():
        ours = _our_name(name.removeprefix("model."), 0, where=folder)
        if ours is None:
            continue
        if "*" not in ours:
            tensors[ours] = [tensor.whole()]
        else:
            # All layers in one tensor.
            for layer in range(tensor.shape[0]):
                tensors[ours.replace("*", str(layer))] = [tensor.row(layer)]
    return _Shards(tensors, arguments, 3.0, 1)


def _read_layer_files(folder: Path, names: list[str]) -> _Shards:
    """Megatron-DeepSpeed's files of one layer each."""
    matches = (_LAYER_FILE.fullmatch(name) for name in names)
    files = sorted((int(match[1]), int(match[2])) for match in matches if match)
    ranks = 1 + max(rank for _, rank in files)
    tensors: dict[str, list[LazyTensor]] = {}
    layer, last = -1, -1
    for number, rank in files:
        path = folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
        below = tensors_below(read_torch_file(path), where=path)
        block = any(name.startswith(("self_attention.", "attention.")) for name in below)
        if block and number != last:
            layer, last = layer + 1, number
        for name, tensor in below.items():
            if block:
                core = f"decoder.layers.{layer}.{name}"
            elif name in ("weight", "bias"):
                core = f"decoder.final_layernorm.{name}"
            else:
                core = f"embedding.{name}"
            ours = _our_name(core, 0, where=path)
            if ours is not None:
                tensors.setdefault(ours, []).append(tensor)
    for name, parts in tensors.items():
        if len(parts) != ranks:
            raise DataError(f"{name} is there {len(parts)} times, not {ranks}", where=folder)
    state = folder / "mp_rank_00_model_states.pt"
    content = read_torch_file(state)
    if not isinstance(content, dict):
        raise DataError("not the state of a run", where=state)
    version = _version({"checkpoint_version": 3.0, **content}, state)
    return _Shards(tensors, arguments_of(content.get("args"), where=state), version, ranks)


# ------------------------------------------------------------------ our rows


def _assemble(folder: Path, shards: _Shards, program: str) -> ImportedModel:
    if "embedding.weight" not in shards.tensors:
        raise DataError("the checkpoint has no word embeddings", where=folder)
    merged = {}
    for name, parts in shards.tensors.items():
        dim = _PARALLEL.get(re.sub(r"blocks\.\d+\.", "", name))
        merged[name] = parts[0] if dim is None else concatenated(name, parts, dim, where=folder)
    rows = merged["embedding.weight"].shape[0]
    config = config_of(shards.arguments, vocab=rows, where=folder)
    if config.tie_head:
        # The copy on the last stage.
        merged.pop("head.weight", None)
    if config.groups % shards.ranks and shards.ranks > 1:
        what = f"--num-query-groups {config.groups} on {shards.ranks} ranks are not merged"
        raise DataError(what, where=folder)
    qkv, halves = _query_rows(config, shards), _gate_rows(config, shards.ranks)
    problems = []
    for name, tensor in merged.items():
        order = None
        if ".attention.qkv." in name:
            order = qkv
        elif ".mlp.up." in name and config.activation == "swiglu":
            order = halves
        if order is None:
            continue
        if tensor.shape[0] != len(order):
            what = f"{name} has {tensor.shape[0]} rows, not {len(order)}"
            problems.append(Problem(what, str(folder)))
        else:
            merged[name] = tensor.reordered(order)
    if problems:
        raise DataError(problems)
    return ImportedModel(program, folder, config, merged)


def _query_rows(config: GPTConfig, shards: _Shards) -> torch.Tensor:
    """Where each of our rows of queries, keys and values is."""
    heads, groups, size = config.heads, config.groups, config.head_size
    rows = torch.arange((heads + 2 * groups) * size)
    if shards.version >= 2:
        each = heads // groups
        by_group = rows.view(groups, each + 2, size)
        parts = (by_group[:, :each], by_group[:, each], by_group[:, each + 1])
    elif shards.version >= 1:
        by_feature = rows.view(heads, size, 3)
        parts = (by_feature[..., 0], by_feature[..., 1], by_feature[..., 2])
    else:
        by_rank = rows.view(shards.ranks, 3, -1)
        parts = (by_rank[:, 0], by_rank[:, 1], by_rank[:, 2])
    return torch.cat([part.reshape(-1) for part in parts])


def _gate_rows(config: GPTConfig, ranks: int) -> torch.Tensor:
    """Where each row of SwiGLU's two halves is."""
    rows = torch.arange(2 * config.inner)
    if config.inner % ranks:
        return rows[:0]
    return rows.view(ranks, 2, -1).transpose(0, 1).reshape(-1)
