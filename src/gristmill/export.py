"""A model as a Hugging Face folder that `transformers` loads, proven equal before it is called
done.

    DIR/  config.json · generation_config.json · model.safetensors · tokenizer files

The folder is written under a temporary name. Then transformers itself loads it: in fp32 its logits
must agree with ours within 1e-5 (of the largest logit, where that is above 1), and greedy
continuations must be the same ids. Only then the folder gets its name.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gristmill.base.errors import Exit, UserError, optional
from gristmill.base.files import share_file, storage_errors, sync_file, sync_folder, write_json
from gristmill.checkpoint.model import LoadedModel
from gristmill.config.hf import to_hf
from gristmill.generate import Engine, Sampling
from gristmill.models.weights import to_gpt2

TOLERANCE = 1e-5
_GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Exported:
    """What was written, and how closely it agrees with the source."""

    folder: Path
    largest_difference: float
    greedy_tokens: int


def export(loaded: LoadedModel, folder: Path) -> Exported:
    """Write and check a Hugging Face folder."""
    transformers = optional("transformers", extra="hf", purpose="checking an export")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            "this folder is not empty",
            where=str(folder),
            remedy="give a new one",
            exit=Exit.REFUSED,
        )
    model = loaded.model.float()
    settings = to_hf(model.config, vocab=model.vocab, end_of_text=loaded.tokenizer.end_of_text)
    staging = folder.with_name(f".{folder.name}.writing")
    with storage_errors(folder):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _write(loaded, staging, settings)
    try:
        result = _check(loaded, staging, transformers, folder)
    except UserError:
        shutil.rmtree(staging)
        raise
    with storage_errors(folder):
        for file in staging.iterdir():
            sync_file(file)
        if folder.exists():
            folder.rmdir()
        os.rename(staging, folder)
        sync_folder(folder.parent)
    return result


def _write(loaded: LoadedModel, folder: Path, settings: dict[str, Any]) -> None:
    save_file(to_gpt2(loaded.model), folder / "model.safetensors", metadata={"format": "pt"})
    share_file(folder / "model.safetensors")
    write_json(folder / "config.json", settings)
    end = loaded.tokenizer.end_of_text
    write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    loaded.tokenizer.save(folder)


def _check(loaded: LoadedModel, staging: Path, transformers: Any, folder: Path) -> Exported:
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(staging).eval()
    ours = loaded.model.cpu().eval()
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
    return Exported(folder, difference, tokens)


def _greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(tokens):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return [int(i) for i in ids[0, len(prompt) :]]
