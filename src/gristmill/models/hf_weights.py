"""Weights of a Hugging Face folder, under the names that its class in transformers gives them.

Most folders have exactly these names, or lack the prefix of the body, or hold a tied tensor under
its other name. These are read a region at a time, so no second copy of the weights is ever in
memory. Where transformers converts tensors when it loads them (such as experts that it stacks),
it loads the model into host memory, and the regions come from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import DataError, Problem
from gristmill.base.tensor_slices import TensorSlice
from gristmill.config.hf import model_type
from gristmill.models.families import open_foreign
from gristmill.models.hf import HFModel
from gristmill.models.hf_classes import library
from gristmill.models.spec import CausalLM
from gristmill.models.weights import TensorParts, Weights, WeightsInMemory


class RenamedWeights(Weights):
    """Tensors under other names."""

    def __init__(self, stored: Weights, names: Mapping[str, str]) -> None:
        self.where, self._stored, self._names = stored.where, stored, names
        self.shapes = {ours: stored.shapes[theirs] for ours, theirs in names.items()}

    def parts(self, name: str, region: TensorSlice) -> TensorParts:
        return self._stored.parts(self._names[name], region)


def folder_weights(stored: Weights, model: CausalLM, config: Any, *, folder: Path) -> Weights:
    """The parameters of a model, which needs no memory, from a Hugging Face folder whose tensors
    are `stored` and whose config.json has the content `config`."""
    if not isinstance(model, HFModel):
        return open_foreign(stored, model, model_type(config, where=str(folder)))
    names = {name: _find(name, stored, model) for name in model.roles()}
    found = {ours: theirs for ours, theirs in names.items() if theirs is not None}
    _refuse_trained_buffers(stored, model)
    if len(found) == len(names):
        return RenamedWeights(stored, found)
    return _converted(model, folder, missing=[name for name, one in names.items() if one is None])


def _find(name: str, stored: Weights, model: HFModel) -> str | None:
    prefix = f"{model.inner.base_model_prefix}."
    for one in model.names_of(name):
        for candidate in (one, one.removeprefix(prefix), f"{prefix}{one}"):
            if candidate in stored.shapes:
                return candidate
    return None


def _refuse_trained_buffers(stored: Weights, model: HFModel) -> None:
    """Checkpoints hold parameters only, and compute buffers anew."""
    parameters = dict(model.inner.named_parameters(remove_duplicate=False))
    for name, value in model.inner.state_dict().items():
        if name in parameters or name not in stored.shapes:
            continue
        if stored.shapes[name] != tuple(value.shape) or not torch.equal(
            stored.read(name), value.float().cpu()
        ):
            what = f"{name} is a buffer with values of its own, which a run here would not keep"
            raise DataError(what, where=stored.where)


def _converted(model: HFModel, folder: Path, *, missing: list[str]) -> Weights:
    transformers = library()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    problems: list[str] = []
    try:
        loaded, info = type(model.inner).from_pretrained(
            folder,
            config=model.inner.config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        problems += _described(info)
    except Exception as error:  # the library raises nothing more precise
        problems += [f"the weights lack {name}" for name in missing[:3]]
        problems += (str(error).strip().splitlines() or [type(error).__name__])[:1]
    if problems:
        raise DataError([Problem(what, str(folder)) for what in problems])
    return WeightsInMemory({model.canonical_name(n): one for n, one in loaded.named_parameters()})


def _described(info: Mapping[str, object]) -> Iterator[str]:
    missing, mismatched = info.get("missing_keys"), info.get("mismatched_keys")
    for names, what in ((missing, "the weights lack"), (mismatched, "of another shape:")):
        if isinstance(names, list | set | tuple) and names:
            yield f"{what} {', '.join(sorted(map(str, names))[:3])}"
