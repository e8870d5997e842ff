"""Opening a model: a run folder, one checkpoint, a Hugging Face folder or a Hugging Face name.

A `StoredModel` is a model on disk, whose weights can be read region by region: enough where nothing
is computed with it. Loading it gives a `LoadedModel`, which is in memory.

A run that trained adapters opens as the merged model: their base is found and checked, and the
products of the adapters are added to its weights as they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import read_json, refuse_devices
from gristmill.checkpoint.adapter_base import AdapterBase, saved_base
from gristmill.checkpoint.layout import (
    ALONE,
    MANIFEST,
    CheckpointFolder,
    describe_problems,
    step_of,
    verify,
)
from gristmill.checkpoint.loading import check_weights, load_weights
from gristmill.checkpoint.pieces import OPTIMIZER, STRATEGY
from gristmill.checkpoint.state_file import STATE, is_count, read_state, shown
from gristmill.checkpoint.tensorfile import open_hf_tensors, open_tensors
from gristmill.config.hf import CODE_TYPE, architecture_settings, from_hf
from gristmill.config.lora import LoraConfig
from gristmill.config.model import ModelConfig
from gristmill.config.schema import parse_model
from gristmill.distributed.control import ControlGroup
from gristmill.hub.downloads import model_folder
from gristmill.models.build import build_meta_model, build_model
from gristmill.models.hf import folder_weights
from gristmill.models.lora import MergedWeights
from gristmill.models.spec import CausalLM
from gristmill.models.weights import Weights
from gristmill.strategies.sharding import ShardedParameters
from gristmill.text.chat.template import ChatTemplate, find_template
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, with its tokenizer."""

    model: CausalLM
    tokenizer: Tokenizer
    origin: Path
    """The checkpoint or Hugging Face folder the weights came from."""
    run: Path | None = None
    """The run folder, if it came from a run."""
    step: int | None = None


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, with its tokenizer."""

    config: ModelConfig
    vocab: int
    weights: Weights
    """Under our names; checked to hold every parameter in the right shape."""
    tokenizer: Tokenizer
    origin: Path
    run: Path | None = None
    step: int | None = None
    notes: tuple[str, ...] = ()
    """What the user should know about the choice of this checkpoint."""
    base: AdapterBase | None = None
    """If these are `MergedWeights`, the model that the adapters belong to, where it is now."""
    lora: LoraConfig | None = None
    """Their settings, which `config` has no more."""

    def meta_model(self) -> CausalLM:
        """The model with names and shapes only."""
        return build_meta_model(self.config, vocab=self.vocab)

    def load(self, device: torch.device) -> LoadedModel:
        """The model in memory."""
        model = build_model(self.config, vocab=self.vocab, device=device)
        try:
            load_weights(model, self.weights)
        except DataError as error:
            raise self.unusable(error) from error
        return LoadedModel(model.eval(), self.tokenizer, self.origin, self.run, self.step)

    def unusable(self, error: DataError) -> DataError:
        """An error about the weights, with what to do about it."""
        *others, last = error.problems
        remedy = "choose another checkpoint of this run with --checkpoint" if self.run else None
        return DataError([*others, replace(last, remedy=remedy)])


def chat_template(model: LoadedModel | StoredModel) -> ChatTemplate | None:
    """How conversations become text for a model; None if nothing beside its tokenizer says so."""
    folder = model.origin if model.run is None else model.run / "tokenizer"
    return find_template(folder, model.tokenizer)


def open_model(spec: str, *, device: torch.device, checkpoint: str = "latest") -> LoadedModel:
    """Load what `spec` names; `checkpoint` chooses in a run folder: latest, best or a step."""
    return open_stored(spec, checkpoint=checkpoint).load(device)


def open_stored(spec: str, *, checkpoint: str = "latest") -> StoredModel:
    """Find what `spec` names, and check that it is intact."""
    path = model_folder(spec, where="MODEL")
    refuse_devices(path)
    if (path / "run.toml").is_file():
        chosen = _choose_checkpoint(path, checkpoint)
        return _from_checkpoint(chosen.path, notes=chosen.notes)
    if (path / MANIFEST).is_file():
        return _from_checkpoint(_require_intact(path))
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            f"{spec!r} is neither a run folder (run.toml), a checkpoint ({MANIFEST}) nor a "
            "Hugging Face model (config.json)",
            where="MODEL",
            exit=Exit.DATA,
        )
    values, stored = read_json(file), open_hf_tensors(path)
    config = _read_hf_config(values, file)
    assert config.vocab is not None
    meta_model = _meta_model(config, vocab=config.vocab, stored=stored, where=file)
    weights = folder_weights(stored, meta_model, values, folder=path)
    return StoredModel(config, config.vocab, weights, open_tokenizer(path), path)


def _read_hf_config(content: Any, file: Path) -> ModelConfig:
    """The settings of a model in a Hugging Face folder: ours if we have such a model, those of
    transformers otherwise."""
    try:
        return parse_model(from_hf(content, where=str(file)))
    except DataError:
        if not isinstance(content, dict) or content.get("model_type") in (None, CODE_TYPE):
            raise
    settings = {"hf": str(file.parent), "hf_config": architecture_settings(content)}
    try:
        return parse_model(settings)
    except ValidationError as error:
        what = "; ".join(f"no {details['loc'][-1]}" for details in error.errors())
        raise DataError(f"not the config.json of a causal model: {what}", where=file) from error


def _from_checkpoint(path: Path, *, notes: tuple[str, ...] = ()) -> StoredModel:
    content = _open_content(path)
    run, state = _run_of(path), read_state(path)
    tokenizer, step = open_tokenizer(run / "tokenizer"), state["progress"]["steps"]
    if state["identity"].get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(
            "not the tokenizer that this model was trained with",
            where=str(run / "tokenizer"),
            remedy=f"`gristmill train {run}` writes it anew, and trains no step if the run is done",
            exit=Exit.DATA,
        )
    return StoredModel(
        content.config,
        content.vocab,
        content.weights,
        tokenizer,
        path,
        run=run,
        step=step,
        notes=notes,
        base=content.base,
        lora=content.lora,
    )


@dataclass(frozen=True)
class _Content:
    """The model of a checkpoint, with its adapters merged if it has any."""

    config: ModelConfig
    vocab: int
    weights: Weights
    base: AdapterBase | None = None
    lora: LoraConfig | None = None


def _open_content(path: Path) -> _Content:
    """The settings, vocabulary and weights of a checkpoint, checked against each other."""
    settings, where = read_state(path)["settings"], path / STATE
    try:
        config = parse_model(settings.get("model"))
    except ValidationError as error:
        first = error.errors()[0]
        # The first part is the kind of model.
        place = "".join(f".{part}" for part in first["loc"][1:])
        what = f"settings.model{place}: {first['msg']}"
        raise DataError(what, where=where) from error
    vocab = _vocab(path)
    stored = open_tensors(path)
    if config.adapters is not None:
        return _merged(path, config, config.adapters, vocab, stored)
    check_weights(_meta_model(config, vocab=vocab, stored=stored, where=where), stored)
    return _Content(config, vocab, stored)


def _merged(
    path: Path, config: ModelConfig, lora: LoraConfig, vocab: int, adapters: Weights
) -> _Content:
    """The model of a checkpoint of adapters."""
    where, merged = path / STATE, config.merged
    base = AdapterBase.of(read_state(path).get("base"), where=where)
    folder = base.find(_run_of(path))
    weights: Weights
    if base.checkpoint is not None:
        weights = _open_content(_require_intact(base.path(folder))).weights
        meta_model = _meta_model(merged, vocab=vocab, stored=weights, where=where)
    else:
        stored = open_hf_tensors(folder)
        meta_model = _meta_model(merged, vocab=vocab, stored=stored, where=where)
        values = read_json(folder / "config.json")
        weights = folder_weights(stored, meta_model, values, folder=folder)
    check_weights(meta_model, weights)
    try:
        adapted = build_meta_model(config, vocab=vocab)
    except UserError as error:
        raise DataError(
            [replace(problem, where=str(where)) for problem in error.problems]
        ) from error
    check_weights(adapted, adapters)
    both = MergedWeights(weights, adapters, layers=adapted.adapters, scale=lora.scale)
    return _Content(merged, vocab, both, replace(base, folder=str(folder)), lora)


def _run_of(checkpoint: Path) -> Path:
    return checkpoint.resolve().parent.parent


def _vocab(path: Path) -> int:
    """The vocabulary of a checkpoint's model."""
    vocab = read_state(path)["settings"].get("vocab")
    if not is_count(vocab):
        raise DataError(f"settings.vocab is {shown(vocab)}", where=path / STATE)
    return int(vocab)


def _meta_model(config: ModelConfig, *, vocab: int, stored: Weights, where: Path) -> CausalLM:
    """The model with names and shapes only. Settings that ask for more than is stored are refused
    before they take time or memory."""
    layers = getattr(config, "layers", 0)
    if layers > len(stored.shapes):
        what = f"{layers} layers, but only {len(stored.shapes)} tensors are stored"
        raise DataError(what, where=where)
    try:
        return build_meta_model(config, vocab=vocab)
    except (RuntimeError, OverflowError, TypeError) as error:
        # Even a tensor without memory has a largest size.
        raise DataError(f"no model has these sizes: {error}", where=where) from error


@dataclass(frozen=True)
class Started:
    """What a run has started from."""

    base: AdapterBase | None = None
    """What these weights are, if the run trains adapters of them."""
    notes: tuple[str, ...] = ()
    """What the user should know about them."""


def load_start_weights(
    model: CausalLM,
    start: str,
    parameters: ShardedParameters,
    *,
    run: Path | None = None,
    control: ControlGroup = ALONE,
) -> Started:
    """Load the weights of a run folder, a Hugging Face folder or name into this rank's shards of a
    freshly built model. Of one with adapters these are its base: if the run in the folder `run` has
    been saved before, the very same base."""
    path, notes = model_folder(start), tuple[str, ...]()
    base, base_names, chosen = None, model.base_parameters(), None
    if base_names:
        assert run is not None, "runs with adapters have a folder"
        parameters = {
            name: parameter for name, parameter in parameters.items() if name in base_names
        }
        base = _same_on_all(lambda: _saved_base(run, start, path), control)
    weights: Weights
    if (path / "run.toml").is_file():
        which = "latest" if base is None else str(step_of(base.path(path)))
        choice = _choose_checkpoint(path, which, control)
        chosen, notes, content = choice.path, choice.notes, _open_content(choice.path)
        if content.vocab != model.vocab:
            raise UserError(
                f"the weights in {start!r} are for a vocabulary of {content.vocab}, not "
                f"{model.vocab}",
                where="model.start",
            )
        weights = content.weights
    else:
        meta_model = build_meta_model(model.config.merged, vocab=model.vocab)
        values = read_json(path / "config.json")
        weights = folder_weights(open_hf_tensors(path), meta_model, values, folder=path)
    control.on_all_ranks(lambda: load_weights(model, weights, parameters))
    if base_names and base is None:
        base = _same_on_all(
            lambda: AdapterBase.at(start, path, checkpoint=chosen, run=run or Path()), control
        )
    return Started(base, notes)


def _saved_base(run: Path, start: str, folder: Path) -> AdapterBase | None:
    """The base of the adapters that a run has saved, which must be in this folder now."""
    known = saved_base(CheckpointFolder(run / "checkpoints"))
    return None if known is None else known.moved_to(start, folder, run=run)


def _same_on_all(
    find: Callable[[], AdapterBase | None], control: ControlGroup
) -> AdapterBase | None:
    """What rank 0 finds."""

    def as_json() -> dict[str, Any] | None:
        base = find()
        return None if base is None else asdict(base)

    values = control.on_rank0(as_json)
    return None if values is None else AdapterBase(**values)


@dataclass(frozen=True)
class _ChosenCheckpoint:
    """A checkpoint of a run, every byte of whose model is as it was written."""

    path: Path
    notes: tuple[str, ...] = ()
    """Why it is not the newest."""


def _choose_checkpoint(run: Path, which: str, control: ControlGroup = ALONE) -> _ChosenCheckpoint:
    folder = CheckpointFolder(run / "checkpoints")
    if which == "latest":
        search = folder.newest_intact(control, read=_of_model, check=_content_problems)
        if search.path is None:
            what = f"this run has no {'intact ' if search.damaged else ''}checkpoint"
            each = [Problem(describe_problems(problems)) for _, problems in search.damaged]
            raise UserError([Problem(what, str(run)), *each], exit=Exit.DATA)
        instead = f"using {search.path.name} instead"
        notes = (
            f"{path.name} is damaged ({describe_problems(problems)}); {instead}"
            for path, problems in search.damaged
        )
        return _ChosenCheckpoint(search.path, tuple(notes))
    if which == "best":
        try:
            best = folder.best()
        except DataError as error:
            remedy = "name a step with --checkpoint; the next resume of the run rebuilds this file"
            raise DataError([replace(error.problems[0], remedy=remedy)]) from error
        if best is None:
            raise UserError("this run has no best checkpoint yet", where=str(run), exit=Exit.DATA)
        path = folder.path(best.step)
    elif which.isdigit():
        path = folder.path(int(which))
    else:
        raise UserError(f"{which!r} is not latest, best or a step", where="--checkpoint")
    if not path.is_dir():
        steps = ", ".join(str(step_of(p)) for p in folder.committed())
        raise UserError(f"no checkpoint {path.name}", where=str(run), remedy=f"there are: {steps}")
    return _ChosenCheckpoint(_require_intact(path))


def _content_problems(path: Path) -> list[Problem]:
    """Why the model of a checkpoint cannot be used, though its files are intact."""
    try:
        _open_content(path)
    except DataError as error:
        return error.problems
    return []


def _of_model(name: str) -> bool:
    """Whether a file is needed for the model. The others are several times as large."""
    return not name.startswith((OPTIMIZER, STRATEGY))


def _require_intact(path: Path) -> Path:
    problems = verify(path, read=_of_model)
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    return path
