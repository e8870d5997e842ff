"""Opening a model for use: a run folder, one checkpoint, a Hugging Face folder or a Hugging Face
name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import read_json
from gristmill.checkpoint.layout import ALONE, MANIFEST, CheckpointFolder, step_of, verify
from gristmill.checkpoint.state import (
    copy_held,
    load_held,
    load_weights,
    read_state,
    vocabulary_tables,
)
from gristmill.config.hf import from_hf, model_folder
from gristmill.config.schema import ModelConfig
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.models.weights import from_gpt2
from gristmill.parallel.council import Council
from gristmill.parallel.held import Held, held_whole
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use, with its tokenizer."""

    model: GPT
    tokenizer: Tokenizer
    origin: Path
    """The checkpoint or Hugging Face folder the weights came from."""
    run: Path | None = None
    """The run folder, if it came from a run."""
    step: int | None = None


def open_model(spec: str, *, device: torch.device, checkpoint: str = "latest") -> LoadedModel:
    """Load what `spec` names; `checkpoint` chooses in a run folder: latest, best or a step."""
    path = model_folder(spec, where="MODEL")
    if (path / "run.toml").is_file():
        return _from_checkpoint(_choose(path, checkpoint), device)
    if (path / MANIFEST).is_file():
        return _from_checkpoint(path, device)
    if (path / "config.json").is_file():
        return _from_hf(path, device)
    raise UserError(
        f"{spec!r} is neither a run folder (run.toml), a checkpoint ({MANIFEST}) nor a "
        "Hugging Face model (config.json)",
        where="MODEL",
        exit=Exit.DATA,
    )


def fill_model(
    model: GPT,
    start: str,
    *,
    held: Mapping[str, Held] | None = None,
    council: Council = ALONE,
) -> None:
    """Put the weights of a run folder, a Hugging Face folder or name into a freshly built model; of
    one that is divided, into what this process holds."""
    path = model_folder(start, where="model.start")
    shares = list((held or held_whole(model)).values())
    tables = vocabulary_tables(one.name for one in shares)
    for one in shares:
        if one.name in tables:
            one.local.detach().zero_()
    if (path / "run.toml").is_file():
        chosen = _choose(path, "latest", council)
        vocab = read_state(chosen)["settings"]["vocab"]
        if vocab != model.vocab:
            raise UserError(
                f"the weights in {start!r} are for a vocabulary of {vocab}, not {model.vocab}",
                where="model.start",
            )
        load_held(shares, chosen, padded=tables)
    elif held is None:
        from_gpt2(model, _hf_tensors(path), where=start)
    else:
        # The table of names and layouts is for whole models: one is made, for a moment.
        whole = build_model(model.config, vocab=model.vocab, device=torch.device("cpu"))
        from_gpt2(whole, _hf_tensors(path), where=start)
        copy_held(shares, dict(whole.named_parameters()))


def _choose(run: Path, which: str, council: Council = ALONE) -> Path:
    folder = CheckpointFolder(run / "checkpoints")
    if which == "latest":
        found = folder.newest_intact(council).path
        if found is None:
            raise UserError("this run has no intact checkpoint", where=str(run), exit=Exit.DATA)
        return found
    best = folder.best()
    if which == "best" and best is None:
        raise UserError("this run has no best checkpoint yet", where=str(run), exit=Exit.DATA)
    if which != "best" and not which.isdigit():
        raise UserError(f"{which!r} is not latest, best or a step", where="--checkpoint")
    path = folder.path(best.step if which == "best" and best else int(which))
    if not path.is_dir():
        steps = ", ".join(str(step_of(p)) for p in folder.committed())
        raise UserError(f"no checkpoint {path.name}", where=str(run), remedy=f"there are: {steps}")
    return path


def _from_checkpoint(path: Path, device: torch.device) -> LoadedModel:
    problems = verify(path)
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    settings = read_state(path)["settings"]
    run = path.resolve().parent.parent
    config = ModelConfig.model_validate(settings["model"])
    model = build_model(config, vocab=settings["vocab"], device=device)
    load_weights(model, path)
    model.eval()
    tokenizer = open_tokenizer(run / "tokenizer")
    return LoadedModel(model, tokenizer, path, run=run, step=step_of(path))


def _from_hf(path: Path, device: torch.device) -> LoadedModel:
    values = read_json(path / "config.json")
    settings = from_hf(values, where=str(path / "config.json"))
    config = ModelConfig.model_validate(settings)
    assert config.vocab is not None
    model = build_model(config, vocab=config.vocab, device=device)
    from_gpt2(model, _hf_tensors(path), where=str(path))
    model.eval()
    return LoadedModel(model, open_tokenizer(path), path)


def _hf_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder; only safetensors, which run no code when read."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(
            "no .safetensors file here; pickled weights are not read, since they can run code",
            where=str(path),
            exit=Exit.DATA,
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
