"""The text a model is evaluated on: token files, plain text, or the run's own validation text.

A model that was trained on separated documents is evaluated the same way, on any text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gristmill.base.errors import UserError
from gristmill.checkpoint.model import LoadedModel
from gristmill.config.load import load_run
from gristmill.config.schema import RunConfig
from gristmill.data.build import build_rules
from gristmill.data.dataset import open_data, prove_tokenizer
from gristmill.data.documents import JOINED, DocumentRules
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import Document
from gristmill.tokens.store import open_tokens


@dataclass(frozen=True)
class EvaluationText:
    """Token ids, where they come from, and where documents begin in them."""

    ids: np.ndarray
    name: str
    starts: np.ndarray
    rules: DocumentRules = JOINED
    """How the boundaries of documents are treated."""
    predicted: np.ndarray | None = None
    """Which ids are predicted; None for all. What a tokenizer puts before every text is not."""


def evaluation_ids(
    loaded: LoadedModel, *, data: str | None = None, text: Sequence[str] | None = None
) -> EvaluationText:
    """The ids of token files or of text, or of the validation text of the model's run."""
    assert data is None or not text, "one of the two"
    if text:
        chosen = _encode(loaded, text)
    elif data is not None:
        reader = open_tokens(data)
        remedy = "the model needs its own tokenizer: evaluate on the text itself with --text"
        prove_tokenizer(loaded.tokenizer, reader, where=data, remedy=remedy)
        chosen = EvaluationText(reader.read(0, len(reader)), data, reader.document_starts)
    elif loaded.run is not None:
        chosen = _held_out(loaded.run)
    else:
        raise UserError(
            "this model did not come with validation text",
            where="evaluate",
            remedy="name some: --data PREFIX or --text FILE",
        )
    if loaded.run is None or not (loaded.run / "run.toml").is_file():
        return chosen
    config = _load_settings(loaded.run)
    rules = build_rules(config.data, end_of_text=loaded.tokenizer.end_of_text)
    return replace(chosen, rules=replace(rules, unweighted=False))  # every token counts


def _encode(loaded: LoadedModel, paths: Sequence[str]) -> EvaluationText:
    tokenizer = loaded.tokenizer
    ids, starts = list[int](), list[int]()
    for item in SourceReader(list(paths)):
        if isinstance(item, Document):
            starts.append(len(ids))
            ids += [*tokenizer.prefix, *tokenizer.encode(item.text), tokenizer.end_of_text]
    predicted = None
    if tokenizer.prefix:
        places = np.add.outer(np.array(starts, np.int64), np.arange(len(tokenizer.prefix)))
        predicted = np.ones(len(ids), np.bool_)
        predicted[places.flatten()] = False
    return EvaluationText(
        np.array(ids, dtype=np.int64), " ".join(paths), np.array(starts), predicted=predicted
    )


def _load_settings(run: Path) -> RunConfig:
    """The settings of a run. They are complete, so what it started from need not be there."""
    return load_run(run / "run.toml", find_model=lambda name, *, where: run)


def _held_out(run: Path) -> EvaluationText:
    """A run's validation text: the parts of its token sets, each of which begins a document."""
    config = _load_settings(run)
    if config.data.kind == "chat":
        raise UserError(
            "this run was trained on conversations, which are no text to read in windows",
            where=str(run),
            remedy=f"its loss on answers: `gristmill train {run} --validate-only`; on text: --data "
            "or --text",
        )
    sequence = config.data.sequence or config.model.context
    held = open_data(config.data, sequence=sequence).validation
    if held is None:
        raise UserError(
            "this run has no validation text", where=str(run), remedy="use --data or --text"
        )
    ids, starts, total = list[np.ndarray](), list[np.ndarray](), 0
    for part in held.splits:
        begin, end = part.tokens.start, part.tokens.stop
        inside = part.reader.document_starts
        inside = inside[np.searchsorted(inside, begin) : np.searchsorted(inside, end)]
        starts.append(np.union1d([0], inside - begin) + total)
        ids.append(part.reader.read(begin, end - begin))
        total += end - begin
    name = ", ".join(part.path for part in held.splits)
    return EvaluationText(
        ids[0] if len(ids) == 1 else np.concatenate(ids),
        name if config.data.validation else f"{name} (held out)",
        np.concatenate(starts),
    )
