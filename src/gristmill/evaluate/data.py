"""The text a model is evaluated on: token files, plain text, or the run's own validation text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.base.errors import UserError
from gristmill.checkpoint.model import LoadedModel
from gristmill.config.load import load_run
from gristmill.data.dataset import open_parts, prove_tokenizer
from gristmill.text.sources import Document, open_sources
from gristmill.tokens.store import open_tokens


@dataclass(frozen=True)
class EvaluationText:
    """Token ids and where they come from."""

    ids: np.ndarray
    name: str


def evaluation_ids(
    loaded: LoadedModel, *, data: str | None, text: Sequence[str] | None
) -> EvaluationText:
    """The ids of the text that is asked for."""
    if data is not None and text:
        raise UserError("give token files or text, not both", where="--data, --text")
    if text:
        return EvaluationText(_encode(loaded, text), " ".join(text))
    if data is not None:
        reader = open_tokens(data)
        remedy = "the model needs its own tokenizer: evaluate on the text itself with --text"
        prove_tokenizer(loaded.tokenizer, reader, where=data, remedy=remedy)
        return EvaluationText(reader.read(0, len(reader)), data)
    if loaded.run is None:
        raise UserError(
            "this model did not come with validation text",
            where="evaluate",
            remedy="name some: --data PREFIX or --text FILE",
        )
    return _own_validation(loaded)


def _encode(loaded: LoadedModel, paths: Sequence[str]) -> np.ndarray:
    tokenizer = loaded.tokenizer
    ids: list[int] = []
    for item in open_sources(list(paths)):
        if isinstance(item, Document):
            ids += [*tokenizer.encode(item.text), tokenizer.end_of_text]
    return np.array(ids, dtype=np.int64)


def _own_validation(loaded: LoadedModel) -> EvaluationText:
    assert loaded.run is not None
    config = load_run(loaded.run / "run.toml")
    sequence = config.data.sequence or config.model.context
    held = open_parts(config.data, sequence=sequence).validation
    if held is None:
        raise UserError(
            "this run has no validation text", where=str(loaded.run), remedy="use --data or --text"
        )
    ids = held.reader.read(held.stretch.begin, len(held.stretch))
    return EvaluationText(ids, config.data.validation or f"{config.data.paths} (held out)")
