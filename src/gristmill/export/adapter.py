"""Exports the adapters of a run alone, as PEFT lays them out, and verifies them.

    DIR/  adapter_model.safetensors   base_model.model.MODULE.lora_A.weight    rank x inputs
                                      base_model.model.MODULE.lora_B.weight    outputs x rank
          adapter_config.json         the model they belong to, rank, alpha, names of the modules

Modules have the names of transformers. Where one of our layers is several of theirs, such as qkv,
each gets all of A and its own rows of B, in its own order: together they are exactly our product.

Before the folder gets its name, PEFT's formula, base + (alpha / rank) B A, is computed from what
was written, for each weight of the class, and compared with the merged weight that an export of the
whole model would write.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json, write_json
from gristmill.checkpoint.adapter_base import AdapterBase
from gristmill.checkpoint.model import StoredModel
from gristmill.checkpoint.tensorfile import StreamedTensor, write_streamed
from gristmill.config.hf import choose_family
from gristmill.config.lora import LoraConfig
from gristmill.config.model import GPTConfig
from gristmill.export.staging import refuse_used_folder, row_regions, staged_folder
from gristmill.models.families import TABLES, foreign_tensors
from gristmill.models.lora import MergedWeights
from gristmill.models.weights import ForeignTensor

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_TOLERANCE = 1e-6
"""Relative; merged weights are rounded to fp32."""


@dataclass(frozen=True)
class ExportedAdapter:
    """What was written; it was read back, and gives the same weights as the source."""

    folder: Path
    modules: int
    bytes: int
    notes: tuple[str, ...] = ()
    """What the user should know."""


@dataclass(frozen=True)
class _Module:
    """A linear layer of transformers, and ours that it is, or is a part of."""

    theirs: str
    ours: str
    weight: ForeignTensor
    transposed: bool
    """Whether its weight is inputs x outputs."""
    rows: list[int] | None
    """Its outputs, by their number in ours; all if None."""


def export_adapter(stored: StoredModel, folder: Path) -> ExportedAdapter:
    """Write and check the adapters of a run."""
    weights, base, lora = stored.weights, stored.base, stored.lora
    if not isinstance(weights, MergedWeights) or base is None or lora is None:
        raise UserError(
            "this model has no adapters",
            where=str(stored.origin),
            remedy="leave --adapter out, or give a run with model.lora",
        )
    family = _family(stored, base)
    linears = _linears(stored, weights, family)
    modules = [module for module in linears if module.ours in weights.layers]
    refuse_used_folder(folder)
    tensors = dict[str, torch.Tensor]()
    for module in modules:
        a, b = (weights.adapters.read(f"{module.ours}.{part}") for part in ("lora_a", "lora_b"))
        tensors[_key(module, "A")] = a
        tensors[_key(module, "B")] = b if module.rows is None else b[module.rows]
    with staged_folder(folder) as staging:
        streamed = {
            name: StreamedTensor(tensor.dtype, tuple(tensor.shape), partial(iter, (tensor,)))
            for name, tensor in tensors.items()
        }
        size = write_streamed(staging / WEIGHTS, streamed, metadata={"format": "pt"})
        _compare(load_file(staging / WEIGHTS), modules, weights, folder)
        write_json(staging / SETTINGS, _settings(lora, base, modules, linears))
    notes: tuple[str, ...] = ()
    if base.checkpoint is not None:
        notes = (
            f"these adapters belong to {base.checkpoint} of {base.start}, which PEFT cannot load: "
            f"export that too, with `gristmill export {base.path(Path(base.folder))} DIR`, and "
            "load the adapters onto DIR",
        )
    return ExportedAdapter(folder, len(modules), size, notes)


def _family(stored: StoredModel, base: AdapterBase) -> str | None:
    """The family of the class that the adapters are loaded onto; None for a model of transformers,
    which has its own names."""
    if not isinstance(stored.config, GPTConfig):
        return None
    if base.checkpoint is not None:
        try:
            return choose_family(stored.config).type
        except UserError as error:
            raise _inexpressible(error.problems[0].what) from error
    kind = read_json(Path(base.folder) / "config.json").get("model_type")
    if kind not in TABLES:
        raise _inexpressible(f"a model of type {kind!r} is not one of transformers' own classes")
    return str(kind)


def _inexpressible(why: str) -> UserError:
    remedy = "export the merged model: leave --adapter out (and give --code if it asks for that)"
    return UserError(why, where="--adapter", remedy=remedy)


def _linears(stored: StoredModel, weights: MergedWeights, family: str | None) -> list[_Module]:
    """The matrices of the class of transformers, embeddings included."""
    linears = []
    for tensor in foreign_tensors(stored.meta_model(), family or ""):
        theirs, _, kind = tensor.name.rpartition(".")
        if kind == "weight" and tensor.ours is not None and len(tensor.shape) > 1:
            ours = tensor.ours.rpartition(".")[0]
            if family is None:
                linears.append(_Module(theirs, ours, tensor, weights.layers.get(ours, False), None))
            else:
                rows = list(itertools.chain.from_iterable(part.ours for part in tensor.rows))
                linears.append(_Module(theirs, ours, tensor, tensor.transposed, rows))
    return linears


def _key(module: _Module, part: str) -> str:
    return f"base_model.model.{module.theirs}.lora_{part}.weight"


def _settings(
    lora: LoraConfig, base: AdapterBase, modules: list[_Module], linears: list[_Module]
) -> dict[str, Any]:
    """The content of adapter_config.json."""
    alpha = lora.effective_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.start if base.relative is None else base.folder,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _targets(modules, linears),
        "fan_in_fan_out": any(module.transposed for module in modules),
        "bias": "none",
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _targets(modules: list[_Module], linears: list[_Module]) -> list[str]:
    """The last parts of names, which PEFT looks for, if they stand for these modules and no others;
    whole names otherwise."""
    last = {module.theirs.rpartition(".")[2] for module in modules}
    meant = [module for module in linears if module.theirs.rpartition(".")[2] in last]
    return sorted(last) if meant == modules else [module.theirs for module in modules]


def _compare(
    written: dict[str, torch.Tensor], modules: list[_Module], weights: MergedWeights, folder: Path
) -> None:
    """Apply what was written to the base as PEFT does, and compare it with the merged weights."""
    for module in modules:
        a, b = (written[_key(module, part)].double() for part in "AB")
        left, right = (a.T, b.T) if module.transposed else (b, a)
        for region in row_regions(module.weight.shape):
            (rows, _), wanted = region.slices, module.weight.read(weights, region)
            computed = module.weight.read(weights.base, region) + weights.scale * left[rows] @ right
            if not torch.allclose(computed, wanted.double(), rtol=_TOLERANCE, atol=_TOLERANCE / 10):
                raise UserError(
                    f"the adapters of {module.theirs} do not give the weights of the source; "
                    "nothing was exported",
                    where=str(folder),
                    exit=Exit.INTERNAL,
                )
