"""Loss, perplexity and bits per byte of a model on text: token files, plain text, or the run's own
validation text.

The text is read in windows of the model's context that do not overlap, the last one shorter; every
token but the first of each window is predicted. A model that separates documents separates them in
a window too, on any text. Bits per byte divide by the bytes of the predicted tokens, so that models
with different tokenizers can be compared. What a tokenizer puts before every text, such as Llama's
<s>, is given to the model and not predicted.

Windows are the items of standard errors: the tokens of a text depend on each other. How many of
them are computed at once is a matter of speed and memory, and no result depends on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import sha256_text
from gristmill.checkpoint.model import LoadedModel
from gristmill.config.load import load_run
from gristmill.config.schema import RunConfig
from gristmill.data.build import build_rules
from gristmill.data.dataset import open_data, prove_tokenizer
from gristmill.data.loader import JOINED, DocumentRules, make_batch
from gristmill.data.sampling import TokenSpans
from gristmill.data.stream import doc_starts_in_spans
from gristmill.evaluate.measures import Measure, ratio
from gristmill.evaluate.measures import perplexity as perplexity_of
from gristmill.evaluate.results import EvaluationResult
from gristmill.models.loss_terms import LossTerms
from gristmill.models.spec import Loss
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import Document
from gristmill.tokens.store import open_tokens


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    loss: float
    """Mean over predicted tokens, in nats."""
    perplexity: float
    bits_per_byte: float
    tokens: int
    """Tokens predicted."""
    seconds: float
    measures: dict[str, Measure] = field(default_factory=dict)
    """The first three with their standard errors."""


def evaluate_loss(
    loaded: LoadedModel,
    ids: np.ndarray,
    *,
    batch: int = 8,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    rules: DocumentRules = JOINED,
    starts: np.ndarray | None = None,
    predicted: np.ndarray | None = None,
) -> Evaluation:
    """Evaluate on a sequence of token ids, on its first `limit` tokens if given.

    Rules that separate documents by the token files need their `starts`. `predicted` says which
    ids are predicted, if not all are.
    """
    ids = ids if limit is None else ids[: limit + 1]
    if len(ids) < 2:
        raise UserError("the text has fewer than two tokens", where="evaluate", exit=Exit.DATA)
    started = time.monotonic()
    tokenizer, device = loaded.tokenizer, loaded.model.device
    bytes_of = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.size)])
    losses, tokens, text_bytes = list[float](), list[int](), list[int]()
    for pieces in _windows(len(ids), context=loaded.model.config.context, batch=batch):
        length = int(pieces.counts[0])
        windows_BS = np.stack([ids[begin : begin + length] for begin in pieces.begins])
        largest = int(windows_BS.max())
        if largest >= tokenizer.size:
            what = f"the id {largest} is outside the vocabulary of {tokenizer.size}"
            raise DataError(what, where="evaluate", remedy="check the data: tokens verify")
        doc_starts_BS = None
        if rules.doc_starts == "files":
            assert starts is not None, "these rules need the starts of documents"
            doc_starts_BS = doc_starts_in_spans(pieces, starts=starts, length=length)
        predicted_BS = np.ones(windows_BS.shape, np.bool_)
        if predicted is not None:
            predicted_BS = np.stack([predicted[begin : begin + length] for begin in pieces.begins])
        part = make_batch(
            windows_BS,
            doc_starts_BS=doc_starts_BS,
            loss_mask_BS=None if predicted_BS.all() else predicted_BS,
            rules=rules,
        ).to(device)
        with torch.inference_mode():
            loss = loaded.model(
                part.tokens_BT,
                targets_BT=part.targets_BT,
                terms=LossTerms(part.loss_weights_BT, by_sample=True),
                positions_BT=part.positions_BT,
                documents_BT=part.documents_BT,
            )
        assert isinstance(loss, Loss)
        losses += loss.total.tolist()
        tokens += predicted_BS[:, 1:].sum(axis=1).tolist()
        text_bytes += bytes_of[windows_BS[:, 1:]].sum(axis=1).tolist()
        if progress is not None:
            progress(sum(tokens), len(ids) - 1)
    if not any(tokens):
        raise UserError("the text has no token to predict", where="evaluate", exit=Exit.DATA)
    mean = ratio(losses, tokens)
    if not math.isfinite(mean.value):
        what = f"the loss is {mean.value}: the model computes numbers that are not finite"
        raise DataError(what, where=loaded.origin)
    perplexity = perplexity_of([-log_loss for log_loss in mean.items])
    # A text of control tokens alone has no bytes.
    bits = ratio([loss / math.log(2) for loss in losses], text_bytes if any(text_bytes) else tokens)
    return Evaluation(
        loss=mean.value,
        perplexity=perplexity.value,
        bits_per_byte=bits.value,
        tokens=sum(tokens),
        seconds=time.monotonic() - started,
        measures={"bits_per_byte": bits, "loss": mean, "perplexity": perplexity},
    )


def evaluate_text(
    loaded: LoadedModel,
    text: EvaluationText,
    *,
    batch: int = 8,
    limit: int | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> EvaluationResult:
    """Evaluate on a text, on its first `limit` tokens if given. `progress` gets its name, the
    tokens done and their number."""
    measured = evaluate_loss(
        loaded,
        text.ids,
        batch=batch,
        limit=limit,
        progress=lambda done, total: progress(text.name, done, total),
        rules=text.rules,
        starts=text.starts,
        predicted=text.predicted,
    )
    content = ",".join(map(str, text.ids[: None if limit is None else limit + 1].tolist()))
    facts = {
        "data": text.name,
        "ids_sha256": sha256_text(content),
        "context": loaded.model.config.context,
    }
    return EvaluationResult(
        text.name, measured.measures, measured.tokens, measured.seconds, facts, kind="text"
    )


def _windows(tokens: int, *, context: int, batch: int) -> Iterator[TokenSpans]:
    """Windows of context + 1 tokens that share one token with the next, then the rest."""
    whole = (tokens - 1) // context
    for first in range(0, whole, batch):
        begins = np.arange(first, min(first + batch, whole)) * context
        yield TokenSpans(begins, np.full(len(begins), context + 1))
    rest = tokens - whole * context
    if rest > 1:
        yield TokenSpans(np.array([whole * context]), np.array([rest]))


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
    validation = open_data(config.data, sequence=sequence).validation
    if validation is None:
        raise UserError(
            "this run has no validation text", where=str(run), remedy="use --data or --text"
        )
    ids, starts, total = list[np.ndarray](), list[np.ndarray](), 0
    for part in validation.splits:
        begin, end = part.tokens.start, part.tokens.stop
        inside = part.reader.document_starts
        inside = inside[np.searchsorted(inside, begin) : np.searchsorted(inside, end)]
        starts.append(np.union1d([0], inside - begin) + total)
        ids.append(part.reader.read(begin, end - begin))
        total += end - begin
    name = ", ".join(part.path for part in validation.splits)
    return EvaluationText(
        ids[0] if len(ids) == 1 else np.concatenate(ids),
        name if config.data.validation else f"{name} (held out)",
        np.concatenate(starts),
    )
