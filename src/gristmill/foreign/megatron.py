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

Settings come from the arguments that a checkpoint holds. Those that our model cannot follow are
refused under the name of the option on Megatron's command line. Arguments that change nothing about
the function that the weights compute (dropout apart, which is kept) are not looked at.
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
from gristmill.foreign.model import ImportedModel, model_config
from gristmill.foreign.pickled import PickledObject
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
    arguments = _arguments(first.get("args"), where=places[0, 0])
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
    arguments = _arguments(content.get("args"), where=common)
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
    return _Shards(tensors, _arguments(content.get("args"), where=state), version, ranks)


# ------------------------------------------------------------------ our rows


def _assemble(folder: Path, shards: _Shards, program: str) -> ImportedModel:
    if "embedding.weight" not in shards.tensors:
        raise DataError("the checkpoint has no word embeddings", where=folder)
    merged = {}
    for name, parts in shards.tensors.items():
        dim = _PARALLEL.get(re.sub(r"blocks\.\d+\.", "", name))
        merged[name] = parts[0] if dim is None else concatenated(name, parts, dim, where=folder)
    rows = merged["embedding.weight"].shape[0]
    config = _config(shards.arguments, vocab=rows, where=folder)
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


# ------------------------------------------------------------------ settings


_OPTIONS = {
    "layers": "--num-layers",
    "heads": "--num-attention-heads",
    "width": "--hidden-size",
    "context": "--max-position-embeddings",
    "kv_heads": "--num-query-groups",
    "head_width": "--kv-channels",
    "mlp_width": "--ffn-hidden-size",
    "rotary_base": "--rotary-base",
    "rotary_fraction": "--rotary-percent",
    "norm_eps": "--norm-epsilon",
    "dropout": "--hidden-dropout",
    "init_std": "--init-method-std",
}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,),
    "apply_layernorm_1p": (False,),
    "num_experts": (None, 0, 1, [1]),
    "multi_latent_attention": (False,),
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (1,),
    "rotary_scaling_factor": (1, 1.0),
    "use_rope_scaling": (False,),
    "window_size": (),
    "no_rope_freq": (),
    "mtp_num_layers": (0,),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (False,),
    "experimental_attention_variant": (),
    "linear_attention_type": (),
    "attention_output_gate": (False,),
    "softmax_type": ("vanilla",),
    "quick_geglu": (False,),
    "qk_l2_norm": (False,),
    "glu_activation": (),
    "embed_layernorm": (False,),
    "retro_add_retriever": (False,),
}
"""Arguments of which our model knows these values only, and None."""
_POSITIONS = {"learned_absolute": "learned", "absolute": "learned", "rope": "rotary"}
_DEEPSPEED_POSITIONS = {1: "rotary", 2: "absolute", 3: "alibi"}
"""Numbers of Megatron-DeepSpeed's enumeration."""


def _arguments(value: Any, *, where: Path) -> dict[str, Any]:
    """The arguments of a checkpoint, which are a namespace or a dictionary."""
    fields = value.fields if isinstance(value, PickledObject) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("num_layers"), int):
        raise DataError(
            "the checkpoint does not hold the arguments of its run, which say what the model is",
            where=where,
            remedy="save it with a Megatron-LM of 2020 or later",
        )
    return {key: value for key, value in fields.items() if isinstance(key, str)}


def _config(arguments: Mapping[str, Any], *, vocab: int, where: Path) -> GPTConfig:
    """Our settings; refuses what our model cannot be."""
    problems = [
        _refused(name, arguments[name], where)
        for name, known in _ONLY.items()
        if arguments.get(name) is not None and arguments[name] not in known
    ]
    settings, more = _settings(arguments, where)
    problems += more
    if problems:
        raise DataError(problems)
    return model_config({**settings, "vocab": vocab}, _OPTIONS, where=where)


def _refused(name: str, value: Any, where: Path, what: str = "") -> Problem:
    option = f"--{name.replace('_', '-')}"
    shown = "" if value is True else f" {value}" if isinstance(value, int | float | str) else ""
    return Problem(f"trained with {option}{shown}, which our GPT cannot be{what}", str(where))


def _settings(arguments: Mapping[str, Any], where: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Our settings, and what our model cannot follow."""
    get, problems = arguments.get, list[Problem]()
    norm = str(get("normalization") or "LayerNorm")
    bias = bool(get("add_bias_linear", True))
    heads = get("num_attention_heads")
    grouped = get("group_query_attention") and get("num_query_groups")
    settings: dict[str, Any] = {
        "layers": get("num_layers"),
        "heads": heads,
        "width": get("hidden_size"),
        "context": get("max_position_embeddings") or get("seq_length"),
        "kv_heads": get("num_query_groups") if grouped else None,
        "head_width": get("kv_channels"),
        "mlp_width": get("ffn_hidden_size"),
        "norm": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}.get(norm),
        "norm_eps": get("norm_epsilon") or get("layernorm_epsilon") or 1e-5,
        "bias": bias,
        "qkv_bias": True if get("add_qkv_bias") and not bias else None,
        "qk_norm": bool(get("qk_layernorm")),
        "tie_head": not get("untie_embeddings_and_output_weights", False),
        "dropout": get("hidden_dropout") or 0.0,
        "init_std": get("init_method_std") or 0.02,
    }
    if settings["norm"] is None:
        problems.append(_refused("normalization", norm, where))
    if norm == "LayerNorm" and not bias:
        what = "--disable-bias-linear with LayerNorm, whose biases our GPT would not have"
        problems.append(Problem(f"trained with {what}", str(where)))
    if norm == "LayerNorm" and get("qk_layernorm"):
        problems.append(_refused("qk_layernorm", True, where, ": its norm of queries is RMSNorm"))
    settings["activation"] = _activation(arguments)
    settings |= _positions(arguments, problems, where)
    return {name: value for name, value in settings.items() if value is not None}, problems


def _activation(arguments: Mapping[str, Any]) -> str:
    """Megatron's fused GELU is the approximation by tanh, and the other one is not."""
    get = arguments.get
    if get("swiglu"):
        return "swiglu"
    if get("squared_relu"):
        return "relu2"
    fused = get("bias_gelu_fusion", True) and get("add_bias_linear", True)
    return "gelu_tanh" if get("openai_gelu") or fused else "gelu"


def _positions(
    arguments: Mapping[str, Any], problems: list[Problem], where: Path
) -> dict[str, Any]:
    kind = arguments.get("position_embedding_type") or "learned_absolute"
    if isinstance(kind, PickledObject):
        number = kind.arguments[0] if kind.arguments else None
        kind = _DEEPSPEED_POSITIONS.get(number, "unknown") if isinstance(number, int) else "unknown"
    if arguments.get("use_rotary_position_embeddings") or kind == "rotary":
        kind = "rope"
    if str(kind) not in _POSITIONS:
        problems.append(_refused("position_embedding_type", str(kind), where))
        return {}
    if _POSITIONS[str(kind)] == "learned":
        return {"positions": "learned"}
    fraction = arguments.get("rotary_percent")
    return {
        "positions": "rotary",
        "rotary_base": arguments.get("rotary_base"),
        "rotary_fraction": None if fraction in (None, 1) else fraction,
    }
