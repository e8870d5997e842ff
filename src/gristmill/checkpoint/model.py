"""Opening a model: a run folder, one checkpoint, a Hugging Face folder or a Hugging Face name.

A `StoredModel` is a model on disk, whose weights can be read region by region: enough where nothing
is computed with it. Loading it gives a `LoadedModel`, which is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gristmill.base.downloads import model_folder
from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json
from gristmill.checkpoint.layout import ALONE, MANIFEST, CheckpointFolder, step_of, verify
from gristmill.checkpoint.state import check_weights, load_weights, read_state
from gristmill.checkpoint.tensor_reader import open_hf_tensors, open_tensors
from gristmill.config.hf import from_hf
from gristmill.config.model import ModelConfig
from gristmill.config.schema import parse_model
from gristmill.models.build import build_model, outline_model
from gristmill.models.spec import CausalLM
from gristmill.models.weights import Gpt2Weights, Weights
from gristmill.parallel.control import ControlGroup
from gristmill.parallel.sharding import ShardedParameters
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

    def outline(self) -> CausalLM:
        """The model with names and shapes only."""
        return outline_model(self.config, vocab=self.vocab)

    def load(self, device: torch.device) -> LoadedModel:
        """The model in memory."""
        model = build_model(self.config, vocab=self.vocab, device=device)
        load_weights(model, self.weights)
        return LoadedModel(model.eval(), self.tokenizer, self.origin, self.run, self.step)


def open_model(spec: str, *, device: torch.device, checkpoint: str = "latest") -> LoadedModel:
    """Load what `spec` names; `checkpoint` chooses in a run folder: latest, best or a step."""
    return open_stored(spec, checkpoint=checkpoint).load(device)


def open_stored(spec: str, *, checkpoint: str = "latest") -> StoredModel:
    """Find what `spec` names, and check that it is intact."""
    path = model_folder(spec, where="MODEL")
    if (path / "run.toml").is_file():
        return _from_checkpoint(_choose_checkpoint(path, checkpoint))
    if (path / MANIFEST).is_file():
        return _from_checkpoint(_require_intact(path))
    if not (path / "config.json").is_file():
        raise UserError(
            f"{spec!r} is neither a run folder (run.toml), a checkpoint ({MANIFEST}) nor a "
            "Hugging Face model (config.json)",
            where="MODEL",
            exit=Exit.DATA,
        )
    config = parse_model(from_hf(read_json(path / "config.json"), where=str(path / "config.json")))
    assert config.vocab is not None
    weights = Gpt2Weights(open_hf_tensors(path), outline_model(config, vocab=config.vocab))
    return StoredModel(config, config.vocab, weights, open_tokenizer(path), path)


def _from_checkpoint(path: Path) -> StoredModel:
    state = read_state(path)
    config, vocab = parse_model(state["settings"]["model"]), state["settings"]["vocab"]
    weights = open_tensors(path)
    check_weights(outline_model(config, vocab=vocab), weights)
    run = path.resolve().parent.parent
    tokenizer, step = open_tokenizer(run / "tokenizer"), state["progress"]["steps"]
    return StoredModel(config, vocab, weights, tokenizer, path, run=run, step=step)


def load_start_weights(
    model: CausalLM, start: str, parameters: ShardedParameters, *, control: ControlGroup = ALONE
) -> None:
    """Load the weights of a run folder, a Hugging Face folder or name into this rank's shards of a
    freshly built model."""
    path = model_folder(start)
    weights: Weights
    if (path / "run.toml").is_file():
        checkpoint = _choose_checkpoint(path, "latest", control)
        vocab = read_state(checkpoint)["settings"]["vocab"]
        if vocab != model.vocab:
            raise UserError(
                f"the weights in {start!r} are for a vocabulary of {vocab}, not {model.vocab}",
                where="model.start",
            )
        weights = open_tensors(checkpoint)
    else:
        outline = outline_model(model.config, vocab=model.vocab)
        weights = Gpt2Weights(open_hf_tensors(path), outline)
    load_weights(model, weights, parameters)


def _choose_checkpoint(run: Path, which: str, control: ControlGroup = ALONE) -> Path:
    """A checkpoint of a run, every byte of whose model is as it was written."""
    folder = CheckpointFolder(run / "checkpoints")
    if which == "latest":
        found = folder.newest_intact(control, read=_of_model).path
        if found is None:
            raise UserError("this run has no intact checkpoint", where=str(run), exit=Exit.DATA)
        return found
    if which == "best":
        best = folder.best()
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
    return _require_intact(path)


def _of_model(name: str) -> bool:
    """Whether a file is needed for the model. The optimizer's files are twice as large as all
    others together."""
    return not name.startswith("optimizer")


def _require_intact(path: Path) -> Path:
    problems = verify(path, read=_of_model)
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    return path
